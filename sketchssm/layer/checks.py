"""Checks of single arguments: numbers, words, classes and sequences."""

from __future__ import annotations

import numbers
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

ACTIVATIONS = ("bfloat16", "float16", "float32")
"""Types in which a device may hold q, k, v and outputs."""


class UnsupportedError(ValueError):
    """The machine can't run a backend, or the backend has no kernels for a layer or plan."""


def check_choice(name: str, value: Any, choices: Collection[str], more: str = "") -> None:
    """Check that an argument is one of some words; `more` ends the list of the words in the message."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}{more}, got {value!r}")


def check_integer(name: str, value: Any, least: int, most: int, more: str = "") -> int:
    """Check and return an integer of a range; `more` ends the range in the message."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= most:
        raise ValueError(f"{name}: expected an integer from {least} to {most}{more}, got {value!r}")
    return int(value)


def check_instance(name: str, value: Any, kind: type) -> None:
    """Check the class of an argument; TypeError if it is another one."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected a {kind.__name__}, got {type(value).__name__}")


def check_number(name: str, value: Any, expected: str, fits: Callable[[Any], bool]) -> None:
    """Check that an argument is a real number that `fits`; `expected` is the range in words."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not fits(value):
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


def check_size(name: str, value: Any) -> int:
    """Check and return a positive integer."""
    check_number(name, value, "a positive integer", lambda size: isinstance(size, int | np.integer) and bool(size > 0))
    return int(value)


def check_seed(seed: Any) -> None:
    """Check the seed of a generator; ValueError unless it is an integer of at least 0."""
    check_number("seed", seed, "an integer of at least 0", lambda x: isinstance(x, int | np.integer) and bool(x >= 0))


def check_bool(name: str, value: Any) -> None:
    """Check that an argument is True or False."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}: expected a bool, got {value!r}")


def no_memory(part: Any, num_slots: int) -> MemoryError:
    """Return the error of a machine that has no room for a part of all slots."""
    return MemoryError(f"num_slots: no memory for {num_slots} slots with {part.name} of {part.shape} {part.dtype}")


def as_array(name: str, value: Any, dtype: Any = None) -> npt.NDArray[Any]:
    """Return an array of an argument on the host, or raise a `ValueError` that names the argument."""
    try:
        return np.asarray(value, dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}: expected an array, got {value!r}") from error


def check_items(name: str, value: Any, items: str) -> tuple[Any, ...]:
    """Check and return the items of a sequence, no string or mapping; `items` says what they are, for the message."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        raise TypeError(f"{name}: expected a sequence of {items}, got {reprlib.repr(value)}")
    return tuple(value)


def check_dtype_name(value: Any, name: str) -> None:
    """Check that an argument is None or names a type of `ACTIVATIONS`."""
    if value is not None:
        check_choice(name, value, ACTIVATIONS, " or None")
