"""Random sequences of calls to heads, against a model that keeps every token and runs the plain recurrence."""

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
from samples import LAYERS, at, gate_of, plan_of, raw_of, states_of, tokens_of

import sketchssm as ss
from sketchssm.layer.recurrence import FULL_STATE, KINDS, Tokens
from sketchssm.reference.recurrence import run

SLOTS = 3
WINDOW = 3
RANKS = np.array([2, FULL_STATE, 3, 1])
# Float64 and float32 roundings on a path of at most a few dozen tokens, relative to the size of what is summed: unit
# queries and states that hold a few values of size one, so no result is off by more than this many absolute units.
EXACT = {"reference": 1e-12, "cpu": 2e-5}

seeds = st.integers(0, 2**32 - 1)
some_slots = st.lists(st.integers(-1, SLOTS - 1), min_size=1, max_size=SLOTS + 1).filter(
    lambda slots: len({s for s in slots if s >= 0}) == len([s for s in slots if s >= 0])
)


class Slot:
    """Expected contents of a slot: a state and the tokens since the last flush."""

    def __init__(self, layer):
        self.layer = layer
        self.state = np.zeros((1, *layer.state_shape))
        self.pending = []

    def step(self, token):
        """Decode a token ``(1, 1, ...)``; return its output ``(heads, V)`` and whether the window ended."""
        self.pending.append(token)
        output, state = self.run()
        ended = len(self.pending) == WINDOW
        if ended:
            self.load(state)
        return output[0, -1], ended

    def load(self, state):
        self.state, self.pending = state, []

    def current(self):
        """State after the pending tokens."""
        return self.run()[1] if self.pending else self.state

    def run(self):
        inputs = zip(*self.pending, strict=True)
        joined = Tokens(*(None if parts[0] is None else np.concatenate(parts, axis=1) for parts in inputs))
        return run(self.layer, *joined, state=self.state)


def machine(kind, backend, raw=False):
    """Build the state machine of one kind and backend with all systems that have exact states.

    With `raw`, those that can take raw gate inputs, the last one aside.
    """
    layer = LAYERS[kind]
    plan = plan_of(np.random.default_rng(7), layer, RANKS, window=WINDOW)
    tolerance = EXACT[backend]
    gate = gate_of(np.random.default_rng(8), layer) if raw else None
    wide = np.float64 if backend == "reference" else np.float32
    bad = {"beta": np.nan} if raw else {"g": 1.0}

    def draw(rng, batch, length, harsh=False):
        """Tokens, and the argument g of the heads that have a gate."""
        tokens = tokens_of(rng, layer, batch, length, np.float64, harsh)
        if not raw:
            return tokens, tokens.g
        a = raw_of(rng, layer, batch, length)
        if harsh:
            a = np.where(rng.random(a.shape) < 0.5, a, rng.choice([-np.inf, -100, 20, np.inf], size=a.shape))
        return tokens._replace(g=gate.log_decays(a).astype(wide)), a

    class Heads(RuleBasedStateMachine):
        @initialize()
        def start(self):
            self.model = [Slot(layer) for _ in range(SLOTS)]
            self.standard = ss.StandardHead(layer, SLOTS, backend, gate=gate)
            self.replay = ss.ReplayHead(layer, SLOTS, backend, window=WINDOW, gate=gate)
            self.sketch = ss.SketchHead(plan, SLOTS, backend, gate=gate)
            self.copy = ss.CopyReadHead(layer, SLOTS, backend, window=WINDOW)
            self.heads = (self.standard, self.replay, self.sketch, self.copy)

        def given(self, tokens, g):
            """Pairs of a head and its inputs."""
            return [(head, tokens if head is self.copy else tokens._replace(g=g)) for head in self.heads]

        @rule(seed=seeds, slots=some_slots, length=st.integers(1, 2 * WINDOW + 1), harsh=st.booleans())
        def step(self, seed, slots, length, harsh):
            tokens, g = draw(np.random.default_rng(seed), len(slots), length, harsh)
            if length == 1:
                outputs = [head.step(*at(x, np.s_[:, 0]), slots=slots)[:, None] for head, x in self.given(tokens, g)]
            else:
                outputs = [head.step(*x, slots=slots) for head, x in self.given(tokens, g)]
            standard, replay, sketch, copy = outputs
            for row, slot in enumerate(slots):
                if slot < 0:
                    for output in outputs:
                        np.testing.assert_array_equal(output[row], 0)
                    continue
                for t in range(length):
                    want, ended = self.model[slot].step(at(tokens, np.s_[row : row + 1, t : t + 1]))
                    close(standard[row, t], want)
                    close(replay[row, t], want)
                    exact = slice(None) if ended else RANKS == FULL_STATE
                    close(sketch[row, t, exact], want[exact])
                    if ended:
                        close(copy[row, t], want)
                    assert np.isfinite(sketch[row, t]).all()
                    assert np.isfinite(copy[row, t]).all()

        @rule(slots=some_slots)
        def flush(self, slots):
            for head in self.heads:
                head.flush(slots)
            for slot in (s for s in slots if s >= 0):
                self.model[slot].load(self.model[slot].current())
                for head in self.heads:
                    close(head.state[slot], self.model[slot].state[0])

        @rule()
        def flush_all(self):
            self.flush(list(range(SLOTS)))

        @rule(slots=some_slots)
        def reset(self, slots):
            for head in self.heads:
                head.reset(slots)
            for slot in (s for s in slots if s >= 0):
                self.model[slot] = Slot(layer)

        @rule(seed=seeds, slots=some_slots)
        def load_state(self, seed, slots):
            state = states_of(np.random.default_rng(seed), layer, len(slots))
            for head in self.heads:
                head.load_state(state, slots=slots)
            for row, slot in enumerate(slots):
                if slot >= 0:
                    self.model[slot].load(state[row : row + 1].astype(np.float64))

        @rule(seed=seeds, slots=some_slots)
        def poison_and_reset(self, seed, slots):
            """A reset clears NaN from the ring and, if the window ended, from the state."""
            tokens, g = draw(np.random.default_rng(seed), len(slots), 2)
            tokens.v[...] = np.nan
            for head, given in self.given(tokens, g):
                head.step(*given, slots=slots)
            self.reset(slots)

        @precondition(lambda self: any(slot.pending for slot in self.model))
        @rule(seed=seeds)
        def refused(self, seed):
            """A call that is refused for its last argument changes nothing."""
            tokens, g = draw(np.random.default_rng(seed), SLOTS, 1)
            for name, value in bad.items():
                getattr(tokens, name)[-1] = value
            for head, given in self.given(tokens, g):
                with pytest.raises(ValueError, match=rf"^{min(bad)}: "):
                    head.step(*given)

        @invariant()
        def states_and_cursors(self):
            """States are those of the last flush (for standard: of the last token); cursors count pending tokens."""
            for slot, model in enumerate(self.model):
                close(self.standard.state[slot], model.current()[0])
                assert self.standard.position[slot] == 0
                for head in (self.replay, self.sketch, self.copy):
                    close(head.state[slot], model.state[0])
                    assert head.position[slot] == len(model.pending)

    def close(got, want):
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(1.0, np.abs(want).max(initial=0)))

    return Heads


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(("kind", "raw"), [*((kind, False) for kind in KINDS), ("kda", True)])
def test_any_sequence_of_calls(kind, raw, backend):
    run_state_machine_as_test(
        machine(kind, backend, raw),
        settings=settings(
            max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
