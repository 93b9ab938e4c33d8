"""Deferred flushes: a slot with W - 1 tokens is flushed after its read."""

import re
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from samples import LAYERS, at, plan_of, states_of, tokens_of

import sketchssm as ss
from sketchssm.heads.overlap import current_scope
from sketchssm.layer.recurrence import FULL_STATE, KINDS
from sketchssm.reference.recurrence import run

SLOTS, WINDOW = 4, 4
RANKS = np.array([2, FULL_STATE, 3, 1])
# Float64 and float32 roundings on a path of at most a few dozen tokens, relative to the size of what is summed.
EXACT = {"reference": 1e-12, "cpu": 2e-5}
# A ridge of 1e-3 makes the map of a nearly singular sketch amplify rounding by up to 1e3.
SKETCHED = {"reference": 1e-12, "cpu": 2e-2}

seeds = st.integers(0, 2**32 - 1)
some_slots = st.lists(st.integers(-1, SLOTS - 1), min_size=1, max_size=SLOTS + 1).filter(
    lambda slots: len({s for s in slots if s >= 0}) == len([s for s in slots if s >= 0])
)


def plan_for(layer, ranks=RANKS, **settings):
    return plan_of(np.random.default_rng(7), layer, ranks, window=WINDOW, **settings)


class TestRefusals:
    def test_arguments(self, rng):
        layer = LAYERS["gdn"]
        plan = plan_for(layer)
        for given, message in (
            ({"deferred": 1}, "deferred: expected a bool, got 1"),
            (
                {"deferred": True, "phase": 0},
                "deferred: expected False with phase=0, as a clock's rows flush together, got True",
            ),
        ):
            with pytest.raises(ValueError, match=re.escape(message)):
                ss.SketchHead(plan, 2, "reference", **given)
        refreshed = plan_for(layer, abs(RANKS), flush_every=2 * WINDOW)
        message = f"deferred: expected a plan without refreshes, got flush_every {2 * WINDOW} with window {WINDOW}"
        with pytest.raises(ValueError, match=re.escape(message)):
            ss.SketchHead(refreshed, 2, "reference", deferred=True)

    def test_drafts(self, backend, rng):
        layer = LAYERS["gdn"]
        head = ss.SketchHead(plan_for(layer), 2, backend, deferred=True)
        assert head.drafts == 0
        tokens = tokens_of(rng, layer, 2, 1)
        with pytest.raises(ValueError, match="draft: expected False, as this head takes no drafts"):
            head.step(*tokens, draft=True)
        with pytest.raises(ValueError, match="accepted: expected no call, as this head takes no drafts"):
            head.commit([1, 1])
        with pytest.raises(ValueError, match="drafts: expected False, as this head takes no drafts"):
            head.warmup(drafts=True)

    def test_snapshots_of_other_heads(self, backend, rng):
        """A head without deferred flushes may hold W - 1 tokens, which a deferred one must not begin with."""
        layer = LAYERS["gdn"]
        plain, deferred = (ss.SketchHead(plan_for(layer), 2, backend, deferred=x) for x in (False, True))
        plain.step(*tokens_of(rng, layer, 2, WINDOW - 1))
        with pytest.raises(ValueError, match="snapshot: expected deferred true, got false"):
            deferred.restore(plain.snapshot())
        with pytest.raises(ValueError, match="snapshot: expected deferred false, got true"):
            plain.restore(deferred.snapshot())


def test_scopes():
    """Scopes belong to a thread and nest; a scope's end joins what was added, also after an error."""
    joined, seen = [], []
    assert current_scope() is None
    with ss.overlap_flushes():
        outer = current_scope()
        outer.append(lambda: joined.append("outer"))
        thread = threading.Thread(target=lambda: seen.append(current_scope()))
        thread.start(), thread.join()
        with pytest.raises(KeyError), ss.overlap_flushes():
            current_scope().append(lambda: joined.append("inner"))
            current_scope().append(lambda: 1 / 0)  # the caller's error matters more
            raise KeyError
        assert joined == ["inner"]
        assert current_scope() is outer
    assert current_scope() is None
    assert (joined, seen) == (["inner", "outer"], [None])
    with pytest.raises(ZeroDivisionError), ss.overlap_flushes():
        current_scope().append(lambda: 1 / 0)


