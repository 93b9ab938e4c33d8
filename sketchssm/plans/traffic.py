"""The byte model: state-memory traffic per head and decoded token (appendix *State Memory Traffic Reduction*).

Every function counts the bytes of state, sketch and map that one head of one sequence reads and writes per token,
averaged over the tokens of a window. A full state is ``D = 4 K V`` bytes in float32, and half of that in 16 bits. As
in the paper, three things are not counted: ring buffers, writes of all that a flush makes for reads (sketches, maps,
shadows), and the bases that all sequences share. Every function refuses unknown kinds, maps and types, and numbers out
of range, with a ValueError.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm.layer.checks import as_array, check_choice, check_integer, check_number
from sketchssm.layer.coefficients import DEFAULT_MAP, CoefficientMap
from sketchssm.layer.formats import DEFAULT_FORMAT, SketchFormat
from sketchssm.layer.recurrence import FULL_STATE, KINDS, MAX_ELEMENTS, PROPERTIES
from sketchssm.layer.residual import RESIDUAL_BITS, residual_bytes

__all__ = ["compressed", "read_only_copy", "reduction", "replay", "sketch", "sketch_read", "standard", "state_bytes"]

Bytes = npt.NDArray[np.float64]

STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a state's element, by type."""


def state_bytes(key_dim: int, value_dim: int, state_dtype: str = "float32") -> float:
    """Bytes of a state.

    Parameters
    ----------
    key_dim, value_dim : int
        K and V.
    state_dtype : {"float32", "bfloat16", "float16"}, default "float32"
        Type of states in memory.

    Returns
    -------
    float
        ``D``.
    """
    check_choice("state_dtype", state_dtype, STATE_BYTES)
    _check_shape(key_dim, value_dim)
    return float(STATE_BYTES[state_dtype] * key_dim * value_dim)


def standard(key_dim: int, value_dim: int, state_dtype: str = "float32") -> float:
    """Bytes per token of standard decode, which reads and writes the state at every token.

    Parameters
    ----------
    key_dim, value_dim : int
        K and V.
    state_dtype : str, default "float32"
        See `state_bytes`.

    Returns
    -------
    float
        ``2 D``.
    """
    return 2 * state_bytes(key_dim, value_dim, state_dtype)


def replay(key_dim: int, value_dim: int, window: int = 16, state_dtype: str = "float32") -> float:
    """Bytes per token of replay, which reads the state at every token and writes it once a window.

    Parameters
    ----------
    key_dim, value_dim : int
        K and V.
    window : int, default 16
        W.
    state_dtype : str, default "float32"
        See `state_bytes`.

    Returns
    -------
    float
        ``D + D / W``.
    """
    state = state_bytes(key_dim, value_dim, state_dtype)
    return state + state / _checked("window", window)


def compressed(key_dim: int, value_dim: int, *, bits: float | None = None, sparsity: float | None = None) -> float:
    """Bytes per token of a recurrence whose state itself is compressed, read and written at every token.

    Parameters
    ----------
    key_dim, value_dim : int
        K and V.
    bits : float, optional
        Bits per element of a quantised state. With 16-bit scales along both dimensions (DSQ) the compression is
        ``32 / (bits + 16 (K + V) / (K V))``.
    sparsity : float, optional
        Share of the rows or channels that pruning removes (GHOST, DRRQR); the compression is ``1 / (1 - sparsity)``.
        Exactly one of `bits` and `sparsity` is given.

    Returns
    -------
    float
        ``2 D / C_rate``.
    """
    if (bits is None) == (sparsity is None):
        raise ValueError("compressed: expected either bits or sparsity")
    if bits is not None:
        return 2 * _quantised(key_dim, value_dim, bits)
    assert sparsity is not None
    check_number("sparsity", sparsity, "a number from 0 to below 1", lambda number: 0 <= number < 1)
    return standard(key_dim, value_dim) * (1 - sparsity)


def read_only_copy(key_dim: int, value_dim: int, bits: float, window: int = 16) -> float:
    """Bytes per token if reads use a quantised copy, and the full state is read and written once a window.

    Parameters
    ----------
    key_dim, value_dim : int
        K and V.
    bits : float
        Bits per element of the copy, scales as in `compressed`.
    window : int, default 16
        W.

    Returns
    -------
    float
        ``((W - 1) D / C_rate + 2 D) / W``, from the appendix *Ablation of Preserving Full-State Updates*.
    """
    reads = _checked("window", window) - 1
    return (reads * _quantised(key_dim, value_dim, bits) + standard(key_dim, value_dim)) / window


