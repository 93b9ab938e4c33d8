"""How a call's arrays reach an engine that computes on the host, and how its results go back."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm.interop import from_host, is_on_device, is_real, to_host, to_type
from sketchssm.recurrence import Tokens, check_gates, check_slots

__all__ = ["HostArrays"]


class HostArrays:
    """Converts a call's arrays for an engine that computes on the host, and the engine's results for the caller.

    Parameters
    ----------
    dtype : dtype
        Type of the engine's states, inputs and outputs.
    log_decays : callable, optional
        Converts the argument g to log-decays. Default: g holds log-decays.
    why : str, default ""
        Why the head computes on the host, for the warning about arrays on a device.
    """

    def __init__(self, dtype: Any, log_decays: Callable[[Any], npt.NDArray[Any]] | None = None, why: str = "") -> None:
        self.dtype = np.dtype(dtype)
        self._log_decays = log_decays
        self._why, self._warned = why, False

    def call(self, *arrays: Any) -> HostArrays:
        """See `sketchssm.backends.Arrays`."""
        return self

    def __enter__(self) -> HostArrays:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def slots(self, slots: Any, batch: int | None, capacity: int) -> npt.NDArray[np.int64]:
        """See `sketchssm.backends.Call`."""
        host = None if slots is None else to_host(slots, "slots")
        if batch is None:
            host = np.arange(capacity) if host is None else np.atleast_1d(host)
            batch = host.shape[0]
        return check_slots(host, batch, capacity)

    def inputs(
        self, given: Tokens, slots: Any, out: Any, several: bool, capacity: int
    ) -> tuple[Tokens, npt.NDArray[np.int64], npt.NDArray[Any]]:
        """See `sketchssm.backends.Call`."""
        index = self.slots(slots, given.v.shape[0], capacity)
        self._note_device("v", given.v)
        live = index >= 0 if (index < 0).any() else slice(None)
        host = (None if x is None else self._take(x, name, live) for name, x in given._asdict().items())
        tokens = Tokens(*(x if x is None or several else x[:, None] for x in host))
        for name in ("beta",) if self._log_decays is not None else ("g", "beta"):
            if getattr(tokens, name) is not None:
                self.check(name, getattr(tokens, name)[live])
        shape = tokens.v.shape
        return tokens, index, out.reshape(shape) if self._fits(out, tokens) else np.empty(shape, dtype=self.dtype)

    def states(self, state: Any, slots: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """See `sketchssm.backends.Call`."""
        self._note_device("state", state)
        live = slots >= 0
        host = self._take(state, "state", live)
        self.check("state", host[live])
        return host

    def result(self, written: npt.NDArray[Any], v: Any, out: Any) -> Any:
        """See `sketchssm.backends.Call`."""
        if type(out) is np.ndarray and np.may_share_memory(written, out):
            return out
        return from_host(written.reshape(v.shape), like=v, out=out)

    def check(self, name: str, values: npt.NDArray[Any]) -> None:
        """Check the values of one argument, padding apart.

        Parameters
        ----------
        name : str
            The argument's name.
        values : ndarray
            The argument's rows, without padding.

        Raises
        ------
        ValueError
            If a log-decay is positive or NaN (the state would grow), a write gate or a state not finite.
        """
        check_gates(values if name == "g" else None, values if name == "beta" else None)
        if name == "state" and not np.isfinite(values).all():
            raise ValueError("state: expected finite numbers, got NaN or infinity")

    def view(self, state: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """See `sketchssm.backends.Arrays`."""
        view = state.view()
        view.flags.writeable = False
        return view

    def _note_device(self, name: str, array: Any) -> None:
        """Warn, once, that arrays on a device are copied."""
        if type(array) is np.ndarray or self._warned or not is_on_device(array):
            return
        self._warned = True
        warnings.warn(
            f"{name}: arrays on a device are copied to the host at every call, and results back, as the head computes "
            f"on the host: {self._why}",
            RuntimeWarning,
            stacklevel=4,  # the caller of a head's method
        )

    def _fits(self, out: Any, tokens: Tokens) -> bool:
        """Tell whether an engine can write the caller's array in place; it must share no memory with an input."""
        return (
            type(out) is np.ndarray
            and out.dtype == self.dtype
            and out.flags.carray
            and not any(x is not None and np.may_share_memory(out, x) for x in tokens)
        )

    def _take(self, array: Any, name: str, live: Any) -> npt.NDArray[Any]:
        """The caller's array on the host, contiguous and in the engine's type; no copy where none is needed."""
        host = to_host(array, name)
        if not is_real(host.dtype):
            raise TypeError(f"{name}: expected a real floating-point array, got dtype {host.dtype}")
        if name == "g" and self._log_decays is not None:
            with np.errstate(all="ignore"):  # of padding rows, and of numbers beyond the type's range
                return self._log_decays(host).astype(self.dtype)
        return to_type(host, self.dtype, name, live)
