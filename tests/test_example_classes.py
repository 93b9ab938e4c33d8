"""The example's models as classes of transformers: two code paths, the same perplexity and recall. The small models of
random weights always run. The trained models need SKETCHSSM_MODELS, the folder of their weights, with a folder
``tokens`` beside it.
"""

import importlib
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from samples import relative
from test_example_lm import LM, tiny
from tiny_models import cache_argument

import sketchssm as ss
from sketchssm.calibrate.traces import SHIPPED

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
st = ss.transformers

WINDOW = 8


@pytest.fixture(scope="module")
def lm():
    """The example's modules, imported as its scripts import them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(LM))
        names = ("recurrence", "model", "prompts", "systems", "figure", "evaluate", "classes")
        yield {name: importlib.import_module(name) for name in names}
        for name in names:
            sys.modules.pop(name, None)


def random_model(lm, kind):
    """A tiny model whose every parameter matters."""
    model = tiny(lm, kind)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or name.endswith("conv_w"):
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def tokens(model, rows=2, length=40):
    generator = torch.Generator().manual_seed(6)
    return torch.randint(model.emb.num_embeddings, (rows, length), generator=generator)


@pytest.mark.parametrize("kind", SHIPPED)
def test_logits(kind, lm):
    """Without heads. Float32, three blocks."""
    model = random_model(lm, kind)
    with torch.no_grad():
        got = lm["classes"].as_transformers(model)(tokens(model), use_cache=False).logits
    assert relative(got, model.head(model(tokens(model)))) < 1e-5


@pytest.mark.parametrize("kind", SHIPPED)
def test_calibration(kind, lm):
    """Ranks and bases are those of the example's own calibration."""
    model = random_model(lm, kind)
    ids = tokens(model, 3)
    got = st.calibrate(lm["classes"].as_transformers(model), ids, mean_rank=3, window=WINDOW)
    calibrations = lm["systems"].calibrate(model, ids, WINDOW)
    (want,) = lm["systems"].sketches(calibrations, [3], WINDOW)
    for plan, system in zip(got.values(), want.layers.values(), strict=True):
        assert np.array_equal(plan.ranks, system.plan.ranks)
        # Projections on the columns: signs of columns are arbitrary, and float32 inputs differ by rounding.
        spans = [x.omega[..., :1] @ x.omega[..., :1].swapaxes(1, 2) for x in (plan, system.plan)]
        assert relative(*spans) < 1e-3
    assert got.reduction == pytest.approx(want.reduction, rel=1e-6)


def sketched(model, plans):
    """Heads of the example by place, for plans by layer of transformers."""
    return dict(zip(model.recurrent, plans.values(), strict=True))


def stepwise(model, patch, ids, prompt):
    """Logits of a patched model from a prompt's last token on, one token at a time."""
    cache = None
    logits = []
    with torch.no_grad(), patch:
        for part in (ids[:, :prompt], *ids[:, prompt:].split(1, 1)):
            positions = torch.zeros(1, part.shape[1], dtype=torch.long)  # the models know none
            result = model(part, use_cache=True, position_ids=positions, **{cache_argument(model): cache})
            cache = result[cache_argument(model)]
            logits.append(result.logits[:, -1:])
    return torch.cat(logits, 1)


def check_scores(lm, model, ids, plans, window):
    """Loss and likeliest tokens of the example, of `evaluate`, and of a patched model step by step."""
    heads = {place: ss.SketchHead(plan, len(ids), "cpu") for place, plan in sketched(model, plans).items()}
    losses, guesses = lm["evaluate"].score_text(model, heads, ids)[:2]
    other = lm["classes"].as_transformers(model)
    whole = st.evaluate(other, ids, plans, backend="cpu")
    # The first window of zero states is exact: a prompt of one window goes on as the example does.
    patch = st.patch(other, plans, slots=len(ids), backend="cpu")
    logits = stepwise(other, patch, ids, window)[:, :-1].log_softmax(-1)
    following = ids[:, window:, None]
    patched = -logits.gather(2, following)[..., 0].double().numpy()
    assert (logits.argmax(-1).numpy() == guesses[:, window - 1 :]).mean() > 0.995  # near ties
    # How much the heads change the loss of a token, and how much of that the code paths differ by.
    exact = {place: ss.StandardHead(model.layer, len(ids), "cpu") for place in model.recurrent}
    change = np.abs(losses - lm["evaluate"].score_text(model, exact, ids)[0]).mean()
    assert np.abs(patched - losses[:, window - 1 :]).mean() < 0.02 * change
    assert whole.patched_loss == pytest.approx(losses.mean(), abs=0.02 * change)
    return losses, patched, whole


