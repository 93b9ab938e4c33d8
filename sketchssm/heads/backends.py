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
from sketchssm.arrays.options import EngineOptions
from sketchssm.heads.engine import Engine
from sketchssm.layer.checks import UnsupportedError, check_dtype_name
from sketchssm.layer.recurrence import PAD_SLOT, Layer, check_choice, check_instance
from sketchssm.layer.slots import SlotPart

if TYPE_CHECKING:
    from sketchssm.arrays.gates import GateInput

__all__ = ["BACKENDS", "load_engine", "load_parts"]

BACKENDS = ("reference", "cpu", "cuda")

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
    ("cuda", "replay"): "sketchssm.cuda.window:ReplayEngine",
    ("cuda", "sketch"): "sketchssm.cuda.window:SketchEngine",
}


OPTIONS = {"state_dtype": "float32", "memory": None, "phase": None, "drafts": 0}
"""Settings of engines that need not support them, with their defaults."""


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
    device: dict[str, Any] = {"activation_dtype": activation_dtype, "output_dtype": output_dtype}
    options = {name: x for name, x in (options or {}).items() if x != OPTIONS[name]}
    check_choice("backend", backend, ["auto", *(b for b in BACKENDS if (b, system) in ENGINES)], f" for {system}")
    why, device_lacks_kernels = f"the head was made with backend={backend!r}", False
    if backend in ("auto", "cuda"):
        why = _why_not_cuda(system)
        if not why:
            try:
                make = _engine(system, "cuda", {})
                given = EngineOptions(gate=gate, pad_slot=pad_slot, **device, **options)
                for name in given.changed():
                    if name not in make.supports:
                        raise UnsupportedError(f"{name}: backend 'cuda' does not support it for {system}")
                engine = make(*args, **settings, options=given)
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
    check_choice("backend", backend, ("auto", *BACKENDS))
    if backend == "auto":
        backend = "cpu" if _why_not_cuda(system) else "cuda"
    check_dtype_name(activation_dtype, "activation_dtype")
    device: dict[str, Any] = {}
    if backend == "cuda":
        engine = _engine(system, backend, {})
        names = ("state_dtype", "drafts")
        options = {name: settings.pop(name) for name in names if name in settings}
        given = EngineOptions(gate=gate, activation_dtype=activation_dtype, **options)
        described: tuple[SlotPart, ...] = engine.parts_of(*args, **settings, options=given)
        return described
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
