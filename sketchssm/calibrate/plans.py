"""One layer's traces, calibrated: a basis from some sequences, rank scores from others, plans from both."""

from __future__ import annotations

from dataclasses import dataclass, field

from sketchssm.calibrate.allocation import allocate_ranks
from sketchssm.calibrate.basis import SketchBasis, fit_basis
from sketchssm.calibrate.moments import Moments
from sketchssm.calibrate.scores import RankScores
from sketchssm.coefficients import MAPS, CoefficientMap
from sketchssm.formats import DEFAULT_FORMAT, SketchFormat
from sketchssm.plan import SketchPlan
from sketchssm.traces import Traces

__all__ = ["Calibrated", "Settings", "calibrate"]


@dataclass(frozen=True)
class Settings:
    """Settings of plans, as in the options of `sketchssm calibrate`.

    Attributes
    ----------
    window : int, default 16
        Tokens from one flush to the next.
    map : CoefficientMap
        Coefficient map, by default the default map.
    method : str or None
        Allocation method, see `allocate_ranks`. None: "gradient" if the traces have gradients, else "error".
    weighting : {"uniform", "output"}, default "uniform"
        Weight of a sample in the basis, see `Moments`.
    sketch_dtype : str, default "bfloat16"
        Format of sketches, see `SketchPlan`.

    Raises
    ------
    ValueError
        If the format is unknown or does not serve the map.
    """

    window: int = 16
    map: CoefficientMap = field(default_factory=CoefficientMap)
    method: str | None = None
    weighting: str = "uniform"
    sketch_dtype: str = DEFAULT_FORMAT

    def __post_init__(self) -> None:
        SketchFormat.of(self.sketch_dtype).check_map(self.map)

    def maps(self) -> list[CoefficientMap]:
        """Return every map that the format serves: `map` with its parameters, the others with their defaults."""
        maps = [self.map if name == self.map.name else CoefficientMap(name) for name in MAPS]
        return [map for map in maps if SketchFormat.of(self.sketch_dtype).serves(map)]


@dataclass(frozen=True)
class Calibrated:
    """Calibration of one layer.

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

    def plan(
        self,
        mean_rank: float,
        map: str | CoefficientMap = "ridge",
        method: str | None = None,
        basis: SketchBasis | None = None,
        sketch_dtype: str = DEFAULT_FORMAT,
    ) -> SketchPlan:
        """Make a plan for one mean rank.

        Parameters
        ----------
        mean_rank : float
            The budget: the read bytes of all heads at this rank.
        map : CoefficientMap or str, default "ridge"
            Coefficient map.
        method : str, optional
            Allocation method, see `allocate_ranks`.
        basis : SketchBasis, optional
            Replaces the calibrated basis; the ranks stay the same.
        sketch_dtype : str, default "bfloat16"
            Format of sketches, see `allocate_ranks`.

        Returns
        -------
        SketchPlan
            The plan.
        """
        allocation = allocate_ranks(self.scores, mean_rank, method, map=map, sketch_dtype=sketch_dtype)
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
