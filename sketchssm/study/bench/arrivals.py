"""Times of steps while requests arrive and leave at random, compared with rows in lockstep.

The layers of a model decode one batch: a step runs all layers, with the same slots and inputs. As in a model, the
sketches and rings of all layers exceed the caches.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm.heads.head import DecodeHead
from sketchssm.heads.sketch import SketchHead
from sketchssm.heads.standard import StandardHead
from sketchssm.layer.recurrence import Tokens
from sketchssm.study.bench.arrivals_device import inputs_on_device, run_on_device
from sketchssm.study.bench.cases import Case
from sketchssm.study.bench.device import compile_all, device_name
from sketchssm.study.bench.runs import Inputs, Requests, Run, run_on_host
from sketchssm.study.evaluate.measure import relative_error
from sketchssm.study.tables import number

MODES = ("lockstep", "clock", "no clock")
"""Window positions of a sketch's rows: all the same; random, with a clock; random, without a clock."""

JUDGED_HEADS = 8
"""At least so many heads are compared with float64, if the layer has as many."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ArrivalsResult:
    """Step times of one system while requests arrive and leave.

    Errors are relative, of one row over all steps, against the same system in float64 with the same requests.
    """

    shape: str
    system: str
    backend: str
    mode: str  # of `MODES`; "arrivals" for standard decode, which has no windows
    batch: int
    window: int
    layers: int  # of the model
    requests: int  # that began in the timed steps
    microseconds: float  # a step of one layer, mean over layers and timed steps
    over_lockstep: float  # relative to the same sketch in lockstep; NaN for standard decode
    slowest: float  # the slowest step of all layers over the mean step
    error: float  # of the outputs
    state_error: float  # of the last state
    steps: list[float]  # microseconds of each timed step, mean over the layers


@dataclass
class ArrivalsReport:
    """Results of several cases."""

    layers: int
    mean_tokens: float  # mean length of a request
    results: list[ArrivalsResult] = field(default_factory=list)
    not_timed: list[str] = field(default_factory=list)  # systems that could not be timed, with the reason
    device: str = ""  # name of the GPU; empty on a CPU
    duty: float = 1.0  # share of the time that the GPU worked


@dataclass(frozen=True)
class Model:
    """A system in a mode: makes heads for the layers of a model. With "clock", layer i has phase ``i % window``."""

    case: Case
    plan: Any  # of every layer; None for standard decode
    mode: str  # of `MODES`

    def head(self, index: int, num_slots: int, backend: str) -> DecodeHead:
        """Make the head of a layer."""
        types: Any = {"gate": self.case.gate, "state_dtype": self.case.state_dtype}
        if self.plan is None:
            return StandardHead(self.case.layer, num_slots, backend, **types)
        phase = index % self.case.window if self.mode == "clock" else None
        return SketchHead(self.plan, num_slots, backend, phase=phase, **types)

    def judge(self, index: int, inputs: Inputs, requests: Requests, run: Run) -> tuple[float, float]:
        """Errors of outputs and state of some heads of a layer for the first row, against the layer in float64."""
        layer = self.case.layer
        world = math.gcd(layer.key_heads, max(layer.heads // JUDGED_HEADS, 1))
        heads, keys = layer.shard_heads(0, world)
        axes = Tokens(keys, keys, heads, heads, heads)
        row = Tokens(*(None if x is None else x[:, own] for x, own in zip(inputs.first_row, axes, strict=True)))
        gate = None if self.case.gate is None else self.case.gate.shard(0, world)
        plan = None if self.plan is None else self.plan.shard(0, world)
        case = replace(self.case, layer=layer.shard(0, world), gate=gate)
        twin = Model(case, plan, self.mode).head(index, 1, "reference")
        outputs = np.empty((len(run.outputs), *twin.layer.state_shape[:2]))
        for t, joins in enumerate(requests.joins[:, 0]):
            slots = np.minimum(requests.slots[t, :1], 0)  # the row's slot is the only one here
            if joins:
                twin.load_state(inputs.start[None, heads], slots=slots)
            token = row.at(np.s_[None, t % len(inputs.steps)])
            outputs[t] = twin.step(*token, slots=slots)[0]
        return relative_error(run.outputs[:, heads], outputs), relative_error(run.state[heads], twin.state[0])


def measure_arrivals(
    case: Case,
    backend: str,
    *,
    layers: int,
    steps: int,
    mean_tokens: float,
    duty: float,
    seed: int,
    failed: Callable[[str, str, Exception], None],
) -> Iterator[ArrivalsResult]:
    """Time standard decode, and every sketch of a case in every mode; see `time_arrivals`."""
    run: Callable[[Sequence[DecodeHead], Inputs, Requests], Run] = run_on_host
    if backend == "cuda":
        inputs, run = inputs_on_device(case, seed), partial(run_on_device, duty=duty)
    else:
        inputs = Inputs.on_host(case, seed)
    window = case.window
    length = window * (1 + -(-steps // window))
    together = Requests.together(case.batch, length)
    arriving = Requests.arriving(case.batch, length, window, mean_tokens, seed)
    for plan in (None, *case.plans):
        system = "standard" if plan is None else f"sketch G={number(plan.mean_rank)} {plan.map.name}"
        lockstep = math.nan
        for mode in ("arrivals",) if plan is None else MODES:
            requests = together if mode == "lockstep" else arriving
            model = Model(case, plan, mode)
            gc.collect()  # frees the memory of the heads before
            try:
                heads = [model.head(i, requests.num_slots, backend) for i in range(layers)]
                found = run(heads, inputs, requests)
            except MemoryError as lack:
                failed(system, mode, lack)
                continue
            finally:
                heads = []
            timed = found.times[window:] / layers
            mean = float(timed.mean())
            lockstep = mean if mode == "lockstep" else lockstep
            error, state_error = model.judge(layers - 1, inputs, requests, found)
            yield ArrivalsResult(
                shape=case.shape,
                system=system,
                backend=backend,
                mode=mode,
                batch=case.batch,
                window=window,
                layers=layers,
                requests=int(requests.joins[window:].sum()),
                microseconds=mean,
                over_lockstep=mean / lockstep,
                slowest=float(timed.max()) / mean,
                error=error,
                state_error=state_error,
                steps=np.round(timed, 3).tolist(),
            )


def time_arrivals(
    cases: Sequence[Case],
    backend: str = "cpu",
    *,
    layers: int = 32,
    steps: int = 128,
    mean_tokens: float = 256,
    duty: float = 1.0,
    seed: int = 0,
    progress: Callable[[str], None] = lambda label: None,
) -> ArrivalsReport:
    """Time standard decode, and every sketch of some cases in every mode, in the order of `MODES`.

    The model has `layers` layers. `steps` timed steps are rounded up to whole windows; the first requests begin in one
    more window, which is not timed. Requests have `mean_tokens` tokens on average. `duty` is that of `typical_times`.
    `progress` is called with a label before each case.
    """
    for name, value in (("layers", layers), ("steps", steps), ("mean_tokens", mean_tokens)):
        if not 1 <= value < math.inf:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    if not 0 < duty <= 1:
        raise ValueError(f"duty: expected a share in (0, 1], got {duty}")
    report = ArrivalsReport(layers, mean_tokens, duty=duty)
    if backend == "cuda":
        report.device = device_name()
        listed = {(case.shape, case.window): case.systems() for case in cases}  # batches share kernels
        progress("compiling")
        compile_all([system for own in listed.values() for system in own if system.name != "replay"])
    for case in cases:
        progress(str(case))

        def failed(system: str, mode: str, error: Exception, case: Case = case) -> None:
            reason = " ".join(str(error).split())
            report.not_timed.append(f"{case.shape}, batch {case.batch}: {system}, {mode}, was not timed: {reason}")

        report.results += measure_arrivals(
            case, backend, layers=layers, steps=steps, mean_tokens=mean_tokens, duty=duty, seed=seed, failed=failed
        )
    return report
