"""Which engine runs which system on which backend, and the protocols of engines and their arrays.

A head (`sketchssm.head.DecodeHead`) checks a call. The engine's `Arrays` convert the caller's arrays for the engine,
and results for the caller. The engine owns the memory of one layer's slots and does the arithmetic. Engines are
imported on first use, which keeps the import of the library cheap.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from sketchssm.host_arrays import HostArrays
from sketchssm.recurrence import PAD_SLOT, Layer, Tokens
from sketchssm.slots import SlotPart

if TYPE_CHECKING:
    from sketchssm.gates import GateInput

__all__ = [
    "ACTIVATIONS",
    "BACKENDS",
    "Arrays",
    "Call",
    "Engine",
    "ExactEngine",
    "UnsupportedError",
    "common_rank",
    "load_engine",
    "load_layer_inputs",
    "load_parts",
]

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


OPTIONS = {"state_dtype": "float32", "memory": None, "phase": None, "drafts": 0}
"""Settings of engines that need not support them, with their defaults."""

COMMON_RANKS = {"mamba2": (70, 61), "gdn": (70, 61), "kda": (61, 56)}
REFRESHED_RANKS = {"mamba2": (56, 48), "gdn": (56, 48), "kda": (61, 56)}
"""Largest ranks of `common_rank` on backend "cuda" at K = V = 128, with windows of up to 16 and of 32: of plans
without refreshes, and with them."""


class UnsupportedError(ValueError):
    """The machine can't run a backend, or the backend has no kernels for a layer or plan."""


