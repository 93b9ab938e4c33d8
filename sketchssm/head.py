"""Decode heads: all heads of one layer, for all slots, behind one interface.

`DecodeHead` is what every system shares: it checks a call's arguments before anything is written, takes arrays of
any framework, and gives the caller's kind of array back. What a system does with a token is its engine's affair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sketchssm import interop
from sketchssm.backends import Engine, load_engine
from sketchssm.recurrence import Layer, Tokens, check_gates, check_slots, check_state, check_tokens

if TYPE_CHECKING:
    from sketchssm.plan import SketchPlan

__all__ = ["DecodeHead", "SketchHead"]


class DecodeHead:
    """Common interface of every decode system; make one of its subclasses instead.

    Attributes
    ----------
    layer : Layer
        Kind and shape.
    slots : int
        Number of state slots.
    backend : str
        Backend in use.
    """

    def __init__(self, layer: Layer, slots: int, backend: str, engine: Engine) -> None:
        self.layer = layer
        self.slots = slots
        self.backend = backend
        self._engine = engine

    @property
    def state(self) -> npt.NDArray[Any]:
        """States as of each slot's last flush, ``(slots, heads, V, K)``: exact, and a read-only view, not a copy.

        Of heads that approximate the state itself it is what they have in its place, and may be a copy.
        """
        view = self._engine.state.view()
        view.flags.writeable = False
        return view

    @property
    def position(self) -> npt.NDArray[np.int32]:
        """Tokens that each slot has buffered since its last flush, ``(slots,)``."""
        return self._engine.position.copy()

    def step(self, q: Any, k: Any, v: Any, g: Any, beta: Any = None, *, slots: Any = None, out: Any = None) -> Any:
        """Decode one token, or several in order, for each row of a batch.

        Parameters
        ----------
        q, k : array, (batch, [tokens,] key_heads, K)
            Queries and keys, normalised and scaled.
        v : array, (batch, [tokens,] heads, V)
            Values (for mamba2 with dt folded in).
        g : array, (batch, [tokens,] heads) or, for kda, (batch, [tokens,] heads, K)
            Log-decays, <= 0; -inf forgets all.
        beta : array, (batch, [tokens,] heads), optional
            Write gates; None for mamba2.
        slots : array of int, (batch,), optional
            State slot of each row, each at most once; -1 is padding. Default: row i uses slot i.
        out : array, optional
            Writable array of the output's shape to fill and return.

        Returns
        -------
        array, (batch, [tokens,] heads, V)
            Outputs: v's kind of array and dtype, or `out`. Rows of slot -1 are zeros.

        Raises
        ------
        ValueError
            Naming the argument, before any state is touched: a wrong shape, a gate above 0 or NaN, a slot out of
            range or named twice.
        TypeError
            If an argument is not a real floating-point array.
        """
        several = check_tokens(self.layer, q, k, v, g, beta)
        batch = v.shape[0]
        index = check_slots(None if slots is None else interop.to_host(slots, "slots"), batch, self.slots)
        if out is not None:
            interop.check_out(out, tuple(v.shape))
        given = Tokens(q, k, v, g, beta)
        host = [None if x is None else self._take(x, name) for name, x in given._asdict().items()]
        tokens = Tokens(*(x if x is None or several else x[:, None] for x in host))
        live = index >= 0 if (index < 0).any() else slice(None)
        check_gates(tokens.g[live], None if tokens.beta is None else tokens.beta[live])
        result = np.empty(tokens.v.shape, dtype=self._engine.dtype)
        self._engine.step(tokens, index, result)
        return interop.from_host(result if several else result[:, 0], like=v, out=out)

    def load_state(self, state: Any, slots: Any = None) -> None:
        """Set the states of some slots, such as those a prefill ends with; what they had buffered is dropped.

        Parameters
        ----------
        state : array, (batch, heads, V, K)
            States, K last.
        slots : array of int, (batch,), optional
            Slot of each row; -1 skips a row. Default: row i goes to slot i.

        Raises
        ------
        ValueError
            If the shape does not fit, a state is not finite, or a slot is out of range or named twice.
        """
        check_state(self.layer, state)
        index = check_slots(None if slots is None else interop.to_host(slots, "slots"), state.shape[0], self.slots)
        host = self._take(state, "state")
        if not np.isfinite(host[index >= 0]).all():
            raise ValueError("state: expected finite numbers, got NaN or infinity")
        self._engine.load_state(host, index)

    def flush(self, slots: Any = None) -> None:
        """Fold what some slots have buffered into their states now, whatever their window position.

        Parameters
        ----------
        slots : array of int, optional
            Which slots; default all.
        """
        self._engine.flush(self._chosen(slots))

    def reset(self, slots: Any = None) -> None:
        """Make some slots as new: zero state, sketch, ring and cursor, whatever they held.

        Parameters
        ----------
        slots : array of int, optional
            Which slots; default all.
        """
        self._engine.reset(self._chosen(slots))

    def _chosen(self, slots: Any) -> npt.NDArray[np.int64]:
        if slots is None:
            return np.arange(self.slots, dtype=np.int64)
        host = np.atleast_1d(interop.to_host(slots, "slots"))
        return check_slots(host, host.shape[0], self.slots)

    def _take(self, array: Any, name: str) -> npt.NDArray[Any]:
        """The caller's array on the host, contiguous and in the engine's type; no copy where none is needed."""
        host = interop.to_host(array, name)
        if not interop.is_real(host.dtype):
            raise TypeError(f"{name}: expected a real floating-point array, got dtype {host.dtype}")
        return np.ascontiguousarray(host, dtype=self._engine.dtype)


def check_capacity(slots: Any) -> int:
    """Check a head's slot count."""
    if isinstance(slots, bool) or not isinstance(slots, int | np.integer) or slots < 1:
        raise ValueError(f"slots: expected a positive integer, got {slots!r}")
    return int(slots)


class SketchHead(DecodeHead):
    """Exact states, written once a window, and read through their sketches in between (algorithm 1).

    Parameters
    ----------
    plan : SketchPlan
        Bases, ranks and settings of the layer.
    slots : int
        Number of state slots.
    backend : {"auto", "reference", "cpu"}, default "auto"
        Where to run.
    sketch_dtype : {"bfloat16", "float32"}, default "bfloat16"
        How sketches and coefficient maps are stored; `reference` always keeps float64.

    Raises
    ------
    ValueError
        If an argument is out of range.
    """

    def __init__(self, plan: SketchPlan, slots: int, backend: str = "auto", *, sketch_dtype: str = "bfloat16") -> None:
        if sketch_dtype not in ("bfloat16", "float32"):
            raise ValueError(f"sketch_dtype: expected 'bfloat16' or 'float32', got {sketch_dtype!r}")
        capacity = check_capacity(slots)
        name, engine = load_engine("sketch", backend, plan, capacity, sketch_dtype=sketch_dtype)
        super().__init__(plan.layer, capacity, name, engine)
        self.plan = plan
