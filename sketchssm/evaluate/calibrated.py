"""One layer's traces, calibrated: a basis from some sequences, rank scores from others, plans from both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sketchssm.calibrate.allocation import Allocation, allocate_ranks
from sketchssm.calibrate.basis import SketchBasis, fit_basis
from sketchssm.calibrate.moments import Moments
from sketchssm.calibrate.scores import RankScores
from sketchssm.coefficients import DEFAULT_MAP, CoefficientMap
from sketchssm.plan import SketchPlan
from sketchssm.traces import Traces

__all__ = ["Calibrated", "allocate", "calibrate"]


@dataclass(frozen=True)
class Calibrated:
    """What calibration makes of one layer's traces.

    Attributes
    ----------
    traces : Traces
        The traces.
    basis : SketchBasis
        Bases fitted to `Traces.fit_part`.
    scores : RankScores
        Scores measured on `Traces.score_part`.
    """

    traces: Traces
    basis: SketchBasis
    scores: RankScores

    @property
    def default_method(self) -> str:
        """The allocation method that there are data for: "gradient", or "error" without gradients."""
        return self.scores.default_method

    def plan(
        self,
        mean_rank: float,
        *,
        map: str | CoefficientMap = DEFAULT_MAP,
        method: str | None = None,
        basis: SketchBasis | None = None,
    ) -> SketchPlan:
        """Make a plan for one mean rank.

        Parameters
        ----------
        mean_rank : float
            The budget: what all heads would read at this rank.
        map : CoefficientMap or str, default "ridge"
            Coefficient map.
        method : str, optional
            Allocation method, see `allocate_ranks`.
        basis : SketchBasis, optional
            Read through this basis in place of the calibrated one, at the same ranks.

        Returns
        -------
        SketchPlan
            The plan.
        """
        allocation = allocate(self, mean_rank, map=map, method=method)
        return SketchPlan(basis or self.basis, allocation, self.basis.window, map)


def calibrate(traces: Traces, window: int = 16, rank_max: int | None = None, weighting: str = "uniform") -> Calibrated:
    """Fit bases and score ranks on disjoint calibration sequences.

    Parameters
    ----------
    traces : Traces
        Traces of one layer.
    window : int, default 16
        Tokens from one flush to the next.
    rank_max : int, optional
        Columns of the basis; default min(K, V).
    weighting : {"uniform", "output"}, default "uniform"
        Weight of a sample in the basis, see `Moments`.

    Returns
    -------
    Calibrated
        Basis and scores.

    Raises
    ------
    ValueError
        If a setting is out of range or there are fewer than two calibration sequences.
    """
    held_out, grad = traces.score_part()
    moments = Moments(traces.layer, window=window, weighting=weighting)
    moments.update(*traces.fit_part())
    basis = fit_basis(moments, rank_max)
    scores = RankScores(basis)
    scores.update(*held_out, grad=grad)
    return Calibrated(traces, basis, scores)


def allocate(
    layers: Calibrated | Sequence[Calibrated],
    mean_rank: float,
    *,
    map: str | CoefficientMap = DEFAULT_MAP,
    method: str | None = None,
) -> Allocation:
    """Allocate ranks to one layer or, under one shared budget, to several, at what the map's storage costs.

    Parameters
    ----------
    layers : Calibrated or sequence of them
        Calibrated layers.
    mean_rank : float
        The budget: what all heads would read at this rank.
    map : CoefficientMap or str, default "ridge"
        Coefficient map.
    method : str, optional
        See `allocate_ranks`.

    Returns
    -------
    Allocation
        Ranks with their certificate.
    """
    scores = layers.scores if isinstance(layers, Calibrated) else [layer.scores for layer in layers]
    return allocate_ranks(scores, mean_rank, method, map=map)
