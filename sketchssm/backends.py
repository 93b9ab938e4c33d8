"""Which engine runs which system on which backend, and the protocols of engines and their arrays.

A head (`sketchssm.head.DecodeHead`) checks a call. The engine's `Arrays` convert the caller's arrays to the engine's,
and results back. The engine owns the memory of one layer's slots and does the arithmetic. Engines are imported on
first use, so that importing the library stays cheap.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from sketchssm.host_arrays import HostArrays
from sketchssm.recurrence import Tokens

if TYPE_CHECKING:
    from sketchssm.gates import GateInput

__all__ = ["ACTIVATIONS", "BACKENDS", "Arrays", "Call", "Engine", "UnsupportedError", "load_engine"]

BACKENDS = ("reference", "cpu", "cuda")

ACTIVATIONS = ("bfloat16", "float16", "float32")
"""Types in which a device may hold q, k, v and outputs."""

ENGINES = {
    ("reference", "standard"): "sketchssm.reference.engines:StandardEngine",
    ("reference", "replay"): "sketchssm.reference.engines:ReplayEngine",
    ("reference", "sketch"): "sketchssm.reference.engines:SketchEngine",
    ("reference", "quantised"): "sketchssm.reference.baselines:QuantisedEngine",
    ("reference", "copy"): "sketchssm.reference.baselines:CopyEngine",
    ("reference", "reduced"): "sketchssm.baselines.reduced:reference_engine",
    ("cpu", "standard"): "sketchssm.cpu.standard:StandardEngine",
    ("cpu", "replay"): "sketchssm.cpu.replay:ReplayEngine",
    ("cpu", "sketch"): "sketchssm.cpu.sketch:SketchEngine",
    ("cpu", "quantised"): "sketchssm.cpu.quantised:QuantisedEngine",
    ("cpu", "copy"): "sketchssm.cpu.quantised:CopyEngine",
    ("cpu", "reduced"): "sketchssm.baselines.reduced:cpu_engine",
    ("cuda", "standard"): "sketchssm.cuda.standard:StandardEngine",
    ("cuda", "replay"): "sketchssm.cuda.engines:ReplayEngine",
    ("cuda", "sketch"): "sketchssm.cuda.engines:SketchEngine",
}


class UnsupportedError(ValueError):
    """The machine can't run a backend, or the backend has no kernels for a layer or plan."""


class Call(Protocol):
    """One call's arrays, while the engine's device and the caller's stream are current."""

    def slots(self, slots: Any, batch: int | None, capacity: int) -> Any:
        """Check ``slots=`` and convert them to int64; a `batch` of None takes any number of them, by default all."""

    def inputs(self, given: Tokens, slots: Any, out: Any, several: bool, capacity: int) -> tuple[Tokens, Any, Any]:
        """Check and convert a step's arguments: tokens ``(batch, tokens, ...)``, slots, and the array to be written.

        `several` says that the caller's arrays have a tokens axis.
        """

    def states(self, state: Any, slots: Any) -> Any:
        """Check and convert states to be loaded."""

    def result(self, written: Any, v: Any, out: Any) -> Any:
        """Return the written outputs as `out`, or as v's kind of array, shape and dtype."""


class Context(Protocol):
    """Context manager of a call."""

    def __enter__(self) -> Call: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class Arrays(Protocol):
    """Converts a caller's arrays for an engine, and the engine's results for the caller."""

    def call(self, *arrays: Any) -> Context:
        """Begin a call, on the stream of the first array that is where the engine computes."""

    def view(self, state: Any) -> Any:
        """View of an engine's own array for the caller, read-only where that is possible."""


class Engine(Protocol):
    """A backend's memory and arithmetic for one head.

    All arrays are the backend's own (on ``cuda`` pointers), C-contiguous, and already checked: slots are unique, in
    range, or -1 for padding rows.
    """

    arrays: Any
    """The engine's `Arrays`."""

    @property
    def state(self) -> Any:
        """``(slots, heads, V, K)``: states as of each slot's last flush, exact unless the system itself is not."""

    @property
    def position(self) -> Any:
        """``(slots,)`` int32: tokens buffered since each slot's last flush."""

    @property
    def window(self) -> int:
        """Tokens from one flush to the next; 1 where every token writes the state."""

    def warmup(self, activation_dtype: str | None = None) -> None:
        """Compile what a step may need; the activations' type matters to the engines that have several."""

    def step(self, tokens: Tokens, slots: Any, out: Any) -> None:
        """Run ``(batch, tokens, ...)`` inputs, token by token, and write ``out (batch, tokens, heads, V)``."""

    def load_state(self, state: Any, slots: Any) -> None:
        """Set states ``(batch, heads, V, K)`` at the start of a window."""

    def flush(self, slots: Any) -> None:
        """Fold what the slots have buffered into their states and start a new window."""

    def reset(self, slots: Any) -> None:
        """Make the slots as new, whatever they held: zero state, empty ring."""


