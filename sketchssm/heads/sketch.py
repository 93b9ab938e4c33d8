"""The sketch head: exact states that are read through their sketches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sketchssm.arrays.options import EngineOptions
from sketchssm.heads.backends import load_parts
from sketchssm.heads.exact import ExactHead, check_phase
from sketchssm.heads.registry import SKETCH
from sketchssm.layer.checks import check_bool, check_instance
from sketchssm.layer.formats import SketchFormat
from sketchssm.layer.recurrence import PAD_SLOT
from sketchssm.layer.slots import EXACT, POSITION, SlotPart
from sketchssm.plans.plan import SketchPlan

if TYPE_CHECKING:
    from sketchssm.arrays.gates import GateInput


class ReadErrors(NamedTuple):
    """Errors of reads through sketches, from `SketchHead.errors`.

    Parameters
    ----------
    error : ndarray of float64, (slots, heads)
        Sums of the squared norms of the differences between the sketch's outputs and exact outputs.
    energy : ndarray of float64, (slots, heads)
        Sums of the squared norms of these exact outputs.
    samples : ndarray of int64, (slots,)
        Number of measured tokens.
    exact : ndarray of bool, (slots,)
        Whether the error was above the head's tolerance, so that reads are exact now.
    """

    error: npt.NDArray[np.float64]
    energy: npt.NDArray[np.float64]
    samples: npt.NDArray[np.int64]
    exact: npt.NDArray[np.bool_]

    @property
    def relative(self) -> float:
        """Relative squared error of all slots and heads together; NaN if nothing was measured."""
        energy = float(self.energy.sum())
        return float(self.error.sum()) / energy if energy else float("nan")


class SketchHead(ExactHead):
    """Exact states, written once a window, and read through their sketches in between (the paper's algorithm 1).

    Parameters
    ----------
    plan : SketchPlan
        Bases, ranks and settings of the layer.
    num_slots : int
        Number of state slots.
    backend : {"auto", "reference", "cpu", "cuda"}, default "auto"
        Where to run; "auto" is "cuda" if CuPy sees a device and the kernels support the plan, else "cpu".
    sketch_dtype : {"float32", "bfloat16", "int8"}, optional
        Format in which sketches and maps are stored, instead of the plan's; see `sketchssm.layer.formats`. `reference`
        stores float64 instead of "float32" and "bfloat16", and rounds to codes as the other backends do. Full-state
        heads read their states in "float32", else bfloat16 copies of them. Default: the plan's.
    gate : GateInput, optional
        For kda and gla: the argument g of `step` is then the layer's raw gate input, and the head computes log-decays.
    activation_dtype : {"bfloat16", "float16", "float32"}, optional
        ``cuda`` only, an error elsewhere: type of q, k and v in the kernels and in the ring; arrays of another type
        are converted. Default: the narrowest type that holds q, k and v of the first call (or the type that `warmup`
        names). After that, an array of a wider type is an error, so that no input is rounded unless asked. float64
        counts as float32.
    output_dtype : {"bfloat16", "float16", "float32"}, optional
        ``cuda`` only: type of the kernels' outputs. Default: the activations' type.
    pad_slot : int, default -1
        Slot number that means padding. If the number is in range, the slot with this number is not used.
    memory : mapping of str to array, optional
        The caller's memory, such as a serving engine's pool, for any of `parts`, by name: ``(num_slots, *shape)`` on
        the head's device, contiguous and aligned within a slot, any stride between slots. The head sets the cursors
        and does not read the other contents: a slot begins with `load_state`, `adopt`, `reset`, `copy` or `restore`.
    state_dtype : {"float32", "bfloat16", "float16"}, default "float32"
        Type of the states. A 16-bit type halves their bytes; a state is rounded when it is written, once a window. In
        float16 a number beyond 65504 becomes infinite.
    phase : int, optional
        Starts a clock at this position, 0 to ``plan.window - 1``: all rows flush at the same steps, independent of the
        steps at which their requests began. Layers with different phases flush at different steps. Default: no clock,
        each row has its own windows.
    monitor : int, default 0
        Measures the sketch's error at every so many flushes of a slot, for `errors`; 0 never. A measured flush takes
        one more read: 4% to 6% of a window's bytes.
    tolerance : float, optional
        Most relative squared error of a request; needs a monitor. If after a measured flush, the fourth or a later
        one, a slot's error of all heads together is above it, the slot flushes at every further token: its outputs are
        exact from then on, and take the time of standard decode, and more for the sketch. Default: any error.

    Raises
    ------
    ValueError
        If an argument is out of range or of another backend, the gate is not the layer's, the backend has no kernels
        for the plan, or it needs a package or a device that this machine does not have.

    Warns
    -----
    RuntimeWarning
        If "auto" finds a device but takes "cpu", because the kernels do not support the plan; and at the first call
        with arrays on a device, if the head computes on the host and has to copy them.
    """

    def __init__(
        self,
        plan: SketchPlan,
        num_slots: int,
        backend: str = "auto",
        *,
        sketch_dtype: str | None = None,
        gate: GateInput | None = None,
        activation_dtype: str | None = None,
        output_dtype: str | None = None,
        pad_slot: int = PAD_SLOT,
        memory: Mapping[str, Any] | None = None,
        state_dtype: str = "float32",
        phase: int | None = None,
        monitor: int = 0,
        tolerance: float | None = None,
    ) -> None:
        check_instance("plan", plan, SketchPlan)
        form = SketchFormat.of(plan.sketch_dtype if sketch_dtype is None else sketch_dtype)
        phase = check_phase(phase, plan.window)
        types = gate, activation_dtype, output_dtype, state_dtype
        options = EngineOptions(*types, memory, phase, pad_slot=pad_slot, monitor=monitor, tolerance=tolerance)
        super().__init__(SKETCH, plan, num_slots, backend, form.name, options=options)
        self.plan, self.sketch_dtype, self.monitor = plan, form.name, int(monitor)
        self.tolerance = None if tolerance is None else float(tolerance)
        if tolerance is not None:
            self._lasting = POSITION | EXACT

    def _owner(self) -> dict[str, Any]:
        monitor = {"monitor": self.monitor} if self.monitor else {}
        return super()._owner() | {"sketch_dtype": self.sketch_dtype} | monitor

    def errors(self, slots: Any = None, *, reset: bool = False) -> ReadErrors:
        """Return what the monitor has measured in some slots since their requests began; waits for the device.

        The output of a flush token is exact. At a measured flush the head also reads the token through the sketch, and
        adds up the squared norms of the difference and of the exact output. These are errors of reads at the end of a
        window: those before have mostly larger ones, so compare errors with errors of the same plan on the text of
        its calibration. Drafts and `flush` have no exact output, and measure nothing.

        The sums belong to the request: `load_state`, `adopt` and `reset` clear them; `copy` and snapshots keep them.
        A slot that is read exactly is not measured any more: its sums tell why.

        Parameters
        ----------
        slots : array of int, (count,), optional
            Which slots, none of them padding. Default: all.
        reset : bool, default False
            Whether to clear the sums of these slots. Reads that are exact remain so.

        Returns
        -------
        ReadErrors
            Sums over the measured flushes of each slot.

        Raises
        ------
        ValueError
            If the head has no monitor, or a slot is out of range, padding or named twice.
        """
        check_bool("reset", reset)
        if not self.monitor:
            raise ValueError("monitor: expected a head with monitor=1 or more, got monitor=0")
        with self._lock.held(), self._arrays.call(slots) as call:
            sums, index = self._engine.memory["errors"], self._own_slots(call, slots)
            rows = call.fetch(sums, index)
            exact = call.fetch(self._engine.memory["cursor"], index) & self._lasting & EXACT != 0
            if reset:
                call.store(sums, index, np.zeros_like(rows))
        error, energy = rows[..., 0].sum(-1, dtype=np.float64), rows[..., 1].sum(-1, dtype=np.float64)
        return ReadErrors(error, energy, -(-rows[:, 0, 0, 2].astype(np.int64) // self.monitor), exact)

    @staticmethod
    def parts_of(
        plan: SketchPlan,
        backend: str = "auto",
        *,
        sketch_dtype: str | None = None,
        gate: GateInput | None = None,
        activation_dtype: str | None = None,
        state_dtype: str = "float32",
        monitor: int = 0,
    ) -> tuple[SlotPart, ...]:
        """Describe the memory of a slot without a head, to allocate `memory`.

        Parameters
        ----------
        plan : SketchPlan
            Bases, ranks and settings of the layer.
        backend, sketch_dtype, gate, activation_dtype, state_dtype, monitor : optional
            As for the head. On ``cuda`` the activations' type is required.

        Returns
        -------
        tuple of SlotPart
            The head's `parts`.
        """
        check_instance("plan", plan, SketchPlan)
        form = SketchFormat.of(plan.sketch_dtype if sketch_dtype is None else sketch_dtype)
        options = EngineOptions(gate, activation_dtype, state_dtype=state_dtype, monitor=monitor)
        return load_parts(SKETCH, backend, plan, form.name, options=options)
