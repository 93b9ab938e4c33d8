"""A few windows of every kind and way of folding, small enough for compute-sanitizer (see test_cuda_sanitizer.py)."""

import cupy
import numpy as np
from gpu.cuda_pairs import ReplayEngine, SketchEngine, StandardEngine, with_blocks
from gpu.cuda_support import LAYERS, make_plan, make_tokens, named_gate, tokens_to_device
from samples import plan_of

from sketchssm.cuda import modules
from sketchssm.layer.recurrence import FULL_STATE, Tokens

WINDOW, SLOTS, STEPS = 4, 3, 10


def run(engine, layer, activation, gate, rng):
    slots = cupy.asarray(np.array([2, -1, 0]))
    steps = 6 * WINDOW if engine._options.tolerance else STEPS  # until rows are read exactly
    tokens = tokens_to_device(make_tokens(layer, 3, steps, activation, rng, gate=gate), activation, gate)
    engine.load_state(cupy.zeros((SLOTS, *layer.state_shape), dtype=np.float32), cupy.arange(SLOTS))
    for t in range(steps):
        token = Tokens(*(x if x is None else cupy.ascontiguousarray(x[:, t : t + 1]) for x in tokens))
        out = cupy.zeros((3, 1, layer.heads, layer.value_dim), dtype=np.float32)
        engine.step(token, slots, out)
    engine.flush(cupy.arange(SLOTS))
    cupy.cuda.Device().synchronize()


CASES = [(name, activation) for name in ("mamba2", "gdn", "kda") for activation in ("bfloat16", "float32")]
MAPS = {("kda-raw", "bfloat16"): ("lowrank",)}

CODES = [("mamba2", "ridge"), ("gdn", "lowrank"), ("kda", "ridge"), ("kda", "lowrank")]


def cases():
    """Each engine, whether one block computes all its tiles, and what else `run` takes."""
    rng = np.random.default_rng(0)
    for name, activation in [*CASES, ("kda-raw", "bfloat16")]:
        layer = LAYERS[name]
        gate = named_gate(name, layer, rng)
        options = {"activation_dtype": activation, "output_dtype": "float32", "gate": gate}
        yield StandardEngine(layer, SLOTS, **options), False, layer, activation, gate, rng
        yield ReplayEngine(layer, SLOTS, WINDOW, **options), False, layer, activation, gate, rng
        for kind in MAPS.get((name, activation), ("lowrank", "ridge")):
            plan = make_plan(layer, np.resize([9, FULL_STATE, 3], layer.heads), rng, map=kind, window=WINDOW)
            yield SketchEngine(plan, SLOTS, **options), True, layer, activation, gate, rng
    options = {"activation_dtype": "bfloat16", "output_dtype": "float32"}
    for name, kind in CODES:
        layer = LAYERS[name]
        plan = make_plan(layer, np.resize([9, FULL_STATE, 3], layer.heads), rng, map=kind, window=WINDOW)
        yield SketchEngine(plan, SLOTS, "int8", **options), True, layer, "bfloat16", None, rng
    for name in ("mamba2", "gdn", "kda"):
        layer = LAYERS[name]
        ranks, bits = (np.resize(x, layer.heads) for x in ([9, FULL_STATE, 3], [1, 0, 2]))
        plan = plan_of(rng, layer, ranks, "subspace", window=WINDOW, residual_bits=bits)
        yield SketchEngine(plan, SLOTS, "int8", **options), True, layer, "bfloat16", None, rng
        shadows = make_plan(layer, np.full(layer.heads, FULL_STATE), rng, window=WINDOW)
        yield SketchEngine(shadows, SLOTS, **options), False, layer, "bfloat16", None, rng
        plan = make_plan(layer, np.resize([9, 3], layer.heads), rng, map="ridge", window=WINDOW)
        bounded = SketchEngine(plan, SLOTS, monitor=1, tolerance=1e-9, **options)
        yield bounded, False, layer, "bfloat16", None, rng


def main():
    every = list(cases())
    modules.warmup(list({variant for engine, *_ in every for variant in engine.variants()}))  # all at once
    for engine, alone, *rest in every:
        if alone:  # one block for all tiles: more than its queue holds, in turn in the same shared memory
            with_blocks(engine, 1)
        run(engine, *rest)
    print("all kernels have run")


if __name__ == "__main__":
    main()