@pytest.mark.parametrize("kind", SHIPPED)
def test_text_with_heads(kind, lm):
    """Sketches from random bases, which change the loss."""
    model = random_model(lm, kind)
    ids = tokens(model)
    plans = {}
    other = lm["classes"].as_transformers(model)
    for name, layer in st.layers(other).items():
        basis = ss.SketchBasis.random(layer.layer, 4, window=WINDOW)
        plans[name] = ss.SketchPlan(basis, [1, 2, 3, 4], window=WINDOW)
    check_scores(lm, model, ids, plans, WINDOW)


@pytest.fixture(scope="module")
def folder():
    path = Path(os.environ.get("SKETCHSSM_MODELS", "missing"))
    if not (path.parent / "tokens" / "test.npy").exists():
        pytest.skip("needs SKETCHSSM_MODELS, a folder of trained models beside a folder of tokens")
    return path


@pytest.fixture(scope="module", params=SHIPPED)
def trained(request, lm, folder):
    """A trained model, its plans from the example's calibration rows, and the folder of tokens."""
    model = lm["model"].HybridLM.load(folder / f"{request.param}.safetensors")
    other = lm["classes"].as_transformers(model)
    rows = np.load(folder.parent / "tokens" / "calib.npy")[: 3 * 384].reshape(3, 384).astype(np.int64)
    return model, st.calibrate(other, rows, mean_rank=4), folder.parent / "tokens"


def test_trained_models_on_text(trained, lm):
    """The same perplexity to four decimals of the loss: seven blocks in float32, logits of up to 20."""
    model, plans, folder = trained
    ids = torch.from_numpy(np.load(folder / "test.npy")[: 2 * 256].reshape(2, 256).astype(np.int64))
    losses, patched, whole = check_scores(lm, model, ids, plans, 16)
    print(f"{model.layer.kind}: {whole.loss:.5f}; with heads {losses.mean():.5f}, {whole.patched_loss:.5f}")
    assert patched.mean() == pytest.approx(losses[:, 15:].mean(), abs=5e-5)


def test_trained_models_recall(trained, lm):
    """The same answers to needle prompts, after an exact prefill."""
    model, plans, folder = trained
    encode = lm["evaluate"].encoder(folder)
    prompts = lm["prompts"].needle_prompts(np.load(folder / "test.npy"), encode, 12, 384, np.random.default_rng(4))
    ids = torch.from_numpy(prompts.ids)
    heads = {place: ss.SketchHead(plan, 12, "cpu") for place, plan in sketched(model, plans).items()}
    want = lm["evaluate"].continued(model, heads, lm["evaluate"].prefill(model, ids, prompts.question))
    other = lm["classes"].as_transformers(model)
    patch = st.patch(other, plans, slots=12, backend="cpu")
    got = stepwise(other, patch, ids, prompts.question)[:, 1:].argmax(-1).numpy()
    recalled = [prompts.right(rest) for rest in (got, want)]
    score = st.recall(other, prompts, plans, backend="cpu")
    assert score.share == recalled[0].mean()
    print(f"{model.layer.kind}: recall {recalled[0].mean()} {recalled[1].mean()}, tokens {(got == want).mean()}")
    assert np.array_equal(*recalled)
    assert (got == want).mean() > 0.995  # padding after the answers has near ties
