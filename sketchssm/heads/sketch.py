"""The sketch head: exact states that are read through their sketches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sketchssm.arrays.options import EngineOptions
from sketchssm.heads.backends import load_parts
from sketchssm.heads.exact import ExactHead, check_phase
from sketchssm.heads.registry import SKETCH
from sketchssm.layer.formats import SketchFormat
from sketchssm.layer.recurrence import PAD_SLOT, check_instance
from sketchssm.layer.slots import SlotPart
from sketchssm.plans.plan import SketchPlan

if TYPE_CHECKING:
    from sketchssm.arrays.gates import GateInput

__all__ = ["SketchHead"]


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
        stores float64 instead of "float32" and "bfloat16", and rounds to codes as the other backends do. Default: the
        plan's.
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
    ) -> None:
        check_instance("plan", plan, SketchPlan)
        form = SketchFormat.of(plan.sketch_dtype if sketch_dtype is None else sketch_dtype)
        phase = check_phase(phase, plan.window)
        options = EngineOptions(gate, activation_dtype, output_dtype, state_dtype, memory, phase, pad_slot=pad_slot)
        super().__init__(SKETCH, plan, num_slots, backend, form.name, options=options)
        self.plan, self.sketch_dtype = plan, form.name

    def _owner(self) -> dict[str, Any]:
        return super()._owner() | {"sketch_dtype": self.sketch_dtype}

    @staticmethod
    def parts_of(
        plan: SketchPlan,
        backend: str = "auto",
        *,
        sketch_dtype: str | None = None,
        gate: GateInput | None = None,
        activation_dtype: str | None = None,
        state_dtype: str = "float32",
    ) -> tuple[SlotPart, ...]:
        """Describe the memory of a slot without a head, to allocate `memory`.

        Parameters
        ----------
        plan : SketchPlan
            Bases, ranks and settings of the layer.
        backend : str
            As for the head.
        sketch_dtype, gate : optional
            As for the head.
        activation_dtype, state_dtype : str
            As for the head. On ``cuda`` the activations' type is required.

        Returns
        -------
        tuple of SlotPart
            The head's `parts`.
        """
        check_instance("plan", plan, SketchPlan)
        form = SketchFormat.of(plan.sketch_dtype if sketch_dtype is None else sketch_dtype)
        options = EngineOptions(gate, activation_dtype, state_dtype=state_dtype)
        return load_parts(SKETCH, backend, plan, form.name, options=options)
