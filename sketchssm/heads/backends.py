"""Which backend runs a head, and why: what "auto" means, and what is refused."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from sketchssm.arrays.options import DEFAULTS, EngineOptions
from sketchssm.heads.registry import BACKENDS, SKETCH, System
from sketchssm.layer.checks import UnsupportedError, check_choice, check_instance
from sketchssm.layer.recurrence import Layer
from sketchssm.layer.slots import SlotPart


def load_engine(
    system: System, backend: str, source: Any, num_slots: int, *args: Any, options: EngineOptions = DEFAULTS
) -> tuple[str, Any]:
    """Build the engine of a system on a backend: "auto" takes "cuda" if it can run the head here, else "cpu".

    `source`, the layer or the plan, `num_slots` and `args` are passed to the engine. Returns the name of the backend
    in use, and the engine. Raises ValueError if the backend is unknown or does not have the system, UnsupportedError
    if it was named and lacks a kernel, an option, a package or a device. Warns if "auto" takes "cpu" although there is
    a device.
    """
    if system is not SKETCH:  # whose head has checked the plan
        check_instance("layer", source, Layer)
    check_choice("backend", backend, ["auto", *system.engines], f" for {system.name}")
    why, refused = f"the head was made with backend={backend!r}", False
    if backend in ("auto", "cuda"):
        why = _why_not_cuda(system)
        if not why:
            try:
                engine = _engine(system, "cuda", options)(source, num_slots, *args, options=options)
                engine.fit()
                return "cuda", engine
            except UnsupportedError as error:
                if backend == "cuda":
                    raise
                why, refused = str(error), True
        if backend == "cuda":
            raise UnsupportedError(f"backend: 'cuda' can't run here: {why}")
        backend = "cpu"
    options = replace(options, why=why)
    engine = _engine(system, backend, options)(source, num_slots, *args, options=options)
    if refused:
        warnings.warn(f"backend: 'auto' takes 'cpu': {why}", RuntimeWarning, stacklevel=4)
    return backend, engine


def load_parts(
    system: System, backend: str, source: Any, *args: Any, options: EngineOptions = DEFAULTS
) -> tuple[SlotPart, ...]:
    """Describe the memory of a slot without an engine; arguments and errors as of `load_engine`.

    "auto" takes "cuda" if there is a device.
    """
    if system is not SKETCH:  # whose head has checked the plan
        check_instance("layer", source, Layer)
    check_choice("backend", backend, ("auto", *BACKENDS))
    if backend == "auto":
        backend = "cpu" if _why_not_cuda(system) else "cuda"
    parts: tuple[SlotPart, ...] = _engine(system, backend, options).parts_of(source, *args, options=options)
    return parts


def _why_not_cuda(system: System) -> str:
    """Reason why no engine of a system can run on this machine's CUDA backend; empty if one can."""
    if "cuda" not in system.engines:
        return f"there are no CUDA kernels for {system.name}"
    from sketchssm.cuda import missing

    return missing()


def _engine(system: System, backend: str, options: EngineOptions) -> Any:
    """The class of the engine, if it supports all options that differ from the defaults."""
    engine = system.engine(backend)
    for name, default in options.changed().items():
        if name not in engine.supports:
            having = ", ".join(repr(other) for other in system.engines if name in system.engine(other).supports)
            why = f" ({options.why})" if options.why else ""
            raise UnsupportedError(
                f"{name}: expected {default!r} on backend {backend!r}, as only {having} has it{why}"
            )
    return engine
