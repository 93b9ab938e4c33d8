"""Fit of sketch bases: uncentred PCA of state-weighted queries (section 4.1 and its appendix).

With ``E0 = E[S0 S0^T]`` and ``C_z = E0^{1/2} E[x x^T] E0^{1/2} = P Diag(lambda) P^T``, the optimal rank-G basis is
``E0^{-1/2} P_G`` (equation *app-offline-solution*). A `SketchBasis` has an orthonormal basis of its span.
"""

from __future__ import annotations

import numpy as np

from sketchssm.calibrate.cores import on_cores
from sketchssm.calibrate.moments import Moments
from sketchssm.layer.checks import check_instance
from sketchssm.plans.basis import SketchBasis, check_rank_max, orthonormal
from sketchssm.reference.recurrence import Array

SUPPORT = 1e-10
"""Eigenvalues of E0 below this share of the largest count as zero. Directions with so little of the states' energy do
not change an output, and a float64 eigenvalue solver has errors of more than 1e-5 in smaller eigenvalues."""


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
    metric = np.stack([_unit_trace(gram) for gram in moments.state_gram])
    scale = np.trace(moments.state_gram / samples, axis1=-2, axis2=-1) / layer.key_dim
    fits = on_cores(lambda head: _fit_head(metric[head], queries[head], columns), range(layer.heads))
    omega, spectrum = (np.stack(parts) for parts in zip(*fits, strict=True))
    spectrum *= scale[:, None]
    total = spectrum.sum(axis=-1, keepdims=True)
    share = np.cumsum(spectrum[:, :columns], axis=-1) / np.where(total > 0, total, 1.0)
    retained = np.where(total > 0, np.minimum(share, 1.0), 1.0)  # a head without energy loses none
    return SketchBasis(layer, moments.window, omega, spectrum, retained)


def _fit_head(e0: Array, queries: Array, columns: int) -> tuple[Array, Array]:
    """One head's omega ``(K, columns)`` and its spectrum ``(K,)``, by steps 1 to 5 of the derivation."""
    size = e0.shape[-1]
    root, inverse, null = _support(e0)  # E0 = root root^T, inverse^T root = I
    energy, axes = _descending(root.T @ (queries if queries.any() else np.eye(size)) @ root)
    spectrum = np.zeros(size)
    if queries.any():
        spectrum[: energy.size] = np.maximum(energy, 0.0)
    inside = min(columns, energy.size)
    weighted = inverse @ axes[:, :inside]
    largest = np.abs(weighted).argmax(axis=0)
    weighted *= np.where(weighted[largest, np.arange(inside)] < 0, -1.0, 1.0)
    omega = orthonormal(weighted)[0]
    if inside < columns:
        rest = null @ _descending(null.T @ queries @ null)[1]
        omega = orthonormal(np.hstack([omega, rest[:, : columns - inside]]))[0]
    return omega, spectrum


def _support(e0: Array) -> tuple[Array, Array, Array]:
    """Factor E0 on its support: ``root`` and ``inverse (K, r)``, and a basis ``(K, K - r)`` of the complement."""
    values, vectors = _descending(e0)
    rank = int((values > SUPPORT * values[0]).sum())
    scale = np.sqrt(values[:rank])
    return vectors[:, :rank] * scale, vectors[:, :rank] / scale, vectors[:, rank:]


def _unit_trace(gram: Array) -> Array:
    """Scale a metric to trace K. A zero metric becomes the identity."""
    trace = np.trace(gram)
    return gram * (gram.shape[-1] / trace) if trace > 0 else np.eye(gram.shape[-1])


def _descending(gram: Array) -> tuple[Array, Array]:
    """Eigenvalues of a symmetric matrix, largest first, and their vectors."""
    values, vectors = np.linalg.eigh((gram + gram.T) / 2)
    return values[::-1], vectors[:, ::-1]
