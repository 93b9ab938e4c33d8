"""The plan of one layer: sketch bases, ranks and settings, and their file."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sketchssm.layer.coefficients import DEFAULT_MAP, CoefficientMap
from sketchssm.layer.formats import DEFAULT_FORMAT, SketchFormat
from sketchssm.layer.recurrence import FULL_STATE, Layer, check_flush_every, check_window
from sketchssm.plans import traffic
from sketchssm.plans.files import FileFormat, FileFormatError, fingerprint, load_file, save_file

if TYPE_CHECKING:
    from sketchssm.calibrate.allocation import Allocation, RankTable
    from sketchssm.calibrate.basis import SketchBasis

__all__ = ["PlanFileError", "SketchPlan", "total_reduction"]


class PlanFileError(FileFormatError):
    """A plan file that can't be used: damaged, not a plan, of another version, or inconsistent."""


FORMAT = FileFormat(
    "sketchssm-plan",
    3,
    ("omega", "projection", "ranks"),
    PlanFileError,
    older={2: {"sketch_dtype": "bfloat16", "wide": None, "flush_every": None}},
)


class SketchPlan:
    """Bases, ranks and settings of one layer's sketches.

    Parameters
    ----------
    basis : SketchBasis
        Calibrated bases, from `fit_basis`.
    ranks : array_like of int, (heads,), Allocation or RankTable
        Rank of each head; `FULL_STATE` for a head that reads its full state.
    window : int, optional
        Tokens of a window (W): after so many buffered tokens, the sketch is computed again. Default: the basis's
        window.
    map : CoefficientMap or {"exact", "ridge", "lowrank", "prior", "offline"}, default "ridge"
        Coefficient map; a name stands for the map with its default parameters.
    sketch_dtype : {"float32", "bfloat16", "int8", "fp8", "int8+int4"}, optional
        Format in which sketches and maps are stored, see `sketchssm.layer.formats`. Default: the format of `ranks` if that
        is an `Allocation`, else "bfloat16".
    wide : array_like of int, (heads,), optional
        "int8+int4" only: number of columns of each head in 8 bits, 0 to its rank; the other columns have 4 bits.
        Default: the widths of `ranks` if that is an `Allocation`.
    flush_every : int, optional
        Tokens from one flush to the next: a multiple of the window, at most 128. At the end of a window without a
        flush, the sketch is refreshed: computed from the old sketch and the buffered tokens, without the state.
        Default: the window, that is, no refreshes.

    Attributes
    ----------
    layer : Layer
        Kind and shape.
    ranks : ndarray of int64, (heads,)
        Rank per head; `FULL_STATE` for a head that reads its full state.
    omega : ndarray of float32, (heads, K, rank_max)
        Sketch basis: a head of rank G uses its first G columns. Orthonormal columns, or E0-orthonormal ones for
        `prior` and `offline`.
    projection : ndarray of float32, (heads, K, rank_max)
        The map's shared projection Pi: `omega` itself, or ``E0 omega``.
    window : int
        As given.
    map : CoefficientMap
        As given, with all parameters.
    sketch_dtype : str
        Format of sketches and maps.
    wide : ndarray of int64, (heads,), or None
        Columns in 8 bits of "int8+int4"; None for any other format.
    flush_every : int
        As given; the window if there are no refreshes.

    Raises
    ------
    ValueError
        If a setting, a rank or a width is out of range, a basis holds NaN, or a head that reads its full state is
        combined with refreshes.
    """

    def __init__(
        self,
        basis: SketchBasis,
        ranks: npt.ArrayLike | Allocation | RankTable,
        window: int | None = None,
        map: str | CoefficientMap = DEFAULT_MAP,
        sketch_dtype: str | None = None,
        wide: npt.ArrayLike | None = None,
        flush_every: int | None = None,
    ) -> None:
        if not hasattr(basis, "columns"):  # no import of the calibration for a plan that is loaded
            raise TypeError(f"basis: expected a SketchBasis, got {type(basis).__name__}")
        if sketch_dtype is None:
            sketch_dtype = getattr(ranks, "sketch_dtype", DEFAULT_FORMAT)
        if wide is None and sketch_dtype == getattr(ranks, "sketch_dtype", None):
            wide = getattr(ranks, "wide", None)
        table = np.asarray(getattr(ranks, "ranks", ranks))
        used = int(table.max(initial=1)) if table.dtype.kind in "iu" else 1
        if used > basis.rank_max:
            raise ValueError(f"ranks: expected at most the basis's rank_max={basis.rank_max}, got {used}")
        map = CoefficientMap.of(map)
        omega, projection = basis.columns(used, weighted=map.weighted)
        tensors = {"omega": omega, "projection": projection, "ranks": table}
        settings = basis.window if window is None else window, map, sketch_dtype, wide, flush_every
        self._fill(basis.layer, tensors, *settings)

    def _fill(
        self,
        layer: Layer,
        tensors: dict[str, npt.NDArray[Any]],
        window: int,
        map: CoefficientMap,
        sketch_dtype: str = DEFAULT_FORMAT,
        wide: npt.ArrayLike | None = None,
        flush_every: int | None = None,
    ) -> None:
        """Check and set every field, of a new plan and of a loaded one."""
        self.window = check_window(window)
        self.flush_every = check_flush_every(flush_every, self.window)
        self.omega, self.projection = (_columns(layer, name, tensors[name]) for name in ("omega", "projection"))
        if self.omega.shape != self.projection.shape:
            raise ValueError(f"projection: expected omega's shape {self.omega.shape}, got {self.projection.shape}")
        ranks = tensors["ranks"]
        if ranks.shape != (layer.heads,) or ranks.dtype.kind not in "iu":
            raise ValueError(f"ranks: expected {layer.heads} integers, got shape {ranks.shape} of {ranks.dtype}")
        limit = min(layer.key_dim, layer.value_dim, self.omega.shape[-1])
        wrong = ranks[(ranks != FULL_STATE) & ((ranks < 1) | (ranks > limit))]
        if wrong.size:
            raise ValueError(f"ranks: expected FULL_STATE or 1 to {limit} (columns, K and V bound it), got {wrong[0]}")
        if self.flush_every > self.window and (ranks == FULL_STATE).any():
            full = int(np.argmin(ranks != FULL_STATE))
            raise ValueError(
                f"flush_every: expected the window ({self.window}), as head {full} reads its full state, "
                f"got {self.flush_every}"
            )
        self.layer = layer
        self.ranks = ranks.astype(np.int64)
        self.map = map
        form = SketchFormat.of(sketch_dtype)
        form.check_map(map)
        self.sketch_dtype, self.wide = form.name, form.check_wide(wide, self.ranks)

    @property
    def mean_rank(self) -> float:
        """Mean rank of the sketched heads; NaN if all heads read full states."""
        sketched = self.ranks[self.ranks != FULL_STATE]
        return float(sketched.mean()) if sketched.size else float("nan")

    @property
    def reduction(self) -> float:
        """Traffic reduction: how many times fewer bytes than standard decode, by the byte model."""
        return self.reduction_with()

    def reduction_with(self, state_dtype: str = "float32", sketch_dtype: str | None = None) -> float:
        """Traffic reduction, relative to standard decode with float32 states, of a head with the plan.

        Parameters
        ----------
        state_dtype : {"float32", "bfloat16", "float16"}, default "float32"
            Type of states in memory.
        sketch_dtype : str, optional
            Format of the head's sketches; default the plan's.

        Returns
        -------
        float
            Bytes of standard decode / bytes of the head, by the byte model.
        """
        layer, form = self.layer, self.sketch_dtype if sketch_dtype is None else sketch_dtype
        shape = layer.kind, layer.key_dim, layer.value_dim
        wide = self.wide if form == self.sketch_dtype else None
        more: Any = {"sketch_dtype": form, "wide": wide, "flush_every": self.flush_every}
        return traffic.reduction(*shape, self.ranks, self.window, self.map, state_dtype, **more)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the plan's contents, in hexadecimal; the checksum of its file."""
        return fingerprint(FORMAT, *self._contents())

    def _contents(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        """Tensors and fields of the file."""
        tensors = {name: getattr(self, name) for name in ("omega", "projection", "ranks")}
        return tensors, {
            "layer": asdict(self.layer),
            "window": self.window,
            "flush_every": self.flush_every,
            "map": asdict(self.map),
            "sketch_dtype": self.sketch_dtype,
            "wide": None if self.wide is None else self.wide.tolist(),
        }

    def shard(self, rank: int, world: int) -> SketchPlan:
        """Plan of the heads of one process of a tensor-parallel group, as vLLM and Megatron split a layer.

        Process r holds the value heads ``r * heads / world`` to ``(r + 1) * heads / world`` and their key heads. If
        there are more processes than key heads, several processes hold the same key head.

        Parameters
        ----------
        rank : int
            Process, from 0 to ``world - 1``.
        world : int
            Processes in the group. Divides the heads, and divides the key heads or is a multiple of them.

        Returns
        -------
        SketchPlan
            The plan of the layer ``plan.layer.shard(rank, world)``. Heads keep their ranks, so `mean_rank` and
            `reduction` may differ from process to process.

        Raises
        ------
        ValueError
            If the heads or key heads do not divide evenly, or a number is out of range.

        Examples
        --------
        >>> import sketchssm as ss
        >>> layer = ss.Layer("gdn", heads=8, key_dim=64, value_dim=64, key_heads=4)
        >>> plan = ss.SketchPlan(ss.SketchBasis.random(layer, 8), [2, 2, 4, 4, 6, 6, 8, 8])
        >>> plan.shard(1, 2).ranks
        array([6, 6, 8, 8])
        """
        heads, _ = self.layer.shard_heads(rank, world)
        ranks = self.ranks[heads]
        columns = max(int(ranks.max()), 1)
        tensors = {name: getattr(self, name)[heads, :, :columns].copy() for name in ("omega", "projection")}
        shard = SketchPlan.__new__(SketchPlan)
        wide = None if self.wide is None else self.wide[heads]
        layer = self.layer.shard(rank, world)
        shard._fill(
            layer, tensors | {"ranks": ranks}, self.window, self.map, self.sketch_dtype, wide, self.flush_every
        )
        return shard

    def __repr__(self) -> str:
        """Kind, shape, ranks and settings in one line."""
        sketched = self.ranks[self.ranks != FULL_STATE]
        flushes = f", flush_every={self.flush_every}" if self.flush_every > self.window else ""
        span = f"{sketched.min()}..{sketched.max()}" if sketched.size else "none"
        mean = f" (mean {self.mean_rank:.2f})" if sketched.size else ""
        wide = "" if self.wide is None else f", wide={self.wide.min()}..{self.wide.max()}"
        return (
            f"SketchPlan({self.layer.kind}, heads={self.layer.heads}, K={self.layer.key_dim}, "
            f"V={self.layer.value_dim}, ranks={span}{mean}, "
            f"full_state={int((self.ranks == FULL_STATE).sum())}, window={self.window}{flushes}, map={self.map}, "
            f"sketch_dtype={self.sketch_dtype}{wide})"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a safetensors file, all or nothing.

        Parameters
        ----------
        path : str or PathLike
            Where to; the new file replaces an existing one when it is complete.
        """
        save_file(path, FORMAT, *self._contents())

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
            If the file is damaged, is no plan, is of another version, or contradicts itself.
        """
        return load_file(path, FORMAT, cls._build)

    @classmethod
    def _build(
        cls,
        tensors: dict[str, npt.NDArray[Any]],
        layer: Any,
        window: Any,
        map: Any,
        sketch_dtype: Any,
        wide: Any,
        flush_every: Any,
    ) -> SketchPlan:
        plan, full = cls.__new__(cls), CoefficientMap(**map)
        if asdict(full) != map:
            raise ValueError(f"map: expected all parameters of {full}, got {map}")
        plan._fill(Layer(**layer), tensors, window, full, sketch_dtype, wide, flush_every)
        return plan


def total_reduction(plans: Collection[SketchPlan]) -> float:
    """Traffic reduction of several layers together: how many times fewer bytes than standard decode."""
    standard = [plan.layer.heads * traffic.standard(plan.layer.key_dim, plan.layer.value_dim) for plan in plans]
    return sum(standard) / sum(whole / plan.reduction for whole, plan in zip(standard, plans, strict=True))


def _columns(layer: Layer, name: str, array: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Columns ``(heads, K, rank_max)`` of a plan, checked, in float32."""
    if array.ndim != 3 or array.shape[:2] != (layer.heads, layer.key_dim) or array.shape[2] == 0:
        raise ValueError(f"{name}: expected shape ({layer.heads}, {layer.key_dim}, rank_max), got {array.shape}")
    if array.dtype.kind != "f":
        raise ValueError(f"{name}: expected floating-point numbers, got dtype {array.dtype}")
    with np.errstate(over="ignore"):  # beyond float32 becomes infinite, which is refused
        columns = np.ascontiguousarray(array, dtype=np.float32)
    if not np.isfinite(columns).all():
        raise ValueError(f"{name}: expected finite numbers, got NaN or infinity")
    return columns
