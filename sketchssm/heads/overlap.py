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
    """Scope in which a captured CUDA graph runs deferred flushes beside later kernels.

    The scope is for heads with ``deferred=True``. In a capture within the scope, the flush of a step runs on a stream
    of the head, and the head's next call waits for the flush. At the end of the scope, also after an exception, the
    streams of the steps wait for their flushes. So the scope must end before the capture ends.

    The scope has no effect on other heads, outside of captures, on the host backends, and on steps of other threads.
    Flushes then run in order, with the same results. Scopes may be nested.

    Yields
    ------
    None
        Nothing.

    Examples
    --------
    >>> import sketchssm as ss
    >>> with torch.cuda.graph(graph), ss.overlap_flushes():  # doctest: +SKIP
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
    """Return the functions that the end of this thread's innermost scope calls; None outside of scopes."""
    joins: list[Join] | None = getattr(_thread, "joins", None)
    return joins
