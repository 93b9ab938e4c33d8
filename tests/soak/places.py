"""Where a head of the simulated server runs: its memory, its arrays and its streams."""

import contextlib
import os

import ml_dtypes
import numpy as np
from samples import one_block

from sketchssm.layer.recurrence import Tokens
from sketchssm.layer.slots import DUE


class Host:
    """A head, from ``make(num_slots, memory)``, on arrays of the host: all of a slot is in one block of a pool."""

    overlaps = False
    """Whether calls on `side` run beside other calls."""

    refuses = True
    """Whether a call with a wrong slot is an error."""

    leaves_out = False
    """Whether the rows of a wrong slot are left out, and counted."""

    def __init__(self, make, slots):
        self.pool, self.memory = one_block(make(1, None).parts, slots, self._pool)
        self.poison(slice(None))
        self.head = make(slots, self.memory)
        self.drafts = self.head.drafts
        """Most tokens of a draft; 0 where the backend takes no drafts."""

    def _pool(self, shape, dtype):
        raw = np.empty(shape[0] * shape[1] + 64, dtype)
        first = -raw.ctypes.data % 64
        return raw[first : len(raw) - 64 + first].reshape(shape)

    def poison(self, slots):
        """Overwrite all that freed slots hold."""
        self.pool[slots] = 0xFF  # NaN in every type, and a cursor that no slot may have

    def running(self):
        """Context of the whole run."""
        return contextlib.nullcontext()

    def side(self):
        """Context of calls that a prefill makes."""
        return contextlib.nullcontext()

    def join(self):
        """Wait for the calls on `side`."""

    def array(self, x):
        return np.asarray(x)

    def get(self, x):
        return np.asarray(x)

    def tokens(self, tokens):
        """Inputs as the head's kernels see them, in float64."""
        return Tokens(*(None if x is None else x.astype(np.float64) for x in tokens))

    def write_states(self, states, slots):
        """Put states into the pool, as a prefill of the engine's own does."""
        _, values, keys = states[0].shape  # a backend may pad both axes
        memory = self.memory["state"][..., :values, :keys]
        kept = states.astype(ml_dtypes.bfloat16).view(np.uint16) if memory.dtype == np.uint16 else states
        for slot, state in zip(slots, kept, strict=True):
            memory[slot] = self.array(state)

    def due(self, slots):
        """DUE bits of some slots."""
        return self.get(self.memory["cursor"])[slots] & DUE != 0

    def step(self, tokens, slots, lengths=None, rng=None):
        """Begin a step, or with lengths a draft; returns a function that waits for its outputs."""
        wide = tokens._replace(v=tokens.v.astype(np.float64))  # outputs have the type of v
        given = wide if rng.random() < 0.5 or tokens.v.shape[1] > 1 else wide.at(np.s_[:, 0])
        draft = {} if lengths is None else {"draft": True, "lengths": lengths}
        output = self.head.step(*given, slots=slots, **draft)
        return lambda: self.get(output).reshape(tokens.v.shape)

    def commit(self, accepted, slots):
        self.head.commit(self.array(accepted), slots=self.array(slots))

    def used(self):
        """Bytes of memory in use."""
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
