"""Refreshes between flushes on the CUDA kernels, run on the host, against the reference."""

import numpy as np
import pytest
from gpu.cuda_support import (
    EXACT,
    REFRESHED,
    SketchEngine,
    error,
    make_plan,
    make_tokens,
    named_gate,
    refreshed_plan,
    run_pair,
    slot_table,
    tokens_to_device,
    with_blocks,
)
from host import fixtures, heads
from host.kernels import LAYERS, RANKS, poisoned

import sketchssm as ss
from sketchssm.reference import engines as reference

cupy, pytestmark = fixtures.of_kernels, fixtures.cold


def make_pair(plan, slots, stored, rng, cupy, **settings):
    """An engine on the device, whose memory held NaN, and the reference of the same format, with the same states."""
    device = SketchEngine(plan, slots, stored, output_dtype="float32", **settings)
    phase = {"phase": settings["phase"]} if "phase" in settings else {}
    oracle = reference.SketchEngine(plan, slots, "float32" if stored == "bfloat16" else stored, **phase)
    poisoned(device).sketch.view(np.uint8)[...] = 0xFF
    device.reset(cupy.arange(slots))
    start = rng.standard_normal((slots, *plan.layer.state_shape)).astype(np.float32)
    device.load_state(cupy.asarray(start), cupy.arange(slots))
    oracle.load_state(start.astype(np.float64), np.arange(slots))
    return device, oracle


@pytest.mark.parametrize(
    ("name", "kind", "stored", "window", "windows", "activation"),
    [
        ("mamba2", "ridge", "float32", 16, 2, "bfloat16"),
        ("gdn", "ridge", "float32", 16, 2, "bfloat16"),
        ("kda", "ridge", "float32", 16, 2, "bfloat16"),
        ("mamba2", "ridge", "bfloat16", 8, 4, "bfloat16"),
        ("gdn", "ridge", "bfloat16", 16, 2, "bfloat16"),
        ("kda-raw", "ridge", "bfloat16", 8, 3, "bfloat16"),
        ("mamba2-80", "exact", "bfloat16", 4, 8, "float16"),
        ("gdn-96", "offline", "float32", 8, 3, "float32"),
        ("kda-64", "offline", "bfloat16", 4, 4, "bfloat16"),
        ("mamba2-128", "ridge", "bfloat16", 8, 2, "bfloat16"),
        ("kda-64", "ridge", "float32", 32, 2, "float32"),
        ("mamba2", "ridge", "int8", 8, 3, "bfloat16"),
        ("gdn", "ridge", "int8", 8, 3, "bfloat16"),
        ("kda", "ridge", "fp8", 8, 3, "bfloat16"),
        ("gdn-96", "ridge", "fp8", 4, 3, "float16"),
        ("kda-64-bounded", "offline", "int8", 8, 3, "bfloat16"),
        ("gdn", "lowrank", "float32", 16, 2, "bfloat16"),
        ("kda", "lowrank", "float32", 8, 3, "bfloat16"),
        ("mamba2", "lowrank", "bfloat16", 8, 3, "bfloat16"),
        ("gdn-96", "prior", "float32", 8, 3, "float16"),
        ("kda-64", "prior", "bfloat16", 4, 4, "bfloat16"),
        ("mamba2-80", "prior", "int8", 8, 3, "bfloat16"),
        ("gdn", "lowrank", "fp8", 8, 3, "bfloat16"),
        ("gdn", "ridge", "int8+int4", 8, 3, "bfloat16"),
        ("kda-64", "ridge", "int8+int4", 8, 2, "float32"),
    ],
)
def test_reads(name, kind, stored, window, windows, activation, rng, cupy):
    """Mixed ranks, padding, rows at different windows of their rings; gates of 0, -50 and -inf among the rest."""
    plan = refreshed_plan(LAYERS[name], RANKS[LAYERS[name].kind], rng, kind, window, windows, stored)
    layer, every, gate = plan.layer, plan.flush_every, named_gate(name, plan.layer, rng)
    device, oracle = make_pair(plan, 4, stored, rng, cupy, activation_dtype=activation, gate=gate)
    length = 2 * every + 4
    tokens = make_tokens(layer, 3, length, activation, rng, gate=gate)
    got, want, where = run_pair(device, oracle, layer, tokens, slot_table(3, 4, length, rng), activation, gate)
    flushes = where == every - 1
    refreshes = (where % window == window - 1) & ~flushes & (where >= 0)
    assert flushes.any()
    assert refreshes.any()
    assert (where > window).any()
    assert np.array_equal(device.position.get(), oracle.position)
    assert error(got[flushes], want[flushes]) < EXACT
    assert error(device.state.get(), oracle.state) < EXACT
    assert error(got[refreshes], want[refreshes]) < REFRESHED[stored]
    assert error(got[~flushes], want[~flushes]) < REFRESHED[stored]
    device.flush(cupy.arange(4))
    oracle.flush(np.arange(4))
    assert error(device.state.get(), oracle.state) < EXACT


