"""The plan of one layer: sketch bases, ranks and settings, and the file that carries them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sketchssm.files import FileFormat, FileFormatError, layer_fields, load_file, save_file
from sketchssm.recurrence import DENSE, Layer

if TYPE_CHECKING:
    from sketchssm.calibrate.allocation import Allocation
    from sketchssm.calibrate.basis import SketchBasis

__all__ = ["DEFAULT_MAP", "DEFAULT_RIDGE", "MAPS", "PlanFileError", "SketchPlan"]

MAPS = ("exact", "ridge", "lowrank", "prior", "offline")
"""Coefficient maps; `sketchssm.reference.maps` defines each."""

DEFAULT_MAP = "ridge"
"""What loses least energy per byte read on the real traces measured so far, at reductions of 6 to 12 times."""

DEFAULT_RIDGE = {"exact": 0.0, "ridge": 0.001, "lowrank": 0.1, "prior": 0.001, "offline": 0.0}
"""Ridge of each map unless the plan names one: the paper's for lowrank, measured on real traces for the others."""

STORAGE = {"exact": "dense", "ridge": "dense", "lowrank": "factors", "prior": "factors", "offline": "shared"}
"""What a state keeps of its map: the dense matrix, its factors, or nothing (one matrix per head for all states)."""

SETTINGS = ("window", "map", "pivots", "ridge")


class PlanFileError(FileFormatError):
    """A plan file that can't be used: truncated, not a plan, of a newer version, or inconsistent."""


FORMAT = FileFormat("sketchssm-plan", 1, ("phi", "projection", "ranks"), PlanFileError)


