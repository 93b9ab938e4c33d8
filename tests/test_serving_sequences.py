"""Random sequences of a server's calls, against a model of slots that runs the plain recurrence."""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from samples import LAYERS, at, one_block, plan_of, states_of, tokens_of
from serving_model import DRAFTS, RANKS, SLOTS, WINDOW, Model, Slot, StandardSlot

import sketchssm as ss
from sketchssm.layer.recurrence import FULL_STATE, KINDS

BACKENDS = ("reference", "cpu")
# Absolute errors of results of size one. Float64 and float32 round some dozen operations on a path of tokens.
EXACT = {"reference": 1e-11, "cpu": 2e-5}
# A ridge of 1e-3 makes the map of a nearly singular sketch amplify rounding by up to 1e3.
SKETCHED = {"reference": 1e-8, "cpu": 2e-2}

seeds = st.integers(0, 2**32 - 1)
PAD = -1  # of the lists that Hypothesis draws; heads see their own number
some_slots = st.lists(st.integers(PAD, SLOTS - 1), min_size=1, max_size=SLOTS + 1).filter(
    lambda slots: len({s for s in slots if s >= 0}) == len([s for s in slots if s >= 0])
)


def machine(kind, backend, state_dtype):
    layer = LAYERS[kind]
    plan = plan_of(np.random.default_rng(7), layer, RANKS, window=WINDOW, map="ridge", ridge=1e-3)

    class Heads(RuleBasedStateMachine):
        @initialize(
            phase=st.sampled_from([None, *range(WINDOW)]), pad=st.sampled_from([-1, 0, 77]), pooled=st.booleans()
        )
        def start(self, phase, pad, pooled):
            self.pad, self.first = pad, int(pad == 0)  # slot 0 is padding, so the first slot is 1
            self.taken = []  # snapshots with the models' contents
            count = SLOTS + self.first
            shared = {"pad_slot": pad, "state_dtype": state_dtype}
            kinds = {
                "standard": (ss.StandardHead, layer, {"drafts": DRAFTS}),
                "replay": (ss.ReplayHead, layer, {"window": WINDOW}),
                "sketch": (ss.SketchHead, plan, {"sketch_dtype": "float32"}),
            }
            self.heads, self.models, self.pools = {}, {}, {}
            for name, (make, source, options) in kinds.items():
                memory = None
                if pooled:
                    parts = make.parts_of(source, backend, state_dtype=state_dtype, **options)
                    _, memory = one_block(parts, count)
                else:
                    (part,) = (
                        p
                        for p in make.parts_of(source, backend, state_dtype=state_dtype, **options)
                        if p.name == "state"
                    )
                    memory = {"state": np.zeros((count, *part.shape), part.dtype)}
                self.pools[name] = memory["state"]
                clock = {} if name == "standard" else {"phase": phase}
                self.heads[name] = make(source, count, backend, memory=memory, **options, **shared, **clock)
                slot, window = (StandardSlot, 1) if name == "standard" else (Slot, WINDOW)
                self.models[name] = Model(plan, slot, window, clock.get("phase"), state_dtype)

        def at_head(self, slots):
            """Slots as the heads number them."""
            return [self.pad if s < 0 else s + self.first for s in slots]

        def check(self, name, output, want, sketched, flushed):
            exact = slice(None) if flushed or name != "sketch" else RANKS == FULL_STATE
            close(output[exact], want[exact], EXACT[backend])
            if name == "sketch":
                close(output, sketched, SKETCHED[backend])

        @rule(seed=seeds, slots=some_slots, length=st.integers(1, 2 * WINDOW + 1), harsh=st.booleans())
        def step(self, seed, slots, length, harsh):
            tokens = tokens_of(np.random.default_rng(seed), layer, len(slots), length, np.float64, harsh)
            for name, head in self.heads.items():
                output, model = head.step(*tokens, slots=self.at_head(slots)), self.models[name]
                for t in range(length):
                    for row, slot in enumerate(slots):
                        if slot < 0:
                            np.testing.assert_array_equal(output[row], 0)
                        else:
                            token = at(tokens, np.s_[row : row + 1, t : t + 1])
                            self.check(name, output[row, t], *model.slots[slot].step(token))
                    model.tick([s for s in slots if s >= 0])

        @rule(seed=seeds, slots=some_slots, count=st.integers(1, DRAFTS))
        def draft(self, seed, slots, count):
            rng = np.random.default_rng(seed)
            tokens = tokens_of(rng, layer, len(slots), count, np.float64)
            lengths = np.where(
                np.array(slots) < 0, 9, rng.integers(0, count + 1, len(slots))
            )  # padding holds anything
            for row, length in enumerate(lengths):
                for x in tokens:
                    if x is not None:
                        x[row, length:] = np.nan
            for name, head in self.heads.items():
                model = self.models[name]
                output = head.step(*tokens, slots=self.at_head(slots), draft=True, lengths=lengths)
                for row, slot in enumerate(slots):
                    real = 0 if slot < 0 else lengths[row]
                    given = [at(tokens, np.s_[row : row + 1, t : t + 1]) for t in range(real)]
                    np.testing.assert_array_equal(output[row, len(given) :], 0)
                    if slot >= 0:
                        for t, want in enumerate(model.slots[slot].draft(given, count)):
                            self.check(name, output[row, t], *want)
                if model.clock is not None:
                    model.clock.draft(count)

        @rule(seed=seeds, slots=some_slots)
        def commit(self, seed, slots):
            """Accept some of each row's drafts; a slot without a draft has none."""
            rng, rows = np.random.default_rng(seed), self.models["replay"].slots
            accepted = [5 if s < 0 else int(rng.integers(rows[s].row.drafted + 1)) for s in slots]
            for name, head in self.heads.items():
                head.commit(accepted, self.at_head(slots))
                live = [(s, a) for s, a in zip(slots, accepted, strict=True) if s >= 0]
                for slot, count in live:
                    self.models[name].slots[slot].commit(count)
                self.models[name].committed([s for s, _ in live])

        @rule(seed=seeds, calls=st.integers(1, 8))
        def decode(self, seed, calls):
            """Single tokens, drafts and flushes of changing rows."""
            rng = np.random.default_rng(seed)
            for _ in range(calls):
                slots = rng.permutation(SLOTS)[: rng.integers(1, SLOTS + 1)].tolist()
                kind = rng.random()
                if kind < 0.45:
                    self.step(int(rng.integers(2**32)), slots, 1, False)
                elif kind < 0.6:
                    self.flush(slots)
                else:
                    self.draft(int(rng.integers(2**32)), slots, int(rng.integers(1, DRAFTS + 1)))
                    if rng.random() < 0.8:
                        self.commit(int(rng.integers(2**32)), slots)
                self.states_and_cursors()

        @rule(slots=some_slots)
        def flush(self, slots):
            for name, head in self.heads.items():
                head.flush(self.at_head(slots))
                for slot in (s for s in slots if s >= 0):
                    each = self.models[name].slots[slot]
                    self.models[name].begin(slot, each.current() if each.pending else None)

        @rule(slots=some_slots)
        def reset(self, slots):
            for name, head in self.heads.items():
                head.reset(self.at_head(slots))
                for slot in (s for s in slots if s >= 0):
                    self.models[name].begin(slot, np.zeros((1, *layer.state_shape)))

        @rule(seed=seeds, slots=some_slots)
        def load_state(self, seed, slots):
            state = states_of(np.random.default_rng(seed), layer, len(slots))
            for name, head in self.heads.items():
                head.load_state(state, self.at_head(slots))
                for row, slot in enumerate(slots):
                    if slot >= 0:
                        self.models[name].begin(slot, state[row : row + 1].astype(np.float64))

        @rule(order=st.permutations(range(SLOTS)))
        def load_own_states(self, order):
            """The argument is the memory that the call overwrites."""
            for name, head in self.heads.items():
                head.load_state(head.state[self.first :], self.at_head(order))
                kept = [slot.written for slot in self.models[name].slots]
                for row, slot in enumerate(order):
                    self.models[name].begin(slot, kept[row])

        @rule(seed=seeds, slots=some_slots)
        def adopt(self, seed, slots):
            """Write states into the pools and begin windows on them."""
            state = states_of(np.random.default_rng(seed), layer, len(slots)).astype(np.float64)
            for name, head in self.heads.items():
                for row, slot in enumerate(slots):
                    if slot >= 0:
                        rounded = self.models[name].rounded(state[row : row + 1])
                        place = slot + self.first, *map(slice, layer.state_shape)  # memory may be wider than states
                        self.pools[name][place] = rounded[0]
                        self.models[name].begin(slot, rounded)
                head.adopt(self.at_head(slots))

        @rule(src=st.lists(st.integers(PAD, SLOTS - 1), min_size=SLOTS, max_size=SLOTS), dst=some_slots)
        def copy(self, src, dst):
            src, dst = src[: len(dst)], dst[: len(src)]
            for name, head in self.heads.items():
                head.copy(self.at_head(src), self.at_head(dst))
                slots = self.models[name].slots
                taken = [None if s < 0 else (slots[s].contents(), slots[s].row.due) for s in src]
                for slot, given in zip(dst, taken, strict=True):
                    if slot >= 0 and given is not None:
                        slots[slot].put(given[0])
                        slots[slot].row.due = given[1]

        @rule(slots=some_slots.map(lambda slots: [s for s in slots if s >= 0]).filter(len))
        def snapshot(self, slots):
            taken = {}
            for name, head in self.heads.items():
                kept = [self.models[name].slots[s].contents() for s in slots]
                taken[name] = head.snapshot(self.at_head(slots)), kept
            self.taken.append((len(slots), taken))

        @precondition(lambda self: self.taken)
        @rule(slots=some_slots, which=st.integers(0, 10))
        def restore(self, slots, which):
            count, taken = self.taken[which % len(self.taken)]
            slots = (slots + [PAD] * count)[:count]
            for name, head in self.heads.items():
                snapshot, kept = taken[name]
                head.restore(snapshot, self.at_head(slots))
                model = self.models[name]
                for slot, contents in zip(slots, kept, strict=True):
                    if slot >= 0:
                        model.slots[slot].put(contents)
                        model.slots[slot].row.due = model.clock is not None and model.clock.due

        @rule(slot=st.integers(0, SLOTS - 1))
        def refused(self, slot):
            """Slots named twice are refused, and nothing changes."""
            for head in self.heads.values():
                with pytest.raises(ValueError, match=r"^dst: expected each slot at most once"):
                    head.copy(self.at_head([slot, slot]), self.at_head([slot, slot]))

        @invariant()
        def states_and_cursors(self):
            """A commit of one token too many is refused, which tells the number of drafts."""
            for name, head in self.heads.items():
                for slot, each in enumerate(self.models[name].slots):
                    close(head.state[slot + self.first], each.written[0], EXACT[backend])
                    assert head.position[slot + self.first] == each.row.position
                    most = each.row.drafted
                    with pytest.raises(ValueError, match=rf"^accepted: expected 0 to {most}, the drafted tokens of"):
                        head.commit([most + 1], self.at_head([slot]))
                    if self.first:
                        assert not head.state[0].any()

    def close(got, want, tolerance):
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(1.0, np.abs(want).max(initial=0)))

    return Heads


# A float32 result may round to another 16-bit number than the model's float64 result.
NARROW = [("reference", "gdn", "bfloat16"), ("reference", "kda", "float16")]


@pytest.mark.parametrize(
    ("backend", "kind", "state_dtype"),
    [*((backend, kind, "float32") for backend in BACKENDS for kind in KINDS), *NARROW],
)
def test_any_sequence_of_calls(backend, kind, state_dtype):
    run_state_machine_as_test(
        machine(kind, backend, state_dtype),
        settings=settings(
            max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
