"""One layer's traces and how they are to be evaluated: calibrated when first needed, named by a digest."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from sketchssm.calibrate.allocation import METHODS
from sketchssm.calibrate.moments import check_window
from sketchssm.calibrate.windows import SketchReads, host_tokens, walk
from sketchssm.evaluate.calibrated import Calibrated
from sketchssm.evaluate.settings import Settings
from sketchssm.evaluate.windows import Windows, collect_windows
from sketchssm.files import layer_fields
from sketchssm.plan import SketchPlan
from sketchssm.recurrence import Tokens
from sketchssm.reference.recurrence import Array, run
from sketchssm.traces import Traces

__all__ = ["Study"]


@dataclass(eq=False)
class Study:
    """One layer's evaluation.

    Attributes
    ----------
    traces : Traces
        The layer's traces.
    settings : Settings
        How plans are made.
    ranks : sequence of int
        Mean ranks of the sketches.
    mean_rank : float
        Mean rank of the ablations.
    method : str or None
        Allocation method; None for the best there are data for.
    seed : int
        Seed of random bases.
    plan : SketchPlan or None
        A ready plan to measure beside the others.
    every : int
        Tokens from one point of the drift curves to the next.

    Raises
    ------
    ValueError
        If a setting is out of range, needs gradients that the traces lack, or does not fit the plan or the text.
    """

    traces: Traces
    settings: Settings = field(default_factory=Settings)
    ranks: Sequence[int] = (2, 4, 6, 8, 12, 16)
    mean_rank: float = 8.0
    method: str | None = None
    seed: int = 0
    plan: SketchPlan | None = None
    every: int = 64

    def __post_init__(self) -> None:
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
        """Refuse what would only fail at some system, when results of others are written."""
        limit = min(self.traces.layer.key_dim, self.traces.layer.value_dim)
        whole = [isinstance(rank, int | np.integer) and rank >= 1 for rank in self.ranks]
        if not whole or not all(whole) or len(set(self.ranks)) < len(whole):
            raise ValueError(f"ranks: expected different positive integers, got {self.ranks!r}")
        if self.method == "uniform" and max(self.ranks) > limit:
            raise ValueError(f"ranks: expected at most {limit} for uniform ranks, got {max(self.ranks)}")
        if not 1 <= self.mean_rank <= limit:
            raise ValueError(f"mean_rank: expected 1 to {limit} (K and V bound it), got {self.mean_rank!r}")
        if self.method is not None and self.method not in METHODS:
            raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {self.method!r}")
        if self.method in ("gradient", "sensitivity") and self.traces.score_part()[1] is None:
            raise ValueError(f"method: {self.method!r} needs gradients, and {self.traces.name} has none to score by")
        for name, value, least in (("every", self.every, 1), ("seed", self.seed, 0)):
            if value < least:
                raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")

    @property
    def length(self) -> int:
        """Tokens of a test sequence."""
        return int(self.traces.test.v.shape[1])

    @property
    def calibration_length(self) -> int:
        """Tokens of a calibration sequence, or of the shorter ones that ranks are scored on."""
        return min(int(part.v.shape[1]) for part in (self.traces.calib, self.traces.score_part()[0]))

    @property
    def checkpoints(self) -> list[int]:
        """Token counts at which drift is measured: every `every` tokens, and the end if half of that is left."""
        points = list(range(self.every, self.length + 1, self.every))
        if 2 * (self.length % self.every) < self.every:
            points = points[:-1]
        return [*points, self.length]

    def calibrated(self, window: int | None = None) -> Calibrated:
        """Basis and rank scores for a window; default the settings'.

        Parameters
        ----------
        window : int, optional
            Tokens from one flush to the next.

        Returns
        -------
        Calibrated
            Made once.
        """
        window = window or self.settings.window
        if window not in self._calibrated:
            self._calibrated[window] = self.settings.calibrate(self.traces, window)
        return self._calibrated[window]

    @cached_property
    def windows(self) -> Windows:
        """Windows of the test sequences, at the settings' window."""
        return collect_windows(self.traces.layer, self.traces.test, self.settings.window)

    def read_energy(self, window: int) -> Array:
        """Energy of the state reads between the flushes of a window, one window after the other.

        Parameters
        ----------
        window : int
            Tokens from one flush to the next.

        Returns
        -------
        ndarray of float64, (windows, heads)
            Sums of squares over the test sequences; windows that are whole.
        """
        if window not in self._energies:
            layer = self.traces.layer
            count = self.length // window
            energy = np.zeros((count, layer.heads))

            def add(reads: SketchReads) -> None:
                energy[reads.tokens.start // window] += np.square(reads.queries @ reads.state).sum(axis=(0, 2, 3))

            whole = Tokens(*(None if x is None else x[:, : count * window] for x in self.traces.test))
            walk(layer, host_tokens(layer, *whole), window, None, add)
            self._energies[window] = energy
        return self._energies[window]

    @cached_property
    def output(self) -> Array:
        """What the float64 recurrence gives for the test sequences, ``(sequences, tokens, heads, V)``."""
        return run(self.traces.layer, *self.traces.test)[0]

    def state(self, tokens: int) -> Array:
        """States ``(sequences, heads, V, K)`` of the float64 recurrence after some tokens of the test sequences.

        Parameters
        ----------
        tokens : int
            How many.

        Returns
        -------
        ndarray of float64
            States, K last.
        """
        # always by way of the checkpoints, so that the last digits do not depend on what was asked for before
        stops = [point for point in self.checkpoints if point < tokens]
        for start, stop in pairwise([0, *stops, tokens]):
            if stop not in self._states:
                part = (None if x is None else x[:, start:stop] for x in self.traces.test)
                self._states[stop] = run(self.traces.layer, *part, state=self._states.get(start))[1]
        return self._states[tokens]

    @cached_property
    def half_life(self) -> Array:
        """Tokens after which each head's gates have halved what it wrote, ``(heads,)``; writes are not counted.

        The median over tokens of the log-decay says it, for kda that of the channel with the longest memory but for a
        tenth of them; infinite where the median gate keeps all.
        """
        gates = np.asarray(self.traces.test.g, dtype=np.float64)
        typical = np.median(gates, axis=(0, 1))
        if typical.ndim == 2:
            typical = np.quantile(typical, 0.9, axis=1)
        return np.divide(-math.log(2), typical, out=np.full_like(typical, np.inf), where=typical < 0)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the traces' contents and of all settings that a result depends on, beside what is measured."""
        known = hashlib.sha256()
        settings = asdict(self.settings)
        described: list[Any] = [layer_fields(self.traces.layer), settings, self.mean_rank, self.method, self.seed]
        known.update(repr([*described, self.every]).encode())
        arrays = [*self.traces.calib, *self.traces.test, self.traces.grad]
        if self.plan is not None:
            known.update(repr(self.plan).encode())
            arrays += [self.plan.omega, self.plan.projection, self.plan.ranks]
        for array in arrays:
            known.update(b"none" if array is None else repr((array.shape, array.dtype.str)).encode())
            known.update(b"" if array is None else np.ascontiguousarray(array).tobytes())
        return known.hexdigest()
