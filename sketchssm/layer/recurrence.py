"""Kind and shape of one recurrent layer, and the bounds of its windows.

The kinds differ in this one place. With ``S`` of shape ``(K, V)``, one token does

    S_t = M_t S_{t-1} + beta_t k_t v_t^T,    o_t = S_t^T q_t,    M_t = (I - beta_t k_t k_t^T) Diag(exp g_t)

(equations *update* and *read* of the paper). A kind is two facts: whether it erases (else ``M_t = Diag(exp g_t)`` and
``beta_t = 1``), and whether ``g_t`` has a number for each key channel or one for the head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sketchssm.layer.checks import check_choice, check_integer, check_size


class Kind(NamedTuple):
    """What tells kinds of recurrences apart."""

    erases: bool
    channel_decays: bool


PROPERTIES = {
    "mamba2": Kind(erases=False, channel_decays=False),
    "gdn": Kind(erases=True, channel_decays=False),
    "kda": Kind(erases=True, channel_decays=True),
    "gla": Kind(erases=False, channel_decays=True),
}
"""Kinds by name. A new kind is an entry here: names are compared only for interfaces of other libraries."""

KINDS = tuple(PROPERTIES)

FULL_STATE = -1
"""Rank that marks a head which reads the full state instead of a sketch."""

MAX_WINDOW = 64
"""Longest window in tokens: reads work on tables of W x W products."""

MAX_ELEMENTS = 1 << 40
"""Most elements of a slot's state: no machine holds more, and kernels compute offsets in 64 bits."""

ROUNDING = 1e-5
"""Relative errors of outputs and states below this value are float32 rounding."""

PAD_SLOT = -1
"""Slot of a padding row. No memory is read or written for the row, and its output is zeros."""


class Tokens(NamedTuple):
    """Inputs of the recurrence, with a leading ``(batch,)`` or ``(batch, tokens)``.

    Parameters
    ----------
    q, k : array, (..., key_heads, K)
        Queries and keys, normalised and scaled.
    v : array, (..., heads, V)
        Values (for mamba2 with dt folded in).
    g : array, (..., heads) or, for kda and gla, (..., heads, K)
        Log-decays, <= 0.
    beta : array, (..., heads), or None
        Write gates; None for mamba2 and gla.
    """

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any

    def at(self, index: Any) -> Tokens:
        """Index all arrays alike.

        Parameters
        ----------
        index : index
            As of NumPy: ``np.s_[:, 3]`` is token 3 of each row.

        Returns
        -------
        Tokens
            The parts of the arrays.
        """
        return Tokens(*(None if x is None else x[index] for x in self))


