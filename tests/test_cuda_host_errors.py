"""Monitors on the CUDA backend: the sketch's answers at flush tokens, and the sums that flushes keep."""

import ml_dtypes
import numpy as np
import pytest
from host import fixtures
from ledger import Ledger
from samples import plan_of, states_of, tokens_of
from test_errors import call, continue_exactly, go_on_exactly

import sketchssm as ss
from sketchssm.layer.recurrence import FULL_STATE, Layer
from sketchssm.study.bench.graphs import captured

cupy = fixtures.of_kernels
pytestmark = pytest.mark.usefixtures("cupy")

SLOTS = 4
RANKS = [2, 11, FULL_STATE, 3]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
RESIDUAL = {"map": "subspace", "residual_bits": [1, 2, 0, 2]}
LOWRANK = {"map": "lowrank", "pivots": 4}


def case(kind, window, activation, form, plan=None, ranks=RANKS, thorough=False, dims=(64, 64)):
    """Two heads share a key, except in kda. Windows of 16 fill the operands of tensor cores."""
    layer = Layer(kind, 4, *dims, 4 if kind == "kda" else 2)
    marks = [pytest.mark.thorough] if thorough else []
    values = layer, window, activation, form, plan or {}, ranks
    return pytest.param(*values, marks=marks, id=f"{kind}-{window}-{activation}-{form}-{len(plan or {})}-{max(ranks)}")


CASES = [
    case("gdn", 16, "bfloat16", "bfloat16", LOWRANK),
    case("gdn", 16, "bfloat16", "int8", RESIDUAL),
    case("mamba2", 16, "bfloat16", "bfloat16", ranks=[2, 4, 3, 3]),
    case("kda", 4, "float32", "float32"),
    case("gdn", 16, "bfloat16", "bfloat16", ranks=[2, 4, 3, 3], thorough=True),
    case("gdn", 32, "float16", "float32", thorough=True),
    case("mamba2", 8, "bfloat16", "int8", RESIDUAL, thorough=True),
    case("kda", 16, "bfloat16", "bfloat16", RESIDUAL, thorough=True),
    case("gla", 16, "bfloat16", "bfloat16", thorough=True),
    case("gdn", 16, "bfloat16", "bfloat16", RESIDUAL, thorough=True, dims=(192, 144)),
]
TOLERANCE = {"float32": 3e-5, "bfloat16": 1e-2, "int8": 1e-2, "residual": 3e-2}
"""Of outputs, relative to the largest. float32 sketches: the basis in slices to 2^-16. bfloat16: sketch and map are
rounded to 2^-9 and cancel in part. Codes: by 1/254 of a column's largest. Of residuals up to 2% of the codes differ by
a level, as states are in bf16."""


def small_tokens(rng, layer, batch, count):
    """Tokens in bf16 with small decays and writes, so that reads at the end of a window are of the state."""
    tokens = tokens_of(rng, layer, batch, count)
    tokens = tokens._replace(**{name: getattr(tokens, name).astype(BFLOAT16).astype(np.float32) for name in "qkv"})
    tokens.g[...] *= 0.05
    if layer.erases:
        tokens.beta[...] *= 0.3
    return tokens


@pytest.mark.parametrize(("layer", "window", "activation", "form", "plan", "ranks"), CASES)
def test_errors_of_reads_at_flush_tokens(layer, window, activation, form, plan, ranks):
    """Every second flush; rows at different positions, and betas above 1, whose windows are folded token by token."""
    rng = np.random.default_rng(8)
    plan = plan_of(rng, layer, ranks, window=window, **plan)
    head = ss.SketchHead(
        plan, SLOTS, "cuda", sketch_dtype=form, activation_dtype=activation, output_dtype="float32", monitor=2
    )
    head.warmup()
    tokens = small_tokens(rng, layer, 3, 3 * window)
    if layer.erases:
        tokens.beta[1, :window] = 1.5
    ledger = Ledger(head, SLOTS)
    head.load_state(states_of(rng, layer, SLOTS))
    ledger.step(tokens.at(np.s_[:1, :3]), [2])
    ledger.step(tokens, [0, 2, 3])
    ledger.check(TOLERANCE["residual" if plan.residual_bits.any() else form])
    np.testing.assert_array_equal(head.errors().samples, [2, 0, 2, 2])
    assert (head.errors([2]).error > 1e-3 * head.errors([2]).energy)[0, np.array(ranks) > 0].all()


def test_requests_carry_their_sums(cupy, rng):
    """Copies and snapshots take them along; the next request of a slot, `reset` and `reset=True` clear them."""
    layer = Layer("kda", 4, 64, 64, 4)
    plan = plan_of(rng, layer, RANKS, window=4)
    make = {"sketch_dtype": "float32", "activation_dtype": "float32", "monitor": 2}
    parts = ss.SketchHead.parts_of(plan, "cuda", **make)
    memory = {"errors": cupy.full((SLOTS, *next(p.shape for p in parts if p.name == "errors")), np.nan, np.float32)}
    head = ss.SketchHead(plan, SLOTS, "cuda", memory=memory, phase=1, **make)
    head.warmup(drafts=True)
    assert (head.errors().samples == 0).all()
    ledger, slots = Ledger(head, SLOTS), [1, 2, 3, 0]
    for name, count in (
        *(("step", 7), ("copy", 1), ("snapshot", 1), ("step", 4), ("reset", 1), ("step", 4), ("adopt", 1)),
        *(("step", 4), ("load_state", 1), ("step", 4), ("draft", 3), ("flush", 1), ("take", 2), ("step", 4)),
    ):
        call(ledger, rng, name, slots, count)
        ledger.check(TOLERANCE["float32"])
        slots = [*slots[1:], slots[0]]


