"""Fit of sketch bases: uncentred PCA of state-weighted queries (section 4.1 and its appendix).

With ``E0 = E[S0 S0^T]`` and ``C_z = E0^{1/2} E[x x^T] E0^{1/2} = P Diag(lambda) P^T``, the optimal rank-G basis is
``E0^{-1/2} P_G`` (equation *app-offline-solution*): the E0-orthonormal form of a `SketchBasis`.
"""

from __future__ import annotations

import numpy as np

from sketchssm.calibrate.moments import Moments
from sketchssm.layer.recurrence import check_instance
from sketchssm.plans.basis import SketchBasis, check_rank_max, descending, orthonormal, support, unit_trace
from sketchssm.reference.recurrence import Array


def fit_basis(moments: Moments, rank_max: int | None = None) -> SketchBasis:
    """Fit nested sketch bases to calibration moments.

    Parameters
    ----------
    moments : Moments
        Moments of the calibration traces.
    rank_max : int, optional
        Number of columns; default min(K, V), because a wider sketch is not more accurate. Backend "cuda" takes ranks
        of up to 16.

    Returns
    -------
    SketchBasis
        Optimal bases of every rank up to `rank_max` for the loss of equation *m-subspace-objective*. A head with zero
        queries gets the leading directions of its states, a head with zero states the leading directions of its
        queries, and a head without samples the unit vectors.

    Raises
    ------
    ValueError
        If `rank_max` is out of range or there is no sample of any head.
    """
    check_instance("moments", moments, Moments)
    if not moments.samples.any():
        raise ValueError(
            f"moments: expected samples of at least one head, got none: sequences must be longer than the window of "
            f"{moments.window} tokens and write a state"
        )
    layer = moments.layer
    columns = check_rank_max(layer, min(layer.key_dim, layer.value_dim) if rank_max is None else rank_max)
    samples = np.maximum(moments.samples, 1)[:, None, None]
    queries = moments.query_gram / samples
    metric = np.stack([unit_trace(gram) for gram in moments.state_gram])
    scale = np.trace(moments.state_gram / samples, axis1=-2, axis2=-1) / layer.key_dim
    fits = [_fit_head(e0, gram, columns) for e0, gram in zip(metric, queries, strict=True)]
    omega, weighted, spectrum = (np.stack(parts) for parts in zip(*fits, strict=True))
    spectrum *= scale[:, None]
    total = spectrum.sum(axis=-1, keepdims=True)
    share = np.cumsum(spectrum[:, :columns], axis=-1) / np.where(total > 0, total, 1.0)
    retained = np.where(total > 0, np.minimum(share, 1.0), 1.0)  # a head without energy loses none
    return SketchBasis(layer, moments.window, omega, weighted, metric, spectrum, retained)


def _fit_head(e0: Array, queries: Array, columns: int) -> tuple[Array, Array, Array]:
    """One head's omega and weighted ``(K, columns)`` and its spectrum ``(K,)``, by steps 1 to 5 of the derivation."""
    size = e0.shape[-1]
    root, inverse, null = support(e0)  # E0 = root root^T, inverse^T root = I
    energy, axes = descending(root.T @ (queries if queries.any() else np.eye(size)) @ root)
    spectrum = np.zeros(size)
    if queries.any():
        spectrum[: energy.size] = np.maximum(energy, 0.0)
    inside = min(columns, energy.size)
    weighted = np.zeros((size, columns))
    weighted[:, :inside] = inverse @ axes[:, :inside]
    largest = np.abs(weighted).argmax(axis=0)
    weighted *= np.where(weighted[largest, np.arange(columns)] < 0, -1.0, 1.0)
    omega = orthonormal(weighted[:, :inside])[0]
    if inside < columns:
        rest = null @ descending(null.T @ queries @ null)[1]
        omega = orthonormal(np.hstack([omega, rest[:, : columns - inside]]))[0]
    return omega, weighted, spectrum
