"""A list of benchmark cases, timed one after the other on the CPU or on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from sketchssm.arrays.gates import GateInput
from sketchssm.layer.checks import UnsupportedError
from sketchssm.layer.coefficients import CoefficientMap
from sketchssm.layer.recurrence import Layer
from sketchssm.plans.model_plans import load_plans
from sketchssm.plans.plan import SketchPlan
from sketchssm.study.bench.authors import measure_authors
from sketchssm.study.bench.device import Workload, compile_all, device_bandwidth, device_name, measure_device
from sketchssm.study.bench.host import copy_bandwidth, measure_host
from sketchssm.study.bench.peers import PEERS, measure_peer
from sketchssm.study.bench.results import BenchResult
from sketchssm.study.bench.workloads import random_gate, random_plan, spread_ranks, systems
from sketchssm.study.systems import System


@dataclass(frozen=True)
class Case:
    """All systems at one shape, batch and window."""

    shape: str  # name of the layer's shape
    layer: Layer
    batch: int
    window: int
    plans: list[SketchPlan]  # of the sketches, beside standard decode and replay
    gate: GateInput | None = None  # of heads that take raw gate inputs
    state_dtype: str = "float32"

    @classmethod
    def random(
        cls,
        shape: str,
        layer: Layer,
        window: int,
        mean_ranks: Sequence[int],
        maps: Sequence[CoefficientMap],
        sketch_dtypes: Sequence[str],
        seed: int = 0,
        rank_max: int | None = None,
        residual_bits: int = 0,
    ) -> Case:
        """Make a case of one row, with a random plan for every mean rank, map and format.

        See `spread_ranks` and `random_plan`; sketches with the map `subspace` alone have the residual bits.
        ValueError if a mean rank is beyond K, V or `rank_max`, the largest rank of a head.
        """
        limit = min(layer.key_dim, layer.value_dim, rank_max or layer.key_dim)
        if max(mean_ranks) > limit:
            raise ValueError(f"mean_ranks: expected at most {limit} for {shape}, got {max(mean_ranks)}")
        spread = [spread_ranks(layer.heads, mean, limit) for mean in mean_ranks]
        plans = [
            random_plan(layer, ranks, window, map, seed, sketch_dtype, residual_bits if map.name == "subspace" else 0)
            for ranks, map, sketch_dtype in product(spread, maps, sketch_dtypes)
        ]
        return cls(shape, layer, 1, window, plans)

    @classmethod
    def of_plans(cls, path: Path) -> list[Case]:
        """Cases of one row with the plans of a file or folder, named by the layers; see `load_plans`."""
        return [cls(name, plan.layer, 1, plan.window, [plan]) for name, plan in load_plans(path).items()]

    def with_raw_gate(self, seed: int = 0) -> Case:
        """Return the case with raw gate inputs if its decay is per channel, else the case itself."""
        if not self.layer.channel_decays:
            return self
        return replace(self, shape=f"{self.shape}, raw gate", gate=random_gate(self.layer, seed))

    def systems(self) -> list[System]:
        """Return standard decode, replay, and the sketches in the order of the plans."""
        return systems(self.layer, self.window, self.plans, self.gate, self.state_dtype)

    def __str__(self) -> str:
        """Shape, batch and window."""
        return f"{self.shape}, batch {self.batch}, window {self.window}"


@dataclass
class Report:
    """Results of several cases."""

    copy_bandwidth: float  # bytes per second, measured in the same run
    results: list[BenchResult] = field(default_factory=list)  # one per case and system
    not_timed: list[str] = field(default_factory=list)  # systems that could not be timed, with the reason
    device: str = ""  # name of the GPU; empty on a CPU
    duty: float = 1.0  # share of the time that the GPU worked
    compile_seconds: float = 0.0  # for all kernels of a GPU at once


def time_cases(
    cases: Sequence[Case],
    backend: str = "cpu",
    *,
    seconds: float | None = None,
    duty: float = 1.0,
    peers: bool = False,
    peer_path: Path | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda label: None,
) -> Report:
    """Time cases one after the other.

    `seconds` are spent on each system; by default 0.5, on "cuda" 0.05 of device time. For "cuda", `duty` is that of
    `typical_times`, and `peers` adds the standard decode of other libraries, and
    `peer_path`, the folder of the authors' package, their sketched decode. `progress` is called with a label before
    each case, and on "cuda" before compiling.
    """
    if backend == "cuda":
        return _on_device(cases, 0.05 if seconds is None else seconds, duty, peers, peer_path, seed, progress)
    report = Report(copy_bandwidth())
    spent = 0.5 if seconds is None else seconds
    for case in cases:
        progress(str(case))
        report.results += measure_host(
            case.shape, case.layer, case.systems(), case.batch, case.window, report.copy_bandwidth,
            backend=backend, seconds=spent, seed=seed,
        )  # fmt: skip
    return report


def _refusal(case: Case) -> str:
    """Why the kernels of a GPU do not support a case's layer; empty if they do."""
    try:
        case.systems()[0].build(1, "cuda")
    except UnsupportedError as error:
        return str(error)
    return ""


def _on_device(
    cases: Sequence[Case],
    seconds: float,
    duty: float,
    peers: bool,
    peer_path: Path | None,
    seed: int,
    progress: Callable[[str], None],
) -> Report:
    """Cases on the current GPU; what does not fit, and a peer that fails, is reported, and the others are timed."""
    others = [peer for peer in PEERS if peers and any(case.layer.kind == peer.kind for case in cases)]
    lacking = {peer: lack for peer in others if (lack := peer.missing())}
    refused = {case.shape: why for case in cases if (why := _refusal(case))}
    cases = [case for case in cases if case.shape not in refused]
    progress("compiling")
    listed = [case.systems() for case in cases]
    kernels = {(case.shape, case.window): own for case, own in zip(cases, listed, strict=True)}
    compiled = compile_all([system for own in kernels.values() for system in own])
    bandwidth = device_bandwidth()
    report = Report(bandwidth, device=device_name(), duty=duty, compile_seconds=compiled)
    report.not_timed += [f"{shape} was not timed: {why}" for shape, why in refused.items()]
    report.not_timed += [f"{peer.name} was not timed: {lack} is not installed." for peer, lack in lacking.items()]

    def failed(case: Case, name: str, error: Exception) -> None:
        reason = " ".join(str(error).split())
        report.not_timed.append(f"{case.shape}, batch {case.batch}: {name} was not timed: {reason}")

    for case, own in zip(cases, listed, strict=True):
        progress(str(case))
        work = Workload(case.layer, case.batch, case.window, seed, case.gate is not None)
        for system in own:
            try:
                timed = measure_device(case.shape, system, work, bandwidth, seconds=seconds, duty=duty)
                report.results.append(timed)
            except MemoryError as error:
                failed(case, system.name, error)
        for peer in (peer for peer in others if peer not in lacking and peer.kind == case.layer.kind):
            try:
                report.results.append(measure_peer(case.shape, peer, work, bandwidth, seconds=seconds, duty=duty))
            except (MemoryError, RuntimeError) as error:
                failed(case, peer.name, error)
        if peer_path is not None and case.plans:
            try:
                plan, settings = case.plans[0], {"seconds": seconds, "duty": duty}
                report.results.append(measure_authors(case.shape, plan, case.batch, bandwidth, peer_path, **settings))
            except RuntimeError as error:
                failed(case, "SNU-ARC/SketchSSM", error)
    return report