class SketchPlan:
    """Bases, ranks and settings of one layer's sketches.

    Parameters
    ----------
    basis : SketchBasis
        Calibrated bases, from `fit_basis`.
    ranks : array_like of int, (heads,), or Allocation
        Rank of each head; `DENSE` for a head that reads its full state.
    window : int, default 16
        Tokens from one flush to the next (W).
    map : {"exact", "ridge", "lowrank", "prior", "offline"}, default "ridge"
        Coefficient map.
    pivots : int, default 4
        Pivot count P of `lowrank` and `prior`; the others ignore it.
    ridge : float, optional
        Regularisation of the coefficients relative to the state metric's mean diagonal. Default: the map's own,
        `DEFAULT_RIDGE`.

    Attributes
    ----------
    layer : Layer
        Kind and shape.
    ranks : ndarray of int64, (heads,)
        Rank per head, `DENSE` where the full state is read.
    phi : ndarray of float32, (heads, K, rank_max)
        Sketch basis: a head of rank G uses its first G columns. Orthonormal columns, or E0-orthonormal ones for
        `prior` and `offline`.
    projection : ndarray of float32, (heads, K, rank_max)
        The map's shared projection Pi: `phi` itself, or ``E0 phi``.
    window, map, pivots, ridge
        As given.

    Raises
    ------
    ValueError
        If a setting or a rank is out of range, or a basis holds NaN.
    """

    def __init__(
        self,
        basis: SketchBasis,
        ranks: npt.ArrayLike | Allocation,
        window: int = 16,
        map: str = DEFAULT_MAP,
        pivots: int = 4,
        ridge: float | None = None,
    ) -> None:
        table = np.asarray(getattr(ranks, "ranks", ranks))
        used = int(max(table.max(initial=1), 1)) if table.dtype.kind in "iu" else 1
        if used > basis.rank_max:
            raise ValueError(f"ranks: expected at most the basis's rank_max={basis.rank_max}, got {used}")
        phi, projection = basis.columns(used, weighted=map in ("prior", "offline"))
        ridge = DEFAULT_RIDGE.get(map, 0.0) if ridge is None else ridge
        self._fill(basis.layer, {"phi": phi, "projection": projection, "ranks": table}, window, map, pivots, ridge)

    def _fill(
        self,
        layer: Layer,
        tensors: dict[str, npt.NDArray[Any]],
        window: int,
        map: str,
        pivots: int,
        ridge: float,
    ) -> None:
        """Check every field and set it; the one way into a plan, from a basis or from a file."""
        if map not in MAPS:
            raise ValueError(f"map: expected one of {', '.join(MAPS)}, got {map!r}")
        for name, value, least in (("window", window, 2), ("pivots", pivots, 1)):
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
                raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")
        if not (np.isfinite(ridge) and ridge >= 0):
            raise ValueError(f"ridge: expected a finite number of at least 0, got {ridge!r}")
        self.phi, self.projection = (_columns(layer, name, tensors[name]) for name in ("phi", "projection"))
        if self.phi.shape != self.projection.shape:
            raise ValueError(f"projection: expected phi's shape {self.phi.shape}, got {self.projection.shape}")
        ranks = tensors["ranks"]
        if ranks.shape != (layer.heads,) or ranks.dtype.kind not in "iu":
            raise ValueError(f"ranks: expected {layer.heads} integers, got shape {ranks.shape} of {ranks.dtype}")
        limit = min(layer.key_dim, layer.value_dim, self.phi.shape[-1])
        wrong = ranks[(ranks != DENSE) & ((ranks < 1) | (ranks > limit))]
        if wrong.size:
            raise ValueError(f"ranks: expected DENSE or 1 to {limit} (columns, K and V bound it), got {wrong[0]}")
        self.layer = layer
        self.ranks = ranks.astype(np.int64)
        self.window, self.map, self.pivots, self.ridge = int(window), map, int(pivots), float(ridge)

    @property
    def storage(self) -> str:
        """What a state keeps of its map: "dense", "factors" or "shared" (nothing of its own)."""
        return STORAGE[self.map]

    @property
    def mean_rank(self) -> float:
        """Mean rank of the sketched heads; NaN if all are dense."""
        sketched = self.ranks[self.ranks != DENSE]
        return float(sketched.mean()) if sketched.size else float("nan")

    def __repr__(self) -> str:
        """Kind, shape, ranks and settings in one line."""
        sketched = self.ranks[self.ranks != DENSE]
        span = f"{sketched.min()}..{sketched.max()}" if sketched.size else "none"
        return (
            f"SketchPlan({self.layer.kind}, heads={self.layer.heads}, K={self.layer.key_dim}, "
            f"V={self.layer.value_dim}, ranks={span} (mean {self.mean_rank:.2f}), "
            f"dense={int((self.ranks == DENSE).sum())}, window={self.window}, map={self.map}, "
            f"pivots={self.pivots}, ridge={self.ridge:g})"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a safetensors file, all or nothing.

        Parameters
        ----------
        path : str or PathLike
            Where to; an existing file is replaced at once when the new one is complete.
        """
        tensors = {name: getattr(self, name) for name in FORMAT.tensors}
        settings = {name: getattr(self, name) for name in SETTINGS}
        save_file(path, FORMAT, tensors, {"layer": layer_fields(self.layer), "settings": settings})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SketchPlan:
        """Read a plan file and check all of it.

        Parameters
        ----------
        path : str or PathLike
            A file that `save` wrote.

        Returns
        -------
        SketchPlan
            The plan.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        PlanFileError
            If the file is truncated, is not a plan, is of a newer version, or contradicts itself.
        """
        return load_file(path, FORMAT, cls._build)

    @classmethod
    def _build(cls, tensors: dict[str, npt.NDArray[Any]], meta: dict[str, Any]) -> SketchPlan:
        plan = cls.__new__(cls)
        settings = meta["settings"]
        plan._fill(Layer(**meta["layer"]), tensors, **{name: settings[name] for name in SETTINGS})
        return plan


def _columns(layer: Layer, name: str, array: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Columns ``(heads, K, rank_max)`` of a plan, checked, in float32."""
    if array.ndim != 3 or array.shape[:2] != (layer.heads, layer.key_dim):
        raise ValueError(f"{name}: expected shape ({layer.heads}, {layer.key_dim}, rank_max), got {array.shape}")
    if array.dtype.kind != "f":
        raise ValueError(f"{name}: expected floating-point numbers, got dtype {array.dtype}")
    with np.errstate(over="ignore"):  # what float32 can't hold becomes infinite, and is refused as such
        columns = np.ascontiguousarray(array, dtype=np.float32)
    if not np.isfinite(columns).all():
        raise ValueError(f"{name}: expected finite numbers, got NaN or infinity")
    return columns
