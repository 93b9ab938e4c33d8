"""The decode systems in float64, one row and one token at a time. Tests compare every faster engine with these."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from sketchssm.host_arrays import HostArrays
from sketchssm.plan import SketchPlan
from sketchssm.recurrence import DENSE, Layer, Tokens
from sketchssm.reference import maps
from sketchssm.reference.recurrence import Array, per_head, step
from sketchssm.reference.window import Ring, fold, read_window

__all__ = ["ReplayEngine", "SketchEngine", "StandardEngine"]


class StandardEngine:
    """Standard decode: the state is read and written at every token."""

    arrays = HostArrays(np.float64)
    window = 1

    def __init__(self, layer: Layer, num_slots: int) -> None:
        self.layer = layer
        self.state = np.zeros((num_slots, *layer.state_shape))
        self.position = np.zeros(num_slots, dtype=np.int32)

    def warmup(self, activation_dtype: str | None = None) -> None:
        """See `sketchssm.backends.Engine`: there is nothing to compile."""

    def step(self, tokens: Tokens, slots: npt.NDArray[np.int64], out: Array) -> None:
        """See `sketchssm.backends.Engine`."""
        inputs = per_head(self.layer, tokens)
        for row, slot in enumerate(slots):
            for t in range(out.shape[1]):
                if slot < 0:
                    out[row, t] = 0.0
                    continue
                out[row, t] = self._token(slot, Tokens(*(x if x is None else x[row, t] for x in inputs)))

    def _token(self, slot: int, token: Tokens) -> Array:
        state, output = step(self.state[slot].swapaxes(-1, -2), *token)
        self.state[slot] = state.swapaxes(-1, -2)
        return output

    def load_state(self, state: Array, slots: npt.NDArray[np.int64]) -> None:
        """See `sketchssm.backends.Engine`."""
        for row, slot in enumerate(slots):
            if slot >= 0:
                self.state[slot] = state[row]
                self._start_window(slot)

    def flush(self, slots: npt.NDArray[np.int64]) -> None:
        """See `sketchssm.backends.Engine`."""

    def reset(self, slots: npt.NDArray[np.int64]) -> None:
        """See `sketchssm.backends.Engine`."""
        for slot in slots[slots >= 0]:
            self.state[slot] = 0.0
            self._start_window(slot)

    def _start_window(self, slot: int) -> None:
        self.position[slot] = 0


class ReplayEngine(StandardEngine):
    """Buffered replay: a ring keeps the raw inputs, and the window's last token folds them into the state."""

    def __init__(self, layer: Layer, num_slots: int, window: int) -> None:
        super().__init__(layer, num_slots)
        self.window = window
        self._ring: list[list[Tokens]] = [[] for _ in range(num_slots)]

    def _token(self, slot: int, token: Tokens) -> Array:
        self._ring[slot].append(
            Tokens(*(x if x is None else x.copy() for x in token))
        )  # the caller may overwrite its arrays
        self.position[slot] += 1
        if self.position[slot] == self.window:
            self.flush(np.array([slot]))
            return np.einsum("hvk,hk->hv", self.state[slot], token.q)
        ring = self._stacked(slot)
        reads = read_window(token.q[:, None, :], ring)
        return self._read(slot, reads.queries[:, 0, :]) + np.einsum("hs,hsv->hv", reads.weights[:, 0, :], ring.v)

    def _read(self, slot: int, queries: Array) -> Array:
        """State-read outputs ``(heads, V)`` of effective queries ``(heads, K)``."""
        return np.einsum("hvk,hk->hv", self.state[slot], queries)

    def _stacked(self, slot: int) -> Ring:
        tokens = self._ring[slot]
        k, v, g = (np.stack([getattr(token, name) for token in tokens], axis=1) for name in "kvg")
        return Ring(k, v, g, np.stack([t.beta for t in tokens], axis=1) if self.layer.erases else None)

    def flush(self, slots: npt.NDArray[np.int64]) -> None:
        """See `sketchssm.backends.Engine`."""
        for slot in slots[slots >= 0]:
            if self._ring[slot]:
                folded = fold(self.state[slot].swapaxes(-1, -2), self._stacked(slot))
                self.state[slot] = folded.swapaxes(-1, -2)
                self._start_window(slot)

    def _start_window(self, slot: int) -> None:
        self.position[slot] = 0
        self._ring[slot] = []


class SketchEngine(ReplayEngine):
    """The paper's algorithm 1: replay, with state reads through a sketch between flushes."""

    def __init__(self, plan: SketchPlan, num_slots: int, sketch_dtype: str = "float64") -> None:
        super().__init__(plan.layer, num_slots, plan.window)
        self.plan = plan
        self._reads: list[list[Callable[[Array], Array]]] = [[] for _ in range(num_slots)]
        for slot in range(num_slots):
            self._start_window(slot)

    def _start_window(self, slot: int) -> None:
        super()._start_window(slot)
        self._reads[slot] = [self._sketch(slot, head) for head in range(self.layer.heads)]

    def _sketch(self, slot: int, head: int) -> Callable[[Array], Array]:
        """Sketch one head's state and return how to read it: effective query ``(K,)`` to output ``(V,)``."""
        state = self.state[slot, head].T.copy()
        rank = int(self.plan.ranks[head])
        if rank == DENSE:
            return lambda x: state.T @ x
        omega, projection = (x[head, :, :rank].astype(np.float64) for x in (self.plan.omega, self.plan.projection))
        read = state.T @ omega @ maps.coefficient_map(self.plan.map, state, omega, projection)
        return lambda x: read @ x

    def _read(self, slot: int, queries: Array) -> Array:
        return np.stack([read(x) for read, x in zip(self._reads[slot], queries, strict=True)])