class Call(Protocol):
    """Conversions of one call's arrays, while the engine's device and the caller's stream are current."""

    def slots(self, slots: Any, batch: int | None, capacity: int, name: str = "slots", repeats: bool = False) -> Any:
        """Check slots and convert them to the engine's; a `batch` of None takes any number of them, by default all.

        `name` is the argument's, and `repeats` allows rows of one slot.
        """

    def lengths(self, lengths: Any, slots: Any, tokens: int) -> Any:
        """Check and convert the lengths of drafts, at most `tokens`, by default all of them.

        `slots` are a result of `slots`.
        """

    def accepted(self, accepted: Any, slots: Any, cursor: Any) -> Any:
        """Check and convert counts of accepted tokens, at most the drafted tokens in the slots' cursor words."""

    def inputs(
        self, given: Tokens, slots: Any, out: Any, several: bool, capacity: int, lengths: Any = None
    ) -> tuple[Tokens, Any, Any]:
        """Check and convert a step's arguments: tokens ``(batch, tokens, ...)``, slots, and the array to be written.

        `several` says that the caller's arrays have a tokens axis. `lengths` are a result of `lengths`: tokens past
        them may hold anything.
        """

    def states(self, state: Any, slots: Any) -> Any:
        """Check and convert states to be loaded."""

    def host_slots(self, slots: Any, batch: int | None, capacity: int) -> npt.NDArray[np.int64]:
        """Check slots like `slots`, and return them on the host; -1 is padding."""

    def fetch(self, array: Any, slots: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Copy some slots of the engine's memory to the host; bfloat16 as uint16 bits."""

    def store(self, array: Any, slots: npt.NDArray[np.int64], rows: npt.NDArray[Any]) -> None:
        """Write rows of `fetch` to some slots of the engine's memory."""

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

    direct: Any
    """Fast path for a step of one token, or None. It takes q, k, v, g, beta, out and slots, and returns the outputs,
    or None for a call that it declines."""

    def call(self, *arrays: Any) -> Context:
        """Begin a call, on the stream of the first array on the engine's device."""

    def view(self, state: Any) -> Any:
        """View of an engine's own array for the caller, read-only where that is possible."""


class Engine(Protocol):
    """A backend's memory and arithmetic for one head.

    All arrays are the backend's own (on ``cuda`` pointers) and already checked. On the host they are C-contiguous,
    slots are unique, in range, or -1 for padding rows, and counts of tokens are in range. On ``cuda``, slots and
    counts on the device are not checked yet.
    """

    arrays: Any
    """The engine's `Arrays`."""

    @property
    def state(self) -> Any:
        """``(slots, heads, V, K)``: states as of each slot's last flush; exact, or the system's approximation."""

    @property
    def position(self) -> Any:
        """``(slots,)`` int32: tokens buffered since each slot's last flush, without drafts."""

    @property
    def window(self) -> int:
        """Tokens of a window (W); 1 if every token writes the state.

        The engine of a plan with refreshes flushes every F tokens, a multiple of W. Without refreshes, F is W.
        """

    def warmup(self, activation_dtype: str | None = None, drafts: bool = False) -> None:
        """Compile all kernels, those of drafts on request; engines with one activation type ignore the type."""

    def step(self, tokens: Tokens, slots: Any, out: Any) -> None:
        """Run ``(batch, tokens, ...)`` inputs, token by token, and write ``out (batch, tokens, heads, V)``.

        Drafts of the slots are dropped first. A token whose slot is due, or at position F - 1, flushes the slot. Any
        other token that ends a window refreshes the slot's sketch after the token has read. Then the clock advances by
        the same rule as a slot. When the clock is at F - 1, the clock and all slots of the call become due. A call
        without rows does nothing.
        """

    def load_state(self, state: Any, slots: Any) -> None:
        """Set states ``(batch, heads, V, K)``, and begin windows as `adopt` does. `state` may be the head's own."""

    def flush(self, slots: Any) -> None:
        """Fold the slots' buffered tokens into their states, and begin windows as `adopt` does."""

    def reset(self, slots: Any) -> None:
        """Clear the slots: zero state, empty ring."""


class ExactEngine(Engine, Protocol):
    """The engine of a head with exact states.

    The constructor takes these settings by name, as far as the engine supports them: ``state_dtype``, ``memory`` (a
    mapping from names of parts to the caller's arrays), ``phase``, ``drafts``; on ``cuda`` also ``pad_slot``.
    """

    @property
    def parts(self) -> tuple[SlotPart, ...]:
        """All memory of a slot."""

    @property
    def memory(self) -> dict[str, Any]:
        """Memory of each part by name, ``(slots, *shape)``."""

    @property
    def drafts(self) -> int:
        """Most tokens of a draft: ``min(8, W - 1)`` with a window, else the constructor's ``drafts``."""

    @staticmethod
    def parts_of(*args: Any, **settings: Any) -> tuple[SlotPart, ...]:
        """Return `parts` of an engine of these constructor arguments (without the number of slots and the memory)."""

    def draft(self, tokens: Tokens, lengths: Any, slots: Any, out: Any) -> None:
        """Decode drafts ``(batch, tokens, ...)``, ``lengths[i]`` tokens of row i; outputs past the lengths are zeros.

        First, each slot that is due, or has no room for its row's drafts below position F, folds its committed tokens.
        Each other slot without room for the drafts in its window (a window has room for W - 1 tokens) fills the window
        with no-op tokens, refreshes its sketch, and begins the next window. The drafts are buffered past the position.
        The position does not change; the cursor word holds the number of drafts. The virtual row drafts a row of full
        length.
        """

    def commit(self, accepted: Any, slots: Any) -> None:
        """Keep the first ``accepted[i]`` drafted tokens of each row's slot, at least 0 and at most all.

        The virtual row keeps all of its n drafts. If it then has no room for n more, it and the slots become due.
        """

    def adopt(self, slots: Any) -> None:
        """Begin windows on the states in memory: sketch the states, position 0, due if the clock is due."""

    def copy(self, src: Any, dst: Any) -> None:
        """Copy all parts of the slots, as if all were read before any is written; drafts are not copied.

        If either slot of a pair is padding, nothing is copied. Slots of `src` may repeat.
        """

    def rejoin(self, slots: Any) -> None:
        """Begin with slots that the caller has written: keep positions, drop drafts, due if the clock is due."""

    def left_out(self) -> int:
        """Return the number of rows left out since the last call, because their slot on the device was wrong.

        Waits for the device. Host engines return 0.
        """


def load_layer_inputs(device: int, heads: int, dim: int, types: tuple[str, ...]) -> tuple[Any, Any]:
    """Load the kernels between a PyTorch layer and a head on a GPU.

    Parameters
    ----------
    device : int
        Number of the GPU.
    heads, dim : int
        Heads of a row, and elements of a head.
    types : tuple of str
        Types of activations, of raw gates, of rates and skips, and of biases.

    Returns
    -------
    kernels : LayerInputs
        The kernels, see `sketchssm.cuda.layer_inputs`.
    stream : callable
        Returns the context in which they are launched on PyTorch's current stream.
    """
    import cupy

    from sketchssm.cuda.frameworks import TorchArrays
    from sketchssm.cuda.layer_inputs import LayerInputs

    with cupy.cuda.Device(device):
        return LayerInputs(heads, dim, types), TorchArrays(device).stream


def common_rank(layer: Layer, window: int, refreshed: bool = False) -> int:
    """Largest rank for which backend "cuda" has room on devices with 227 KB of shared memory (H100, H200, B200).

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    window : int
        Tokens from one sketch to the next.
    refreshed : bool, default False
        Whether sketches are refreshed between flushes, which takes more room.

    Returns
    -------
    int
        Columns for which flushes and refreshes of `ridge` and `exact` in 16 or 8 bits have room, at most min(K, V).
    """
    short, long = (REFRESHED_RANKS if refreshed else COMMON_RANKS)[layer.kind]
    return min(short if window <= 16 else long, layer.key_dim, layer.value_dim)


def load_engine(
    system: str,
    backend: str,
    *args: Any,
    gate: GateInput | None = None,
    activation_dtype: str | None = None,
    output_dtype: str | None = None,
    pad_slot: int = PAD_SLOT,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> tuple[str, Engine]:
    """Build the engine of a system on a backend.

    Parameters
    ----------
    system : str
        "standard", "replay", "sketch", "quantised", "copy" or "reduced".
    backend : {"auto", "reference", "cpu", "cuda"}
        Where to run; "auto" takes "cuda" if CuPy sees a device and the kernels support the layer, else "cpu".
    *args
        Passed to the engine.
    gate : GateInput, optional
        Gate of a layer whose tokens have raw gate inputs.
    activation_dtype, output_dtype : str, optional
        Types for an engine that computes on a device; see `SketchHead`.
    pad_slot : int, default -1
        The caller's slot number for padding.
    options : mapping, optional
        Passed to the engine if they differ from the defaults in `OPTIONS`.
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
        If the backend is unknown or does not have the system, or a type is given for a backend on the host.
    UnsupportedError
        If the backend was named and has no kernels for the layer, plan or options, or needs a package or a device
        that this machine does not have.

    Warns
    -----
    RuntimeWarning
        If "auto" takes "cpu" although there is a device, because the kernels do not support the layer or plan.
    """
    check_dtype_name(activation_dtype, "activation_dtype")
    check_dtype_name(output_dtype, "output_dtype")
    device = {"activation_dtype": activation_dtype, "output_dtype": output_dtype}
    options = {name: x for name, x in (options or {}).items() if x != OPTIONS[name]}
    if backend != "auto" and (backend, system) not in ENGINES:
        have = ["auto", *(b for b in BACKENDS if (b, system) in ENGINES)]
        raise ValueError(f"backend: expected one of {', '.join(have)} for {system}, got {backend!r}")
    why, device_lacks_kernels = f"the head was made with backend={backend!r}", False
    if backend in ("auto", "cuda"):
        why = _why_not_cuda(system)
        if not why:
            try:
                padding = {} if pad_slot == PAD_SLOT else {"pad_slot": pad_slot}
                make = _engine(system, "cuda", options | padding)
                engine = make(*args, gate=gate, **settings, **device, **options, **padding)
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
    engine = _engine(system, backend, options)(*args, **settings, **options)
    own = tuple(getattr(engine, "memory", {"state": engine.state}).values())
    engine.arrays = HostArrays(engine.arrays.dtype, None if gate is None else gate.log_decays, why, pad_slot, own)
    if device_lacks_kernels:
        warnings.warn(f"backend: 'auto' takes 'cpu': {why}", RuntimeWarning, stacklevel=4)
    return backend, engine


def load_parts(
    system: str,
    backend: str,
    *args: Any,
    gate: GateInput | None = None,
    activation_dtype: str | None = None,
    **settings: Any,
) -> tuple[SlotPart, ...]:
    """Describe the memory of a slot, without an engine.

    Parameters
    ----------
    system : str
        "standard", "replay" or "sketch".
    backend : {"auto", "reference", "cpu", "cuda"}
        Where the engine would run; "auto" takes "cuda" if CuPy sees a device.
    *args
        Arguments of the engine apart from the number of slots.
    gate : GateInput, optional
        Gate of a layer whose tokens have raw gate inputs.
    activation_dtype : str, optional
        Type for an engine that computes on a device.
    **settings
        Passed to the engine's ``parts_of``.

    Returns
    -------
    tuple of SlotPart
        All parts of a slot.

    Raises
    ------
    ValueError
        If the backend is unknown, or a type is given for a backend on the host.
    UnsupportedError
        If the backend has no kernels for the layer, plan or settings.
    """
    if backend == "auto":
        backend = "cpu" if _why_not_cuda(system) else "cuda"
    if (backend, system) not in ENGINES:
        raise ValueError(f"backend: expected one of auto, {', '.join(BACKENDS)}, got {backend!r}")
    check_dtype_name(activation_dtype, "activation_dtype")
    device: dict[str, Any] = {}
    if backend == "cuda":
        device = {"gate": gate, "activation_dtype": activation_dtype}
    elif activation_dtype is not None:
        raise ValueError(f"activation_dtype: expected None on backend {backend!r}, as only 'cuda' has it")
    describe = getattr(_engine(system, backend, {}), "parts_of", None)
    if describe is None:
        raise UnsupportedError(f"parts: backend {backend!r} does not describe its memory")
    parts: tuple[SlotPart, ...] = describe(*args, **settings, **device)
    return parts


def _why_not_cuda(system: str) -> str:
    """Reason why no engine of a system can run on this machine's CUDA backend; empty if one can."""
    if ("cuda", system) not in ENGINES:
        return f"there are no CUDA kernels for {system}"
    from sketchssm.cuda import missing

    return missing()


def _engine(system: str, backend: str, options: Mapping[str, Any]) -> Any:
    """Find the class of an engine that supports these options."""
    module, attribute = ENGINES[backend, system].split(":")
    engine = getattr(import_module(module), attribute)
    if options:
        makers = [base.__init__ for base in engine.__mro__ if "__init__" in vars(base)]
        known = {name for maker in makers for name in inspect.signature(maker).parameters}
        for name in options:
            if name not in known:
                raise UnsupportedError(f"{name}: backend {backend!r} does not support it for {system}")
    return engine


def check_dtype_name(value: Any, name: str) -> None:
    """Check that an argument is None or names a type of `ACTIVATIONS`."""
    if value is not None and value not in ACTIVATIONS:
        raise ValueError(f"{name}: expected one of {', '.join(ACTIVATIONS)} or None, got {value!r}")
