"""Recurrences over fewer key channels than the model's: the common part of pruned states and reduced keys.

A recurrence without some key channels is a smaller recurrence of the same kind. Its engine is the standard engine at a
smaller K, behind linear maps of queries and keys. The maps belong to the layer and cost no state traffic.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sketchssm.arrays.options import EngineOptions
from sketchssm.heads.backends import load_engine
from sketchssm.heads.engine import Engine
from sketchssm.heads.head import DecodeHead, check_capacity
from sketchssm.heads.registry import System
from sketchssm.layer.checks import check_number
from sketchssm.layer.recurrence import Layer, Tokens
from sketchssm.reference.recurrence import Array


@dataclass(frozen=True, eq=False)
class ChannelMap:
    """Linear maps from the K channels of a key head to n coordinates.

    `kept (key_heads, n)` has the kept channels in the order of the coordinates; -1 for a coordinate that a key head
    does not use. `query` and `key (key_heads, n, K)` map queries and keys. `lift (key_heads, K, n)` has orthonormal
    columns (zero for unused coordinates): a reduced state ``(V, n)`` stands for ``state @ lift^T``. With `unit_keys`,
    keys are scaled back to their lengths.
    """

    kept: npt.NDArray[np.int64]
    query: Array
    key: Array
    lift: Array
    unit_keys: bool = False

    @classmethod
    def selection(cls, kept: npt.NDArray[np.int64], key_dim: int) -> ChannelMap:
        """Select channels, the same for queries and keys."""
        pick = (kept[..., None] == np.arange(key_dim)).astype(np.float64)
        return cls(kept, pick, pick, pick.swapaxes(-1, -2))

    def reduced(self, layer: Layer) -> Layer:
        """Return the layer with one key channel per coordinate."""
        return Layer(layer.kind, layer.heads, self.kept.shape[-1], layer.value_dim, layer.key_heads)


class ReducedEngine:
    """An engine of a reduced layer (`inner`) with the interface of an engine of the whole layer."""

    window = 1

    def __init__(self, layer: Layer, inner: Engine, channels: ChannelMap) -> None:
        self.layer, self._inner, self.arrays = layer, inner, inner.arrays
        self._query, self._key = (x.astype(inner.state.dtype) for x in (channels.query, channels.key))
        self._lift = layer.expand_keys(channels.lift, axis=0).astype(inner.state.dtype)
        self._kept = layer.expand_keys(channels.kept, axis=0)
        self._unit_keys = channels.unit_keys

    @property
    def state(self) -> Array:
        """States ``(slots, heads, V, K)`` of the whole layer: a new array, not a view."""
        return self._inner.state @ self._lift.swapaxes(-1, -2)

    @property
    def position(self) -> npt.NDArray[np.int32]:
        """See `sketchssm.heads.engine.Engine`."""
        return self._inner.position

    def warmup(self, activation_dtype: str | None = None, drafts: bool = False) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        self._inner.warmup(activation_dtype, drafts)

    def step(self, tokens: Tokens, slots: npt.NDArray[np.int64], out: Array) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        q, k = _mapped(self._query, tokens.q), _mapped(self._key, tokens.k, self._unit_keys)
        g = tokens.g
        if self.layer.channel_decays:
            g = np.where(self._kept >= 0, np.take_along_axis(g, self._kept[None, None], axis=-1), 0).astype(g.dtype)
        self._inner.step(Tokens(q, k, tokens.v, g, tokens.beta), slots, out)

    def load_state(self, state: Array, slots: npt.NDArray[np.int64]) -> None:
        """See `sketchssm.heads.engine.Engine`; the part outside the kept channels is lost."""
        with np.errstate(invalid="ignore", over="ignore"):  # padding rows may hold anything
            self._inner.load_state(np.ascontiguousarray(state @ self._lift), slots)

    def flush(self, slots: npt.NDArray[np.int64]) -> None:
        """See `sketchssm.heads.engine.Engine`."""

    def reset(self, slots: npt.NDArray[np.int64]) -> None:
        """See `sketchssm.heads.engine.Engine`."""
        self._inner.reset(slots)


def reference_engine(layer: Layer, num_slots: int, channels: ChannelMap, options: EngineOptions) -> ReducedEngine:
    """Reduced recurrence in float64."""
    from sketchssm.reference.engines import StandardEngine

    return ReducedEngine(layer, StandardEngine(channels.reduced(layer), num_slots, options), channels)


def cpu_engine(layer: Layer, num_slots: int, channels: ChannelMap, options: EngineOptions) -> ReducedEngine:
    """Reduced recurrence in Numba's float32."""
    from sketchssm.cpu.standard import StandardEngine

    return ReducedEngine(layer, StandardEngine(channels.reduced(layer), num_slots, options), channels)


REDUCED = System("reduced", {"reference": f"{__name__}:reference_engine", "cpu": f"{__name__}:cpu_engine"})


class ReducedHead(DecodeHead):
    """Base class of heads with fewer key channels."""

    def __init__(self, layer: Layer, channels: ChannelMap, num_slots: int, backend: str) -> None:
        capacity = check_capacity(num_slots)
        self.channels = channels
        super().__init__(layer, capacity, *load_engine(REDUCED, backend, layer, capacity, channels))


def check_sparsity(sparsity: float) -> float:
    """Check a share of channels to drop."""
    check_number("sparsity", sparsity, "a number from 0 to below 1", lambda number: 0 <= number < 1)
    return float(sparsity)


def _mapped(maps: Array, x: Array, norm: bool = False) -> Array:
    """Map queries or keys ``(batch, tokens, key_heads, K)``, one vector at a time: rows do not affect each other."""
    with np.errstate(invalid="ignore", over="ignore"):  # padding rows may hold anything
        y = (maps @ x[..., None])[..., 0]
        if norm:
            length, want = (np.sqrt(np.square(z).sum(axis=-1, keepdims=True)) for z in (y, x))
            y = y * np.divide(want, length, out=np.zeros_like(length), where=length > 0)
    return np.ascontiguousarray(y)
