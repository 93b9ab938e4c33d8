"""Drafts on the CUDA kernels, run on the host, against the float64 reference."""

import numpy as np
import pytest
from gpu import cuda_support, draft_graphs
from gpu.cuda_support import (
    EXACT,
    REFRESHED,
    RIDGE,
    ReplayEngine,
    SketchEngine,
    StandardEngine,
    error,
    make_plan,
    make_tokens,
    named_gate,
    refreshed_plan,
    stored_as,
    tokens_to_device,
)
from host import fixtures
from host.kernels import LAYERS, RANKS, poisoned

import sketchssm as ss
from sketchssm import cuda
from sketchssm.layer.recurrence import FULL_STATE, Layer
from sketchssm.layer.slots import POSITION, drafted
from sketchssm.reference import engines as reference

cupy, pytestmark = fixtures.of_kernels, fixtures.cold

STORED = cuda_support.STORED | cuda_support.NEIGHBOURS
SLOTS = 5


class Pair:
    """An engine on the device and its oracle."""

    def __init__(self, cupy, device, oracle, activation, rng, gate=None):
        self.cupy, self.device, self.oracle, self.rng = cupy, device, oracle, rng
        self.activation, self.gate = activation, gate
        self.gots, self.wants = [], []

    def make(self, rows, length):
        return make_tokens(self.device.layer, rows, length, self.activation, self.rng, gate=self.gate)

    def _decode(self, tokens, slots, *lengths):
        """Step, or draft with lengths; returns outputs of both."""
        device, oracle = (self.device.draft, self.oracle.draft) if lengths else (self.device.step, self.oracle.step)
        there = tokens_to_device(tokens, self.activation, self.gate)
        here = tokens if self.gate is None else tokens._replace(g=self.gate.log_decays(tokens.g))
        out = self.cupy.full(tokens.v.shape, np.nan, dtype=np.float32)
        index, *counts = [None if x is None else self.cupy.asarray(x) for x in (slots, *lengths)]
        device(there, *counts, index, out)
        want = np.empty(tokens.v.shape)
        full = np.full(len(slots), tokens.v.shape[1])
        oracle(here, *(full if x is None else x for x in lengths), slots, want)
        self.check_cursors()
        return out.get(), want

    def step(self, tokens, slots):
        """A plain step; other files compare its outputs."""
        got, _ = self._decode(tokens, slots)
        assert np.isfinite(got).all()

    def draft(self, tokens, slots, lengths):
        """Drafts of ragged lengths; None: all."""
        got, want = self._decode(tokens, slots, lengths)
        for row, slot in enumerate(slots):
            length = 0 if slot < 0 else got.shape[1] if lengths is None else lengths[row]
            assert not got[row, length:].any()
            self.gots.append(got[row, :length])
            self.wants.append(want[row, :length])

    def commit(self, accepted, slots):
        index, counts = self.cupy.asarray(slots), self.cupy.asarray(accepted)
        self.device.commit(counts, index)
        self.oracle.commit(np.clip(accepted, 0, drafted(self.oracle.memory["cursor"][slots])), slots)
        self.check_cursors()

    def flush(self, slots):
        index = self.cupy.asarray(slots)
        self.device.flush(index)
        self.oracle.flush(slots)
        self.check_cursors()

    def check_cursors(self):
        assert np.array_equal(self.device.cursor.get(), self.oracle.memory["cursor"])

    def compare(self, full_state, tolerance):
        got, want = np.concatenate(self.gots), np.concatenate(self.wants)
        if full_state.any():
            assert error(got[:, full_state], want[:, full_state]) < EXACT
        if not full_state.all():
            assert error(got[:, ~full_state], want[:, ~full_state]) < tolerance


def decode(pair, calls, most):
    """Drafts of 1 to `most` tokens with all kinds of lengths and commits, plain steps and flushes in between."""
    rng, everything = pair.rng, np.arange(SLOTS)
    for call in range(calls):
        rows, length = rng.integers(1, 5), rng.integers(1, most + 1)
        slots = rng.permutation(SLOTS)[:rows].astype(np.int64)
        slots[rng.uniform(size=rows) < 0.15] = -1
        lengths = None if call % 3 == 0 else rng.integers(0, length + 1, rows)
        pair.draft(pair.make(rows, length), slots, lengths)
        if call % 5 != 4:  # else all drafts are discarded
            pair.commit(rng.integers(-1, length + 2, rows), slots)
        if call % 4 == 1:
            pair.step(pair.make(2, 1), everything[:2])
        if call % 7 == 3:
            pair.flush(everything[2:4])
    pair.flush(everything)
    assert error(pair.device.state.get(), pair.oracle.state) < EXACT