@pytest.mark.parametrize(("name", "stored"), [("gdn", "int8+int4"), ("gdn", "int8"), ("kda-64", "int8+int4")])
def test_codes_of_high_ranks(name, stored, rng, cupy):
    """Four refreshes at ranks up to 33: the kernels' codes drift from the reference's, but err by no more.

    A difference d between the inputs of two refreshes changes a share d / s of the codes by a step s, so that the
    difference grows by about sqrt(d s) a refresh, up to the error of the codes themselves (times sqrt 2).
    """
    plan = refreshed_plan(LAYERS[name], [7, 33, 16, 2], rng, window=8, windows=5, stored=stored)
    layer, every, rows = plan.layer, plan.flush_every, np.arange(3)
    device, oracle = make_pair(plan, len(rows), stored, rng, cupy, activation_dtype="bfloat16")
    exact = reference.SketchEngine(plan, len(rows), "float32")
    exact.load_state(oracle.state.copy(), rows)
    tokens = make_tokens(layer, len(rows), every, "bfloat16", rng)
    unrounded = np.empty(tokens.v.shape)
    exact.step(tokens, rows, unrounded)
    got, want, _ = run_pair(device, oracle, layer, tokens, np.tile(rows, (every, 1)), "bfloat16")
    for first in range(0, every, plan.window):
        own, coded, plain = (x[:, first : first + plan.window - 1] for x in (got, want, unrounded))
        codes = error(coded, plain)
        assert error(own, plain) < 1.1 * codes  # as without refreshes, see tests/test_cuda_host_codes.py
        assert error(own, coded) < 2**0.5 * codes


