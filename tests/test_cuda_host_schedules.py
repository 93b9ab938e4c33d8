"""Results of the CUDA kernels do not depend on batches, blocks, room or the order of threads."""

from unittest.mock import Mock

import numpy as np
import pytest
from gpu.cuda_pairs import ReplayEngine, SketchEngine, StandardEngine, poisoned, with_blocks
from gpu.cuda_support import LAYERS, RANKS, RIDGE, make_plan, make_tokens, named_gate, token, tokens_to_device
from host import fixtures, standin

from sketchssm.cuda import modules, reads, standard
from sketchssm.layer.recurrence import FULL_STATE, Layer

cupy, host, pytestmark = fixtures.of_kernels, fixtures.of_host, fixtures.cold


def same_bits(first, *others):
    """Assert that lists of arrays are equal."""
    for other in others:
        for x, y in zip(first, other, strict=True):
            assert np.array_equal(x.view(np.uint8), y.view(np.uint8))


@pytest.mark.parametrize(
    ("name", "stored"), [*((name, "bfloat16") for name in ("mamba2", "gdn", "kda", "kda-raw")), ("gdn", "int8")]
)
def test_several_tokens_and_batches_are_bitwise_single_ones(name, stored, rng, cupy):
    layer = LAYERS[name]
    plan = make_plan(layer, np.resize(RANKS[layer.kind], layer.heads), rng)
    gate = named_gate(name, layer, rng)
    tokens = make_tokens(layer, 6, 20, "bfloat16", rng, gate=gate)
    at_once, alone = (poisoned(SketchEngine(plan, 6, stored, output_dtype="float32", gate=gate)) for _ in range(2))
    for engine in (at_once, alone):
        engine.reset(cupy.arange(6))
    out = cupy.empty((6, 20, layer.heads, layer.value_dim), np.float32)
    at_once.step(tokens_to_device(tokens, "bfloat16", gate), cupy.arange(6), out)
    for t in range(20):
        single = cupy.empty((1, 1, layer.heads, layer.value_dim), np.float32)
        alone.step(tokens_to_device(token(tokens, t, slice(4, 5)), "bfloat16", gate), cupy.asarray([2]), single)
        assert np.array_equal(out[4, t].get(), single[0, 0].get())
    assert np.array_equal(at_once.state[4].get(), alone.state[2].get())


@pytest.mark.parametrize("name", ["mamba2", "mamba2-80", "gdn", "gdn-96", "kda-raw", "kda-64-bounded"])
def test_blocks_of_standard_decode_do_not_matter(name, rng, cupy, monkeypatch):
    layer = LAYERS[name]
    gate = named_gate(name, layer, rng)
    tokens = tokens_to_device(make_tokens(layer, 3, 5, "bfloat16", rng, gate=gate), "bfloat16", gate)
    results = []
    for many, size in ((standard.MANY_WARPS, standard.BLOCK_BYTES), (1, 2048)):  # blocks of four warps; of one or two
        monkeypatch.setattr(standard, "MANY_WARPS", many)
        monkeypatch.setattr(standard, "BLOCK_BYTES", size)
        engine = StandardEngine(layer, 5, output_dtype="float32", gate=gate)
        out = cupy.empty((3, 5, layer.heads, layer.value_dim), np.float32)
        out[...] = np.nan
        engine.step(tokens, cupy.asarray([4, -1, 0]), out)
        results.append((out.get(), engine.state.get()))
    same_bits(*results)


