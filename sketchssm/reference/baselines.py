"""Baselines with separate arithmetic, in float64: quantised states, and copies for reads."""

from __future__ import annotations

import numpy as np

from sketchssm.arrays.options import DEFAULTS, EngineOptions
from sketchssm.layer.recurrence import Layer, Tokens
from sketchssm.reference.engines import ReplayEngine, StandardEngine
from sketchssm.reference.quantise import round_trip
from sketchssm.reference.recurrence import Array


class QuantisedEngine(StandardEngine):
    """The recurrence on quantised states: a state is quantised again after every token."""

    def __init__(self, layer: Layer, num_slots: int, bits: int, options: EngineOptions = DEFAULTS) -> None:
        super().__init__(layer, num_slots, options)
        self.bits = bits

    def _token(self, slot: int, token: Tokens) -> Array:
        output = super()._token(slot, token)
        self._requantise(slot)
        return output

    def _begin(self, slot: int, word: int) -> None:
        super()._begin(slot, word)
        self._requantise(slot)  # a loaded state is kept quantised, too

    def _requantise(self, slot: int) -> None:
        self.state[slot] = round_trip(self.state[slot], self.bits)


class CopyEngine(ReplayEngine):
    """Replay that reads a copy of the state between flushes: quantised, or projected ``(heads, K, K)``."""

    def __init__(
        self, layer: Layer, num_slots: int, window: int, copy: int | Array, options: EngineOptions = DEFAULTS
    ) -> None:
        super().__init__(layer, num_slots, window, options)
        self._form = copy
        self._copy = np.zeros_like(self.state)

    def _begin(self, slot: int, word: int) -> None:
        super()._begin(slot, word)
        state, form = self.state[slot], self._form
        self._copy[slot] = round_trip(state, form, zero=False) if isinstance(form, int) else state @ form

    def _read(self, slot: int, queries: Array) -> Array:
        return np.einsum("hvk,hk->hv", self._copy[slot], queries)
