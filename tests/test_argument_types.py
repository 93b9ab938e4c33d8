"""Arguments of another class or out of range are refused by name, before anything is computed."""

import re
from functools import partial

import numpy as np
import pytest
from samples import plan_of, refused, tokens_of

import sketchssm as ss
from sketchssm.calibrate.plans import Settings, calibrate, plan_layers
from sketchssm.plans.basis import SketchBasis
from sketchssm.study.evaluate import Study
from sketchssm.study.planning import StepTimes

LAYER = ss.Layer("gdn", 2, 8, 8)
BASIS = SketchBasis.random(LAYER, 4)
PLAN = plan_of(np.random.default_rng(0), LAYER, 2, window=4)
TOKENS = tokens_of(np.random.default_rng(1), LAYER, 2, 12)
MOMENTS = ss.Moments(LAYER, window=4)
MOMENTS.update(*TOKENS)
SCORES = ss.RankScores(ss.fit_basis(MOMENTS))
JOINT = ss.JointScores(ss.fit_basis(MOMENTS))
SCORES.update(*TOKENS)
JOINT.update(*TOKENS)
MOMENTS_OF_KEYS = ss.KeyMoments(LAYER)
MOMENTS_OF_KEYS.update(*TOKENS)
KDA = ss.Layer("kda", 2, 8, 8)
X, DT, A = np.ones((1, 2, 2, 8)), np.ones((1, 2, 2)), np.ones(2)


def gdn(convert=ss.models.gdn_inputs, **settings):
    g = np.full((1, 2, 2, 8), -1.0) if convert is ss.models.kda_inputs else -DT
    return convert(X, X, X, g=g, beta=DT, **settings)


def search(**settings):
    return ss.autoplan([ss.Traces(LAYER, TOKENS, TOKENS)], error=1.0, **settings)


