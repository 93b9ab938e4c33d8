"""One layer to evaluate: its traces, settings and calibrations, and the float64 results for comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from sketchssm.calibrate.allocation import METHODS
from sketchssm.calibrate.plans import Calibrated, Settings, calibrate
from sketchssm.calibrate.traces import Traces
from sketchssm.calibrate.windows import host_tokens
from sketchssm.layer.checks import check_choice, check_instance, check_items, check_number, check_seed, check_size
from sketchssm.layer.recurrence import FULL_STATE, check_window
from sketchssm.plans.plan import SketchPlan
from sketchssm.reference.recurrence import Array, run
from sketchssm.reference.walk import SketchReads, walk


@dataclass(eq=False)
class Study:
    """One layer to evaluate; ValueError if a setting is out of range, or does not fit the traces or the plan."""

    traces: Traces
    settings: Settings = field(default_factory=Settings)
    ranks: Sequence[int] = (2, 4, 6, 8, 12, 16)  # mean ranks of the sketches
    mean_rank: float = 8.0  # of the ablations
    seed: int = 0  # of random bases
    plan: SketchPlan | None = None  # an additional plan to measure
    every: int = 64  # tokens from one point of the curves over tokens to the next

    def __post_init__(self) -> None:
        check_instance("traces", self.traces, Traces)
        check_instance("settings", self.settings, Settings)
        if self.plan is not None:
            check_instance("plan", self.plan, SketchPlan)
        if self.plan is not None and self.plan.layer != self.traces.layer:
            raise ValueError(f"plan: expected one for {self.traces.layer}, got one for {self.plan.layer}")
        check_window(self.settings.window)
        self._check_settings()
        if min(self.length, self.calibration_length) < 2 * self.settings.window:
            raise ValueError(
                f"{self.traces.name}: expected test and calibration sequences, of the latter those with gradients "
                f"too, of at least two windows ({2 * self.settings.window} tokens), got {self.length} and "
                f"{self.calibration_length}"
            )
        self._calibrated: dict[int, Calibrated] = {}
        self._energies: dict[int, Array] = {}
        self._states: dict[int, Array] = {}

    def _check_settings(self) -> None:
        """Refuse settings that would fail only later, when results of other systems are written."""
        limit = min(self.traces.layer.key_dim, self.traces.layer.value_dim)
        method = self.settings.method
        ranks = [check_size("ranks", rank) for rank in check_items("ranks", self.ranks, "integers")]
        if not ranks or len(set(ranks)) < len(ranks):
            raise ValueError(f"ranks: expected different positive integers, got {self.ranks!r}")
        if method == "uniform" and max(self.ranks) > limit:
            raise ValueError(f"ranks: expected at most {limit} for uniform ranks, got {max(self.ranks)}")
        check_number("mean_rank", self.mean_rank, f"1 to {limit} (K and V bound it)", lambda mean: 1 <= mean <= limit)
        if method is not None:
            check_choice("method", method, METHODS)
        if method == "gradient" and self.traces.score_part()[1] is None:
            raise ValueError(f"method: {method!r} needs gradients, and {self.traces.name} has none to score by")
        check_size("every", self.every)
        check_seed(self.seed)

    @property
    def length(self) -> int:
        """Tokens of a test sequence."""
        return int(self.traces.test.v.shape[1])

    @property
    def calibration_length(self) -> int:
        """Tokens of a calibration sequence, or of a sequence that ranks are scored on if those are shorter."""
        return min(int(part.v.shape[1]) for part in (self.traces.calib, self.traces.score_part()[0]))

    @property
    def checkpoints(self) -> list[int]:
        """Points of the curves: every `every` tokens, and the end if at least half of `every` is left there."""
        points = list(range(self.every, self.length + 1, self.every))
        if 2 * (self.length % self.every) < self.every:
            points = points[:-1]
        return [*points, self.length]

    def calibrated(self, window: int | None = None) -> Calibrated:
        """Return basis and rank scores for a window, made once; by default the window of the settings."""
        window = window or self.settings.window
        if window not in self._calibrated:
            self._calibrated[window] = calibrate(self.traces, window)
        return self._calibrated[window]

    def objective(self, ranks: npt.NDArray[np.int64], window: int) -> float | None:
        """Gradient-weighted score of a rank table, the sum over heads; None without gradients."""
        scores = self.calibrated(window).scores
        if scores.weighting != "gradient":
            return None
        sketched = np.flatnonzero(ranks != FULL_STATE)  # a full read loses nothing
        return float(scores.objective("gradient")[sketched, ranks[sketched]].sum())

    def read_energy(self, window: int) -> Array:
        """Energy ``(windows, heads)`` of the test sequences' state reads between flushes, for each whole window."""
        if window not in self._energies:
            layer = self.traces.layer
            count = self.length // window
            energy = np.zeros((count, layer.heads))

            def add(reads: SketchReads) -> None:
                energy[reads.tokens.start // window] += np.square(reads.queries @ reads.state).sum(axis=(0, 2, 3))

            whole = self.traces.test.at(np.s_[:, : count * window])
            walk(layer, host_tokens(layer, *whole), window, add)
            self._energies[window] = energy
        return self._energies[window]

    @cached_property
    def output(self) -> Array:
        """Outputs ``(sequences, tokens, heads, V)`` of the float64 recurrence for the test sequences."""
        return run(self.traces.layer, *self.traces.test)[0]

    def state(self, tokens: int) -> Array:
        """Return the float64 states ``(sequences, heads, V, K)`` after some tokens of the test sequences."""
        # always through the checkpoints, so that the last digits do not depend on earlier calls
        stops = [point for point in self.checkpoints if point < tokens]
        for start, stop in pairwise([0, *stops, tokens]):
            if stop not in self._states:
                part = self.traces.test.at(np.s_[:, start:stop])
                self._states[stop] = run(self.traces.layer, *part, state=self._states.get(start))[1]
        return self._states[tokens]

    @cached_property
    def half_life(self) -> Array:
        """Tokens ``(heads,)`` after which the gates of each head have halved a write; later writes are not counted.

        From the median log-decay over tokens; infinite where the median gate keeps everything. For kda, of the channel
        with the longest memory after the longest tenth is left out.
        """
        gates = np.asarray(self.traces.test.g, dtype=np.float64)
        typical = np.median(gates, axis=(0, 1))
        if typical.ndim == 2:
            typical = np.quantile(typical, 0.9, axis=1)
        return np.divide(-math.log(2), typical, out=np.full_like(typical, np.inf), where=typical < 0)
