"""Sketch bases of one layer, and the algebra of their metric.

The sketch depends only on the span of the basis. A basis has two forms with the same nested spans: `omega` has
orthonormal columns, and `weighted` has E0-orthonormal columns, where E0 is the mean state metric.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm.layer.checks import as_array, check_seed, check_size
from sketchssm.layer.recurrence import Layer, check_instance, check_window
from sketchssm.plans.files import FileFormat, Stored, check_array

Array = npt.NDArray[np.floating[Any]]

SUPPORT = 1e-10
"""Eigenvalues of E0 below this share of the largest count as zero. Directions with so little of the states' energy do
not change an output, and a float64 eigenvalue solver has errors of more than 1e-5 in smaller eigenvalues."""

FORMAT = FileFormat("sketchssm-basis", 2, ("omega", "weighted", "e0", "spectrum", "retained"))


@dataclass(frozen=True, eq=False)
class SketchBasis(Stored):
    """Nested sketch bases of one layer: the first G columns are the rank-G basis.

    Made by `fit_basis`, or by `SketchBasis.random` as a baseline.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    window : int
        Window that the basis was calibrated for.
    omega : ndarray of float64, (heads, K, rank_max)
        Orthonormal columns.
    weighted : ndarray of float64, (heads, K, rank_max)
        E0-orthonormal columns with the same nested spans: ``weighted^T E0 weighted = I``. Columns beyond the rank of
        a head's E0 are zero, because no calibration state has energy there. In `omega` these columns are the leading
        remaining directions of the queries.
    e0 : ndarray of float64, (heads, K, K)
        Mean state metric, scaled to trace K.
    spectrum : ndarray of float64, (heads, K)
        Eigenvalues of C_z, descending; NaN for a random basis.
    retained : ndarray of float64, (heads, rank_max)
        Share of the spectrum in the first G columns: the predicted share of output energy that a sketch of rank G
        retains, for states of the mean metric. NaN for a random basis.
    """

    FORMAT = FORMAT

    layer: Layer
    window: int
    omega: Array
    weighted: Array
    e0: Array
    spectrum: Array
    retained: Array

    @property
    def rank_max(self) -> int:
        """Number of columns."""
        return int(self.omega.shape[-1])

    def columns(self, rank: int, weighted: bool = False) -> tuple[Array, Array]:
        """Sketch basis and shared projection of a coefficient map.

        Parameters
        ----------
        rank : int
            Columns to take, 1 to `rank_max`.
        weighted : bool, default False
            False: the orthonormal basis, which is its own projection. True: the E0-orthonormal basis and ``E0 omega``,
            for `prior` and `offline`.

        Returns
        -------
        omega : ndarray, (heads, K, rank)
            Sketch basis.
        projection : ndarray, (heads, K, rank)
            Projection.

        Raises
        ------
        ValueError
            If the rank is out of range.
        """
        if check_size("rank", rank) > self.rank_max:
            raise ValueError(f"rank: expected 1 to rank_max={self.rank_max}, got {rank}")
        if not weighted:
            return self.omega[..., :rank], self.omega[..., :rank]
        omega = self.weighted[..., :rank]
        return omega, self.e0 @ omega

    @classmethod
    def random(
        cls, layer: Layer, rank_max: int, seed: int = 0, e0: npt.ArrayLike | None = None, window: int = 16
    ) -> SketchBasis:
        """Draw random orthonormal bases, the baseline of a calibrated basis.

        Parameters
        ----------
        layer : Layer
            Kind and shape.
        rank_max : int
            Number of columns, 1 to min(K, V).
        seed : int, default 0
            Seed of the draw.
        e0 : array_like, (heads, K, K), optional
            Mean state metric for the weighted form, such as that of a calibrated basis; default the identity.
        window : int, default 16
            Window of the basis.

        Returns
        -------
        SketchBasis
            Bases without a spectrum.

        Raises
        ------
        ValueError
            If an argument is out of range.
        """
        check_instance("layer", layer, Layer)
        rank_max = check_rank_max(layer, rank_max)
        check_seed(seed)
        heads, size = layer.heads, layer.key_dim
        draw = np.random.default_rng(seed).standard_normal((heads, size, rank_max))
        omega = orthonormal(draw)[0]
        gram = np.broadcast_to(np.eye(size), (heads, size, size)) if e0 is None else as_array("e0", e0)
        if gram.shape != (heads, size, size) or gram.dtype.kind not in "fiu" or not np.isfinite(gram).all():
            raise ValueError(f"e0: expected finite numbers of shape {(heads, size, size)}, got {gram.shape}")
        metric = np.stack([unit_trace(head) for head in gram.astype(np.float64)])
        weighted = np.zeros_like(omega)
        for head in range(heads):
            root = support(metric[head])[0].T
            inside = min(root.shape[0], rank_max)
            _, triangle = orthonormal(root @ omega[head, :, :inside])
            weighted[head, :, :inside] = np.linalg.solve(triangle.T, omega[head, :, :inside].T).T
        unknown = np.full((heads, size), np.nan)
        return cls(layer, check_window(window), omega, weighted, metric, unknown, unknown[:, :rank_max].copy())

    def _contents(self) -> tuple[dict[str, Array], dict[str, Any]]:
        tensors = {name: getattr(self, name) for name in FORMAT.tensors}
        return tensors, {"layer": asdict(self.layer), "window": self.window}

    @classmethod
    def _build(cls, tensors: dict[str, npt.NDArray[Any]], layer: Any, window: Any) -> SketchBasis:
        own = Layer(**layer)
        heads, size, columns = own.heads, own.key_dim, tensors["retained"].shape[-1]
        shapes = [(heads, size, columns)] * 2 + [(heads, size, size), (heads, size), (heads, columns)]
        for name, shape in zip(FORMAT.tensors, shapes, strict=True):
            check_array(name, tensors[name], shape, np.float64)
        check_rank_max(own, columns)
        if not all(np.isfinite(tensors[name]).all() for name in ("omega", "weighted", "e0")):
            raise ValueError("omega, weighted, e0: expected finite numbers, got NaN or infinity")
        return cls(own, check_window(window), **tensors)


def support(e0: Array) -> tuple[Array, Array, Array]:
    """Factor E0 on its support: ``root`` and ``inverse (K, r)``, and a basis ``(K, K - r)`` of the complement."""
    values, vectors = descending(e0)
    rank = int((values > SUPPORT * values[0]).sum())
    scale = np.sqrt(values[:rank])
    return vectors[:, :rank] * scale, vectors[:, :rank] / scale, vectors[:, rank:]


def unit_trace(gram: Array) -> Array:
    """Scale a metric to trace K. A zero metric becomes the identity."""
    trace = np.trace(gram)
    return gram * (gram.shape[-1] / trace) if trace > 0 else np.eye(gram.shape[-1])


def descending(gram: Array) -> tuple[Array, Array]:
    """Eigenvalues of a symmetric matrix, largest first, and their vectors."""
    values, vectors = np.linalg.eigh((gram + gram.T) / 2)
    return values[::-1], vectors[:, ::-1]


def orthonormal(columns: Array) -> tuple[Array, Array]:
    """QR with a positive diagonal: the first G columns of Q span the first G of the input, with the same signs."""
    q, r = np.linalg.qr(columns)
    sign = np.where(np.diagonal(r, axis1=-2, axis2=-1) < 0, -1.0, 1.0)
    return q * sign[..., None, :], r * sign[..., :, None]


def check_rank_max(layer: Layer, rank_max: Any) -> int:
    """Check a number of columns."""
    limit = min(layer.key_dim, layer.value_dim)
    if isinstance(rank_max, bool) or not isinstance(rank_max, int | np.integer) or not 1 <= rank_max <= limit:
        raise ValueError(f"rank_max: expected an integer from 1 to min(K, V)={limit}, got {rank_max!r}")
    return int(rank_max)
