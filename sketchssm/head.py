"""Decode heads: all heads of one layer, for all slots, behind one interface.

`DecodeHead` is the part that all systems share: it checks a call's arguments before anything is written, takes arrays
of any framework, and returns the caller's kind of array. The engine does the arithmetic.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from sketchssm import interop
from sketchssm.backends import Arrays, Engine, check_dtype_name, load_engine
from sketchssm.recurrence import Layer, Tokens, check_state, check_tokens

if TYPE_CHECKING:
    from sketchssm.gates import GateInput
    from sketchssm.plan import SketchPlan

__all__ = ["DecodeHead", "SketchHead"]


class DecodeHead:
    """Common interface of every decode system; make one of its subclasses instead.

    A head is one object for all slots of one layer. Threads may share it: a call waits until the call of another
    thread has returned. A head can't be copied or pickled.

    On the ``cuda`` backend a head works on the device that is current when the head is made. A call runs on the
    current stream of the framework whose arrays it gets; a call without arrays, on that of the call before. Calls of
    one head must follow one another in stream order. After `warmup`, `step` and `flush` with slots on the device
    neither wait for the device nor allocate, so a graph can capture them. The same holds for `load_state` and `reset`
    where states are contiguous float32. The methods' docstrings name further conditions.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    num_slots : int
        Number of state slots.
    backend : str
        Backend in use.
    engine : Engine
        The backend's engine (`sketchssm.backends.Engine`), which owns the slots' memory.
    """

    def __init__(self, layer: Layer, num_slots: int, backend: str, engine: Engine) -> None:
        self.layer = layer
        self.num_slots = num_slots
        self.backend = backend
        self._engine = engine
        self._arrays: Arrays = engine.arrays
        self._seen: Any = None  # shapes of the inputs of the last call, and whether they have a tokens axis
        self._several = False
        self._lock = threading.Lock()  # engines keep one call's arguments in memory of their own

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled: the engine's memory has addresses in it."""
        name = type(self).__name__
        raise TypeError(
            f"{name}: a head can't be copied or pickled; make a new {name} with the same arguments, "
            "then head.flush() and new.load_state(head.state)"
        )

    @property
    def state(self) -> Any:
        """States as of each slot's last flush, ``(slots, heads, V, K)``: exact, and the memory itself, not a copy.

        A read-only NumPy view, or on ``cuda`` a CuPy array, which must not be written either. Heads that approximate
        the state return their approximation, which may be a copy.
        """
        with self._lock:
            return self._arrays.view(self._engine.state)

    @property
    def window(self) -> int:
        """Tokens from one flush to the next (W); 1 for a system that writes its states at every token."""
        return self._engine.window

    def __repr__(self) -> str:
        """System, layer, slots, window and backend in one line."""
        layer = self.layer
        return (
            f"{type(self).__name__}({layer.kind}, heads={layer.heads}, K={layer.key_dim}, V={layer.value_dim}, "
            f"num_slots={self.num_slots}, window={self.window}, backend={self.backend!r})"
        )

    @property
    def position(self) -> Any:
        """Tokens that each slot has buffered since its last flush, ``(slots,)`` int32: a NumPy or CuPy copy."""
        with self._lock, self._arrays.call():
            return self._engine.position.copy()

    def warmup(self, activation_dtype: str | None = None) -> None:
        """Compile the kernels of steps, loads and flushes now, instead of at the first call.

        No state changes. On ``cuda`` all kernels compile in parallel; a step that needs a kernel which is not loaded
        warns.

        Parameters
        ----------
        activation_dtype : {"bfloat16", "float16", "float32"}, optional
            Type of q, k and v that ``cuda`` expects. Default: the type that the head was made for or has seen, else
            "bfloat16". The other backends compute in one type, whatever comes.

        Raises
        ------
        ValueError
            If the type is unknown, or not the one that the head has settled on.
        KernelCompileError
            If a kernel does not compile: source, options and the compiler's log.
        """
        check_dtype_name(activation_dtype, "activation_dtype")
        with self._lock, self._arrays.call():
            self._engine.warmup(activation_dtype)

    def step(self, q: Any, k: Any, v: Any, g: Any, beta: Any = None, *, slots: Any = None, out: Any = None) -> Any:
        """Decode one token, or several in order, for each row of a batch.

        On ``cuda``, arrays on the device are used in place if they are contiguous, aligned to 16 bytes and of the
        right type: q, k and v of the activations' type, g and beta float32. Others are copied, on the device. Values
        on the device are not checked, since a check would wait for the device: a slot out of range or named twice, or
        a gate above 0, is the caller's error. Arrays on the host are checked and uploaded. With a `GateInput`, g has
        the activations' type.

        A graph can capture a call whose arrays are all of one framework, on the device and of those types, if `out` is
        given or PyTorch allocates it; its slots (int64, or int32 for batches of up to `slots` rows) may change
        between replays.

        Parameters
        ----------
        q, k : array, (batch, [tokens,] key_heads, K)
            Queries and keys, normalised and scaled.
        v : array, (batch, [tokens,] heads, V)
            Values (for mamba2 with dt folded in).
        g : array, (batch, [tokens,] heads) or, for kda, (batch, [tokens,] heads, K)
            Log-decays, <= 0; -inf forgets all. Of a head with a `GateInput`: raw gate inputs, any numbers.
        beta : array, (batch, [tokens,] heads), optional
            Write gates; None for mamba2.
        slots : array of int, (batch,), optional
            State slot of each row, each at most once; -1 is padding. Default: row i uses slot i.
        out : array, optional
            Writable array of the output's shape to fill and return. On ``cuda`` the kernels write it in place if it is
            contiguous, aligned, of their output type, and shares no memory with an input.

        Returns
        -------
        array, (batch, [tokens,] heads, V)
            Outputs: v's kind of array, device and dtype, or `out`. Rows of slot -1 are zeros.

        Raises
        ------
        ValueError
            Naming the argument, before any state is touched: a wrong shape or device, a gate above 0, NaN or infinite,
            a number beyond the backend's type, a slot out of range or named twice, an `out` that overlaps itself.
        TypeError
            If an argument is not a real floating-point array, or of a wider type than the head was told to expect.
        """
        given = Tokens(q, k, v, g, beta)
        with self._lock:
            try:
                shapes = q.shape, k.shape, v.shape, g.shape, None if beta is None else beta.shape
            except AttributeError:
                shapes = None  # which `check_tokens` refuses
            if shapes is None or shapes != self._seen:
                self._several = check_tokens(self.layer, *given)
                self._seen = shapes
            if out is not None:
                interop.check_out(out, tuple(v.shape))
            with self._arrays.call(out, v, q, k) as call:
                tokens, index, written = call.inputs(given, slots, out, self._several, self.num_slots)
                self._engine.step(tokens, index, written)
                return call.result(written, v, out)

    def load_state(self, state: Any, slots: Any = None) -> None:
        """Set the states of some slots, such as the final states of a prefill; their buffered tokens are dropped.

        Parameters
        ----------
        state : array, (batch, heads, V, K)
            States, K last. On ``cuda``, states on the device are not checked for NaN.
        slots : array of int, (batch,), optional
            Slot of each row; -1 skips a row. Default: row i goes to slot i.

        Raises
        ------
        ValueError
            If the shape does not fit, a state is not finite, or a slot is out of range or named twice.
        """
        check_state(self.layer, state)
        with self._lock, self._arrays.call(state, slots) as call:
            index = call.slots(slots, state.shape[0], self.num_slots)
            self._engine.load_state(call.states(state, index), index)

    def flush(self, slots: Any = None) -> None:
        """Fold the buffered tokens of some slots into their states now, at any window position.

        Parameters
        ----------
        slots : array of int, optional
            Which slots; -1 is skipped. Default: all.
        """
        with self._lock, self._arrays.call(slots) as call:
            self._engine.flush(call.slots(slots, None, self.num_slots))

    def reset(self, slots: Any = None) -> None:
        """Clear some slots: zero state and sketch, empty ring, cursor at 0, whatever they held.

        Parameters
        ----------
        slots : array of int, optional
            Which slots; -1 is skipped. Default: all.
        """
        with self._lock, self._arrays.call(slots) as call:
            self._engine.reset(call.slots(slots, None, self.num_slots))


