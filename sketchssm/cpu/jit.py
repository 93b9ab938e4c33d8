"""Compile kernels with Numba and keep them on disk."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numba
from llvmlite.binding import parse_assembly
from numba import types
from numba.core import caching
from numba.core.registry import cpu_target

from sketchssm.layer.checks import UnsupportedError
from sketchssm.plans.files import source_digest

if numba.config.DISABLE_JIT:
    raise UnsupportedError("NUMBA_DISABLE_JIT: expected 0, as backend 'cpu' is compiled code, got 1")
WIDEN = "define <8 x float> @f(<8 x half> %x) { %y = fpext <8 x half> %x to <8 x float> ret <8 x float> %y }"
if "call" in cpu_target.target_context.codegen()._tm.emit_assembly(parse_assembly(WIDEN)):  # functions not linked
    raise UnsupportedError("backend: 'cpu' needs instructions that convert float16 (F16C); 'reference' runs without")

SOURCES = (
    "cpu/*.py",
    "layer/recurrence.py",
    "layer/slots.py",
    "layer/coefficients.py",
    "layer/formats.py",
    "plans/plan.py",
    "reference/maps.py",
)
"""Files that machine code depends on: modules with kernels, and modules whose constants kernels use."""

OPTIONS = {"error_model": "numpy", "nogil": True}
"""``error_model`` keeps exception paths out of inner loops; ``nogil`` lets threads run side by side."""


class ReadOnlyLocator(caching.InTreeCacheLocator):  # type: ignore[misc]  # the base is untyped
    """The cache beside the sources, writable or not."""

    def ensure_cache_path(self) -> None:
        """Do not test for a writable folder; saving does."""


class CacheFiles(caching.CompileResultCacheImpl):  # type: ignore[misc]
    """Folder of Numba's compiled functions; beside the sources if no folder can be written."""

    _locator_classes = (*caching.CacheImpl._locator_classes, ReadOnlyLocator)


class IndexFile(caching.IndexDataCacheFile):  # type: ignore[misc]
    """Index of a kernel's compiled files; a damaged one counts as empty, and the next save replaces it."""

    def _load_index(self) -> dict[Any, str]:
        try:
            return dict(super()._load_index())
        except Exception:  # a damaged pickle fails in many ways
            return {}


class PackageCache(caching.FunctionCache):  # type: ignore[misc]
    """Numba's cache on disk, valid for one text of all kernels.

    Numba compares only the kernel's own file, and would miss an edit or an upgrade of a function that the kernel
    calls. A cache beside the sources is read even if it cannot be written. What is damaged is compiled again. If
    saving fails, the process gives one warning and continues with the kernels that it has compiled.
    """

    _impl_class = CacheFiles
    _cache_file: Any

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        beside = str(Path(function.__code__.co_filename).parent / "__pycache__")
        base, digest = self._impl.filename_base, source_digest(*SOURCES)
        self._places = [IndexFile(folder, base, digest) for folder in dict.fromkeys([self._cache_path, beside])]
        self._cache_file = self._places[0]

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load a kernel; None if there is no readable one."""
        for files in self._places:
            self._cache_file = files
            try:
                found = super().load_overload(sig, target_context)
            except Exception:  # a damaged pickle fails in many ways
                continue
            finally:
                self._cache_file = self._places[0]
            if found is not None:
                return found
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save a kernel, or warn once that kernels cannot be saved."""
        global _warned  # noqa: PLW0603
        try:
            super().save_overload(sig, data)
        except OSError as error:
            if not _warned:
                _warned = True
                warnings.warn(
                    f"compiled CPU kernels cannot be kept in {self._cache_path} ({error.strerror or error}), so every "
                    "process compiles them anew; NUMBA_CACHE_DIR names another folder",
                    RuntimeWarning,
                    stacklevel=2,
                )


_warned = False


def njit(function: Callable[..., Any], inline: str = "never") -> Any:
    """Compile a piece of a kernel; `inline` tells whether Numba pastes it into its caller.

    Numba would compile a function once for every constant that it is called with. Here arguments have plain types.
    """
    dispatcher = numba.njit(inline=inline, **OPTIONS)(function)
    template = dispatcher.get_call_template

    def plain(args: tuple[Any, ...], kws: dict[str, Any]) -> Any:
        return template(tuple(map(types.unliteral, args)), {name: types.unliteral(kind) for name, kind in kws.items()})

    dispatcher.get_call_template = plain
    return dispatcher


def pasted(function: Callable[..., Any]) -> Any:
    """Compile a piece of a kernel as part of its only caller, which takes less time than compiling it separately."""
    return njit(function, inline="always")


def entry(function: Callable[..., Any]) -> Any:
    """Compile a function that Python calls, at its first call, or load it from disk."""
    dispatcher = numba.njit(**OPTIONS)(function)
    dispatcher._cache = PackageCache(function)
    return dispatcher


class Kernel:
    """A function ``(context, areas, worker)`` that threads run; it returns nothing and raises nothing.

    It takes the addresses of two records and a worker's number, and is compiled, or loaded from disk, when `address`
    is first read.
    """

    def __init__(self, function: Callable[[Any, Any, int], None]) -> None:
        self.dispatcher = entry(function)

    @cached_property
    def address(self) -> int:
        """Address of the machine code: a C function of three 64-bit integers."""
        signature = types.void(types.intp, types.intp, types.intp)
        self.dispatcher.compile(signature)
        compiled = self.dispatcher.overloads[signature.args]
        return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name))