@pytest.mark.parametrize("activation", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["mamba2-80", "gdn", "kda", "kda-raw"])
def test_standard(name, activation, rng, cupy):
    layer = LAYERS[name]
    gate = named_gate(name, layer, rng)
    device = StandardEngine(layer, SLOTS, activation_dtype=activation, output_dtype="float32", gate=gate, drafts=5)
    pair = Pair(cupy, device, reference.StandardEngine(layer, SLOTS, drafts=5), activation, rng, gate)
    decode(pair, 14, 5)
    pair.compare(np.ones(layer.heads, bool), 0)


@pytest.mark.parametrize(
    ("name", "window", "activation"),
    [
        *((name, 16, "bfloat16") for name in ("mamba2", "gdn", "kda")),
        *(("mamba2-80", 4, "float32"), ("gdn-96", 8, "float16"), ("kda-64", 32, "float32")),
        *(("kda-raw", 8, "float16"), ("kda-64-bounded", 4, "bfloat16")),
    ],
)
def test_replay(name, window, activation, rng, cupy):
    layer = LAYERS[name]
    gate = named_gate(name, layer, rng)
    device = poisoned(
        ReplayEngine(layer, SLOTS, window, activation_dtype=activation, output_dtype="float32", gate=gate)
    )
    pair = Pair(cupy, device, reference.ReplayEngine(layer, SLOTS, window), activation, rng, gate)
    decode(pair, 14, min(window - 1, 8))
    pair.compare(np.ones(layer.heads, bool), 0)


@pytest.mark.parametrize(
    ("name", "window", "kind", "stored", "activation"),
    [
        *((name, 16, "lowrank", "bfloat16", "bfloat16") for name in ("mamba2", "gdn", "kda", "kda-raw")),
        *((name, 16, "ridge", "bfloat16", "bfloat16") for name in ("mamba2", "gdn", "kda")),
        ("mamba2-80", 16, "prior", "float32", "bfloat16"),
        ("gdn-96", 32, "exact", "float32", "bfloat16"),
        ("kda-64", 4, "offline", "float32", "bfloat16"),
        ("mamba2-80", 4, "ridge", "bfloat16", "float16"),
        ("gdn", 8, "prior", "bfloat16", "bfloat16"),
        ("gdn", 32, "lowrank", "bfloat16", "bfloat16"),
        ("mamba2", 32, "ridge", "bfloat16", "float32"),
        ("kda-64-bounded", 8, "lowrank", "bfloat16", "float32"),
        ("mamba2", 16, "ridge", "int8", "bfloat16"),
        ("gdn", 16, "ridge", "int8", "bfloat16"),
        ("gdn-96", 8, "lowrank", "fp8", "bfloat16"),
        ("kda", 16, "lowrank", "int8", "bfloat16"),
        ("kda-64", 8, "ridge", "fp8", "bfloat16"),
        ("mamba2-80", 8, "prior", "int8", "float16"),
        ("mamba2", 16, "ridge", "int8+int4", "bfloat16"),
        ("gdn", 16, "ridge", "int8+int4", "bfloat16"),
        ("kda", 8, "exact", "int8+int4", "bfloat16"),
        ("mamba2-80", 8, "ridge", "int8+int4", "bfloat16"),
        ("gdn-96", 8, "ridge", "int8+int4", "float16"),
    ],
)
def test_sketch(name, window, kind, stored, activation, rng, cupy):
    layer = LAYERS[name]
    gate = named_gate(name, layer, rng)
    ranks = np.resize(RANKS[layer.kind], layer.heads)
    settings = {"map": kind, "ridge": RIDGE[kind], "window": window}
    plan = make_plan(layer, ranks, rng, **settings, **stored_as(stored, ranks))
    device = SketchEngine(plan, SLOTS, stored, activation_dtype=activation, output_dtype="float32", gate=gate)
    oracle = reference.SketchEngine(plan, SLOTS, "float32" if stored == "bfloat16" else stored)
    poisoned(device).sketch.view(np.uint8)[...] = 0xFF
    everything = cupy.arange(SLOTS)
    device.reset(everything)
    start = rng.standard_normal((SLOTS, *layer.state_shape)).astype(np.float32)
    device.load_state(cupy.asarray(start), everything)
    oracle.load_state(start.astype(np.float64), np.arange(SLOTS))
    pair = Pair(cupy, device, oracle, activation, rng, gate)
    decode(pair, 14, min(window - 1, 8))
    pair.compare(plan.ranks == FULL_STATE, STORED[stored])


