"""The plan of one layer: sketch bases, ranks and settings, and their file."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sketchssm.layer.checks import as_array
from sketchssm.layer.coefficients import DEFAULT_MAP, MAPS, CoefficientMap
from sketchssm.layer.formats import DEFAULT_FORMAT, FORMATS, SketchFormat
from sketchssm.layer.recurrence import FULL_STATE, Layer, check_window
from sketchssm.layer.residual import RESIDUAL_BITS
from sketchssm.plans import traffic
from sketchssm.plans.basis import SketchBasis
from sketchssm.plans.files import FileFormat, FileFormatError, Stored, fingerprint


class AllocatedRanks(Protocol):
    """Ranks of one layer and the format that they were allocated for: an `Allocation`, or a part of it."""

    @property
    def ranks(self) -> Any:
        """Rank of each head."""

    @property
    def sketch_dtype(self) -> str:
        """Format of the sketches."""

    @property
    def residual_bits(self) -> Any:
        """Bits of the residuals' codes, of all sketched heads or of each."""


class PlanFileError(FileFormatError):
    """A plan file that can't be used: damaged, not a plan, of another version, or inconsistent."""


FORMAT = FileFormat(
    "sketchssm-plan",
    5,
    ("omega", "ranks"),
    PlanFileError,
    older={4: {}, 3: {"residual_bits": 0}, 2: {"residual_bits": 0, "sketch_dtype": "bfloat16"}},
)


