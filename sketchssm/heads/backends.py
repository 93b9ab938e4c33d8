"""Which engine runs which system on which backend.

Engines are imported on first use, which keeps the import of the library cheap.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sketchssm.arrays.host_arrays import HostArrays
from sketchssm.arrays.interop import host_type
from sketchssm.heads.engine import Engine
from sketchssm.layer.recurrence import PAD_SLOT, Layer, check_instance
from sketchssm.layer.slots import SlotPart

if TYPE_CHECKING:
    from sketchssm.arrays.gates import GateInput

__all__ = [
    "ACTIVATIONS",
    "BACKENDS",
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
    ("reference", "reduced"): "sketchssm.study.baselines.reduced:reference_engine",
    ("cpu", "standard"): "sketchssm.cpu.standard:StandardEngine",
    ("cpu", "replay"): "sketchssm.cpu.replay:ReplayEngine",
    ("cpu", "sketch"): "sketchssm.cpu.sketch:SketchEngine",
    ("cpu", "quantised"): "sketchssm.cpu.quantised:QuantisedEngine",
    ("cpu", "copy"): "sketchssm.cpu.quantised:CopyEngine",
    ("cpu", "reduced"): "sketchssm.study.baselines.reduced:cpu_engine",
    ("cuda", "standard"): "sketchssm.cuda.standard:StandardEngine",
    ("cuda", "replay"): "sketchssm.cuda.replay:ReplayEngine",
    ("cuda", "sketch"): "sketchssm.cuda.sketch:SketchEngine",
}


OPTIONS = {"state_dtype": "float32", "memory": None, "phase": None, "drafts": 0, "deferred": False}
"""Settings of engines that need not support them, with their defaults."""

COMMON_RANKS = {"mamba2": (70, 61), "gdn": (70, 61), "kda": (61, 56)}
"""Ranks of `common_rank` for backend "cuda" at K = V = 128, with windows of up to 16 and of 32."""


class UnsupportedError(ValueError):
    """The machine can't run a backend, or the backend has no kernels for a layer or plan."""


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


def common_rank(layer: Layer, window: int) -> int:
    """A large rank for which backend "cuda" has room on devices with 227 KB of shared memory (H100, H200, B200).

    Calibrations take it as the default of `rank_max`, so that a plan made on any machine runs on these devices.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    window : int
        Tokens from one flush to the next.

    Returns
    -------
    int
        Columns for which flushes of `ridge` and `exact` in 16 or 8 bits have room, at most min(K, V).
    """
    short, long = COMMON_RANKS[layer.kind]
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
    if system != "sketch":
        check_instance("layer", args[0], Layer)
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
    stored = None if options.get("state_dtype") in (None, "float32") else host_type(options["state_dtype"])
    log_decays = None if gate is None else gate.log_decays
    engine.arrays = HostArrays(engine.arrays.dtype, log_decays, why, pad_slot, own, stored)
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
    if system != "sketch":
        check_instance("layer", args[0], Layer)
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
