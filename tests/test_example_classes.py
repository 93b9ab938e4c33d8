"""The example's models as classes of transformers, with random weights: two code paths, the same perplexity."""

import numpy as np
import pytest
from samples import relative
from test_example_lm import modules, tiny
from tiny_models import cache_argument, st, torch

import sketchssm as ss
from sketchssm.calibrate.traces import SHIPPED

WINDOW = 8


lm = modules("classes")


def random_model(lm, kind):
    """A tiny model whose every parameter matters."""
    model = tiny(lm, kind)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or name.endswith("conv_w"):
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def tokens(model, rows=2):
    generator = torch.Generator().manual_seed(6)
    return torch.randint(model.emb.num_embeddings, (rows, 40), generator=generator)


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


@pytest.mark.parametrize("kind", SHIPPED)
def test_text_with_heads(kind, lm):
    """Loss and likeliest tokens of the example, of `evaluate`, and of a patched model step by step; with sketches from
    random bases, which change the loss.
    """
    model, window = random_model(lm, kind), WINDOW
    ids, other = tokens(model), lm["classes"].as_transformers(model)
    plans = {
        name: ss.SketchPlan(ss.SketchBasis.random(layer.layer, 4, window=window), [1, 2, 3, 4])
        for name, layer in st.layers(other).items()
    }
    heads = {
        place: ss.SketchHead(plan, len(ids), "cpu")
        for place, plan in zip(model.recurrent, plans.values(), strict=True)
    }
    losses, guesses = lm["evaluate"].score_text(model, heads, ids)[:2]
    whole = st.evaluate(other, ids, plans, backend="cpu")
    # The first window of zero states is exact: a prompt of one window goes on as the example does.
    patch = st.patch(other, plans, slots=len(ids), backend="cpu")
    logits = stepwise(other, patch, ids, window)[:, :-1].log_softmax(-1)
    patched = -logits.gather(2, ids[:, window:, None])[..., 0].double().numpy()
    assert (logits.argmax(-1).numpy() == guesses[:, window - 1 :]).mean() > 0.995  # near ties
    # How much the heads change the loss of a token, and how much of that the code paths differ by.
    exact = {place: ss.StandardHead(model.layer, len(ids), "cpu") for place in model.recurrent}
    change = np.abs(losses - lm["evaluate"].score_text(model, exact, ids)[0]).mean()
    assert np.abs(patched - losses[:, window - 1 :]).mean() < 0.02 * change
    assert whole.patched_loss == pytest.approx(losses.mean(), abs=0.02 * change)