def test_layers_with_their_own_tolerances_share_kernels(rng):
    plan = plan_of(rng, Layer("kda", 4, 64, 64, 4), RANKS, window=4)
    heads = [ss.SketchHead(plan, SLOTS, "cuda", monitor=1, tolerance=x) for x in (None, 0.1, 0.2)]
    none, one, other = (head._engine.variants() for head in heads)
    assert one == other != none


def test_exact_reads_go_on_through_all_calls(rng):
    layer = Layer("kda", 4, 64, 64, 4)
    make = {"sketch_dtype": "float32", "activation_dtype": "float32", "monitor": 2, "tolerance": 1e-9}
    head = ss.SketchHead(plan_of(rng, layer, RANKS, window=4), SLOTS, "cuda", phase=1, **make)
    head.warmup(drafts=True)
    go_on_exactly(Ledger(head, SLOTS), rng, TOLERANCE["float32"])


@pytest.mark.parametrize(("layer", "window", "activation", "form", "plan", "ranks"), CASES)
def test_requests_above_a_tolerance_continue_exactly(layer, window, activation, form, plan, ranks):
    rng = np.random.default_rng(8)
    plan = plan_of(rng, layer, ranks, window=window, **plan)
    make = {"sketch_dtype": form, "activation_dtype": activation, "output_dtype": "float32", "monitor": 2}

    def head_of(**own):
        head = ss.SketchHead(plan, SLOTS, "cuda", **make, **own)
        head.warmup()
        return head

    tokens = small_tokens(rng, layer, 2, 9 * window)
    continue_exactly(head_of, tokens, states_of(rng, layer, 2), 1e-4)


@pytest.mark.parametrize("phase", [None, 1])
def test_each_row_of_a_large_batch_decides(phase, rng):
    """More rows than a flush has warps, at all positions; about half of them are read exactly, as on the CPU."""
    layer, rows, steps = Layer("kda", 2, 64, 64, 2), 40, 44
    plan, states = plan_of(rng, layer, [3, FULL_STATE], window=4), states_of(rng, layer, rows)
    tokens = tokens_of(rng, layer, rows, steps)
    table = [np.where(rng.uniform(size=rows) < 0.2, -1, rng.permutation(rows)) for _ in range(steps)]

    def decoded(backend, **own):
        head = ss.SketchHead(plan, rows, backend, sketch_dtype="float32", monitor=2, phase=phase, **own)
        head.warmup()
        head.load_state(states)
        outs = [head.step(*tokens.at(np.s_[:, t]), slots=slots) for t, slots in enumerate(table)]
        return np.stack(outs), head.errors()

    sums = decoded("cpu")[1]
    tolerance = float(np.median(sums.error.sum(1) / sums.energy.sum(1)))
    want, found = decoded("cpu", tolerance=tolerance)
    got, same = decoded("cuda", tolerance=tolerance, activation_dtype="float32")
    assert 0.2 < found.exact.mean() < 0.9
    np.testing.assert_array_equal(same.exact, found.exact)
    np.testing.assert_array_equal(same.samples, found.samples)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * abs(want).max())


def test_graphs_measure_and_begin_requests(cupy, rng):
    """A captured step counts its flushes on the device, and finds errors above the tolerance; a captured `adopt`
    clears the sums.
    """
    layer = Layer("kda", 4, 64, 64, 4)
    plan, state = plan_of(rng, layer, RANKS, window=4), states_of(rng, layer, 2)
    make = {"sketch_dtype": "float32", "activation_dtype": "float32", "monitor": 2, "tolerance": 1e-9}
    heads = [ss.SketchHead(plan, SLOTS, "cuda", **make) for _ in range(2)]
    tokens = [None if x is None else cupy.asarray(x[:, 0]) for x in tokens_of(rng, layer, 2, 1)]
    slots, out, stream = cupy.asarray(np.array([3, 1])), cupy.empty((2, 4, 64), np.float32), cupy.cuda.Stream()
    for head in heads:
        head.warmup()
        head.load_state(state, [3, 1])
    step, begin = (captured(x, stream) for x in (
        lambda: heads[0].step(*tokens, slots=slots, out=out), lambda: heads[0].adopt(slots)))  # fmt: skip
    for _ in range(27):
        step.launch(stream)
        stream.synchronize()
        heads[1].step(*tokens, slots=slots, out=out)
    assert not heads[0].errors().exact.any()
    for _ in range(3):
        step.launch(stream)
        stream.synchronize()
        heads[1].step(*tokens, slots=slots, out=out)
    assert heads[0].position.get().tolist() == [0] * SLOTS
    found, want = (head.errors() for head in heads)
    np.testing.assert_array_equal(found.samples, [0, 4, 0, 4])
    np.testing.assert_array_equal(found.exact, [False, True, False, True])
    np.testing.assert_array_equal(found.error, want.error)
    assert (found.error[1, [0, 1, 3]] > 0).all()
    begin.launch(stream)
    stream.synchronize()
    assert not heads[0].errors().samples.any() and not heads[0].errors().exact.any()
