"""Sketch bases of one layer. A sketch depends only on the span of its basis."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm.layer.checks import check_instance, check_integer, check_seed
from sketchssm.layer.recurrence import Layer, check_window
from sketchssm.plans.files import FileFormat, Stored, check_array

Array = npt.NDArray[np.floating[Any]]

FORMAT = FileFormat("sketchssm-basis", 3, ("omega", "spectrum", "retained"))


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
        Orthonormal columns. Beyond the rank of a head's mean state metric, where no calibration state has energy, they
        are the leading remaining directions of the queries.
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
    spectrum: Array
    retained: Array

    @property
    def rank_max(self) -> int:
        """Number of columns."""
        return int(self.omega.shape[-1])

    @classmethod
    def random(cls, layer: Layer, rank_max: int, seed: int = 0, window: int = 16) -> SketchBasis:
        """Draw random orthonormal bases, the baseline of a calibrated basis.

        Parameters
        ----------
        layer : Layer
            Kind and shape.
        rank_max : int
            Number of columns, 1 to min(K, V).
        seed : int, default 0
            Seed of the draw.
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
        omega = orthonormal(np.random.default_rng(seed).standard_normal((heads, size, rank_max)))[0]
        unknown = np.full((heads, size), np.nan)
        return cls(layer, check_window(window), omega, unknown, unknown[:, :rank_max].copy())

    def _contents(self) -> tuple[dict[str, Array], dict[str, Any]]:
        tensors = {name: getattr(self, name) for name in FORMAT.tensors}
        return tensors, {"layer": asdict(self.layer), "window": self.window}

    @classmethod
    def _build(cls, tensors: dict[str, npt.NDArray[Any]], layer: Any, window: Any) -> SketchBasis:
        own = Layer(**layer)
        heads, size, columns = own.heads, own.key_dim, tensors["retained"].shape[-1]
        shapes = (heads, size, columns), (heads, size), (heads, columns)
        for name, shape in zip(FORMAT.tensors, shapes, strict=True):
            check_array(name, tensors[name], shape, np.float64)
        check_rank_max(own, columns)
        if not np.isfinite(tensors["omega"]).all():
            raise ValueError("omega: expected finite numbers, got NaN or infinity")
        return cls(own, check_window(window), **tensors)


def orthonormal(columns: Array) -> tuple[Array, Array]:
    """QR with a positive diagonal: the first G columns of Q span the first G of the input, with the same signs."""
    q, r = np.linalg.qr(columns)
    sign = np.where(np.diagonal(r, axis1=-2, axis2=-1) < 0, -1.0, 1.0)
    return q * sign[..., None, :], r * sign[..., :, None]


def check_rank_max(layer: Layer, rank_max: Any) -> int:
    """Check a number of columns."""
    return check_integer("rank_max", rank_max, 1, min(layer.key_dim, layer.value_dim), " (K and V bound it)")
