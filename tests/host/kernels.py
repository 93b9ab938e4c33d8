"""Layers, tolerances and small steps that the tests of the kernels on the host share."""

import numpy as np
from gpu.cuda_support import make_tokens, slot_table, tokens_to_device

from sketchssm.layer.recurrence import FULL_STATE, Layer, Tokens

LAYERS = {
    "mamba2": Layer("mamba2", 16, 128, 64, 2),
    "mamba2-80": Layer("mamba2", 4, 64, 80, 1),
    "mamba2-128": Layer("mamba2", 2, 128, 128, 1),  # raw keys with two places for states
    "gdn": Layer("gdn", 4, 128, 128, 2),
    "gdn-96": Layer("gdn", 2, 64, 96, 2),
    "kda": Layer("kda", 3, 128, 128, 3),
    "kda-64": Layer("kda", 2, 64, 64, 1),
    "kda-raw": Layer("kda", 3, 128, 128, 3),  # raw gate inputs
    "kda-64-bounded": Layer("kda", 2, 64, 64, 1),
}
RANKS = {"mamba2": [5, 1, 17, FULL_STATE, 40, 8], "gdn": [7, FULL_STATE, 16, 2], "kda": [9, 33, 1]}


def poisoned(engine):
    """The warm engine, with NaN in its ring, which kernels must write before they read."""
    engine.warmup()
    for ring in engine.ring:
        ring.view(np.uint8)[...] = 0xFF
    return engine


def run_served(device, oracle, layer, steps, activation, rng, cupy):
    """Feed both engines as a server would: rows come and go, states are loaded, slots flushed and reset in between.

    Returns outputs of both, and how many tokens each flush of the oracle folded. Cursor words must always agree.
    """
    slots, gots, wants, folded = oracle.position.size, [], [], []
    fold = oracle._fold
    oracle._fold = lambda slot, count: (folded.append(count), fold(slot, count))[1]
    for _ in range(steps):
        some = rng.permutation(slots)[:1]
        match rng.integers(12):
            case 0:
                start = rng.standard_normal((1, *layer.state_shape)).astype(np.float32)
                device.load_state(cupy.asarray(start), cupy.asarray(some))
                oracle.load_state(start.astype(np.float64), some)
            case 1:
                device.flush(cupy.asarray(some)), oracle.flush(some)
            case 2:
                device.reset(cupy.asarray(some)), oracle.reset(some)
        rows, length = rng.integers(1, slots + 1), rng.choice([1, 1, 1, 3])
        table = slot_table(rows, slots, 1, rng)[0]
        tokens = make_tokens(layer, rows, length, activation, rng)
        out = cupy.full(tokens.v.shape, np.nan, dtype=np.float32)
        want = np.empty(tokens.v.shape)
        device.step(tokens_to_device(tokens, activation), cupy.asarray(table), out)
        oracle.step(tokens, table, want)
        assert np.array_equal(device.cursor.get(), oracle.memory["cursor"])
        gots.append(out.get().reshape(-1, layer.heads, layer.value_dim))
        wants.append(want.reshape(gots[-1].shape))
    return np.concatenate(gots), np.concatenate(wants), folded


def token(tokens, t, rows=slice(None)):
    return Tokens(*(None if x is None else np.ascontiguousarray(x[rows, t : t + 1]) for x in tokens))
