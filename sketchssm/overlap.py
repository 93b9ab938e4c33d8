"""Scopes in which captured graphs run deferred flushes beside later kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

__all__ = ["current_scope", "overlap_flushes"]

Join = Callable[[], None]
"""Lets a step's stream wait for the step's flush."""

_thread = threading.local()


@contextmanager
def overlap_flushes() -> Iterator[None]:
    """Let deferred flushes of this thread's steps run beside later kernels; the end of the scope joins them.

    For heads with ``deferred=True``, while a CUDA graph is captured: a step's flush runs on a stream of the head, and
    the head's next call waits for it. At the end of the scope the streams of the steps wait for all flushes, so a
    capture must end after the scope. Outside of captures, outside of scopes and on the other backends, flushes run in
    order. The results are the same.

    Yields
    ------
    None
        Nothing.

    Examples
    --------
    >>> import sketchssm as ss
    >>> with ss.overlap_flushes():  # doctest: +SKIP
    ...     for head, token in zip(heads, tokens):
    ...         head.step(*token, slots=slots, out=out)
    """
    outer = current_scope()
    joins: list[Join] = []
    _thread.joins = joins
    try:
        yield
    except BaseException:
        for join in joins:
            with suppress(Exception):  # the capture may have failed, which the caller's error explains
                join()
        raise
    else:
        for join in joins:
            join()
    finally:
        _thread.joins = outer


def current_scope() -> list[Join] | None:
    """Return what the end of this thread's innermost scope calls, or None outside of scopes."""
    joins: list[Join] | None = getattr(_thread, "joins", None)
    return joins