@pytest.mark.parametrize(
    ("name", "activation", "phase"),
    [("mamba2", "bfloat16", None), ("gdn", "bfloat16", 5), ("kda", "bfloat16", 30), ("kda-64", "float32", None)],
)
def test_rows_of_a_server(name, activation, phase, rng, cupy):
    """States are loaded, slots flushed at any position and reset between steps and drafts.

    Most drafts are committed. One block folds all states in turn. With a clock, rows flush at the strokes, with any
    number of tokens in their rings.
    """
    plan = refreshed_plan(LAYERS[name], RANKS[LAYERS[name].kind], rng, window=8, windows=4)
    layer, slots = plan.layer, 4
    device, oracle = make_pair(plan, slots, "float32", rng, cupy, activation_dtype=activation, phase=phase)
    with_blocks(device, 1)
    gots, wants, folded = [], [], []
    fold = oracle._fold
    oracle._fold = lambda slot, count: (folded.append(count), fold(slot, count))[1]
    for _ in range(130):
        some = rng.permutation(slots)[:1]
        match rng.integers(30):
            case 0:
                start = rng.standard_normal((1, *layer.state_shape)).astype(np.float32)
                device.load_state(cupy.asarray(start), cupy.asarray(some))
                oracle.load_state(start.astype(np.float64), some)
            case 1 | 2:
                device.flush(cupy.asarray(some)), oracle.flush(some)
            case 3:
                device.reset(cupy.asarray(some)), oracle.reset(some)
        drafts = rng.uniform() < 0.3
        rows, length = rng.integers(2, slots + 1), rng.integers(1, 8) if drafts else rng.choice([1, 1, 3])
        table = slot_table(rows, slots, 1, rng)[0]
        tokens = make_tokens(layer, rows, length, activation, rng)
        out, want = cupy.full(tokens.v.shape, np.nan, dtype=np.float32), np.empty(tokens.v.shape)
        given, index = tokens_to_device(tokens, activation), cupy.asarray(table)
        if drafts:
            lengths = rng.integers(0, length + 1, rows)
            device.draft(given, cupy.asarray(lengths), index, out)
            oracle.draft(tokens, lengths, table, want)
            assert np.array_equal(device.cursor.get(), oracle.memory["cursor"])
            accepted = np.where(table < 0, 0, rng.integers(0, lengths + 1))
            if rng.uniform() < 0.8:
                device.commit(cupy.asarray(accepted), index)
                oracle.commit(accepted, table)
        else:
            device.step(given, index, out)
            oracle.step(tokens, table, want)
        assert np.array_equal(device.cursor.get(), oracle.memory["cursor"])
        gots.append(out.get().reshape(-1, layer.heads, layer.value_dim))
        wants.append(want.reshape(gots[-1].shape))
    assert len({-(-count // 8) for count in folded}) > 2  # rings of different numbers of windows
    assert error(np.concatenate(gots), np.concatenate(wants)) < REFRESHED["float32"]
    assert error(device.state.get(), oracle.state) < EXACT


@pytest.mark.parametrize(("name", "stored"), [("gdn", "bfloat16"), ("mamba2", "int8"), ("kda", "float32")])
def test_scaling_a_state_scales_its_refreshes(name, stored, rng, cupy):
    """Also where float32 cannot hold the squares of states. Powers of two change no bit of a sketch."""
    plan = refreshed_plan(LAYERS[name], RANKS[LAYERS[name].kind], rng, window=8)
    layer = plan.layer
    engine = poisoned(SketchEngine(plan, 2, stored, output_dtype="float32"))
    start = rng.standard_normal((2, *layer.state_shape)).astype(np.float32)
    tokens = make_tokens(layer, 2, 12, "bfloat16", rng, hard_gates=False)

    def run(exponent):
        engine.load_state(cupy.asarray(np.ldexp(start, exponent)), cupy.arange(2))
        out = cupy.empty((2, 12, layer.heads, layer.value_dim), np.float32)
        scaled = tokens_to_device(tokens._replace(v=np.ldexp(tokens.v, exponent)), "bfloat16")
        engine.step(scaled, cupy.arange(2), out)
        return np.ldexp(out.get(), -exponent)

    want = run(0)
    for exponent in (-62, -30, 30, 62):
        assert error(run(exponent), want) < 1e-6


def test_rows_do_not_depend_on_their_batch(rng, cupy):
    plan = refreshed_plan(LAYERS["gdn"], RANKS["gdn"], rng, window=8)
    tokens = make_tokens(plan.layer, 3, 12, "bfloat16", rng)
    start = rng.standard_normal((3, *plan.layer.state_shape)).astype(np.float32)
    outs = []
    for rows in ([0, 1, 2], [1]):
        engine = poisoned(SketchEngine(plan, 3, output_dtype="float32"))
        engine.load_state(cupy.asarray(start), cupy.arange(3))
        own = tokens_to_device(type(tokens)(*(x if x is None else x[rows] for x in tokens)), "bfloat16")
        outs.append(cupy.zeros((len(rows), 12, plan.layer.heads, plan.layer.value_dim), np.float32))
        engine.step(own, cupy.asarray(np.array(rows)), outs[-1])
    assert np.array_equal(outs[0][1], outs[1][0])


class TestHeads:
    @pytest.fixture(autouse=True)
    def device(self, monkeypatch):
        yield from heads.install(monkeypatch)

    @staticmethod
    def make_head(**settings):
        plan = make_plan(heads.LAYER, [7, 5], np.random.default_rng(1), map="ridge", window=4, flush_every=16)
        head = ss.SketchHead(plan, 4, "cuda", **settings)
        head.warmup("bfloat16")
        return head

    def test_snapshot_and_copy(self, tmp_path, rng):
        """A slot's memory holds its refreshed sketch: the copies decode bitwise as the first slot does."""
        head, other = self.make_head(), self.make_head()
        head.step(*heads.narrow(heads.tokens_of(rng, 4, 10)))
        head.copy([1], [3])
        head.snapshot([1]).save(tmp_path / "slots")
        other.restore(ss.Snapshot.load(tmp_path / "slots"), [0])
        assert other.position[0] == head.position[3] == 10
        tokens = heads.narrow(heads.tokens_of(rng, 1, 9))
        want = head.step(*tokens, slots=[1])
        for each, slot in ((head, 3), (other, 0)):
            np.testing.assert_array_equal(each.step(*tokens, slots=[slot]).view(np.uint16), want.view(np.uint16))

    def test_parts(self, rng):
        """The ring holds the tokens from flush to flush."""
        head = self.make_head()
        parts = {part.name: part.shape for part in head.parts}
        assert parts["keys"] == (1, 16, 64)
        assert parts["values"] == (2, 16, 80)
        assert {part.name: part.shape for part in ss.SketchHead.parts_of(head.plan, backend="cuda")} == parts
