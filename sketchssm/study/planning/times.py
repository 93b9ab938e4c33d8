"""Measured time of a decode step of all layers."""

from __future__ import annotations

from collections.abc import Sequence

from sketchssm import cuda
from sketchssm.layer.checks import check_choice, check_size
from sketchssm.plans.plan import SketchPlan
from sketchssm.study.bench.device import Workload, device_bandwidth, measure_device
from sketchssm.study.bench.host import copy_bandwidth, measure_host
from sketchssm.study.bench.results import BenchResult
from sketchssm.study.systems import System, exact_systems, sketch_system


class StepTimes:
    """Time of a step of all layers on this machine, mean from one flush to the next.

    Layers with the same shape, ranks, bits and settings are timed once. Inputs are random; times do not depend on the
    inputs.

    Parameters
    ----------
    backend : {"cpu", "cuda"}
        Where to decode.
    batch : int
        Rows of a step.
    """

    def __init__(self, backend: str, batch: int) -> None:
        check_choice("backend", backend, ("cpu", "cuda"))
        if backend == "cuda" and (lack := cuda.missing()):
            raise ValueError(f"backend: 'cuda' can't run here: {lack}")
        self.backend, self.batch = backend, check_size("batch", batch)
        self._seconds = 0.03 if backend == "cuda" else 0.2  # on each plan, on "cuda" of device time
        self._bandwidth = device_bandwidth() if backend == "cuda" else copy_bandwidth()
        self._known: dict[str, float] = {}

    def __call__(self, plans: Sequence[SketchPlan]) -> float:
        """Measure the seconds of a step, the sum over the plans of all layers."""
        names = (f"{plan} {plan.ranks.tolist()} {plan.residual_bits.tolist()}" for plan in plans)
        return sum(self._time(n, sketch_system(plan, "sketch"), plan) for n, plan in zip(names, plans, strict=True))

    def standard(self, plans: Sequence[SketchPlan]) -> float:
        """Measure the seconds of a step of standard decode.

        Parameters
        ----------
        plans : sequence of SketchPlan
            Plans of all layers; only shapes count.

        Returns
        -------
        float
            Sum over the layers.
        """
        return sum(self._time(f"standard {plan.layer}", exact_systems(plan.layer)[0], plan) for plan in plans)

    def _time(self, name: str, system: System, plan: SketchPlan) -> float:
        if name not in self._known:
            self._known[name] = 1e-6 * self._measured(system, plan).microseconds
        return self._known[name]

    def _measured(self, system: System, plan: SketchPlan) -> BenchResult:
        window = plan.window
        if self.backend == "cuda":
            work = Workload(plan.layer, self.batch, window)
            return measure_device(system.name, system, work, self._bandwidth, seconds=self._seconds)
        return measure_host(
            system.name, plan.layer, [system], self.batch, window, self._bandwidth, seconds=self._seconds
        )[0]
