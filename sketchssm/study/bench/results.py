"""Results of a benchmark: times of the positions of a window, bytes, and errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sketchssm.layer.formats import SketchFormat
from sketchssm.layer.recurrence import FULL_STATE, Layer
from sketchssm.layer.residual import residual_bytes
from sketchssm.plans import traffic
from sketchssm.plans.plan import SketchPlan
from sketchssm.study.systems import System

WRONG = 0.05
"""Of another library's results, a larger relative error is not rounding: bf16 leaves 4e-3."""


@dataclass(frozen=True)
class StepBytes:
    """Bytes that a step of all rows must move."""

    read: float  # of a step between flushes, mean over the positions of the window
    flush: float  # of the step that flushes

    def amortised(self, window: int) -> float:
        """Return the mean over the steps of a window."""
        return ((window - 1) * self.read + self.flush) / window


@dataclass(frozen=True)
class BenchResult:
    """Times of one system at one shape, batch and window; floors are bytes over the copy bandwidth of the same run.

    Errors are relative, of one row over a window, against the same system in float64.
    """

    shape: str
    system: str
    backend: str
    batch: int
    window: int
    read_microseconds: float  # a step between flushes, mean over the window's positions
    flush_microseconds: float  # the step that flushes; for standard decode, any step
    microseconds: float  # a step, amortised over the window with its flush
    read_bytes: float  # that each of these must move
    flush_bytes: float
    bytes: float
    read_fraction: float  # of the measured copy bandwidth: 1 is the floor
    flush_fraction: float
    fraction: float
    gigabytes_per_second: float  # rate of moving `bytes`
    error: float  # of the outputs
    state_error: float  # of the state after the window
    first_call_seconds: float  # compiling, or loading compiled kernels
    positions: list[float]  # microseconds at each position of the window

    @classmethod
    def of(
        cls,
        names: tuple[str, str, str],
        batch: int,
        positions: Sequence[float],
        needed: StepBytes,
        bandwidth: float,
        errors: tuple[float, float],
        first_call_seconds: float,
    ) -> BenchResult:
        """Compute a result from microseconds of a step at each position of the window, bytes and the copy bandwidth.

        `names` are shape, system and backend, `errors` those of outputs and state.
        """
        window = len(positions)
        read, flush = float(np.mean(positions[:-1] or positions)), float(positions[-1])
        step, bytes = float(np.mean(positions)), needed.amortised(window)
        return cls(
            *names,
            batch,
            window,
            read_microseconds=read,
            flush_microseconds=flush,
            microseconds=step,
            read_bytes=needed.read,
            flush_bytes=needed.flush,
            bytes=bytes,
            read_fraction=1e6 * needed.read / read / bandwidth,
            flush_fraction=1e6 * needed.flush / flush / bandwidth,
            fraction=1e6 * bytes / step / bandwidth,
            gigabytes_per_second=bytes / step / 1e3,
            error=errors[0],
            state_error=errors[1],
            first_call_seconds=first_call_seconds,
            positions=list(positions),
        )


def step_bytes(system: System, layer: Layer, batch: int, window: int, *, on_device: bool = False) -> StepBytes:
    """Count the bytes that a step of standard decode (named "standard"), replay or a sketch must move.

    States, sketches and maps as in `sketchssm.plans.traffic`, plus the parts that this model leaves out: inputs and
    outputs, the ring (a token is written once and read at each later token of the window, and by the flush), and the
    sketch or shadow that a flush writes. With `on_device`, q, k, v, raw gate inputs and outputs are bf16 and sketches
    are packed as in the CUDA kernels; else inputs are float32, and sketches as in the byte model.
    """
    activation = 2 if on_device else 4
    sizes = {name: int(np.prod(shape)) for name, shape in layer.token_shapes().items()}
    narrow = "qkv" if system.gate is None else "qkvg"
    taken = sum((activation if name in narrow else 4) * size for name, size in sizes.items())
    moved = taken + activation * layer.heads * layer.value_dim
    whole = layer.heads * traffic.standard(layer.key_dim, layer.value_dim, system.state_dtype)
    if system.name == "standard":
        return StepBytes(batch * (whole + moved), batch * (whole + moved))
    buffered = taken - activation * sizes["q"]  # queries are not kept
    read, written = whole / 2, 0.0
    if system.plan is not None:
        sketches = _sketch_bytes(system.plan, on_device, system.state_dtype)
        made = system.plan.ranks != FULL_STATE  # by a flush
        made |= SketchFormat.of(system.plan.sketch_dtype).shadows(system.state_dtype)
        read, written = float(sketches.sum()), float(sketches[made].sum())
    earlier = max(window - 2, 0) / 2  # tokens in the ring, mean over the positions before the flush
    return StepBytes(
        batch * (read + moved + buffered * (1 + earlier)),
        batch * (whole + moved + buffered * (window - 1) + written),
    )


def _sketch_bytes(plan: SketchPlan, on_device: bool, state_dtype: str) -> npt.NDArray[np.float64]:
    """Bytes ``(heads,)`` of each head's sketch and map in a read; padding between heads does not count."""
    layer = plan.layer
    settings = (layer.kind, layer.key_dim, layer.value_dim, plan.ranks, plan.window, plan.map, state_dtype)
    modelled = traffic.sketch_read(*settings, sketch_dtype=plan.sketch_dtype, residual_bits=plan.residual_bits)
    if not on_device:
        return modelled
    form = SketchFormat.of(plan.sketch_dtype)
    packed = form.bytes(plan.map, np.maximum(plan.ranks, 0), layer.key_dim, layer.value_dim)
    packed += residual_bytes(plan.residual_bits, layer.key_dim, layer.value_dim)
    return np.where(plan.ranks == FULL_STATE, modelled, packed)