def sketch_read(
    kind: str,
    key_dim: int,
    value_dim: int,
    rank: npt.ArrayLike,
    window: int = 16,
    map: str | CoefficientMap = DEFAULT_MAP,
    state_dtype: str = "float32",
    *,
    sketch_dtype: str = DEFAULT_FORMAT,
    residual_bits: npt.ArrayLike = 0,
) -> Bytes:
    """Bytes that one read between two flushes moves.

    Parameters
    ----------
    kind : {"mamba2", "gdn", "kda", "gla"}
        Which recurrence.
    key_dim, value_dim : int
        K and V.
    rank : array_like
        Ranks G (fractions allowed, for a budget's mean); `FULL_STATE` for a full read. It moves D bytes, and half of
        them if sketches are smaller than the float32 of the state (`SketchFormat.shadows`).
    window : int, default 16
        W.
    map : CoefficientMap or str, default "ridge"
        Coefficient map. A read moves the sketch and the stored elements of its map (`SketchFormat.bytes`). For gdn and
        kda, a dense map also counts the paper's projected erase vectors, ``2 G W`` bytes. In bfloat16 the sum is
        ``2 G (V + K + W)`` bytes, and ``2 G (V + K)`` for mamba2.
    state_dtype : {"float32", "bfloat16", "float16"}, default "float32"
        Type of states in memory.
    sketch_dtype : {"float32", "bfloat16", "int8"}, default "bfloat16"
        Format of sketches and maps, see `sketchssm.layer.formats`.
    residual_bits : array_like, default 0
        Bits of the residuals' codes, for all ranks or for each (fractions allowed, as for ranks), 0 with other maps
        than "subspace"; see `sketchssm.layer.residual`.

    Returns
    -------
    ndarray of float64
        Bytes, in the shape of `rank`.
    """
    check_choice("kind", kind, KINDS)
    map, form = CoefficientMap.of(map), SketchFormat.of(sketch_dtype)
    state = state_bytes(key_dim, value_dim, state_dtype) / (2 if form.shadows(state_dtype) else 1)
    g: Bytes = as_array("rank", rank, np.float64)
    if not ((g == FULL_STATE) | (g >= 0) & (g < np.inf)).all():
        raise ValueError(f"rank: expected FULL_STATE or numbers of at least 0, got {rank!r}")
    bits: Bytes = as_array("residual_bits", residual_bits, np.float64)
    if not ((bits >= 0) & (bits <= RESIDUAL_BITS[-1])).all():
        raise ValueError(f"residual_bits: expected numbers from 0 to {RESIDUAL_BITS[-1]}, got {residual_bits!r}")
    if bits.shape not in ((), g.shape):
        raise ValueError(
            f"residual_bits: expected a number, or one for each of {g.size} ranks, got shape {bits.shape}"
        )
    if bits.any() and map.name != "subspace":
        raise ValueError(f"residual_bits: expected 0 with the map {map.name!r}, got {residual_bits!r}")
    window = _checked("window", window)
    erase = 2 * window if map.storage == "dense" and PROPERTIES[kind].erases else 0
    rank = np.maximum(g, 0.0)  # 0 where the state is read
    size = form.bytes(map, rank, key_dim, value_dim) + erase * rank
    size = size + residual_bytes(bits, key_dim, value_dim)
    return np.where(g == FULL_STATE, state, size)


def sketch(
    kind: str,
    key_dim: int,
    value_dim: int,
    rank: npt.ArrayLike,
    window: int = 16,
    map: str | CoefficientMap = DEFAULT_MAP,
    state_dtype: str = "float32",
    *,
    sketch_dtype: str = DEFAULT_FORMAT,
    residual_bits: npt.ArrayLike = 0,
) -> Bytes:
    """Bytes per token of decode with sketches, flushes included.

    Parameters
    ----------
    kind, key_dim, value_dim, rank : str, int, int and array_like
        See `sketch_read`.
    window, map, state_dtype, sketch_dtype, residual_bits : optional
        See `sketch_read`.

    Returns
    -------
    ndarray of float64
        ``((W - 1) T_G + 2 D) / W`` in the shape of `rank`, with ``T_G`` from `sketch_read`.
    """
    form: Any = {"sketch_dtype": sketch_dtype, "residual_bits": residual_bits}
    read = sketch_read(kind, key_dim, value_dim, rank, window, map, state_dtype, **form)
    return ((window - 1) * read + standard(key_dim, value_dim, state_dtype)) / window


def reduction(
    kind: str,
    key_dim: int,
    value_dim: int,
    rank: npt.ArrayLike,
    window: int = 16,
    map: str | CoefficientMap = DEFAULT_MAP,
    state_dtype: str = "float32",
    *,
    sketch_dtype: str = DEFAULT_FORMAT,
    residual_bits: npt.ArrayLike = 0,
) -> float:
    """Traffic reduction of decode with sketches, relative to standard decode with float32 states.

    Parameters
    ----------
    kind, key_dim, value_dim : str, int and int
        Which recurrence, K and V.
    rank : array_like
        One rank, or the rank of each head; `FULL_STATE` for a full read. The result is a ratio of sums over heads.
    window, map, state_dtype, sketch_dtype, residual_bits : optional
        See `sketch_read`.

    Returns
    -------
    float
        Bytes of standard decode / bytes with sketches.

    Examples
    --------
    Nemotron 3 Super at a mean rank of 9, as in the paper's table of its accuracy:

    >>> import sketchssm as ss
    >>> round(ss.traffic.reduction("mamba2", 128, 64, 9), 2)
    8.93
    """
    form: Any = {"sketch_dtype": sketch_dtype, "residual_bits": residual_bits}
    used = sketch(kind, key_dim, value_dim, rank, window, map, state_dtype, **form)
    return float(standard(key_dim, value_dim) / used.mean())


def _quantised(key_dim: int, value_dim: int, bits: float) -> float:
    """Bytes of a quantised state: its elements, and one 16-bit scale per row and per column."""
    check_number("bits", bits, "a positive number", lambda number: 0 < number < np.inf)
    _check_shape(key_dim, value_dim)
    return (bits * key_dim * value_dim + 16 * (key_dim + value_dim)) / 8


def _check_shape(key_dim: int, value_dim: int) -> None:
    _checked("key_dim", key_dim)
    _checked("value_dim", value_dim)


def _checked(name: str, size: int) -> int:
    return check_integer(name, size, 1, MAX_ELEMENTS)