@dataclass(frozen=True)
class Layer:
    """Kind and shape of one recurrent layer.

    Parameters
    ----------
    kind : {"mamba2", "gdn", "kda", "gla"}
        Which recurrence the layer runs.
    heads : int
        Value heads; each owns a state of shape ``(value_dim, key_dim)``.
    key_dim : int
        Length K of a query or a key.
    value_dim : int
        Length V of a value or an output.
    key_heads : int, optional
        Heads of q and k; must divide `heads`. Value head ``h`` uses key head ``h // (heads // key_heads)``.
        Default: `heads`.

    Raises
    ------
    ValueError
        If the kind is unknown, a size is not positive, or `key_heads` does not divide `heads`.
    """

    kind: str
    heads: int
    key_dim: int
    value_dim: int
    key_heads: int = None  # type: ignore[assignment]  # stands for `heads` until __post_init__

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        if self.key_heads is None:
            object.__setattr__(self, "key_heads", self.heads)
        for name in ("heads", "key_dim", "value_dim", "key_heads"):
            object.__setattr__(self, name, check_size(name, getattr(self, name)))
        if self.heads * self.key_dim * self.value_dim > MAX_ELEMENTS:
            raise ValueError(f"value_dim: expected states of at most {MAX_ELEMENTS} elements, got {self.state_shape}")
        if self.heads % self.key_heads:
            raise ValueError(f"key_heads: expected a divisor of heads={self.heads}, got {self.key_heads}")

    @property
    def group(self) -> int:
        """Value heads that share one key head."""
        return self.heads // self.key_heads

    @property
    def erases(self) -> bool:
        """Whether a token erases along its key before it writes (the delta rule: gdn and kda; not mamba2 and gla)."""
        return PROPERTIES[self.kind].erases

    @property
    def channel_decays(self) -> bool:
        """Whether every key channel of a head has a decay of its own (kda and gla), or one gate decays the state."""
        return PROPERTIES[self.kind].channel_decays

    @property
    def gate_channels(self) -> int:
        """Length of one head's log-decay: K, or 1 for a scalar gate."""
        return self.key_dim if self.channel_decays else 1

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape ``(heads, V, K)`` of one slot's state, K contiguous."""
        return (self.heads, self.value_dim, self.key_dim)

    def token_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each input after its ``(batch,)`` or ``(batch, tokens)`` axes.

        Returns
        -------
        dict of str to tuple of int
            For q, k, v, g and, if the kind has a write gate, beta.
        """
        shapes: dict[str, tuple[int, ...]] = {
            "q": (self.key_heads, self.key_dim),
            "k": (self.key_heads, self.key_dim),
            "v": (self.heads, self.value_dim),
            "g": (self.heads, self.key_dim) if self.channel_decays else (self.heads,),
        }
        if self.erases:
            shapes["beta"] = (self.heads,)
        return shapes

    def shard_heads(self, rank: int, world: int) -> tuple[slice, slice]:
        """Heads of one process of a tensor-parallel group: equal, contiguous shares in the order of the ranks.

        Parameters
        ----------
        rank : int
            Process, from 0 to ``world - 1``.
        world : int
            Processes in the group. Divides `heads`, and divides `key_heads` or is a multiple of it; in the latter case
            ``world // key_heads`` processes in a row hold the same key head, which their value heads share.

        Returns
        -------
        tuple of slice
            Value heads and key heads of the process.

        Raises
        ------
        ValueError
            If the heads do not divide evenly, or a number is out of range.
        """
        heads = shard_range("heads", self.heads, rank, world)
        if self.key_heads % world == 0:
            return heads, shard_range("key_heads", self.key_heads, rank, world)
        if world % self.key_heads:
            raise ValueError(f"world: expected a divisor or a multiple of key_heads={self.key_heads}, got {world}")
        first = rank * self.key_heads // world
        return heads, slice(first, first + 1)

    def shard(self, rank: int, world: int) -> Layer:
        """Kind and shape of the heads of one process of a tensor-parallel group.

        Parameters
        ----------
        rank, world : int
            Process and processes, see `shard_heads`.

        Returns
        -------
        Layer
            The process's own layer, with ``heads // world`` heads and ``max(key_heads // world, 1)`` key heads.
        """
        heads, keys = self.shard_heads(rank, world)
        return replace(self, heads=heads.stop - heads.start, key_heads=keys.stop - keys.start)

    def expand_keys(self, x: npt.NDArray[Any], axis: int = -2) -> npt.NDArray[Any]:
        """Repeat the key-head axis of an array so that it has one entry per value head.

        Parameters
        ----------
        x : ndarray
            Array with a key-head axis.
        axis : int, default -2
            The key-head axis.

        Returns
        -------
        ndarray
            `x` itself if every value head has its own key head.
        """
        return x if self.group == 1 else np.repeat(x, self.group, axis=axis)


def shard_range(name: str, size: int, rank: int, world: int) -> slice:
    """Share of one process in `size` entries along an axis, split evenly in the order of the ranks."""
    world = check_size("world", world)
    rank = check_integer("rank", rank, 0, world - 1)
    if size % world:
        raise ValueError(f"world: expected a divisor of {name}={size}, got {world}")
    share = size // world
    return slice(rank * share, (rank + 1) * share)


def check_window(window: Any, least: int = 2) -> int:
    """Check and return a window's length in tokens, from `least` to `MAX_WINDOW`.

    A sketch needs a token between two flushes, replay needs none.
    """
    return check_integer("window", window, least, MAX_WINDOW)
