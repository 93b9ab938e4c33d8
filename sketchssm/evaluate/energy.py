"""How much of the state-read outputs' energy a sketch retains, per head, rank and coefficient map."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from sketchssm import traffic
from sketchssm.calibrate.basis import SketchBasis
from sketchssm.coefficients import CoefficientMap
from sketchssm.evaluate.windows import Windows
from sketchssm.plan import SketchPlan
from sketchssm.recurrence import DENSE
from sketchssm.reference import maps
from sketchssm.reference.recurrence import Array

__all__ = ["HeadEnergy", "MapEnergy", "plan_energy", "retained_energy"]


class MapEnergy(NamedTuple):
    """What one map retains at some ranks.

    ``retained (heads, ranks)`` is ``1 - |o - U c|^2 / |o|^2`` summed over tokens, ``reduction (ranks,)`` the traffic
    reduction of all heads at that rank, with what the map stores. ``basis`` names the basis.
    """

    basis: str
    map: CoefficientMap
    ranks: tuple[int, ...]
    retained: Array
    reduction: Array


class HeadEnergy(NamedTuple):
    """Energy of the state-read outputs of each head, and what of it reads through a sketch lose, ``(heads,)``."""

    lost: Array
    energy: Array

    @property
    def retained(self) -> Array:
        """Retained fraction of each head; 1 where there is nothing to lose."""
        return 1.0 - np.divide(self.lost, self.energy, out=np.zeros_like(self.lost), where=self.energy > 0)


def retained_energy(
    basis: SketchBasis,
    windows: Windows,
    ranks: Sequence[int],
    coefficient_maps: Iterable[str | CoefficientMap],
    name: str = "calibrated",
) -> list[MapEnergy]:
    """Measure in float64 what maps retain of the state-read outputs.

    Parameters
    ----------
    basis : SketchBasis
        Bases of the layer.
    windows : Windows
        Held-out windows, from `collect_windows`.
    ranks : sequence of int
        Ranks to measure.
    coefficient_maps : iterable of CoefficientMap or str
        Maps to measure.
    name : str, default "calibrated"
        What to call the basis.

    Returns
    -------
    list of MapEnergy
        One per map. A head whose outputs are all zero retains 1.

    Raises
    ------
    ValueError
        If a rank is above the basis's, or there is no such map.
    """
    layer = basis.layer
    window = windows.queries.shape[2] + 1
    energy = _energy(windows)
    results = []
    for map in [CoefficientMap.of(map) for map in coefficient_maps]:
        retained = np.ones((layer.heads, len(ranks)))
        for column, rank in enumerate(ranks):
            omega, projection = basis.columns(rank, map.weighted)
            lost = [_lost(map, windows, head, omega[head], projection[head]) for head in range(layer.heads)]
            retained[:, column] = HeadEnergy(np.array(lost), energy).retained
        shape = (layer.kind, layer.key_dim, layer.value_dim)
        reduction = [traffic.reduction(*shape, rank, window, map) for rank in ranks]
        results.append(MapEnergy(name, map, tuple(ranks), retained, np.array(reduction)))
    return results


def plan_energy(plan: SketchPlan, windows: Windows) -> HeadEnergy:
    """Measure in float64 what a plan loses of the state-read outputs, each head at its own rank.

    Parameters
    ----------
    plan : SketchPlan
        Plan of the layer.
    windows : Windows
        Held-out windows.

    Returns
    -------
    HeadEnergy
        Per head; a head that reads its full state loses nothing.
    """
    lost = np.zeros(plan.layer.heads)
    energy = _energy(windows)
    for head, rank in enumerate(plan.ranks):
        if rank != DENSE:
            omega, projection = (x[head, :, :rank].astype(np.float64) for x in (plan.omega, plan.projection))
            lost[head] = _lost(plan.map, windows, head, omega, projection)
    return HeadEnergy(lost, energy)


def _energy(windows: Windows) -> Array:
    """Energy ``(heads,)`` of the exact state reads."""
    return np.array([np.square(_outputs(windows, head)).sum() for head in range(windows.states.shape[1])])


def _outputs(windows: Windows, head: int) -> Array:
    """Exact state reads ``(n, W - 1, V)`` of one head."""
    return windows.queries[:, head] @ windows.states[:, head]


def _lost(map: CoefficientMap, windows: Windows, head: int, omega: Array, projection: Array) -> float:
    """Energy that reads through one head's sketch lose."""
    states = windows.states[:, head]
    maps_of_states = maps.coefficient_map(map, states, omega, projection).swapaxes(-1, -2)
    read = windows.queries[:, head] @ maps_of_states @ (states.swapaxes(-1, -2) @ omega).swapaxes(-1, -2)
    return float(np.square(_outputs(windows, head) - read).sum())
