"""Drafts on the CUDA kernels against the float64 reference."""

import numpy as np
import pytest
from gpu.cuda_pairs import ReplayEngine, SketchEngine, StandardEngine, load_same, poisoned
from gpu.cuda_support import (
    EXACT,
    LAYERS,
    RANKS,
    RIDGE,
    STORED,
    full_reads,
    make_plan,
    make_tokens,
    named_gate,
    thorough,
    tokens_to_device,
)
from host import fixtures
from samples import refused, relative

import sketchssm as ss
from sketchssm.arrays.options import EngineOptions
from sketchssm.layer.recurrence import FULL_STATE, Layer, Tokens
from sketchssm.layer.slots import drafted
from sketchssm.reference import engines as reference

cupy, pytestmark = fixtures.of_kernels, fixtures.cold

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

    def compare(self, full_state, tolerance, exact=EXACT):
        got, want = np.concatenate(self.gots), np.concatenate(self.wants)
        if full_state.any():
            assert relative(got[:, full_state], want[:, full_state]) < exact
        if not full_state.all():
            assert relative(got[:, ~full_state], want[:, ~full_state]) < tolerance


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
    assert relative(pair.device.state.get(), pair.oracle.state) < EXACT


@pytest.mark.parametrize("activation", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["mamba2-80", "gdn", "kda", "kda-raw", "olmo-hybrid"])
def test_standard(name, activation, rng, cupy):
    layer = LAYERS[name]
    gate = named_gate(name, layer, rng)
    device = StandardEngine(layer, SLOTS, activation_dtype=activation, output_dtype="float32", gate=gate, drafts=5)
    pair = Pair(cupy, device, reference.StandardEngine(layer, SLOTS, EngineOptions(drafts=5)), activation, rng, gate)
    decode(pair, 14, 5)
    pair.compare(np.ones(layer.heads, bool), 0)


@pytest.mark.parametrize(
    ("name", "window", "activation"),
    [
        *((name, 16, "bfloat16") for name in ("mamba2", "gdn", "kda")),
        *(("mamba2-80", 4, "float32"), ("kda-64", 32, "float32"), ("kda-raw", 8, "float16")),
        *(("falcon-h1", 8, "bfloat16"), ("gla", 16, "float16")),
        *thorough(("gdn-96", 8, "float16"), ("kda-64-bounded", 4, "bfloat16")),
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
        ("mamba2-80", 16, "lowrank", "float32", "bfloat16"),
        ("kda-64", 4, "ridge", "float32", "bfloat16"),
        ("mamba2", 32, "ridge", "bfloat16", "float32"),
        ("kda", 16, "lowrank", "int8", "bfloat16"),
        ("mamba2-80", 8, "lowrank", "int8", "float16"),
        *(("olmo-hybrid", 16, "ridge", "int8", "bfloat16"), ("falcon-h1", 8, "lowrank", "bfloat16", "bfloat16")),
        ("gla-raw", 8, "ridge", "bfloat16", "bfloat16"),
        *thorough(
            ("mamba2-80", 4, "ridge", "bfloat16", "float16"),
            ("gdn", 16, "ridge", "int8", "bfloat16"),
            ("gdn-96", 32, "ridge", "float32", "bfloat16"),
            ("gdn", 8, "lowrank", "bfloat16", "bfloat16"),
            ("gdn", 32, "lowrank", "bfloat16", "bfloat16"),
            ("kda-64-bounded", 8, "lowrank", "bfloat16", "float32"),
            ("mamba2", 16, "ridge", "int8", "bfloat16"),
            ("gdn-96", 8, "lowrank", "int8", "float16"),
            ("kda-64", 8, "ridge", "int8", "bfloat16"),
        ),
    ],
)
def test_sketch(name, window, kind, stored, activation, rng, cupy):
    layer = LAYERS[name]
    gate = named_gate(name, layer, rng)
    ranks = np.resize(RANKS[layer.kind], layer.heads)
    plan = make_plan(layer, ranks, rng, map=kind, ridge=RIDGE[kind], window=window)
    device = SketchEngine(plan, SLOTS, stored, activation_dtype=activation, output_dtype="float32", gate=gate)
    oracle = reference.SketchEngine(plan, SLOTS, "float32" if stored == "bfloat16" else stored)
    poisoned(device).sketch.view(np.uint8)[...] = 0xFF
    everything = cupy.arange(SLOTS)
    device.reset(everything)
    load_same(device, oracle, rng)
    pair = Pair(cupy, device, oracle, activation, rng, gate)
    decode(pair, 14, min(window - 1, 8))
    pair.compare(plan.ranks == FULL_STATE, STORED[stored], full_reads(stored))


@pytest.mark.parametrize("several", [False, True])
def test_tokens_past_a_row_s_length_may_be_anything(several, rng, cupy):
    """Also on the host, whose arrays are checked: NaN log-decays there are neither refused nor read."""
    layer, length = Layer("gdn", 2, 64, 80, 1), 3 if several else 1
    head, twin = (ss.ReplayHead(layer, 3, "cuda", window=4, activation_dtype="float32") for _ in range(2))
    tokens, lengths = make_tokens(layer, 3, length, "float32", rng), np.array([1, 0, length])

    def draft(head, tokens, slots):
        one = tokens if several else Tokens(*(x[:, 0] for x in tokens))
        return head.step(*one, slots=slots, draft=True, lengths=lengths)

    spoilt = Tokens(*(x.copy() for x in tokens))
    for x in spoilt:
        x[np.arange(length) >= lengths[:, None]] = np.nan
        x[2] = np.nan  # padding
    np.testing.assert_array_equal(draft(head, spoilt, [2, 0, -1]), draft(twin, tokens, [2, 0, -1]))
    refused("g: expected", draft, head, spoilt, [2, 0, 1])
