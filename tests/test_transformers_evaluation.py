"""What heads change in a model's predictions, against decoding the same text token by token through a cache."""

import numpy as np
import pytest
from samples import refused
from tiny_models import SETTINGS, call, forward, make, prompt, qwen, st, torch

import sketchssm as ss
from sketchssm.layer.recurrence import Layer
from sketchssm.plans import traffic

__all__ = ["qwen"]  # a fixture

WINDOW = 4


def text(rows=2, length=15):
    return prompt(rows, length, seed=8)


def random_plans(model):
    """Plans of rank 1 with random bases, whose errors are large."""
    plans = {}
    for name, x in st.layers(model).items():
        basis = ss.SketchBasis.random(x.layer, 4, window=WINDOW)
        plans[name] = ss.SketchPlan(basis, [1] * x.layer.heads)
    return plans


def stepwise(model, plans, ids):
    """Log-probabilities ``(rows, tokens, vocabulary)`` of a prompt of one window, then of calls of one token. A head
    that decodes the first window from a zero state is exact there too, and flushes at its end.
    """
    with st.patch(model, plans, slots=len(ids), backend="cpu"):
        logits, cache = forward(model, ids[:, :WINDOW])
        parts = [call(model, ids[:, i : i + 1], cache, i) for i in range(WINDOW, ids.shape[1])]
    return torch.cat([logits, *parts], 1).double().log_softmax(-1)


@pytest.mark.parametrize("name", SETTINGS)
def test_scores_are_those_of_stepwise_decoding(name):
    """A patched cache decodes token by token, as `generate` does."""
    model, ids = make(name), text()
    for x in st.layers(model).values():
        x.module.time_step_limit = (0.0, float("inf"))  # classes with a limit clamp in prefill alone
    plans = random_plans(model)
    got = st.evaluate(model, ids, plans, backend="cpu")
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits.double().log_softmax(-1)[:, :-1]
    patched = stepwise(model, plans, ids)[:, :-1]
    following = ids[:, 1:, None]
    losses = [-x.gather(2, following)[..., 0] for x in (plain, patched)]
    increases = (losses[1] - losses[0]).mean(1).numpy()
    divergence = (plain.exp() * (plain - patched)).sum(-1).mean().item()
    # Float32 logits of a few units, in two orders of summation; random bases change more.
    tolerance = {"abs": 1e-5}
    assert divergence > 2e-5
    assert got.loss == pytest.approx(losses[0].mean().item(), **tolerance)
    assert got.patched_loss == pytest.approx(losses[1].mean().item(), **tolerance)
    assert got.increase == pytest.approx(increases.mean(), **tolerance)
    assert got.increase_error == pytest.approx(increases.std(ddof=1) / 2**0.5, **tolerance)
    assert got.divergence == pytest.approx(divergence, abs=2e-6)
    assert got.agreement == pytest.approx((plain.argmax(-1) == patched.argmax(-1)).double().mean().item(), abs=1e-9)
    assert got.tokens == 28
    assert got.perplexity == pytest.approx(np.exp(got.loss))
    assert got.patched_perplexity == pytest.approx(np.exp(got.patched_loss))


@pytest.mark.parametrize("system", ("standard", "replay"))
def test_exact_systems(qwen, system):
    model = qwen.train()
    window = {"replay": WINDOW}.get(system)
    got = st.evaluate(model, text(), system, window=window, backend="cpu")
    assert model.training
    model.eval()
    assert got.patched_loss == pytest.approx(got.loss, abs=5e-5)
    assert got.agreement == 1
    assert got.divergence == pytest.approx(0, abs=1e-6)
    assert got.reduction == pytest.approx(1 if system == "standard" else 2 / (1 + 1 / WINDOW))


