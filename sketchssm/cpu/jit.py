"""Compiling kernels with Numba, and keeping what was compiled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numba
from numba.core.caching import FunctionCache

from sketchssm.files import source_digest

__all__ = ["njit", "parallel"]

SOURCES = ("cpu/*.py", "recurrence.py", "plan.py", "reference/maps.py")
"""All that a kernel's machine code comes from: modules with kernels, and those whose constants they take."""


class PackageCache(FunctionCache):  # type: ignore[misc]  # the base is untyped
    """Numba's cache on disk, valid for one text of the whole package.

    Numba goes by a kernel's own file, and so would miss an edit, or an upgrade, of another kernel that it calls.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file._source_stamp = source_digest(*SOURCES)


def njit(function: Callable[..., Any]) -> Any:
    """Compile a piece of a kernel; error_model numpy keeps exception paths out of inner loops."""
    return _cached(numba.njit(error_model="numpy", nogil=True)(function))


def parallel(function: Callable[..., Any]) -> Any:
    """Compile a kernel whose `numba.prange` loop spreads over the threads."""
    return _cached(numba.njit(error_model="numpy", nogil=True, parallel=True)(function))


def _cached(dispatcher: Any) -> Any:
    # no folder to write to, or a Numba that keeps its cache otherwise: every process compiles for itself
    with suppress(RuntimeError, AttributeError):
        dispatcher._cache = PackageCache(dispatcher.py_func)
    return dispatcher
