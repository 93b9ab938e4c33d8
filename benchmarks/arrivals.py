"""Times of steps while requests arrive and leave at random, compared with rows in lockstep.

    python benchmarks/arrivals.py --backend cuda --shape qwen3-next --batch 32,128,256 --map lowrank,ridge

The layers of a model decode one batch: a step runs all layers, with the same slots and inputs. As in a model, the
sketches and rings of all layers exceed the caches. docs/serving.md (*Clocks*) describes the requests and the systems.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parents[1]))

from arrival_runs import Inputs, Requests, Run, inputs_on_device, run_on_device, run_on_host
from reports import about, cpu_model, write

from sketchssm import cuda
from sketchssm.heads.head import DecodeHead
from sketchssm.heads.sketch import SketchHead
from sketchssm.heads.standard import StandardHead
from sketchssm.layer.coefficients import CoefficientMap
from sketchssm.layer.formats import DEFAULT_FORMAT, FORMATS
from sketchssm.layer.recurrence import Tokens
from sketchssm.study import bench
from sketchssm.study.bench import Case
from sketchssm.study.evaluate.measure import relative_error

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
    duty: float = 1.0,
    seed: int = 0,
) -> Iterator[ArrivalsResult]:
    """Time standard decode, and every sketch of a case in every mode, in the order of `MODES`.

    `steps` timed steps are rounded up to whole windows; the first requests begin in one more window, which is not
    timed. Requests have `mean_tokens` tokens on average. A mode that does not fit into memory is left out.
    """
    run: Callable[[Sequence[DecodeHead], Inputs, Requests], Run] = run_on_host
    if backend == "cuda":
        inputs, run = inputs_on_device(case, seed), partial(run_on_device, duty=duty)
    else:
        inputs = Inputs.on_host(case, seed)
    window = case.window
    length = window * (1 + -(-steps // window))
    together = Requests.together(case.batch, length)
    arriving = Requests.arriving(case.batch, length, window, mean_tokens, seed)
    names = [system.name for system in case.systems()]
    for plan, system in zip((None, *case.plans), (names[0], *names[2:]), strict=True):
        lockstep = math.nan
        for mode in ("arrivals",) if plan is None else MODES:
            requests = together if mode == "lockstep" else arriving
            model = Model(case, plan, mode)
            gc.collect()  # frees the memory of the heads before
            try:
                heads = [model.head(i, requests.num_slots, backend) for i in range(layers)]
                found = run(heads, inputs, requests)
            except MemoryError as lack:
                print(f"{case}: {system}, {mode}, was not timed: {lack}")
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["cpu", "cuda", "reference"], default="cpu")
    for name, default in (("shape", "nemotron-3-super,qwen3-next,kimi-linear"), ("batch", "8,32"), ("map", "lowrank")):
        parser.add_argument(f"--{name}", default=default, help="with commas between several")
    parser.add_argument("--rank", type=int, help="mean rank (default: the shape's)")
    parser.add_argument("--sketch-dtype", choices=FORMATS, default=DEFAULT_FORMAT)
    parser.add_argument("--residual-bits", type=int, default=0, help="with the map subspace")
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--layers", type=int, default=32, help="of the model")
    parser.add_argument("--steps", type=int, default=128, help="timed steps")
    parser.add_argument("--tokens", type=float, default=256, help="mean length of a request")
    parser.add_argument("--duty", type=float, default=1.0, help="share of the time that a GPU works")
    parser.add_argument("--json", type=Path, help="where to write the result")
    args = parser.parse_args(arguments)
    limit = cuda.MAX_RANK if args.backend == "cuda" else None
    maps = [CoefficientMap(name) for name in args.map.split(",")]
    settings = maps, (args.sketch_dtype,), 0, limit, args.residual_bits
    cases = [
        replace(
            Case.random(shape, bench.SHAPES[shape], args.window, (args.rank or bench.MEAN_RANKS[shape],), *settings),
            batch=batch,
        )
        for shape, batch in product(args.shape.split(","), map(int, args.batch.split(",")))
    ]
    if args.backend == "cuda":
        listed = {case.shape: case.systems() for case in cases}  # batches share kernels
        bench.compile_all([system for own in listed.values() for system in own if system.name != "replay"])
    device = bench.device_name() if args.backend == "cuda" else cpu_model()
    report: dict[str, Any] = about(device) | {"layers": args.layers, "results": []}
    print(f"microseconds of a layer's step, {args.layers} layers\n{'':46}step  of lockstep  slowest  errors")
    for case in cases:
        options: Any = {"layers": args.layers, "steps": args.steps, "mean_tokens": args.tokens, "duty": args.duty}
        for r in measure_arrivals(case, args.backend, **options):
            report["results"].append(asdict(r))
            name = f"{r.shape} {r.batch} {r.system} {r.mode}"
            times = f"{r.microseconds:10.1f}{r.over_lockstep:13.3f}{r.slowest:9.2f}"
            print(f"{name:40}{times}  {r.error:.1e} {r.state_error:.1e}")
    write(report, args.json)


if __name__ == "__main__":
    main()
