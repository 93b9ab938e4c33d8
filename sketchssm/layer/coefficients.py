"""Coefficient maps: parameters, stored elements and cost of each map.

A sketched read is ``o = U c`` with coefficients ``c = C x`` of the effective query x. `sketchssm.reference.maps`
defines C for every map. All other facts of a map are in this module: a new map is one entry of `FORMS` and its
kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sketchssm.layer.checks import check_choice, check_integer, check_number

RIDGE_FLOOR = 1e-4
"""Smallest ridge in use: every backend evaluates a smaller one at this value.

The state metric has a mean diagonal of 1 and a largest eigenvalue of up to K. A direction of the sketch whose share s
of the mean diagonal is near the floor is read as ``s / (s + 1e-4)`` of itself. A lower floor enlarges rounding errors:
float32 rounds the Gram matrix of a sketch to about K 2^-24, and bfloat16 rounds a sketch's columns to 2^-9. The
pseudo-inverse of a sketch with a higher rank than the state enlarges them without bound. Read error on gdn's shipped
trace, rank 16, first window, bfloat16: 9e-2 with the pseudo-inverse, 2e-2 with this floor. Over all windows of the
shipped traces at ranks 4 to 32, this floor is within 4% of the best of 1e-6 to 1e-2, except for gdn at rank 32 (8e-3
against 6e-3 with 1e-5).
"""


class MapForm(NamedTuple):
    """The fixed part of a coefficient map."""

    storage: str
    """What each state stores beside its sketch. "dense": the matrix C ``(G, K)``; "factors": the factors of C, P rows
    of K and ``G P + G`` numbers."""
    ridge: float | None
    """Default regularisation, relative to the mean diagonal of the state metric. None: the map has no ridge."""
    pivots: int | None
    """Default pivot count P. None: the map has no pivots."""


FORMS = {
    "ridge": MapForm("dense", 0.001, None),
    "lowrank": MapForm("factors", 0.1, 4),
    "subspace": MapForm("dense", None, None),
}
"""Every coefficient map. The default ridges are the paper's for `lowrank`, and measured on real traces for `ridge`."""

MAPS = tuple(FORMS)

MAX_PIVOTS = 4096
"""Largest pivot count: no sketch has as many columns."""

DEFAULT_MAP = "ridge"
"""The map that loses least energy per byte read on the real traces measured so far, at reductions of 6 to 12 times."""


@dataclass(frozen=True)
class CoefficientMap:
    """A coefficient map with its parameters.

    Parameters
    ----------
    name : {"ridge", "lowrank", "subspace"}, default "ridge"
        Which map; `sketchssm.reference.maps` has the equations.
    pivots : int, optional
        Pivot count P of `lowrank`, 4 by default. None for the other maps.
    ridge : float, optional
        Regularisation of `ridge` and `lowrank` relative to the mean diagonal of the state metric; the default is in
        `FORMS`. None for `subspace`.

    Raises
    ------
    ValueError
        If the map is unknown, a parameter is out of range, or the map does not have the parameter.
    """

    name: str = DEFAULT_MAP
    pivots: int | None = None
    ridge: float | None = None

    def __post_init__(self) -> None:
        check_choice("map", self.name, MAPS)
        for parameter in ("pivots", "ridge"):
            default, given = getattr(self.form, parameter), getattr(self, parameter)
            if default is None and given is not None:
                raise ValueError(f"{parameter}: map {self.name!r} has no {parameter}, expected None, got {given!r}")
            object.__setattr__(self, parameter, default if given is None else given)
        pivots, ridge = self.pivots, self.ridge
        if pivots is not None:
            object.__setattr__(self, "pivots", check_integer("pivots", pivots, 1, MAX_PIVOTS))
        if ridge is not None:
            check_number("ridge", ridge, "a finite number of at least 0", lambda number: 0 <= number < np.inf)
            object.__setattr__(self, "ridge", float(ridge))

    @classmethod
    def of(cls, map: str | CoefficientMap) -> CoefficientMap:
        """Return a record as it is, and a name as the map with its default parameters.

        Parameters
        ----------
        map : str or CoefficientMap
            The map, or its name.

        Returns
        -------
        CoefficientMap
            The map.
        """
        return map if isinstance(map, CoefficientMap) else cls(map)

    @property
    def form(self) -> MapForm:
        """The fixed part: storage and default parameters."""
        return FORMS[self.name]

    @property
    def storage(self) -> str:
        """What each state stores beside its sketch: "dense" or "factors"; see `MapForm`."""
        return self.form.storage

    @property
    def effective_ridge(self) -> float:
        """The ridge that kernels use: at least `RIDGE_FLOOR`."""
        return max(self.ridge or 0.0, RIDGE_FLOOR)

    def rows(self, rank: npt.ArrayLike) -> npt.NDArray[Any]:
        """Rows of K elements that one state stores: G of a dense map, ``min(G, P)`` of factors.

        Parameters
        ----------
        rank : array_like
            Ranks G.

        Returns
        -------
        ndarray
            Row counts, in the shape of `rank`.
        """
        g = np.asarray(rank)
        return g if self.pivots is None else np.minimum(g, self.pivots)

    def elements(self, rank: npt.ArrayLike, key_dim: int) -> npt.NDArray[Any]:
        """Elements that one state stores beside its sketch.

        Parameters
        ----------
        rank : array_like
            Ranks G.
        key_dim : int
            K.

        Returns
        -------
        ndarray
            Elements of the rows, and for factors also of F ``(G, p)`` and w ``(G,)``, in the shape of `rank`.
        """
        g, rows = np.asarray(rank), self.rows(rank)
        return rows * key_dim + (g * rows + g if self.storage == "factors" else 0)

    def __str__(self) -> str:
        """Name and parameters: ``lowrank(pivots=4, ridge=0.1)``."""
        given = {"pivots": self.pivots, "ridge": self.ridge}
        shown = ", ".join(f"{name}={value:g}" for name, value in given.items() if value is not None)
        return f"{self.name}({shown})" if shown else self.name
