"""One layer of a model to plan: its calibration, and the errors of a plan."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sketchssm.arrays.interop import to_host
from sketchssm.calibrate.basis import SketchBasis
from sketchssm.calibrate.plans import Calibrated, calibrate
from sketchssm.calibrate.scores import RankScores
from sketchssm.calibrate.traces import Traces, named_errors
from sketchssm.heads.backends import common_rank
from sketchssm.heads.sketch import SketchHead
from sketchssm.layer.formats import SketchFormat
from sketchssm.layer.recurrence import FULL_STATE, Layer, Tokens
from sketchssm.plans.plan import SketchPlan
from sketchssm.reference.recurrence import Array, run
from sketchssm.study.planning.candidate import Candidate

__all__ = ["Energies", "PlannedLayer", "ScoredLayer", "TracedLayer"]

Energies = npt.NDArray[np.float64]


class PlannedLayer(Protocol):
    """Interface of a layer for the search.

    Attributes
    ----------
    layer : Layer
        Kind and shape.
    graded : bool
        Whether errors can be weighted by the gradient of the loss.
    rank_limit : int
        Largest rank that a head can have.
    """

    layer: Layer
    graded: bool
    rank_limit: int

    def refusal(self, candidate: Candidate) -> str:
        """Reason why the errors of a candidate can't be measured; empty if they can."""

    def calibrated(self, candidate: Candidate) -> tuple[SketchBasis, RankScores]:
        """Basis and rank scores for the window and the largest rank of a candidate."""

    def error(self, plan: SketchPlan, graded: bool) -> Energies:
        """Energy ``(2, heads)`` of the error and of the signal, weighted by the gradient of the loss if `graded`."""

    def test_error(self, plan: SketchPlan) -> Energies:
        """Energy ``(2, heads)`` of the error and of the signal on text that the search has not used."""


class TracedLayer:
    """Traces of one layer, calibrated once for each window and largest rank.

    Errors are those of a head that decodes the traces.

    Parameters
    ----------
    traces : Traces
        Traces of the layer.
    weighting : {"uniform", "output"}
        Weight of a sample in the basis, see `Moments`.
    backend : str
        Where to decode.
    """

    def __init__(self, traces: Traces, weighting: str, backend: str) -> None:
        self.layer = traces.layer
        self.traces = traces
        self._weighting, self._backend = weighting, backend
        self._scored, self._grad = traces.score_part()
        self._calibrated: dict[tuple[int, int], Calibrated] = {}
        self.graded = self._grad is not None
        self.rank_limit = min(self.layer.key_dim, self.layer.value_dim)

    def refusal(self, candidate: Candidate) -> str:
        """See `PlannedLayer`."""
        return ""

    def calibrated(self, candidate: Candidate) -> tuple[SketchBasis, RankScores]:
        """Return basis and rank scores for a candidate.

        Parameters
        ----------
        candidate : Candidate
            Settings of the plan, of which the window and the largest rank matter.

        Returns
        -------
        basis : SketchBasis
            Fitted to `Traces.fit_part`.
        scores : RankScores
            Measured on `Traces.score_part`.
        """
        window, layer = candidate.window, self.layer
        columns = max(common_rank(layer, window), candidate.rank_max or 0)
        columns = min(columns, self.rank_limit)
        if (window, columns) not in self._calibrated:
            with named_errors(self.traces):
                self._calibrated[window, columns] = calibrate(self.traces, window, columns, self._weighting)
        found = self._calibrated[window, columns]
        return found.basis, found.scores

    def error(self, plan: SketchPlan, graded: bool) -> Energies:
        """Decode the scored sequences with a plan and compare with float64.

        Parameters
        ----------
        plan : SketchPlan
            Plan of the layer.
        graded : bool
            Whether to weight errors by the gradient of the loss.

        Returns
        -------
        ndarray of float64, (2, heads)
            Energy of the error and of the outputs: sums of ``|delta|^2`` and ``|o|^2``, or of ``(grad^T delta)^2`` and
            ``(grad^T o)^2``.
        """
        error = self._decoded(plan, self._scored) - self._output
        if not graded or self._grad is None:
            return np.stack([np.square(x).sum(axis=(0, 1, 3)) for x in (error, self._output)])
        return np.stack([np.square((x * self._grad).sum(axis=-1)).sum(axis=(0, 1)) for x in (error, self._output)])

    def test_error(self, plan: SketchPlan) -> Energies:
        """Decode the test sequences with a plan and compare with float64.

        Parameters
        ----------
        plan : SketchPlan
            Plan of the layer.

        Returns
        -------
        ndarray of float64, (2, heads)
            Sums of ``|delta|^2`` and ``|o|^2``.
        """
        want = run(self.layer, *self.traces.test)[0]
        error = self._decoded(plan, self.traces.test) - want
        return np.stack([np.square(x).sum(axis=(0, 1, 3)) for x in (error, want)])

    @cached_property
    def _output(self) -> Array:
        """Outputs of the scored sequences in float64."""
        return run(self.layer, *self._scored)[0]

    def _decoded(self, plan: SketchPlan, tokens: Tokens) -> Array:
        """Outputs ``(sequences, tokens, heads, V)`` of a head with the plan."""
        head = SketchHead(plan, tokens.v.shape[0], self._backend)
        if head.backend == "cuda":
            head.warmup("float32")
        return np.asarray(to_host(head.step(*tokens), "output"), dtype=np.float64)


class ScoredLayer:
    """Basis and rank scores of one layer, without its traces.

    Errors are those of the ideal map, relative to the state reads, which `ridge` nearly attains. The errors of other
    maps and of other windows are unknown. Codes add their noise, see `sketchssm.layer.formats`.

    Parameters
    ----------
    basis : SketchBasis
        Basis of the layer.
    scores : RankScores
        Scores of the basis.
    """

    def __init__(self, basis: SketchBasis, scores: RankScores) -> None:
        self.layer = basis.layer
        self.graded = bool(scores.graded)
        self.rank_limit = scores.rank_max
        self._basis, self._scores = basis, scores

    def refusal(self, candidate: Candidate) -> str:
        """See `PlannedLayer`."""
        window = self._scores.window
        if candidate.map.storage != "dense":
            return f"without traces, only the errors of exact and ridge are known, got {candidate.map}"
        if candidate.window != window:
            return f"without traces, expected the window of the scores, {window} tokens, got {candidate}"
        return ""

    def calibrated(self, candidate: Candidate) -> tuple[SketchBasis, RankScores]:
        """See `PlannedLayer`."""
        return self._basis, self._scores

    def error(self, plan: SketchPlan, graded: bool) -> Energies:
        """See `PlannedLayer`."""
        heads, rank = np.arange(self.layer.heads), np.maximum(plan.ranks, 0)
        method = "gradient" if graded else "error"
        curves, reads = self._scores.objective(method), self._scores.noise_objective(method)
        noise = SketchFormat.of(plan.sketch_dtype).noise * reads[heads, rank]
        lost = np.where(plan.ranks == FULL_STATE, 0.0, curves[heads, rank] + noise)
        return np.stack([lost, curves[:, 0]]) * self._scores.samples

    def test_error(self, plan: SketchPlan) -> Energies:
        """See `PlannedLayer`; there is no such text."""
        raise ValueError("traces: expected traces of every layer for errors on the test sequences, got scores")
