"""A fixed low-rank read: the simplest read-only variant."""

from __future__ import annotations

import numpy as np

from sketchssm.calibrate.moments import Moments
from sketchssm.layer.checks import check_instance, check_size
from sketchssm.reference.recurrence import Array


def low_rank_projection(moments: Moments, rank: int) -> Array:
    """Compute the projection ``E E^T`` on the leading eigenvectors E of the mean state Gram matrix ``E[S S^T]``.

    Among all subspaces of this dimension, their span has the most energy of the states on average, which does not
    depend on the queries: it minimises ``E |S - E E^T S|^2``, after Eckart and Young.

    Parameters
    ----------
    moments : Moments
        Moments of the layer's traces.
    rank : int
        Eigenvectors of each head, 1 to min(K, V).

    Returns
    -------
    ndarray of float64, (heads, K, K)
        For `CopyReadHead`, whose reads are then ``o = (S^T E)(E^T q)``.

    Raises
    ------
    ValueError
        If a head has no samples or the rank is out of range.
    """
    check_instance("moments", moments, Moments)
    most = min(moments.layer.key_dim, moments.layer.value_dim)
    if check_size("rank", rank) > most:
        raise ValueError(f"rank: expected 1 to {most}, got {rank}")
    if not moments.samples.all():
        raise ValueError("moments: expected samples of every head, some heads have none")
    vectors = np.linalg.eigh(moments.state_gram / moments.samples[:, None, None])[1][:, :, -rank:]
    return vectors @ vectors.swapaxes(-1, -2)
