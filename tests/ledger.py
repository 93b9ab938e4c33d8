"""What a head's monitor should measure, from raw tokens and states in float64; shared by tests of all backends."""

import numpy as np

from sketchssm.layer.formats import SketchFormat
from sketchssm.layer.recurrence import FULL_STATE
from sketchssm.layer.slots import LEAST_SAMPLES
from sketchssm.reference.recurrence import per_head, step
from sketchssm.reference.residual import residual_read
from sketchssm.reference.window import Ring, effective_query


class Ledger:
    """Keeps the ring and the sums of every slot of a head beside the head.

    An error is ``(S0 - S)^T x``: the state at the window's start less its sketch, times the flush token's effective
    query. No buffered value takes part, and no code of a read. `exact` has the slots whose error was above the head's
    tolerance, and `outputs` what such slots gave and should have given.
    """

    def __init__(self, head, slots):
        self.head, self.plan = head, head.plan
        self.rings = [[] for _ in range(slots)]
        self.sums, self.flushes = np.zeros((slots, 2, head.layer.heads)), np.zeros(slots, int)
        self.exact, self.outputs = np.zeros(slots, bool), []

    def step(self, tokens, slots):
        """Let the head decode tokens ``(batch, tokens, ...)``, one a call."""
        for t in range(tokens.v.shape[1]):
            states = np.array(self.host(self.head.state), np.float64)
            found = self.host(self.head.step(*tokens.at(np.s_[:, t]), slots=slots))
            for row, slot in enumerate(slots):
                ring = self.rings[slot]
                ring.append(per_head(self.head.layer, tokens.at((row, t))))
                position = self.host(self.head.position)[slot]
                assert not (position and self.exact[slot])
                if position:
                    continue
                errors, output = self._measured(states[slot], ring)
                if self.exact[slot]:
                    self.outputs.append((found[row], output))
                else:
                    self._count(slot, errors, np.square(output).sum(-1))
                ring.clear()

    def _count(self, slot, errors, energy):
        """Count a flush; sums that differ from the tolerance by less than their roundings may fall to either side."""
        measured = self.flushes[slot] % self.head.monitor == 0
        self.flushes[slot] += 1
        if not measured:
            return
        self.sums[slot] += errors, energy
        error, energy = self.sums[slot].sum(-1)
        if self.head.tolerance is None or self.flushes[slot] <= (LEAST_SAMPLES - 1) * self.head.monitor:
            return
        share = error / (self.head.tolerance * energy)
        self.exact[slot] = self.head.errors([slot]).exact[0] if abs(share - 1) < 1e-3 else share > 1

    def _measured(self, state, tokens):
        """Squared norms of the error (heads,), and the exact output."""
        plan, form = self.plan, SketchFormat.of(self.head.sketch_dtype)
        ring = Ring(
            *(None if x[0] is None else np.stack(x, axis=1).astype(float) for x in list(zip(*tokens, strict=True))[1:])
        )
        queries, errors = effective_query(tokens[-1][0].astype(float), ring), np.zeros(len(state))
        for h, rank in enumerate(plan.ranks):
            if rank != FULL_STATE:
                omega, bits = plan.omega[h, :, :rank].astype(float), int(plan.residual_bits[h])
                served = residual_read(form, plan.map, state[h].T, omega, bits=bits)
                errors[h] = np.square((state[h] - served) @ queries[h]).sum()
        new = state.swapaxes(-1, -2)
        for token in tokens:
            new, output = step(new, *token)
        return errors, output

    def clear(self, slots):
        """After `reset`, `load_state` or `adopt`."""
        for slot in slots:
            self.rings[slot] = []
        self.sums[slots], self.flushes[slots], self.exact[slots] = 0, 0, False

    def copy(self, src, dst):
        """After `copy`, or a snapshot's way from `src` to `dst`."""
        for a, b in zip(src, dst, strict=True):
            self.rings[b] = list(self.rings[a])
        for own in (self.sums, self.flushes, self.exact):
            own[dst] = own[src]

    def check(self, tolerance, slots=None):
        """Compare the roots of the head's sums with the ledger's; the unit of the tolerance is the largest output.

        The root of a sum of squared differences is a norm, so outputs that are right to a tolerance give an error that
        is right to this tolerance, however small it is.
        """
        found, index = self.head.errors(slots), slice(None) if slots is None else slots
        error, energy = np.sqrt(self.sums[index]).swapaxes(0, 1)
        most = tolerance * max(energy.max(), 1e-30)
        np.testing.assert_allclose(np.sqrt(found.error), error, rtol=0, atol=most)
        np.testing.assert_allclose(np.sqrt(found.energy), energy, rtol=0, atol=most)
        np.testing.assert_array_equal(found.samples, -(-self.flushes[index] // self.head.monitor))
        np.testing.assert_array_equal(found.exact, self.exact[index])
        for output, want in self.outputs:
            np.testing.assert_allclose(output, want, rtol=1e-7, atol=tolerance * abs(want).max())
        self.outputs.clear()

    @staticmethod
    def host(array):
        return array.get() if hasattr(array, "get") else array