@pytest.mark.parametrize(
    ("name", "kind", "stored", "window", "windows", "activation"),
    [
        ("mamba2", "ridge", "bfloat16", 8, 3, "bfloat16"),
        ("gdn", "ridge", "bfloat16", 16, 2, "bfloat16"),
        ("kda", "ridge", "bfloat16", 8, 4, "bfloat16"),
        ("kda-raw", "lowrank", "bfloat16", 4, 5, "bfloat16"),
        ("kda-64-bounded", "offline", "int8", 8, 3, "float16"),
        ("mamba2-80", "prior", "float32", 8, 3, "float32"),
        ("gdn-96", "lowrank", "float32", 4, 4, "float16"),
        ("kda-64", "exact", "float32", 32, 2, "float32"),
        ("mamba2-128", "offline", "bfloat16", 16, 2, "bfloat16"),
        ("mamba2", "ridge", "int8", 8, 3, "bfloat16"),
        ("gdn", "prior", "fp8", 8, 3, "bfloat16"),
        ("gdn", "ridge", "int8+int4", 8, 3, "bfloat16"),
    ],
)
def test_refreshes(name, kind, stored, window, windows, activation, rng, cupy):
    """Drafts begin at the next window of their ring, or fold the ring before; windows of any number of tokens."""
    layer = LAYERS[name]
    gate = named_gate(name, layer, rng)
    plan = refreshed_plan(layer, RANKS[layer.kind], rng, kind, window, windows, stored)
    device = SketchEngine(plan, SLOTS, stored, activation_dtype=activation, output_dtype="float32", gate=gate)
    oracle = reference.SketchEngine(plan, SLOTS, "float32" if stored == "bfloat16" else stored)
    skips, room = [], oracle._room

    def counted(word, length):
        position, begin = word & POSITION, room(word, length)
        skips.append(begin - position if begin > position else 0 if begin == position else -1)
        return begin

    oracle._room = counted
    poisoned(device).sketch.view(np.uint8)[...] = 0xFF
    everything = cupy.arange(SLOTS)
    device.reset(everything)
    start = rng.standard_normal((SLOTS, *layer.state_shape)).astype(np.float32)
    device.load_state(cupy.asarray(start), everything)
    oracle.load_state(start.astype(np.float64), np.arange(SLOTS))
    pair = Pair(cupy, device, oracle, activation, rng, gate)
    decode(pair, 20 + 4 * window, min(window - 1, 8))
    assert min(skips) < 0
    assert sum(skip > 0 for skip in skips) > 2
    pair.compare(plan.ranks == FULL_STATE, REFRESHED[stored])


@pytest.mark.filterwarnings("error:loading kernel")  # `warmup` loads all kernels
@pytest.mark.parametrize(("kind", "phase"), [("mamba2", 2), ("gdn", None), ("kda", 5)])
def test_graph(kind, phase, rng, cupy, monkeypatch):
    """As on a device, in windows of 8, with a clock and without."""
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: name)
    layer = Layer(kind, 2, 64, 64, 1)
    plan = make_plan(layer, [5, FULL_STATE], rng, window=8)
    cuda.missing.cache_clear()
    head = ss.SketchHead(plan, draft_graphs.SLOTS, "cuda", output_dtype="float32", phase=phase)
    cuda.missing.cache_clear()
    head.warmup(drafts=True)
    twin = ss.SketchHead(plan, draft_graphs.SLOTS, "reference", phase=phase)
    draft_graphs.check_graph(cupy, head, twin, rng, 60)


@pytest.mark.filterwarnings("error:loading kernel")
@pytest.mark.parametrize(("kind", "phase", "state"), [("mamba2", 20, "float32"), ("gdn", None, "bfloat16")])
def test_graph_with_refreshes(kind, phase, state, rng, cupy, monkeypatch):
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: name)
    plan = refreshed_plan(Layer(kind, 2, 64, 64, 1), [5, 9], rng, window=8, windows=3)
    cuda.missing.cache_clear()
    head = ss.SketchHead(plan, draft_graphs.SLOTS, "cuda", output_dtype="float32", phase=phase, state_dtype=state)
    cuda.missing.cache_clear()
    head.warmup(drafts=True)
    twin = ss.SketchHead(plan, draft_graphs.SLOTS, "reference", phase=phase, state_dtype=state)
    draft_graphs.check_graph(cupy, head, twin, rng, 60, REFRESHED["bfloat16"])