def check_capacity(num_slots: Any) -> int:
    """Check a head's slot count."""
    if isinstance(num_slots, bool) or not isinstance(num_slots, int | np.integer) or num_slots < 1:
        raise ValueError(f"num_slots: expected a positive integer, got {num_slots!r}")
    return int(num_slots)


def check_gate(gate: Any, layer: Layer) -> None:
    """Check that a gate is None or the layer's."""
    if gate is None:
        return
    from sketchssm.gates import GateInput

    if not isinstance(gate, GateInput):
        raise TypeError(f"gate: expected a GateInput or None, got {type(gate).__name__}")
    gate.check(layer)


class SketchHead(DecodeHead):
    """Exact states, written once a window, and read through their sketches in between (algorithm 1).

    Parameters
    ----------
    plan : SketchPlan
        Bases, ranks and settings of the layer.
    num_slots : int
        Number of state slots.
    backend : {"auto", "reference", "cpu", "cuda"}, default "auto"
        Where to run; "auto" is "cuda" where CuPy sees a device and the kernels support the plan, else "cpu".
    sketch_dtype : {"bfloat16", "float32"}, default "bfloat16"
        How sketches and coefficient maps are stored; `reference` always keeps float64.
    gate : GateInput, optional
        For kda: the argument g of `step` is then the layer's raw gate input, which the head converts.
    activation_dtype : {"bfloat16", "float16", "float32"}, optional
        ``cuda`` only, an error elsewhere: type of q, k and v in the kernels and in the ring; arrays of another type
        are converted. Default: the narrowest type that holds q, k and v of the first call (or the type that `warmup`
        names). From then on an array of a wider type is an error, so that nothing is rounded unasked. float64 counts
        as float32.
    output_dtype : {"bfloat16", "float16", "float32"}, optional
        ``cuda`` only: type in which outputs leave the kernels. Default: the activations' type.
    state : array, (num_slots, heads, V, K), optional
        ``cuda`` only: memory for the states, such as a serving engine's pool, instead of the head's own. float32 on
        the device, of any framework with DLPack, contiguous within a slot, any stride between slots. The head does
        not read what the memory holds: a slot begins with `load_state` or `reset`.

    Raises
    ------
    ValueError
        If an argument is out of range or of another backend, the gate is not the layer's, the backend has no kernels
        for the plan, or it needs a package or a device that this machine does not have.

    Warns
    -----
    RuntimeWarning
        If "auto" finds a device but takes "cpu", as the kernels do not support the plan; and at the first call that
        copies arrays from a device to the host, as the head computes on the host.
    """

    def __init__(
        self,
        plan: SketchPlan,
        num_slots: int,
        backend: str = "auto",
        *,
        sketch_dtype: str = "bfloat16",
        gate: GateInput | None = None,
        activation_dtype: str | None = None,
        output_dtype: str | None = None,
        state: Any = None,
    ) -> None:
        if sketch_dtype not in ("bfloat16", "float32"):
            raise ValueError(f"sketch_dtype: expected 'bfloat16' or 'float32', got {sketch_dtype!r}")
        capacity = check_capacity(num_slots)
        check_gate(gate, plan.layer)
        device: Any = {"activation_dtype": activation_dtype, "output_dtype": output_dtype, "state": state}
        engine = load_engine("sketch", backend, plan, capacity, sketch_dtype=sketch_dtype, gate=gate, **device)
        super().__init__(plan.layer, capacity, *engine)
        self.plan = plan
