"""What sketches could lose at best: the best coefficients for every token, the best ranks in hindsight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sketchssm import traffic
from sketchssm.calibrate.allocation import Allocation, allocate_ranks
from sketchssm.calibrate.basis import SketchBasis, fit_basis
from sketchssm.calibrate.moments import Moments
from sketchssm.calibrate.scores import RankScores
from sketchssm.evaluate.measure import Measurement
from sketchssm.evaluate.study import Study
from sketchssm.files import layer_fields
from sketchssm.recurrence import DENSE
from sketchssm.reference.recurrence import Array

__all__ = ["CLOSE", "ideal_losses"]

CLOSE = 0.995
"""Traffic reductions in this ratio count as equal: ranks are whole numbers."""


def ideal_losses(study: Study, systems: Sequence[Measurement]) -> dict[str, Any]:
    """Say what sketches of the calibrated basis would lose with the best map, and with the best ranks too.

    Least-squares coefficients for every token of the test sequences stand for the best map: none reads more from a
    sketch. With them, ranks are allocated by what the test sequences lose, and the allocation's lower bound holds for
    every table of ranks (`sketchssm.calibrate.allocate_ranks`). So a read-only variant that loses less than the bound
    can be beaten by no ranks and no map of the bytes of the one in use, only by another basis or more bytes. The same
    bound for a basis that is fitted to the test sequences themselves says how much another basis could do.

    Parameters
    ----------
    study : Study
        The layer.
    systems : sequence of Measurement
        What was measured: its sketches are judged at their ranks, its read-only variants at their traffic.

    Returns
    -------
    dict
        All as shares of the energy that the layer's heads read from states: ``share``, each head's part of it;
        ``same_ranks``, by setting, what a sketch would lose with the best map; ``least``, by setting of a read-only
        variant, the ``bound``, the loss and ``ranks`` of the best table ``found``, and ``test_basis``, the bound for
        a basis fitted to the test sequences.
    """
    layer, window, settings = study.traces.layer, study.settings.window, study.settings
    moments = Moments(**layer_fields(layer), window=window, weighting=settings.weighting)
    moments.update(*study.traces.test)
    fitted, hindsight = (_scores(study, basis) for basis in (study.calibrated().basis, fit_basis(moments)))
    lost = fitted.objective("error")
    whole = float(lost[:, 0].sum()) or 1.0
    lost = lost / whole
    shape = (layer.kind, layer.key_dim, layer.value_dim)
    ranks = np.arange(1, fitted.rank_max + 1)
    bytes_used = traffic.sketch(*shape, ranks, window, settings.map)

    def best(scores: RankScores, mean_rank: float) -> Allocation:
        return allocate_ranks(scores, mean_rank, "error", map=settings.map)

    least = {}
    for system in (s for s in systems if s.family == "read-only"):
        given = traffic.standard(*shape[1:]) / (CLOSE * system.reduction)
        if given > bytes_used[-1]:
            continue  # more than all heads at the largest rank
        mean_rank = float(np.interp(given, bytes_used, ranks))
        ours = best(fitted, mean_rank)
        table = np.asarray(ours.ranks)
        least[system.setting] = {
            "bound": max(ours.bound, 0.0) / whole,
            "found": float(_at(lost, table).sum()),
            "ranks": table.tolist(),
            "test_basis": max(best(hindsight, mean_rank).bound, 0.0) / whole,
        }
    same = {s.setting: float(_at(lost, np.array(s.ranks)).sum()) for s in systems if s.family == "sketch" and s.ranks}
    return {"share": lost[:, 0].tolist(), "same_ranks": same, "least": least}


def _scores(study: Study, basis: SketchBasis) -> RankScores:
    """What the test sequences lose at every rank of a basis."""
    scores = RankScores(basis)
    scores.update(*study.traces.test)
    return scores


def _at(lost: Array, ranks: np.ndarray[Any, np.dtype[np.int64]]) -> Array:
    """Loss of each head at its rank; none where it reads its full state."""
    return np.where(ranks == DENSE, 0.0, lost[np.arange(len(ranks)), np.maximum(ranks, 0)])
