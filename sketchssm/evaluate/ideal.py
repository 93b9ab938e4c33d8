"""What sketches could lose at best: the best coefficients for every token, the best ranks in hindsight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sketchssm import traffic
from sketchssm.calibrate.allocation import allocate_ranks
from sketchssm.calibrate.scores import RankScores
from sketchssm.evaluate.measure import Measurement
from sketchssm.evaluate.study import Study
from sketchssm.plan import STORAGE
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
    can be beaten by no map and no ranks, only by another basis or more bytes.

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
        variant, the ``bound``, and the ``heads`` losses and ``ranks`` of the best table found.
    """
    scores = RankScores(study.calibrated().basis)
    scores.update(*study.traces.test)
    lost = scores.J("error")
    lost = lost / (lost[:, 0].sum() or 1.0)
    layer, window, settings = study.traces.layer, study.settings.window, study.settings
    shape = (layer.kind, layer.key_dim, layer.value_dim)
    ranks = np.arange(1, scores.rank_max + 1)
    bytes_used = traffic.sketch(*shape, ranks, window, STORAGE[settings.map], settings.pivots)
    least = {}
    for system in (s for s in systems if s.family == "read-only"):
        given = traffic.standard(*shape[1:]) / (CLOSE * system.reduction)
        if given > bytes_used[-1]:
            continue  # more than all heads at the largest rank
        mean = float(np.interp(given, bytes_used, ranks))
        best = allocate_ranks(scores, mean, "error", storage=STORAGE[settings.map], pivots=settings.pivots)
        table = np.asarray(best.ranks)
        heads = _at(lost, table)
        least[system.setting] = {
            "bound": best.bound * float(heads.sum()) / best.objective if best.objective > 0 else 0.0,
            "heads": heads.tolist(),
            "ranks": table.tolist(),
        }
    same = {s.setting: float(_at(lost, np.array(s.ranks)).sum()) for s in systems if s.family == "sketch" and s.ranks}
    return {"share": lost[:, 0].tolist(), "same_ranks": same, "least": least}


def _at(lost: Array, ranks: np.ndarray[Any, np.dtype[np.int64]]) -> Array:
    """Loss of each head at its rank; none where it reads its full state."""
    return np.where(ranks == DENSE, 0.0, lost[np.arange(len(ranks)), np.maximum(ranks, 0)])
