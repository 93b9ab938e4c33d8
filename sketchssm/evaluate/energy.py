"""How much of the state-read outputs' energy a sketch retains, per head, rank and coefficient map."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from sketchssm import traffic
from sketchssm.calibrate.basis import SketchBasis
from sketchssm.evaluate.windows import Windows
from sketchssm.plan import DEFAULT_RIDGE, STORAGE, SketchPlan
from sketchssm.recurrence import DENSE
from sketchssm.reference import maps
from sketchssm.reference.recurrence import Array

__all__ = ["HeadEnergy", "MapEnergy", "MapSetting", "coefficients", "plan_energy", "retained_energy"]


class MapSetting(NamedTuple):
    """A coefficient map with its parameters; a ridge of None is the map's own default."""

    map: str
    pivots: int = 4
    ridge: float | None = None

    @property
    def weighted(self) -> bool:
        """Whether the map reads through the E0-orthonormal form of the basis."""
        return self.map in ("prior", "offline")


class MapEnergy(NamedTuple):
    """What one map retains at some ranks.

    ``retained (heads, ranks)`` is ``1 - |o - U c|^2 / |o|^2`` summed over tokens, ``reduction (ranks,)`` the traffic
    reduction of all heads at that rank, with what the map stores. ``basis`` names the basis.
    """

    basis: str
    setting: MapSetting
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


def coefficients(setting: MapSetting, states: Array, phi: Array, projection: Array) -> Array:
    """Coefficient maps of many states of one head at once.

    Parameters
    ----------
    setting : MapSetting
        Map and parameters.
    states : ndarray, (n, K, V)
        States at window starts.
    phi, projection : ndarray, (K, G)
        Sketch basis and shared projection, from `SketchBasis.columns`.

    Returns
    -------
    ndarray, (n, G, K)
        Maps as dense matrices.

    Raises
    ------
    ValueError
        If there is no such map.
    """
    name, pivots, ridge = setting
    if name not in DEFAULT_RIDGE:
        raise ValueError(f"map: expected one of {', '.join(DEFAULT_RIDGE)}, got {name!r}")
    ridge = DEFAULT_RIDGE[name] if ridge is None else ridge
    if name == "exact":
        return maps.exact_map(states, phi)
    if name == "ridge":
        return maps.ridge_map(states, phi, ridge)
    if name == "lowrank":
        return maps.lowrank_factors(states, phi, pivots, ridge).dense()
    if name == "prior":
        return maps.prior_factors(states, phi, projection, pivots, ridge).dense()
    return np.broadcast_to(projection.T, (states.shape[0], *projection.T.shape))


def retained_energy(
    basis: SketchBasis,
    windows: Windows,
    ranks: Sequence[int],
    settings: Iterable[MapSetting],
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
    settings : iterable of MapSetting
        Maps to measure.
    name : str, default "calibrated"
        What to call the basis.

    Returns
    -------
    list of MapEnergy
        One per setting. A head whose outputs are all zero retains 1.

    Raises
    ------
    ValueError
        If a rank is above the basis's, or there is no such map.
    """
    layer = basis.layer
    window = windows.queries.shape[2] + 1
    energy = _energy(windows)
    results = []
    for setting in settings:
        retained = np.ones((layer.heads, len(ranks)))
        for column, rank in enumerate(ranks):
            phi, projection = basis.columns(rank, setting.weighted)
            lost = [_lost(setting, windows, head, phi[head], projection[head]) for head in range(layer.heads)]
            retained[:, column] = HeadEnergy(np.array(lost), energy).retained
        shape = (layer.kind, layer.key_dim, layer.value_dim)
        reduction = [traffic.reduction(*shape, rank, window, STORAGE[setting.map], setting.pivots) for rank in ranks]
        results.append(MapEnergy(name, setting, tuple(ranks), retained, np.array(reduction)))
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
    setting = MapSetting(plan.map, plan.pivots, plan.ridge)
    lost = np.zeros(plan.layer.heads)
    energy = _energy(windows)
    for head, rank in enumerate(plan.ranks):
        if rank != DENSE:
            phi, projection = (x[head, :, :rank].astype(np.float64) for x in (plan.phi, plan.projection))
            lost[head] = _lost(setting, windows, head, phi, projection)
    return HeadEnergy(lost, energy)


def _energy(windows: Windows) -> Array:
    """Energy ``(heads,)`` of the exact state reads."""
    return np.array([np.square(_outputs(windows, head)).sum() for head in range(windows.states.shape[1])])


def _outputs(windows: Windows, head: int) -> Array:
    """Exact state reads ``(n, W - 1, V)`` of one head."""
    return windows.queries[:, head] @ windows.states[:, head]


def _lost(setting: MapSetting, windows: Windows, head: int, phi: Array, projection: Array) -> float:
    """Energy that reads through one head's sketch lose."""
    states = windows.states[:, head]
    maps_of_states = coefficients(setting, states, phi, projection).swapaxes(-1, -2)
    read = windows.queries[:, head] @ maps_of_states @ (states.swapaxes(-1, -2) @ phi).swapaxes(-1, -2)
    return float(np.square(_outputs(windows, head) - read).sum())
