"""Steps of few rows, which a sketch's engine decodes exactly, against the float64 reference, on a device."""

import ml_dtypes
import numpy as np
import pytest
from cuda_support import LAYERS, error, evaluated, make_plan, make_tokens, named_gate, run_mixed

import sketchssm as ss
from sketchssm.recurrence import DENSE, Tokens
from sketchssm.reference import engines as reference

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:loading kernel:RuntimeWarning")]

# float32 arithmetic over a few hundred tokens; sketches stored in bf16, a few roundings of 2^-9 in a row
EXACT, STORED = 2e-6, 1.2e-2
RANKS = {"mamba2": [5, 1, 17, DENSE], "gdn": [7, DENSE, 16, 2], "kda": [9, 33, 1]}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    ("activation", "window", "kind"),
    [("bfloat16", 16, "lowrank"), ("float16", 4, "ridge"), ("float32", 8, "prior")],
)
def test_small_steps_among_others(name, activation, window, kind, rng, cupy):
    from sketchssm.cuda.engines import SketchEngine

    layer = LAYERS[name]
    ranks = np.resize(RANKS[layer.kind], layer.heads)
    plan = make_plan(layer, ranks, rng, map=kind, ridge={"lowrank": 0.1}.get(kind, 0.001), window=window)
    gate = named_gate(name, layer, rng)
    device = SketchEngine(plan, 6, activation=activation, output="float32", gate=gate, exact_rows=2)
    oracle = reference.SketchEngine(evaluated(plan), 6, exact_rows=2)
    for array in (*device.ring, device.sketch):
        array.view(np.uint8)[...] = 0xFF
    device.reset(cupy.arange(6))
    start = rng.standard_normal((6, *layer.state_shape)).astype(np.float32)
    device.load_state(cupy.asarray(start), cupy.arange(6))
    oracle.load_state(start.astype(np.float64), np.arange(6))
    got, want, exact = run_mixed(device, oracle, layer, 12 * window, activation, rng, gate)
    dense = ranks == DENSE
    assert error(got[exact], want[exact]) < EXACT
    assert not dense.any() or error(got[~exact][:, dense], want[~exact][:, dense]) < EXACT
    assert error(got[~exact][:, ~dense], want[~exact][:, ~dense]) < STORED
    device.flush(cupy.arange(6))
    oracle.flush(np.arange(6))
    assert error(device.state.get(), oracle.state) < EXACT


@pytest.mark.parametrize("kind", ["mamba2", "gdn", "kda"])
def test_a_graph_of_small_steps_is_standard_decode(kind, rng, cupy):
    """One launch a token, which folds what the slots have buffered when the graph is replayed first."""
    layer = LAYERS[kind]
    head = ss.SketchHead(make_plan(layer, [3] * layer.heads, rng), 4, "cuda", exact_rows=2)
    standard = ss.StandardHead(layer, 4, "cuda")

    def tokens(rows):
        drawn = make_tokens(layer, rows, 1, "bfloat16", rng, hard_gates=False)
        moved = (
            x if x is None else x[:, 0].astype(ml_dtypes.bfloat16) if i < 3 else x[:, 0] for i, x in enumerate(drawn)
        )
        return Tokens(*(x if x is None else cupy.asarray(np.ascontiguousarray(x)) for x in moved))

    given, slots = [tokens(2) for _ in range(5)], cupy.asarray([1, 3])
    out = [cupy.zeros(token.v.shape, token.v.dtype) for token in given]
    wide = [tokens(4) for _ in range(3)]
    for each in (head, standard):
        each.warmup()
        each.step(*given[0], slots=slots, out=out[0])  # views of all arrays are made before the capture
        for token in wide:
            each.step(*token)
    assert head.position.tolist() == [3, 2, 3, 2]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        for token, target in zip(given, out, strict=True):
            head.step(*token, slots=slots, out=target)
        graph = stream.end_capture()
        for _ in range(40):
            graph.launch(stream)
        stream.synchronize()
    assert head.position.tolist() == [3, 16, 3, 16]
    for _ in range(40):
        outputs = [standard.step(*token, slots=slots) for token in given]
    for got, want in zip(out, outputs, strict=True):
        assert error(got.get().astype(float), want.get().astype(float)) < 2.0**-8  # bf16's rounding, twice
    assert error(head.state[slots].get(), standard.state[slots].get().astype(float)) < EXACT
    head.flush()
    assert head.position.tolist() == [0, 0, 0, 0]
    assert error(head.state[slots].get(), standard.state[slots].get().astype(float)) < EXACT