class SketchPlan(Stored):
    """Bases, ranks and settings of one layer's sketches.

    Parameters
    ----------
    basis : SketchBasis
        Calibrated bases, from `fit_basis`.
    ranks : array_like of int, (heads,), or Allocation
        Rank of each head; `FULL_STATE` for a head that reads its full state.
    window : int, optional
        Tokens of a window (W), from one flush to the next. Default: the basis's window.
    map : CoefficientMap or {"ridge", "lowrank", "subspace"}, default "ridge"
        Coefficient map; a name stands for the map with its default parameters.
    sketch_dtype : {"float32", "bfloat16", "int8"}, optional
        Format in which sketches and maps are stored, see `sketchssm.layer.formats`. Default: the format of `ranks` if
        that is an `Allocation`, else "bfloat16".
    residual_bits : int or array_like of int, (heads,), optional
        Bits of the codes in which each sketched head keeps what its sketch leaves of the state: 0 (the sketch alone),
        1, 2 or 3; see `sketchssm.layer.residual`. Needs the map "subspace". Default: those of `ranks` if that is an
        `Allocation`, else 0.

    Attributes
    ----------
    layer : Layer
        Kind and shape.
    ranks : ndarray of int64, (heads,)
        Rank per head; `FULL_STATE` for a head that reads its full state.
    omega : ndarray of float32, (heads, K, rank_max)
        Sketch basis, with orthonormal columns: a head of rank G uses its first G.
    map : CoefficientMap
        As given, with all parameters.
    residual_bits : ndarray of int64, (heads,)
        Bits of each head's residual; 0 for a head without one and for a full-state head.

    Raises
    ------
    ValueError
        If a setting or a rank is out of range, or a basis holds NaN.
    """

    FORMAT = FORMAT

    def __init__(
        self,
        basis: SketchBasis,
        ranks: npt.ArrayLike | AllocatedRanks,
        window: int | None = None,
        map: str | CoefficientMap = DEFAULT_MAP,
        sketch_dtype: str | None = None,
        residual_bits: npt.ArrayLike | None = None,
    ) -> None:
        if not hasattr(basis, "rank_max"):
            raise TypeError(f"basis: expected a SketchBasis, got {type(basis).__name__}")
        if sketch_dtype is None:
            sketch_dtype = getattr(ranks, "sketch_dtype", DEFAULT_FORMAT)
        if residual_bits is None:
            residual_bits = getattr(ranks, "residual_bits", 0)
        tensors = {"omega": basis.omega, "ranks": as_array("ranks", getattr(ranks, "ranks", ranks))}
        window = basis.window if window is None else window
        self._fill(basis.layer, tensors, window, CoefficientMap.of(map), sketch_dtype, residual_bits)

    def _fill(
        self,
        layer: Layer,
        tensors: dict[str, npt.NDArray[Any]],
        window: int,
        map: CoefficientMap,
        sketch_dtype: str,
        residual_bits: npt.ArrayLike,
    ) -> None:
        """Check and set every field, of a new plan and of a loaded one."""
        self.window = check_window(window)
        omega = _columns(layer, tensors["omega"])
        ranks = tensors["ranks"]
        if ranks.shape != (layer.heads,) or ranks.dtype.kind not in "iu":
            raise ValueError(f"ranks: expected {layer.heads} integers, got shape {ranks.shape} of {ranks.dtype}")
        limit = min(layer.key_dim, layer.value_dim, omega.shape[-1])
        wrong = ranks[(ranks != FULL_STATE) & ((ranks < 1) | (ranks > limit))]
        if wrong.size:
            raise ValueError(f"ranks: expected FULL_STATE or 1 to {limit} (columns, K and V bound it), got {wrong[0]}")
        self.layer = layer
        self.ranks = ranks.astype(np.int64)
        self.omega = omega[..., : max(int(ranks.max()), 1)].copy()
        self.map = map
        self.sketch_dtype = SketchFormat.of(sketch_dtype).name
        self.residual_bits = _bits(residual_bits, self.ranks, map)

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
        settings = layer.kind, layer.key_dim, layer.value_dim, self.ranks, self.window, self.map, state_dtype
        return traffic.reduction(*settings, sketch_dtype=form, residual_bits=self.residual_bits)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the plan's contents, in hexadecimal; the checksum of its file."""
        return fingerprint(FORMAT, *self._contents())

    def _contents(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        """Tensors and fields of the file."""
        return {"omega": self.omega, "ranks": self.ranks}, {
            "layer": asdict(self.layer),
            "window": self.window,
            "map": asdict(self.map),
            "sketch_dtype": self.sketch_dtype,
            "residual_bits": self.residual_bits.tolist(),
        }

    def shard(self, rank: int, world: int) -> SketchPlan:
        """Plan of the heads of one process of a tensor-parallel group, as vLLM and Megatron split a layer.

        Parameters
        ----------
        rank, world : int
            Process and processes, see `Layer.shard_heads`.

        Returns
        -------
        SketchPlan
            The plan of the layer ``plan.layer.shard(rank, world)``. Heads keep their ranks, so `mean_rank` and
            `reduction` may differ from process to process.

        Examples
        --------
        >>> import sketchssm as ss
        >>> layer = ss.Layer("gdn", heads=8, key_dim=64, value_dim=64, key_heads=4)
        >>> plan = ss.SketchPlan(ss.SketchBasis.random(layer, 8), [2, 2, 4, 4, 6, 6, 8, 8])
        >>> plan.shard(1, 2).ranks
        array([6, 6, 8, 8])
        """
        heads, _ = self.layer.shard_heads(rank, world)
        tensors: dict[str, Any] = {"omega": self.omega[heads], "ranks": self.ranks[heads]}
        shard = SketchPlan.__new__(SketchPlan)
        layer = self.layer.shard(rank, world)
        shard._fill(layer, tensors, self.window, self.map, self.sketch_dtype, self.residual_bits[heads])
        return shard

    def __repr__(self) -> str:
        """Kind, shape, ranks and settings in one line."""
        sketched = self.ranks[self.ranks != FULL_STATE]
        span = f"{sketched.min()}..{sketched.max()}" if sketched.size else "none"
        mean = f" (mean {self.mean_rank:.2f})" if sketched.size else ""
        found = sorted(set(self.residual_bits[self.ranks != FULL_STATE].tolist()))
        bits = f", residual_bits={'/'.join(map(str, found))}" if any(found) else ""
        return (
            f"SketchPlan({self.layer.kind}, heads={self.layer.heads}, K={self.layer.key_dim}, "
            f"V={self.layer.value_dim}, ranks={span}{mean}, "
            f"full_state={int((self.ranks == FULL_STATE).sum())}, window={self.window}, map={self.map}, "
            f"sketch_dtype={self.sketch_dtype}{bits})"
        )

    @classmethod
    def _build(
        cls,
        tensors: dict[str, npt.NDArray[Any]],
        layer: Any,
        window: Any,
        map: Any,
        sketch_dtype: Any,
        residual_bits: Any,
        wide: Any = None,  # this and the next are of versions 3 and 4
        flush_every: Any = None,
    ) -> SketchPlan:
        for name, value, expected in (
            ("flush_every", flush_every, (None, check_window(window))),
            ("sketch_dtype", sketch_dtype, FORMATS),
            ("map", map["name"], MAPS),
            ("wide", wide, (None,)),
        ):
            if value not in expected:
                raise ValueError(f"{name}: this version does not have {value!r}; calibrate again")
        plan, full = cls.__new__(cls), CoefficientMap(**map)
        if asdict(full) != map:
            raise ValueError(f"map: expected all parameters of {full}, got {map}")
        plan._fill(Layer(**layer), tensors, window, full, sketch_dtype, residual_bits)
        return plan


def total_reduction(plans: Collection[SketchPlan]) -> float:
    """Traffic reduction of several layers together: how many times fewer bytes than standard decode."""
    standard = [plan.layer.heads * traffic.standard(plan.layer.key_dim, plan.layer.value_dim) for plan in plans]
    return sum(standard) / sum(whole / plan.reduction for whole, plan in zip(standard, plans, strict=True))


def _bits(given: npt.ArrayLike, ranks: npt.NDArray[np.int64], map: CoefficientMap) -> npt.NDArray[np.int64]:
    """Bits of the residual of each head, checked."""
    bits, sketched = as_array("residual_bits", given), ranks != FULL_STATE
    if bits.ndim == 0 and bits.dtype.kind in "iu":
        bits = np.where(sketched, bits, 0)  # one number is for all sketched heads
    if bits.shape != ranks.shape or bits.dtype.kind not in "iu":
        raise ValueError(
            f"residual_bits: expected one integer or {ranks.size}, got shape {bits.shape} of {bits.dtype}"
        )
    wrong = bits[~np.isin(bits, RESIDUAL_BITS)]
    if wrong.size:
        raise ValueError(f"residual_bits: expected {RESIDUAL_BITS}, got {wrong[0]}")
    if bits[~sketched].any():
        raise ValueError(f"residual_bits: expected 0 for a full-state head, got {bits[~sketched].max()}")
    if bits.any() and map.name != "subspace":
        raise ValueError(f"residual_bits: expected 0 with the map {map.name!r}, got {bits.max()}: use map='subspace'")
    return bits.astype(np.int64)


def _columns(layer: Layer, array: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """A basis ``(heads, K, rank_max)``, checked, in float32."""
    if array.ndim != 3 or array.shape[:2] != (layer.heads, layer.key_dim) or array.shape[2] == 0:
        raise ValueError(f"omega: expected shape ({layer.heads}, {layer.key_dim}, rank_max), got {array.shape}")
    if array.dtype.kind != "f":
        raise ValueError(f"omega: expected floating-point numbers, got dtype {array.dtype}")
    with np.errstate(over="ignore"):  # beyond float32 becomes infinite, which is refused
        columns = np.ascontiguousarray(array, dtype=np.float32)
    if not np.isfinite(columns).all():
        raise ValueError("omega: expected finite numbers, got NaN or infinity")
    return columns