def load_engine(
    system: str,
    backend: str,
    *args: Any,
    gate: GateInput | None = None,
    activation_dtype: str | None = None,
    output_dtype: str | None = None,
    state: Any = None,
    **settings: Any,
) -> tuple[str, Engine]:
    """Build the engine of a system on a backend.

    Parameters
    ----------
    system : str
        "standard", "replay", "sketch", "quantised", "copy" or "reduced".
    backend : {"auto", "reference", "cpu", "cuda"}
        Where to run; "auto" takes "cuda" where CuPy sees a device and the kernels support the layer, else "cpu".
    *args
        Passed to the engine.
    gate : GateInput, optional
        Says that tokens come with raw gate inputs.
    activation_dtype, output_dtype : str, optional
        Types for an engine that computes on a device; see `SketchHead`.
    state : array, optional
        Memory for the states of an engine that computes on a device; see `SketchHead`.
    **settings
        Passed to the engine.

    Returns
    -------
    name : str
        The backend in use.
    engine : Engine
        The engine.

    Raises
    ------
    ValueError
        If the backend is unknown or does not have the system, or a type or `state` is given for a backend on the host.
    UnsupportedError
        If the backend was named and has no kernels for the layer or plan, or needs a package or a device that this
        machine does not have.

    Warns
    -----
    RuntimeWarning
        If "auto" takes "cpu" although there is a device, as the kernels do not support the layer or plan.
    """
    check_dtype_name(activation_dtype, "activation_dtype")
    check_dtype_name(output_dtype, "output_dtype")
    device = {"activation_dtype": activation_dtype, "output_dtype": output_dtype, "state": state}
    if backend != "auto" and (backend, system) not in ENGINES:
        have = ["auto", *(b for b in BACKENDS if (b, system) in ENGINES)]
        raise ValueError(f"backend: expected one of {', '.join(have)} for {system}, got {backend!r}")
    why, device_lacks_kernels = f"the head was made with backend={backend!r}", False
    if backend in ("auto", "cuda"):
        why = _why_not_cuda(system)
        if not why:
            try:
                engine = _engine(system, "cuda")(*args, gate=gate, **settings, **device)
                engine.fit()
                return "cuda", engine
            except UnsupportedError as error:
                if backend == "cuda":
                    raise
                why, device_lacks_kernels = str(error), True
        if backend == "cuda":
            raise UnsupportedError(f"backend: 'cuda' can't run here: {why}")
        backend = "cpu"
    for name, value in device.items():
        if value is not None:
            raise ValueError(f"{name}: expected None on backend {backend!r}, as only 'cuda' has it ({why})")
    engine = _engine(system, backend)(*args, **settings)
    engine.arrays = HostArrays(engine.arrays.dtype, None if gate is None else gate.log_decays, why)
    if device_lacks_kernels:
        warnings.warn(f"backend: 'auto' takes 'cpu': {why}", RuntimeWarning, stacklevel=3)
    return backend, engine


def _why_not_cuda(system: str) -> str:
    """Tell why no engine of a system can run on the CUDA backend of this machine; empty where one can."""
    if ("cuda", system) not in ENGINES:
        return f"there are no CUDA kernels for {system}"
    from sketchssm.cuda import missing

    return missing()


def _engine(system: str, backend: str) -> Any:
    module, attribute = ENGINES[backend, system].split(":")
    return getattr(import_module(module), attribute)


def check_dtype_name(value: Any, name: str) -> None:
    """Check that an argument is None or names a type of `ACTIVATIONS`."""
    if value is not None and value not in ACTIVATIONS:
        raise ValueError(f"{name}: expected one of {', '.join(ACTIVATIONS)} or None, got {value!r}")
