"""Compiles the kernels: one module per operation and variant, from sources with their headers in place."""

from __future__ import annotations

import os
import re
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from sketchssm.cuda.constants import header

STANDARD = "-std=c++17"

CONSTANTS = "constants.cuh"
"""Header that `sketchssm.cuda.constants` writes."""

UNCACHED = "CUPY_CACHE_IN_MEMORY"
"""Environment variable that keeps CuPy from writing compiled kernels to disk, read at every compilation."""


class KernelCompileError(RuntimeError):
    """A kernel does not compile; the message has options, the compiler's log and the folder of the source."""


class Variant:
    """One operation with all constants fixed.

    `operation` is the name of a kernel file at the top of `cuda_src/`, `constants` are those of the preprocessor.
    """

    def __init__(self, operation: str, constants: dict[str, int]) -> None:
        self.operation = operation
        self.constants = tuple(sorted(constants.items()))

    @property
    def options(self) -> tuple[str, ...]:
        """Compiler options of the variant; SKETCHSSM_CUDA_OPTIONS adds some, such as -lineinfo for a profiler."""
        extra = os.environ.get("SKETCHSSM_CUDA_OPTIONS", "").split()
        return (STANDARD, *(f"-D{name}={value}" for name, value in self.constants), *extra)

    def __hash__(self) -> int:
        return hash((self.operation, self.constants))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Variant) and (self.operation, self.constants) == (other.operation, other.constants)


def _source_folder() -> Any:
    """Sources of the installed package, or else of the checkout; another package may have a folder of this name."""
    installed = resources.files("sketchssm") / "cuda_src"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "cuda_src"


@cache
def source_text(operation: str) -> str:
    """Source of an operation with its headers inserted, each once; ``#include`` names a header from `cuda_src/` on.

    CuPy keys its cache by the source text, so the text must change when a header changes.
    """
    folder, seen = _source_folder(), set[str]()

    def expand(name: str) -> str:
        lines = [f'#line 1 "{name}"']
        text = header() if name == CONSTANTS else (folder / name).read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), 1):
            match = re.fullmatch(r'#include "([^"]+)"', line.strip())
            if match is None:
                lines.append("" if line.strip() == "#pragma once" else line)
            elif match[1] not in seen:
                seen.add(match[1])
                lines += [expand(match[1]), f'#line {number + 1} "{name}"']
            else:
                lines.append("")
        return "\n".join(lines)

    return expand(f"{operation}.cu") + "\n"


_modules: dict[tuple[int, Variant], Any] = {}
_lock = threading.Lock()


def load(variant: Variant, *, late: bool = False) -> Any:
    """Compiled module of a variant on the current device; KernelCompileError if the compiler rejects the source.

    With `late`, warn if the module is not loaded yet, because a step is waiting for it.
    """
    import cupy

    key = (cupy.cuda.Device().id, variant)
    module = _modules.get(key)
    if module is not None:
        return module
    if late:
        warnings.warn(
            f"loading kernel {variant.operation} in the middle of decoding, and compiling it unless it is cached; "
            "call warmup() before the first step",
            RuntimeWarning,
            stacklevel=5,  # the caller of a head's step
        )
    try:
        module = _compiled(variant)
    except cupy.cuda.compiler.CompileException as error:
        raise KernelCompileError(
            f"{variant.operation}.cu (in {_source_folder()}) did not compile with {' '.join(variant.options)}\n{error}"
        ) from error
    with _lock:
        return _modules.setdefault(key, module)


def _compiled(variant: Variant) -> Any:
    """Compile a variant; without CuPy's cache on disk if it can't be written."""
    import cupy

    def compiled() -> Any:
        module = cupy.RawModule(code=source_text(variant.operation), options=variant.options)
        module.compile()
        return module

    try:
        return compiled()
    except OSError as error:
        with _lock:
            if os.environ.get(UNCACHED) != "1":
                os.environ[UNCACHED] = "1"
                warnings.warn(
                    f"CuPy can't keep compiled kernels on disk ({error}); they are compiled anew in every process, "
                    f"and {UNCACHED}=1 is set for this one",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return compiled()


def size_of(module: Any, name: str) -> int:
    """An int32 constant of a module."""
    import cupy

    return int(cupy.ndarray((1,), np.int32, module.get_global(name)).get()[0])


def warmup(variants: list[Variant]) -> None:
    """Compile several variants at once, in threads."""
    import cupy

    device = cupy.cuda.Device()

    def one(variant: Variant) -> None:
        with device:
            load(variant)

    with ThreadPoolExecutor(max_workers=max(1, len(variants))) as pool:
        list(pool.map(one, variants))
