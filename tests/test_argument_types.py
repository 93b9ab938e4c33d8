"""Arguments of another class or out of range are refused by name, before anything is computed."""

import numpy as np
import pytest
from samples import plan_of, tokens_of

import sketchssm as ss
from sketchssm.calibrate.basis import SketchBasis
from sketchssm.planning import StepTimes

LAYER = ss.Layer("gdn", 2, 8, 8)
BASIS = SketchBasis.random(LAYER, 4)
PLAN = plan_of(np.random.default_rng(0), LAYER, 2, window=4)
TOKENS = tokens_of(np.random.default_rng(1), LAYER, 2, 12)


def search(**settings):
    return ss.autoplan([ss.Traces(LAYER, TOKENS, TOKENS)], error=1.0, **settings)


@pytest.mark.parametrize(
    ("call", "message"),
    (
        (lambda: ss.SketchHead("plan.safetensors", 4), "plan: expected a SketchPlan, got str"),
        (lambda: ss.SketchHead(LAYER, 4), "plan: expected a SketchPlan, got Layer"),
        (lambda: ss.SketchHead.parts_of(BASIS), "plan: expected a SketchPlan, got SketchBasis"),
        (lambda: ss.ReplayHead(PLAN, 4), "layer: expected a Layer, got SketchPlan"),
        (lambda: ss.ReplayHead.parts_of(PLAN), "layer: expected a Layer, got SketchPlan"),
        (lambda: ss.StandardHead("gdn", 4), "layer: expected a Layer, got str"),
        (lambda: ss.QuantisedHead(PLAN, 4), "layer: expected a Layer, got SketchPlan"),
        (lambda: ss.CopyReadHead(PLAN, 4), "layer: expected a Layer, got SketchPlan"),
        (lambda: ss.PrunedHead(PLAN, [True], 4), "layer: expected a Layer, got SketchPlan"),
        (lambda: ss.KeyReducedHead(LAYER, 4), "reduction: expected a KeyReduction, got Layer"),
        (lambda: ss.KeyMoments("gdn"), "layer: expected a Layer, got str"),
        (lambda: ss.fit_basis(BASIS), "moments: expected a Moments, got SketchBasis"),
        (lambda: ss.RankScores(PLAN), "basis: expected a SketchBasis, got SketchPlan"),
        (lambda: ss.SketchPlan(PLAN, [1, 1]), "basis: expected a SketchBasis, got SketchPlan"),
        (lambda: ss.allocate_ranks([BASIS], 2), "scores: expected a RankScores, got SketchBasis"),
        (lambda: ss.models.prefill_state(np.zeros((1, 2, 8, 8)), "kv", PLAN), "layer: expected a Layer, got SketchPl"),
        (lambda: search(candidates=["ridge"]), "candidates: expected a Candidate, got str"),
        (lambda: ss.Traces("gdn", TOKENS, TOKENS), "layer: expected a Layer, got str"),
        (lambda: ss.Traces(LAYER, TOKENS, tuple(TOKENS)), "test: expected a Tokens, got tuple"),
    ),
)
def test_other_classes(call, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    (
        (lambda: ss.candidates(flushes=(1, -3)), r"flushes: expected positive integers, got -3"),
        (lambda: ss.candidates(flushes=(1.5,)), r"flushes: expected positive integers, got 1\.5"),
        (lambda: StepTimes("cpu", 2.5), r"batch: expected a positive integer, got 2\.5"),
        (lambda: StepTimes("cpu", 2, seconds=0), r"seconds: expected a finite number above 0 or None, got 0"),
        (lambda: StepTimes("cpu", 2, seconds=np.inf), r"seconds: expected a finite number above 0 or None, got inf"),
        (
            lambda: ss.Traces(LAYER, TOKENS, TOKENS._replace(k=TOKENS.k[:1])),
            r"test\.k: expected shape \(2, 12, 2, 8\), got \(1, 12, 2, 8\)",
        ),
        (lambda: ss.Traces(LAYER, TOKENS._replace(beta=None), TOKENS), r"calib\.beta: gdn needs an array"),
        (
            lambda: ss.Traces(LAYER, TOKENS, TOKENS, np.zeros((3, 12, 2, 8))),
            r"grad: expected shape \(n <= 2, t <= 12, 2, 8\), got \(3, 12, 2, 8\)",
        ),
    ),
)
def test_other_values(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


@pytest.mark.parametrize("backend", ("cpu", "reference"))
def test_states_beyond_float16(backend):
    """They would be infinite, and all later outputs NaN."""
    head = ss.ReplayHead(LAYER, 2, backend, state_dtype="float16")
    state = np.full((2, 2, 8, 8), 65504, np.float32)
    head.load_state(state)
    state[1, 0, 0, 0] = 7e4
    with pytest.raises(ValueError, match=r"^state: expected numbers that float16 can hold, got 70000"):
        head.load_state(state)
    assert np.isfinite(head.state).all()
    head.load_state(state, [0, -1])  # padding may hold anything
