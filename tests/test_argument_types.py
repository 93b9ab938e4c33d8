"""Arguments of another class or out of range are refused by name, before anything is computed."""

import numpy as np
import pytest
from samples import plan_of, tokens_of

import sketchssm as ss
from sketchssm.calibrate.basis import SketchBasis
from sketchssm.study.planning import StepTimes

LAYER = ss.Layer("gdn", 2, 8, 8)
BASIS = SketchBasis.random(LAYER, 4)
PLAN = plan_of(np.random.default_rng(0), LAYER, 2, window=4)
TOKENS = tokens_of(np.random.default_rng(1), LAYER, 2, 12)
MOMENTS = ss.Moments(LAYER, window=4)
MOMENTS.update(*TOKENS)
SCORES = ss.RankScores(ss.fit_basis(MOMENTS))
SCORES.update(*TOKENS)
MOMENTS_OF_KEYS = ss.KeyMoments(LAYER)
MOMENTS_OF_KEYS.update(*TOKENS)
X, DT, A = np.ones((1, 2, 2, 8)), np.ones((1, 2, 2)), np.ones(2)


def gdn(convert=ss.models.gdn_inputs, **settings):
    g = np.full((1, 2, 2, 8), -1.0) if convert is ss.models.kda_inputs else -DT
    return convert(X, X, X, g=g, beta=DT, **settings)


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
        (lambda: ss.Traces(LAYER, TOKENS, TOKENS, name=3), "name: expected a str, got int"),
        (lambda: ss.Traces(LAYER, TOKENS, TOKENS, provenance=None), "provenance: expected a str, got NoneType"),
        (lambda: SketchBasis.random("gdn", 4), "layer: expected a Layer, got str"),
        (lambda: ss.GateInput([0.0], [1.0]).check(None), "layer: expected a Layer, got NoneType"),
        (lambda: ss.low_rank_plan(PLAN, 2), "moments: expected a Moments, got SketchPlan"),
        (lambda: ss.allocate_ranks(PLAN, 2), "scores: expected a sequence of RankScores, got SketchPlan"),
        (lambda: ss.candidates(maps="ridge"), "maps: expected a sequence of maps, got 'ridge'"),
        (lambda: ss.candidates(sketch_dtypes="int8"), "sketch_dtypes: expected a sequence of formats, got 'int8'"),
        (lambda: ss.candidates(windows=16), "windows: expected a sequence of integers, got 16"),
        (lambda: search(candidates=3), "candidates: expected a sequence of Candidates, got 3"),
        (lambda: search(mean_ranks=4), "mean_ranks: expected a sequence of numbers, got 4"),
        (lambda: ss.autoplan(PLAN, error=1.0), "layers: expected a sequence of Traces or of pairs"),
        (lambda: ss.models.mamba2_inputs(X, DT, A, X, X, dt_limit=3), "dt_limit: expected a sequence of two numbers"),
        (lambda: ss.Traces(LAYER, TOKENS, tuple(TOKENS)), "test: expected a Tokens, got tuple"),
    ),
)
def test_other_classes(call, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    (
        (lambda: StepTimes("cpu", 2.5), r"batch: expected a positive integer, got 2\.5"),
        (lambda: StepTimes("cpu", 2, seconds=0), r"seconds: expected a finite number above 0 or None, got 0"),
        (lambda: StepTimes("cpu", 2, seconds="1"), r"seconds: expected a finite number above 0 or None, got '1'"),
        (lambda: ss.autoplan([PLAN], error="1"), r"error: expected a finite number above 0, got '1'"),
        (lambda: ss.Layer("gdn", 4, 8, 8, 0), r"key_heads: expected a positive integer, got 0"),
        (
            lambda: ss.StandardHead(LAYER, 1 << 31),
            r"num_slots: expected at most 2147483647, as slots are integers of 32 bits",
        ),
        (lambda: ss.StandardHead(LAYER, 2).copy([0], None), r"dst: expected one integer for each row, got shape \(\)"),
        (lambda: ss.CoefficientMap("ridge", ridge=np.nan), r"ridge: expected a finite number of at least 0, got nan"),
        (lambda: ss.allocate_ranks(SCORES, "4"), r"mean_rank: expected a finite number of at least 1, got '4'"),
        (lambda: ss.allocate_ranks(SCORES, 2, method=""), r"method: expected one of gradient, .*, got ''"),
        (lambda: ss.low_rank_plan(MOMENTS, [1, 2, 3]), r"ranks: expected 2 integers, got shape \(3,\)"),
        (lambda: ss.GateInput([0.0], [1.0], "-5"), r"lower_bound: expected a negative number, got '-5'"),
        (lambda: BASIS.columns(5), r"rank: expected 1 to rank_max=4, got 5"),
        (lambda: BASIS.columns("2"), r"rank: expected a positive integer, got '2'"),
        (lambda: PLAN.reduction_with(sketch_dtype=""), r"sketch_dtype: expected one of float32, .*, got ''"),
        (lambda: ss.Candidate("sparse"), r"map: expected one of exact, .*, got 'sparse'"),
        (lambda: ss.Candidate("ridge", "int4"), r"sketch_dtype: expected one of float32, .*, got 'int4'"),
        (lambda: ss.Candidate("ridge", window=0), r"window: expected an integer from 2 to 64, got 0"),
        (lambda: MOMENTS_OF_KEYS.reduce("0.5"), r"sparsity: expected a number from 0 to below 1, got '0\.5'"),
        (lambda: gdn(scale=np.nan), r"scale: expected a finite number, got nan"),
        (lambda: gdn(scale=np.ones(3)), r"scale: expected a finite number, got array"),
        (lambda: gdn(eps=1e-5, l2norm=False), r"eps: expected None with l2norm=False, got 1e-05"),
        (lambda: gdn(eps=-1.0), r"eps: expected a finite number of at least 0, got -1\.0"),
        (lambda: gdn(ss.models.kda_inputs, lower_bound="-5"), r"lower_bound: expected a negative number, got '-5'"),
        (lambda: gdn(ss.models.kda_inputs, clamp_min=-np.inf), r"clamp_min: expected a negative number, got -inf"),
        (lambda: ss.models.mamba2_inputs(X, DT, A, X, X, dt_limit=(0, 1, 2)), r"dt_limit: expected 0 <= low <= high"),
        (lambda: ss.models.mamba2_inputs(X, DT, A, X, X, dt_limit=("0", 1)), r"dt_limit: expected numbers of at le"),
        (lambda: ss.traffic.standard(0, 8), r"key_dim: expected a positive integer, got 0"),
        (lambda: ss.traffic.reduction("gdn", 8, 8.5, 2), r"value_dim: expected a positive integer, got 8\.5"),
        (lambda: ss.traffic.sketch_read("gdn", -8, 8, 2), r"key_dim: expected a positive integer, got -8"),
        (lambda: ss.traffic.sketch_read("gdn", 8, 8, 2, 0), r"window: expected a positive integer, got 0"),
        (lambda: ss.traffic.compressed(8, 0, bits=4), r"value_dim: expected a positive integer, got 0"),
        (lambda: ss.traffic.compressed(8, 8, bits="4"), r"bits: expected a positive number, got '4'"),
        (lambda: ss.traffic.read_only_copy(8, 8, 4, None), r"window: expected a positive integer, got None"),
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


def test_times_without_a_device(monkeypatch):
    monkeypatch.setattr("sketchssm.cuda.missing", lambda: "no CUDA device")
    with pytest.raises(ValueError, match=r"^backend: 'cuda' can't run here: no CUDA device"):
        StepTimes("cuda", 2)


@pytest.mark.parametrize("backend", ("cpu", "reference"))
@pytest.mark.parametrize(
    ("state_dtype", "largest", "beyond"), [("float16", 65504, 7e4), ("bfloat16", 3.38e38, 3.4e38)]
)
def test_states_beyond_16_bits(backend, state_dtype, largest, beyond):
    """They would be infinite, and all later outputs NaN."""
    head = ss.ReplayHead(LAYER, 2, backend, state_dtype=state_dtype)
    state = np.full((2, 2, 8, 8), largest, np.float32)
    head.load_state(state)
    state[1, 0, 0, 0] = beyond
    with pytest.raises(ValueError, match=rf"^state: expected numbers that {state_dtype} can hold, got "):
        head.load_state(state)
    assert np.isfinite(head.state.astype(float)).all()
    head.load_state(state, [0, -1])  # padding may hold anything