def test_traffic_by_layer(qwen):
    """Bytes of each layer, for plans of some layers and states of 16 bits too."""
    plans = random_plans(qwen)
    first, second = plans
    layer = Layer("gdn", 4, 8, 12, 2)
    standard = layer.heads * 2 * 4 * 8 * 12
    cost = float(traffic.sketch("gdn", 8, 12, [1] * 4, WINDOW).sum())
    got = st.evaluate(qwen, text(), {second: plans[second]}, backend="cpu")
    assert got.layers == {first: (standard, standard), second: (standard, pytest.approx(cost))}
    assert got.reduction == pytest.approx(2 * standard / (standard + cost))
    got = st.evaluate(qwen, text(), plans, backend="cpu", state_dtype="bfloat16")
    narrow = float(traffic.sketch("gdn", 8, 12, [1] * 4, WINDOW, state_dtype="bfloat16").sum())
    assert got.layers[first] == (standard, pytest.approx(narrow))
    got = st.evaluate(qwen, text(), plans, backend="cpu", sketch_dtype="float32")
    wider = float(traffic.sketch("gdn", 8, 12, [1] * 4, WINDOW, sketch_dtype="float32").sum())
    assert got.layers[first] == (standard, pytest.approx(wider))
    got = st.evaluate(qwen, text(), "standard", backend="cpu", state_dtype="bfloat16")
    assert got.layers[first] == (standard, standard / 2)


def test_rows_of_different_lengths_and_progress(qwen):
    """Losses are means over tokens, not over rows."""
    rows, labels = [text(1, 20)[0], text(1, 6)[0]], []
    got = st.evaluate(qwen, rows, "standard", backend="cpu", progress=labels.append)
    each = [st.evaluate(qwen, [row], "standard", backend="cpu") for row in rows]
    assert got.loss == pytest.approx((19 * each[0].loss + 5 * each[1].loss) / 24)
    assert np.isnan(each[0].increase_error)
    assert labels == ["row 1 of 2", "row 2 of 2"]


def test_bad_arguments(qwen, tmp_path):
    refused("text: expected rows of at least 2 tokens, got a row of 1", st.evaluate, qwen, text(2, 1), "standard")
    with pytest.raises(
        ValueError, match=r"plans: made for another model: expected a Qwen3NextForCausalLM, got a Qwen3_5"
    ):
        st.evaluate(make("Qwen3_5"), text(), st.calibrate(qwen, text(3, 24), window=WINDOW, mean_rank=3))


def test_errors_that_heads_report(qwen):
    """Of all rows together, though each row resets the heads; those of a patch, of each sequence."""
    plans, rows = random_plans(qwen), text()
    settings = {"backend": "cpu", "monitor": 1}
    got, *each = (st.evaluate(qwen, x, plans, **settings).errors for x in (rows, rows[:1], rows[1:]))
    assert set(got) == set(plans)
    for name, error in got.items():
        low, high = sorted(one[name] for one in each)
        assert 0 < low < error < high
    assert st.evaluate(qwen, rows, plans, backend="cpu").errors == {}
    with st.patch(qwen, plans, slots=3, **settings) as patched:
        _, cache = forward(qwen, rows[:, :WINDOW])
        for i in range(WINDOW, 2 * WINDOW):
            call(qwen, rows[:, i : i + 1], cache, i)
        found = patched.errors(reset=True)
        assert [sorted(x.samples) for x in found.values()] == [[0, 1, 1]] * len(plans)
        assert all(x.relative > 0 for x in found.values())
        assert not patched.errors()[next(iter(plans))].samples.any()
    bounded = settings | {"tolerance": 1e-20}
    assert set(st.evaluate(qwen, text(2, 5 * WINDOW), plans, **bounded).exact_rows.values()) == {2}
    with st.patch(qwen, plans, **bounded) as patched:
        assert not any(x.exact.any() for x in patched.errors().values())
    refused(r"monitor: expected patch\(..., monitor=1 or more\) with", st.patch(qwen, "replay", backend="cpu").errors)