def machine(kind, backend):
    """A deferred head, a plain one whose slots are flushed at W - 1 tokens, and the reference's deferred head."""
    layer = LAYERS[kind]
    plan = plan_for(layer)

    class Heads(RuleBasedStateMachine):
        @initialize()
        def start(self):
            self.head = ss.SketchHead(plan, SLOTS, backend, sketch_dtype="float32", deferred=True)
            self.plain = ss.SketchHead(plan, SLOTS, backend, sketch_dtype="float32")
            self.oracle = ss.SketchHead(plan, SLOTS, "reference", sketch_dtype="float32", deferred=True)
            self.heads = self.head, self.plain, self.oracle
            self.current = np.zeros((SLOTS, *layer.state_shape))
            self.pending = np.zeros(SLOTS, int)

        @rule(seed=seeds, slots=some_slots, length=st.integers(1, 2 * WINDOW + 1), harsh=st.booleans())
        def step(self, seed, slots, length, harsh):
            tokens = tokens_of(np.random.default_rng(seed), layer, len(slots), length, np.float64, harsh)
            with ss.overlap_flushes():  # has no effect on the host
                got, oracle = (head.step(*tokens, slots=slots) for head in (self.head, self.oracle))
            live = np.array([slot for slot in slots if slot >= 0], int)
            for t in range(length):
                want = self.plain.step(*at(tokens, np.s_[:, t]), slots=slots)
                np.testing.assert_array_equal(got[:, t], want)
                self.pending[live] += 1
                full = live[self.pending[live] == WINDOW - 1]
                self.plain.flush(full)
                self.pending[full] = 0
            for row, slot in enumerate(slots):
                if slot < 0:
                    np.testing.assert_array_equal(got[row], 0)
                    continue
                wants, state = run(layer, *at(tokens, np.s_[row : row + 1]), state=self.current[None, slot])
                self.current[slot] = state[0]
                exact = RANKS == FULL_STATE
                close(got[row][:, exact], wants[0][:, exact], EXACT[backend])
                close(got[row], oracle[row], SKETCHED[backend])

        @rule(slots=some_slots)
        def flush(self, slots):
            for head in self.heads:
                head.flush(slots)
            live = [slot for slot in slots if slot >= 0]
            self.pending[live] = 0

        @rule(seed=seeds, slots=some_slots)
        def load_state(self, seed, slots):
            state = states_of(np.random.default_rng(seed), layer, len(slots))
            for head in self.heads:
                head.load_state(state, slots=slots)
            for row, slot in enumerate(slots):
                if slot >= 0:
                    self.current[slot], self.pending[slot] = state[row], 0

        @rule(slots=some_slots)
        def adopt(self, slots):
            """Windows begin on the states as of the last flush."""
            for head in self.heads:
                head.adopt(slots)
            live = [slot for slot in slots if slot >= 0]
            self.current[live], self.pending[live] = self.oracle.state[live], 0

        @rule(slots=some_slots)
        def reset(self, slots):
            for head in self.heads:
                head.reset(slots)
            live = [slot for slot in slots if slot >= 0]
            self.current[live], self.pending[live] = 0, 0

        @rule(source=st.integers(0, SLOTS - 1), to=st.integers(0, SLOTS - 1))
        def copy(self, source, to):
            for head in self.heads:
                head.copy([source], [to])
            self.current[to], self.pending[to] = self.current[source], self.pending[source]

        @rule(source=st.integers(0, SLOTS - 1), to=st.integers(0, SLOTS - 1))
        def restore(self, source, to):
            for head in self.heads:
                head.restore(head.snapshot([source]), [to])
            self.current[to], self.pending[to] = self.current[source], self.pending[source]

        @invariant()
        def cursors(self):
            for head in self.heads:
                np.testing.assert_array_equal(head.position, self.pending)

        @invariant()
        def states(self):
            np.testing.assert_array_equal(self.head.state, self.plain.state)
            for slot in np.flatnonzero(self.pending == 0):
                close(self.head.state[slot], self.current[slot], EXACT[backend])

    def close(got, want, tolerance):
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(1.0, np.abs(want).max(initial=0)))

    return Heads


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_sequence_of_calls(kind, backend):
    run_state_machine_as_test(
        machine(kind, backend),
        settings=settings(
            max_examples=20, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