@pytest.mark.parametrize(
    ("call", "message"),
    (
        (lambda: ss.allocate_ranks([BASIS], 2), "scores: expected a RankScores, got SketchBasis"),
        (lambda: ss.allocate_ranks(PLAN, 2), "scores: expected a sequence of RankScores, got SketchPlan"),
        (lambda: ss.allocate_joint(BASIS), r"^scores: expected a sequence of JointScores, got SketchBasis\(.{,20}$"),
        (lambda: search(candidates=["ridge"]), "candidates: expected a Candidate, got str"),
        (lambda: search(candidates=3), "candidates: expected a sequence of Candidates, got 3"),
        (lambda: ss.autoplan(PLAN, error=1.0), "layers: expected a sequence of Traces, got SketchPlan"),
        (lambda: ss.GateInput([0.0], [1.0]).check(None), "layer: expected a Layer, got NoneType"),
        (lambda: ss.Traces(LAYER, TOKENS, tuple(TOKENS)), "test: expected a Tokens, got tuple"),
        (
            lambda: ss.StandardHead(LAYER, 1 << 31),
            "num_slots: expected an integer from 1 to 2147483647, got 2147483648",
        ),
        (lambda: gdn(scale=np.ones(3)), r"scale: expected a finite number, got array"),
        (lambda: gdn(eps=1e-5, l2norm=False), r"eps: expected None with l2norm=False"),
        (lambda: ss.models.mamba2_inputs(X, DT, A, X, X, dt_limit=(0, 1, 2)), r"dt_limit: expected 0 <= low <= high"),
        (lambda: ss.models.mamba2_inputs(X, DT, A, X, X, dt_limit=("0", 1)), r"dt_limit: expected numbers of at le"),
        (lambda: ss.Traces(LAYER, TOKENS, TOKENS._replace(k=TOKENS.k[:1])), r"test\.k: expected shape"),
        (lambda: ss.Traces(LAYER, TOKENS._replace(beta=None), TOKENS), r"calib\.beta: gdn needs an array"),
        (lambda: ss.Traces(LAYER, TOKENS, TOKENS, np.zeros((3, 12, 2, 8))), r"grad: expected shape \(n <= 2, t <= 12"),
    ),
)
def test_other_objects(call, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        call()


ODD = [
    None, True, 0, -1, 3, 2.5, 1j, np.nan, 1e308, 10**30, "x", "", b"x", [], ["a"], [[1, 2], [3]], {}, {"a": 1}, int,
    np.array(3), np.array([1, 2]), np.array([1.5]), np.array(["a"]), np.array([object()]), np.zeros(0), np.eye(2),
    np.datetime64("2020"), object(), LAYER, PLAN, iter([1]), slice(2), ...,
]  # fmt: skip
TYPES = {"gate": None, "activation_dtype": None, "state_dtype": "float32"}
HEAD = {"num_slots": 2, "backend": "reference"}
EXACT = HEAD | TYPES | {"output_dtype": None, "pad_slot": -1, "memory": None}
TOKENS_BY_NAME = TOKENS._asdict()
SIZES, READ = {"key_dim": 8, "value_dim": 8}, {"kind": "gdn", "window": 4, "map": "ridge", "sketch_dtype": "int8"}
CALLS = [
    (ss.StandardHead, EXACT | {"layer": LAYER, "drafts": 0}),
    (ss.ReplayHead, EXACT | {"layer": LAYER, "window": 4, "phase": 1}),
    (ss.SketchHead, EXACT | {"plan": PLAN, "sketch_dtype": None, "phase": 1}),
    (ss.StandardHead.parts_of, TYPES | {"layer": LAYER, "backend": "cpu", "drafts": 0}),
    (ss.ReplayHead.parts_of, TYPES | {"layer": LAYER, "backend": "cpu", "window": 4}),
    (ss.SketchHead.parts_of, TYPES | {"plan": PLAN, "backend": "cpu", "sketch_dtype": None}),
    (ss.QuantisedHead, HEAD | {"layer": LAYER, "bits": 8}),
    (ss.CopyReadHead, HEAD | {"layer": LAYER, "bits": 8, "window": 4}),
    (ss.PrunedHead, HEAD | {"layer": KDA, "keep": np.ones((2, 8), bool)}),
    (ss.KeyReducedHead, HEAD | {"reduction": MOMENTS_OF_KEYS.reduce(0.5)}),
    (ss.SketchPlan, {"basis": BASIS, "ranks": [2, 2], "window": 4, "map": "ridge", "sketch_dtype": "int8"}),
    (PLAN.shard, {"rank": 0, "world": 1}),
    (PLAN.reduction_with, {"state_dtype": "float32", "sketch_dtype": "float32"}),
    (ss.Layer, {"kind": "gdn", "heads": 4, "key_dim": 8, "value_dim": 8, "key_heads": 1}),
    (ss.CoefficientMap, {"name": "lowrank", "pivots": 2, "ridge": 0.1}),
    (ss.GateInput, {"A_log": np.zeros(2), "dt_bias": np.zeros((2, 8)), "lower_bound": None}),
    (ss.KeyMoments, {"layer": LAYER}),
    (MOMENTS_OF_KEYS.reduce, {"sparsity": 0.5}),
    (ss.ChannelScores(KDA).update, TOKENS_BY_NAME | {"g": np.tile(TOKENS.g[..., None], 8)}),
    (ss.Moments(LAYER, window=4).update, TOKENS_BY_NAME | {"carry": None}),
    (ss.RankScores(ss.fit_basis(MOMENTS)).update, TOKENS_BY_NAME | {"carry": None}),
    (ss.low_rank_projection, {"moments": MOMENTS, "rank": 2}),
    (ss.fit_basis, {"moments": MOMENTS, "rank_max": 2}),
    (partial(ss.Moments, LAYER), {"window": 4}),
    (ss.RankScores, {"basis": BASIS, "window": 4, "rank_max": 2}),
    (
        ss.JointScores,
        {"basis": BASIS, "window": 4, "ranks": [1, 2], "bits": [1], "sketch_dtype": "int8", "every": 1},
    ),
    (ss.JointScores(BASIS).update, TOKENS_BY_NAME | {"carry": None}),
    (ss.allocate_joint, {"scores": JOINT, "reduction": 0.5, "answers": None}),
    (SketchBasis.random, {"layer": LAYER, "rank_max": 2, "seed": 0, "window": 4}),
    (ss.allocate_ranks, {"scores": SCORES, "mean_rank": 2, "method": "error", "map": "ridge", "rank_max": 2}),
    (calibrate, {"traces": ss.Traces(LAYER, TOKENS, TOKENS), "window": 4, "rank_max": 2}),
    (plan_layers, {"bases": [BASIS], "scores": [SCORES], "mean_rank": 2, "map": "ridge", "sketch_dtype": "int8"}),
    (partial(search, candidates=[ss.Candidate("ridge", window=4)]), {"mean_ranks": (2,)}),
    (partial(Study, ss.Traces(LAYER, TOKENS, TOKENS)), {"settings": Settings(4), "ranks": [2], "mean_rank": 2}),
    (partial(Study, ss.Traces(LAYER, TOKENS, TOKENS), Settings(4), [2], 2), {"seed": 0, "plan": None, "every": 4}),
    (StepTimes, {"backend": "cpu", "batch": 2}),
    (ss.Candidate, {"map": "ridge", "sketch_dtype": "int8", "window": 4}),
    (ss.candidates, {"maps": ["ridge"], "sketch_dtypes": ["int8"], "windows": [4]}),
    (ss.Traces, {"layer": LAYER, "calib": TOKENS, "test": TOKENS, "name": "a", "provenance": "b"}),
    (ss.Traces.shipped, {"kind": "gdn"}),
    (ss.traffic.standard, SIZES | {"state_dtype": "float32"}),
    (ss.traffic.replay, SIZES | {"window": 4}),
    (
        partial(ss.traffic.sketch_read, **SIZES, rank=2),
        {"kind": "gdn", "window": 4, "map": "ridge", "sketch_dtype": "int8"},
    ),
    (
        partial(ss.traffic.reduction, **SIZES, rank=2),
        {"kind": "gdn", "window": 4, "map": "ridge", "sketch_dtype": "int8"},
    ),
    (ss.traffic.read_only_copy, SIZES | {"bits": 4.0, "window": 4}),
    (partial(ss.traffic.compressed, **SIZES), {"bits": 4.0}),
    (partial(ss.traffic.compressed, bits=4), SIZES),
    (gdn, {"scale": 1.0, "eps": 1e-6}),
    (partial(gdn, ss.models.kda_inputs), {"scale": 1.0}),
    (partial(ss.models.mamba2_inputs, X, DT, A, X, X), {"dt_limit": (0.0, 1.0)}),
    (partial(ss.models.prefill_state, layout="kv"), {"state": np.zeros((1, 2, 8, 8)), "layer": LAYER}),
]
for made in (ss.StandardHead(LAYER, 2, "reference", drafts=3), ss.SketchHead(PLAN, 2, "reference")):
    step = {name: x[:, :2] for name, x in TOKENS_BY_NAME.items()} | {"slots": None, "lengths": None, "draft": True}
    CALLS += [(getattr(made, name), {"slots": None}) for name in ("flush", "reset", "adopt", "snapshot")]
    CALLS += [
        (made.step, step),
        (made.load_state, {"state": np.zeros((2, 2, 8, 8)), "slots": None}),
        (made.commit, {"accepted": [0, 0], "slots": None}),
        (made.copy, {"src": [0], "dst": [1]}),
        (made.restore, {"snapshot": made.snapshot(), "slots": None}),
        (made.warmup, {"activation_dtype": None, "drafts": False}),
    ]


BOTH = {
    "name": "map|name", "src": "src|dst", "A_log": "A_log|dt_bias", "heads": "heads|key_heads|value_dim",
    "key_dim": "key_dim|value_dim", "bases": "bases|basis|scores", "settings": "settings|traces",
    "bits": "bits|compressed",
}  # fmt: skip
BOTH |= {name: f"{name}|{name.removesuffix('s')}" for name in ("maps", "sketch_dtypes", "windows")}
LEAST = dict.fromkeys(
    ("num_slots", "batch", "heads", "key_dim", "value_dim", "window", "rank_max", "pivots", "every"), 1
)
LEAST |= {"bits": 2, "phase": 0, "seed": 0, "drafts": 0, "pad_slot": -1}
"""Integers from these on."""
UNBOUNDED = "batch", "key_dim", "value_dim", "window", "every", "seed"


@pytest.mark.parametrize(("call", "arguments"), CALLS, ids=lambda x: getattr(x, "__qualname__", ""))
def test_odd_arguments_are_taken_or_named(call, arguments):
    """Whatever an argument is, an error is a ValueError or a TypeError that begins with the argument's name; arguments
    that are integers take integers in their range alone.
    """
    for name in arguments:
        whole = name in LEAST and type(arguments[name]) is int
        for value in ODD:
            try:
                call(**arguments | {name: value})
            except (ValueError, TypeError) as error:
                assert re.match(rf"({BOTH.get(name, name)})\b", str(error)), (name, value, error)
            else:
                most = 10 ** (31 if name in UNBOUNDED else 30)
                taken = value is None or (type(value) is int and LEAST.get(name, 0) <= value < most)
                assert taken or not whole, (name, value)


@pytest.mark.parametrize("backend", ("cpu", "reference"))
def test_more_slots_than_memory(backend):
    with pytest.raises(MemoryError, match=r"^num_slots: no memory for 2147483647 slots with state of "):
        ss.StandardHead(ss.Layer("gdn", 2, 1 << 12, 1 << 12), (1 << 31) - 1, backend)
    refused(r"value_dim: expected states of at most 1099511627776 elements, got \(2,", ss.Layer, "gdn", 2, 8, 1 << 50)


def test_times_without_a_device(monkeypatch):
    monkeypatch.setattr("sketchssm.cuda.missing", lambda: "no CUDA device")
    refused("backend: 'cuda' can't run here: no CUDA device", StepTimes, "cuda", 2)


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
    refused(f"state: expected numbers that {state_dtype} can hold, got ", head.load_state, state)
    assert np.isfinite(head.state.astype(float)).all()
    head.load_state(state, [0, -1])  # padding may hold anything