MANY_HEADS = {
    "mamba2-96": Layer("mamba2", 24, 64, 96, 12),
    "gdn-64": Layer("gdn", 24, 64, 64, 12),
    "kda-64": Layer("kda", 24, 64, 64, 24),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda", *MANY_HEADS])
def test_claims_of_a_flush_do_not_matter(name, rng, cupy):
    """Bitwise equal results where one block takes more tiles than its queue holds, and where many take a few. Few
    heads have a sketch. Between two of them, warps would get ahead of the warp that finishes sketches by more than a
    queue's length if the kernel let them. (On the host, blocks run one after the other: the first takes all tiles.)
    """
    layer, rows = (LAYERS | MANY_HEADS)[name], 5 if cupy is standin else 50
    ranks = np.where(np.arange(layer.heads) % (12 if name in MANY_HEADS else 3), FULL_STATE, 16)
    plan = make_plan(layer, ranks, rng)
    tokens = tokens_to_device(make_tokens(layer, rows, 20, "bfloat16", rng), "bfloat16")
    start = rng.standard_normal((rows, *layer.state_shape)).astype(np.float32)
    slots = np.array([3, -1, 0, 4, 1, *range(5, rows)])
    results = []
    for blocks in (None, 1, 8 * rows):  # None: a few
        engine = poisoned(SketchEngine(plan, rows, output_dtype="float32"))
        if blocks:
            with_blocks(engine, blocks)
        out = cupy.empty((rows, 20, layer.heads, layer.value_dim), np.float32)
        engine.load_state(cupy.asarray(start), cupy.arange(rows))
        engine.step(tokens, cupy.asarray(slots), out)
        engine.flush(cupy.arange(rows))
        results.append([x.get() for x in (out, engine.state, engine.sketch, engine.position)])
    same_bits(*results)


@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda", "kda-raw"])
def test_shares_of_a_read_step_do_not_matter(name, rng, host, monkeypatch):
    """Bitwise equal results where few warps do everything: one tile after the other in room for one, or ahead. With
    room for four, a block may have three tiles at most, so that there are many blocks.
    """
    layer = LAYERS[name]
    plan = make_plan(layer, np.resize(RANKS[layer.kind], layer.heads), rng)
    gate = named_gate(name, layer, rng)
    tokens = tokens_to_device(make_tokens(layer, 5, 18, "bfloat16", rng, gate=gate), "bfloat16", gate)
    outs = []
    for room in (None, 1, 2, 4):
        engine = SketchEngine(plan, 5, output_dtype="float32", gate=gate)
        least = modules.size_of(modules.load(engine.variants()[0]), "read_shared_bytes")
        tables = 512 * 8 + (128 * 72 if layer.kind == "mamba2" else 0)  # of most rows and scores: here are few
        least += 1024 - tables
        with monkeypatch.context() as patch:
            if room:
                patch.setattr(reads, "shared_limit", lambda size=room * least: size)
            poisoned(engine)
        engine.reset(host.arange(5))
        if room:
            step_reads = engine._kernels[0]
            _, row_tiles, max_tiles, _ = step_reads._limits
            step_reads._limits = 1, row_tiles, max_tiles if room < 4 else 3, 4
        outs.append(host.empty((5, 18, layer.heads, layer.value_dim), np.float32))
        engine.step(tokens, host.asarray([3, -1, 0, 4, 1]), outs[-1])
    same_bits(*([out] for out in outs))


@pytest.mark.parametrize("kind", ["lowrank", "ridge"])
@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda", "kda-raw"])
def test_order_of_threads_does_not_matter(name, kind, rng, host, monkeypatch):
    """Bitwise equal results in any order of the threads, which a missing barrier would break."""
    layer = LAYERS[name]
    plan = make_plan(layer, np.resize(RANKS[layer.kind], layer.heads), rng, map=kind, ridge=RIDGE[kind])
    gate = named_gate(name, layer, rng)
    start = rng.standard_normal((2, *layer.state_shape)).astype(np.float32)
    tokens = tokens_to_device(make_tokens(layer, 2, 17, "bfloat16", rng, gate=gate), "bfloat16", gate)
    results = []
    for order in (0, 1, 2, 3):
        monkeypatch.setattr(standin, "order", order)
        engine = poisoned(SketchEngine(plan, 2, output_dtype="float32", gate=gate))
        engine.load_state(host.asarray(start), host.arange(2))
        out = host.empty((2, 17, layer.heads, layer.value_dim), np.float32)
        engine.step(tokens, host.arange(2), out)
        results.append((out, engine.state, engine.sketch))
    same_bits(*results)


def test_decays_that_transform_warps_leave_the_solver(rng, host, monkeypatch):
    """One block, all channels decay, at another rate for each token: bitwise equal results in many orders of threads.
    A tile's largest decays must stay until the solver has read them: those of another would scale writes by other
    powers. Without the producer's wait for the solver, one of these orders brings that out.
    """
    layer = LAYERS["kda"]
    tokens = make_tokens(layer, 4, 17, "bfloat16", rng, hard_gates=False)
    tokens.g[...] = rng.uniform(-2, -1, tokens.g.shape) * rng.uniform(1, 8, (*tokens.g.shape[:3], 1))
    moved = tokens_to_device(tokens, "bfloat16")
    start = rng.standard_normal((4, *layer.state_shape)).astype(np.float32)
    states = []
    for order in range(12):
        monkeypatch.setattr(standin, "order", order)
        engine = poisoned(ReplayEngine(layer, 4, 16, output_dtype="float32"))
        engine.load_state(host.asarray(start), host.arange(4))
        with_blocks(engine, 1)
        engine.step(moved, host.arange(4), host.empty((4, 17, layer.heads, layer.value_dim), np.float32))
        states.append(engine.state)
    same_bits(*([state] for state in states))


def test_an_interrupted_step_leaves_others_whole(rng, cupy, monkeypatch):
    """The interruption comes between the two launches of a step, after a read has reported that no flush is due."""
    layer = LAYERS["gdn"]
    plan = make_plan(layer, [7, 3, 16, 2], rng, window=4)
    engines = [poisoned(SketchEngine(plan, 2, output_dtype="float32")) for _ in range(2)]
    tokens = make_tokens(layer, 1, 6, "bfloat16", rng)
    outs = [cupy.empty((1, 1, layer.heads, layer.value_dim), np.float32) for _ in engines]

    def step(which, t, slot):
        one = tokens_to_device(token(tokens, t), "bfloat16")
        engines[which].step(one, cupy.asarray([slot]), outs[which])

    for engine in engines:
        engine.reset(cupy.arange(2))
    for t in range(6):
        for which in (0, 1):
            if t == 3 and which == 1:
                with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                    interrupt = Mock(side_effect=KeyboardInterrupt)
                    patch.setattr(engines[1]._kernels[1], "launches", [interrupt] * 4)  # of every mode
                    step(1, 0, 1)
            step(which, t, 0)
        assert np.array_equal(*(out.get() for out in outs))
    assert np.array_equal(*(engine.state[0].get() for engine in engines))
    assert np.isfinite(outs[0].get()).all()
