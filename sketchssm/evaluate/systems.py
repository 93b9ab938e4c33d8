"""Decode systems side by side: what each costs in bytes and time, and what its outputs lose.

A system is one entry of a list: a name, a way to build its head and its traffic. Whatever has the interface of
`sketchssm.head.DecodeHead` can be entered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sketchssm import traffic
from sketchssm.baselines import ReplayHead, StandardHead
from sketchssm.cuda.timing import timed_steps, upload
from sketchssm.head import DecodeHead, SketchHead
from sketchssm.interop import to_host
from sketchssm.plan import SketchPlan
from sketchssm.recurrence import Layer, Tokens
from sketchssm.reference.recurrence import Array, run

if TYPE_CHECKING:
    from sketchssm.gates import GateInput

__all__ = ["System", "SystemResult", "compare", "exact_systems", "relative_error", "sketch_system"]


@dataclass(frozen=True)
class System:
    """A decode system to compare.

    Attributes
    ----------
    name : str
        What to call it in a table.
    build : callable
        ``build(slots, backend)`` makes its head.
    reduction : float
        Traffic reduction relative to standard decoding.
    plan : SketchPlan or None
        The plan of a sketch.
    gate : GateInput or None
        What its head makes log-decays of raw gate inputs with; `compare` has log-decays alone.
    """

    name: str
    build: Callable[[int, str], DecodeHead]
    reduction: float
    plan: SketchPlan | None = None
    gate: GateInput | None = None


@dataclass(frozen=True)
class SystemResult:
    """What a run of a system gave.

    Attributes
    ----------
    name : str
        The system's name.
    reduction : float
        Traffic reduction relative to standard decoding.
    output_error : float
        Relative norm of the error of all outputs.
    flush_error : float
        Worst relative error of a window's last token, over all rows and windows: reads of the exact state.
    state_error : float
        Relative norm of the error of the final states.
    microseconds : float
        Time of one token of one row: a step's wall time over its rows, averaged over a window with its flush; the
        median over windows, the first left out. On ``cuda`` it is the device's time for a window as one graph, with
        inputs and outputs that are there.
    first_call_seconds : float
        What the first window took beyond that: compiling, or loading what was compiled earlier.
    backend : str
        Backend in use.
    rows : int
        Rows of a step.
    """

    name: str
    reduction: float
    output_error: float
    flush_error: float
    state_error: float
    microseconds: float
    first_call_seconds: float
    backend: str
    rows: int


def exact_systems(layer: Layer, window: int = 16, gate: GateInput | None = None) -> list[System]:
    """List the exact systems: standard decoding and buffered replay.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    window : int, default 16
        Tokens from one flush to the next.
    gate : GateInput, optional
        Of heads that take raw gate inputs.

    Returns
    -------
    list of System
        Entries for `compare`.
    """
    whole = traffic.standard(layer.key_dim, layer.value_dim)
    replayed = traffic.replay(layer.key_dim, layer.value_dim, window)
    return [
        System("standard", partial(StandardHead, layer, gate=gate), 1.0, gate=gate),
        System("replay", partial(ReplayHead, layer, window=window, gate=gate), whole / replayed, gate=gate),
    ]


def sketch_system(plan: SketchPlan, name: str, gate: GateInput | None = None) -> System:
    """Make the entry of a sketch.

    Parameters
    ----------
    plan : SketchPlan
        Plan of the layer.
    name : str
        What to call it.
    gate : GateInput, optional
        Of a head that takes raw gate inputs.

    Returns
    -------
    System
        An entry for `compare`.
    """
    return System(name, partial(SketchHead, plan, gate=gate), plan.reduction, plan, gate)


def compare(
    systems: Iterable[System],
    layer: Layer,
    tokens: Tokens,
    *,
    window: int = 16,
    backend: str = "auto",
    rows: int | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> list[SystemResult]:
    """Decode sequences with several systems and judge them by the float64 recurrence.

    Parameters
    ----------
    systems : iterable of System
        What to compare.
    layer : Layer
        Kind and shape.
    tokens : Tokens
        Sequences ``(sequences, tokens, ...)`` that start from a zero state.
    window : int, default 16
        Tokens from one flush to the next.
    backend : str, default "auto"
        Where to run.
    rows : int, optional
        Rows that decode at once; sequences are repeated to fill them. More rows than sequences make times realistic:
        states that fit a cache cost next to nothing to read. Default: one per sequence.
    progress : callable, optional
        Called with each system's name before its first call, which may have to compile, and with "decoding".

    Returns
    -------
    list of SystemResult
        In the order of `systems`.

    Raises
    ------
    ValueError
        If there are fewer tokens than two windows, or `rows` is not positive.
    """
    sequences, length = tokens.v.shape[:2]
    rows = sequences if rows is None else rows
    if length < 2 * window:
        raise ValueError(f"tokens: expected at least two windows ({2 * window} tokens), got {length}")
    if rows < 1:
        raise ValueError(f"rows: expected a positive number, got {rows}")
    output, state = run(layer, *tokens)
    which = np.arange(rows) % sequences
    # each token's inputs contiguous, as a model's layer would hand them over
    steps = [
        Tokens(*(None if x is None else np.ascontiguousarray(x[which, t]) for x in tokens)) for t in range(length)
    ]
    listed = list(systems)
    heads, inputs, first = [], [], []
    on_device: list[Tokens] = []
    for system in listed:
        progress(system.name)
        begun = time.perf_counter()
        head = system.build(rows, backend)
        if head.backend == "cuda":
            head.warmup("float32")
        built = time.perf_counter() - begun
        if head.backend == "cuda" and not on_device:
            on_device = [upload(step) for step in steps]
        heads.append(head)
        inputs.append(on_device if head.backend == "cuda" else steps)
        first.append(built + _timed(head, inputs[-1][:window])[1])
        head.reset()
    progress("decoding")
    outputs: list[list[npt.NDArray[Any]]] = [[] for _ in listed]
    seconds: list[list[float]] = [[] for _ in listed]
    # systems take turns, so that whatever else the machine does slows all of them alike
    for start in range(0, length, window):
        for i, head in enumerate(heads):
            made, took = _timed(head, inputs[i][start : start + window])
            outputs[i] += made
            seconds[i].append(took / len(made))
    results = []
    for i, (system, head) in enumerate(zip(listed, heads, strict=True)):
        head.flush()
        typical = float(np.median(seconds[i][1 : length // window]))  # whole windows
        have = np.stack(outputs[i], axis=1)
        flushes = slice(window - 1, None, window)
        result = SystemResult(
            system.name,
            system.reduction,
            relative_error(have, output[which]),
            relative_error(have[:, flushes], output[which][:, flushes], axis=(-1, -2)),
            relative_error(to_host(head.state, "state"), state[which]),
            1e6 * typical / rows,
            max(first[i] - window * typical, 0.0),
            head.backend,
            rows,
        )
        results.append(result)
    return results


def relative_error(have: npt.NDArray[Any], want: Array, axis: Sequence[int] | None = None) -> float:
    """Norm of the error over the norm of what is right.

    Parameters
    ----------
    have : ndarray
        What was computed.
    want : ndarray
        What is right.
    axis : sequence of int, optional
        Axes of one norm; the worst over the others is returned. Default: one norm over all.

    Returns
    -------
    float
        The ratio; infinity for an error where right is zero.
    """
    axes = None if axis is None else tuple(axis)
    lost = np.sqrt(np.square(np.asarray(have, dtype=np.float64) - want).sum(axis=axes))
    size = np.sqrt(np.square(want).sum(axis=axes))
    ratio = np.divide(lost, size, out=np.where(lost > 0, np.inf, 0.0), where=size > 0)
    return float(np.max(ratio))


def _timed(head: DecodeHead, steps: Sequence[Tokens]) -> tuple[list[npt.NDArray[Any]], float]:
    """Outputs ``(rows, heads, V)`` of one step after the other, on the host, and the seconds that all took."""
    if head.backend == "cuda":
        made, took = timed_steps(head, steps)
        return [to_host(output, "output") for output in made], took
    start = time.perf_counter()
    outputs = [head.step(*token) for token in steps]
    return outputs, time.perf_counter() - start
