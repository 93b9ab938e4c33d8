"""One layer of a model to plan: its calibration, and the errors of a plan."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from sketchssm.arrays.interop import to_host
from sketchssm.calibrate.joint_scores import JointScores
from sketchssm.calibrate.plans import Calibrated, calibrate
from sketchssm.calibrate.scores import RankScores
from sketchssm.calibrate.traces import Traces, named_errors
from sketchssm.cuda import MAX_RANK
from sketchssm.heads.sketch import SketchHead
from sketchssm.layer.recurrence import Tokens
from sketchssm.plans.basis import SketchBasis
from sketchssm.plans.plan import SketchPlan
from sketchssm.reference.recurrence import Array, run
from sketchssm.study.planning.candidate import Candidate

Energies = npt.NDArray[np.float64]


class TracedLayer:
    """Traces of one layer, calibrated once for each window.

    Errors are those of a head that decodes the traces. `graded` says whether they can be weighted by the gradient of
    the loss, and `rank_limit` is the largest rank that a head can have.
    """

    def __init__(self, traces: Traces, backend: str) -> None:
        self.layer = traces.layer
        self.traces = traces
        self._backend = backend
        self._scored, self._grad = traces.score_part()
        self._calibrated: dict[int, Calibrated] = {}
        self._joint: dict[Candidate, JointScores] = {}
        self.graded = self._grad is not None
        self.rank_limit = min(self.layer.key_dim, self.layer.value_dim)

    def calibrated(self, candidate: Candidate) -> tuple[SketchBasis, RankScores]:
        """Return basis and rank scores for the window of a candidate."""
        window = candidate.window
        if window not in self._calibrated:
            with named_errors(self.traces):
                self._calibrated[window] = calibrate(self.traces, window, min(MAX_RANK, self.rank_limit))
        found = self._calibrated[window]
        return found.basis, found.scores

    def joint(self, candidate: Candidate) -> JointScores:
        """Return the scores of ranks with the residuals of a candidate."""
        if candidate not in self._joint:
            basis, _ = self.calibrated(candidate)
            scores = JointScores(basis, bits=candidate.residual_bits, sketch_dtype=candidate.sketch_dtype)
            with named_errors(self.traces):
                scores.update(*self._scored, grad=self._grad)
            self._joint[candidate] = scores
        return self._joint[candidate]

    def error(self, plan: SketchPlan, graded: bool) -> Energies:
        """Decode the scored sequences with a plan: energies ``(2, heads)`` of errors against float64 and of outputs.

        Sums of ``|delta|^2`` and ``|o|^2`` or, with `graded`, of ``(grad^T delta)^2`` and ``(grad^T o)^2``.
        """
        error = self._decoded(plan, self._scored) - self._output
        if not graded or self._grad is None:
            return np.stack([np.square(x).sum(axis=(0, 1, 3)) for x in (error, self._output)])
        return np.stack([np.square((x * self._grad).sum(axis=-1)).sum(axis=(0, 1)) for x in (error, self._output)])

    def test_error(self, plan: SketchPlan) -> Energies:
        """Decode the test sequences with a plan: sums ``(2, heads)`` of ``|delta|^2`` and ``|o|^2``."""
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
