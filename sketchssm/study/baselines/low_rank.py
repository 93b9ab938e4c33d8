"""A fixed low-rank read: the simplest read-only variant."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sketchssm.calibrate.moments import Moments
from sketchssm.layer.checks import as_array, check_size
from sketchssm.layer.recurrence import check_instance
from sketchssm.plans.basis import SketchBasis
from sketchssm.plans.plan import SketchPlan


def low_rank_basis(moments: Moments, rank_max: int | None = None) -> SketchBasis:
    """Compute the leading eigenvectors of the mean state Gram matrix ``E[S S^T]`` of every head.

    Among all subspaces of this dimension, their span has the most energy of the states on average, which does not
    depend on the queries: it minimises ``E |S - E E^T S|^2``. The basis has the eigenvectors E as `omega` and
    `weighted`, and the identity for `e0`, so that sketch and projection are both E; `spectrum` holds the eigenvalues,
    and `retained` their running share. `rank_max` columns; default min(K, V).
    """
    check_instance("moments", moments, Moments)
    layer = moments.layer
    most = min(layer.key_dim, layer.value_dim)
    columns = most if rank_max is None else check_size("rank_max", rank_max)
    if columns > most:
        raise ValueError(f"rank_max: expected 1 to {most}, got {rank_max}")
    if not moments.samples.all():
        raise ValueError("moments: expected samples of every head, some heads have none")
    energy, vectors = np.linalg.eigh(moments.state_gram / moments.samples[:, None, None])
    energy, vectors = np.maximum(energy[:, ::-1], 0.0), np.ascontiguousarray(vectors[:, :, ::-1][:, :, :columns])
    total = energy.sum(axis=-1, keepdims=True)
    retained = np.cumsum(energy, axis=-1)[:, :columns] / np.where(total > 0, total, 1.0)
    identity = np.broadcast_to(np.eye(layer.key_dim), moments.state_gram.shape)
    return SketchBasis(layer, moments.window, vectors, vectors, identity, energy, retained)


def low_rank_plan(moments: Moments, ranks: npt.ArrayLike) -> SketchPlan:
    """Plan reads through a fixed low-rank form of the state: ``o = (S^T E)(E^T q)``.

    A read-only variant of the paper's appendix *Ablation of Preserving Full-State Updates*, after Eckart and Young: a
    fixed basis E from `low_rank_basis`, and projections as coefficients. A sketch with the basis E and the fixed map
    ``E^T`` reads the same, so every backend of `SketchHead` runs this plan. The paper counts the bytes of the
    projection for every state. In this library's byte model the projection is shared, as for `offline`, and free.

    Parameters
    ----------
    moments : Moments
        Moments of the layer's traces; their window is the plan's.
    ranks : array_like of int, (heads,)
        Rank of each head; one number stands for all.

    Returns
    -------
    SketchPlan
        For `SketchHead`. Its map is "offline", the map with a shared projection.

    Raises
    ------
    ValueError
        If the moments are empty or a rank is out of range.
    """
    check_instance("moments", moments, Moments)
    table = as_array("ranks", ranks)
    table = np.full(moments.layer.heads, table) if table.ndim == 0 else table
    return SketchPlan(low_rank_basis(moments), table, moments.window, map="offline")
