"""Decode heads: all heads of one layer, for all slots, behind one interface.

`DecodeHead` is the part that all systems share: it checks a call's arguments before anything is written, takes arrays
of any framework, and returns the caller's kind of array. The engine does the arithmetic.
"""

from __future__ import annotations

from typing import Any, NoReturn

from sketchssm.arrays import interop
from sketchssm.heads.call_lock import CallLock
from sketchssm.heads.engine import Arrays, Engine
from sketchssm.layer.calls import check_state, check_tokens
from sketchssm.layer.checks import check_bool, check_dtype_name, check_integer
from sketchssm.layer.recurrence import Layer, Tokens
from sketchssm.layer.slots import MAX_SLOTS


class DecodeHead:
    """Common interface of every decode system; construct a subclass.

    A head is one object for all slots of one layer; a slot holds the state of one request. Threads may share a head: a
    call waits until the call of another thread has returned. A call from within a call of the same thread, such as in
    a finalizer or a signal handler, is a `RuntimeError`. A head can't be copied or pickled.

    On the ``cuda`` backend a head works on the device that is current when the head is constructed. A call runs on the
    current stream of the framework of its arrays; a call without arrays runs on the stream of the previous call. Calls
    on different streams may overlap if their slots are disjoint. Calls that share slots, and with a clock all calls of
    `step`, must be ordered by streams. After `warmup`, calls whose arrays are on the device neither wait for the
    device nor allocate, so a graph can capture them. The methods' docstrings name further conditions.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    num_slots : int
        Number of state slots.
    backend : str
        Backend in use.
    engine : Engine
        The backend's engine (`sketchssm.heads.engine.Engine`), which owns the slots' memory.

    Attributes
    ----------
    drafts : int
        Most tokens of a row's draft; 0 for heads without drafts.
    """

    drafts = 0
    _no_drafts = "as this head takes no drafts"

    def __init__(self, layer: Layer, num_slots: int, backend: str, engine: Engine) -> None:
        self.layer = layer
        self.num_slots = num_slots
        self.backend = backend
        self._engine: Any = engine  # of an `ExactHead`: an `ExactEngine`
        self._arrays: Arrays = engine.arrays
        self._seen: Any = None  # shapes of the inputs of the last call, and whether they have a tokens axis
        self._several = False
        self._lock = CallLock()  # engines keep one call's arguments in memory of their own

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

        A read-only NumPy view, or on ``cuda`` a CuPy array, which must not be written either. CuPy's current stream
        waits for the calls on PyTorch's current stream. Heads that approximate the state return their approximation,
        which may be a copy.
        """
        with self._lock.held():
            return self._arrays.view(self._engine.state)

    @property
    def window(self) -> int:
        """Tokens of a window (W); 1 for a system that writes its states at every token."""
        return self._engine.window

    def __repr__(self) -> str:
        """System, layer, slots, window, backend and settings in one line."""
        shown = ", ".join(f"{name}={value!r}" for name, value in self._shown().items())
        return f"{type(self).__name__}({self.layer.kind}, {shown})"

    def _shown(self) -> dict[str, Any]:
        """Names and values of `__repr__`."""
        layer = self.layer
        sizes = {"heads": layer.heads, "K": layer.key_dim, "V": layer.value_dim, "num_slots": self.num_slots}
        return sizes | {"window": self.window, "backend": self.backend}

    @property
    def position(self) -> Any:
        """Tokens that each slot has buffered since its last flush, ``(slots,)`` int32: a NumPy or CuPy copy."""
        with self._lock.held(), self._arrays.call() as call:
            return call.handed_out(self._engine.position.copy())

    def warmup(self, activation_dtype: str | None = None, *, drafts: bool = False) -> None:
        """Compile the kernels of steps, loads and flushes now, instead of at the first call.

        No state changes. On ``cuda`` all kernels compile in parallel; without `warmup`, a step that has to load a
        kernel warns.

        Parameters
        ----------
        activation_dtype : {"bfloat16", "float16", "float32"}, optional
            Type of q, k and v on ``cuda``. Default: the type that the head was constructed for or has seen, else
            "bfloat16". The other backends compute in one type for all inputs.
        drafts : bool, default False
            Whether to compile the kernels of drafts and commits too; only for heads with drafts.

        Raises
        ------
        ValueError
            If the type is unknown or differs from the head's type, or the head takes no drafts.
        KernelCompileError
            If a kernel does not compile: source, options and the compiler's log.
        """
        check_dtype_name(activation_dtype, "activation_dtype")
        check_bool("drafts", drafts)
        if drafts and not self.drafts:
            raise ValueError(f"drafts: expected False, {self._no_drafts}")
        with self._lock.held(), self._arrays.call():
            self._engine.warmup(activation_dtype, drafts)

    def step(
        self,
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any = None,
        *,
        slots: Any = None,
        out: Any = None,
        draft: bool = False,
        lengths: Any = None,
    ) -> Any:
        """Decode one token, or several in order, for each row of a batch.

        With ``draft=True`` the tokens are drafts: the outputs are the same, but a slot keeps no token until `commit`
        accepts the first ones. Any other call that changes a slot drops its drafts.

        On ``cuda``, arrays on the device are used in place if their last axes, (heads, dim), are contiguous, all rows
        and tokens are aligned to 16 bytes, and the type is right: q, k and v of the activations' type, g and beta
        float32. Other arrays are copied on the device. Gates on the device are not checked, because a check would wait
        for the device. Rows whose slot is on the device and out of range or named twice are left out (`left_out` of
        `ExactHead`). Arrays on the host are checked and uploaded. With a `GateInput`, g has the activations' type.

        A graph can capture a call whose arrays are all of one framework, on the device and of those types, if `out` is
        given or PyTorch allocates it; its slots (int64 or int32) may change between replays.

        Parameters
        ----------
        q, k : array, (batch, [tokens,] key_heads, K)
            Queries and keys, normalised and scaled.
        v : array, (batch, [tokens,] heads, V)
            Values (for mamba2 with dt folded in).
        g : array, (batch, [tokens,] heads) or, for kda and gla, (batch, [tokens,] heads, K)
            Log-decays, <= 0; -inf clears the state. For a head with a `GateInput`: raw gate inputs, any numbers.
        beta : array, (batch, [tokens,] heads), optional
            Write gates; None for mamba2 and gla.
        slots : array of int, (batch,), optional
            State slot of each row, each at most once; `pad_slot` (by default -1) is padding. Default: row i uses
            slot i.
        out : array, optional
            Writable array of the output's shape to fill and return. On ``cuda`` the kernels write it in place if it is
            contiguous, aligned, of their output type, and shares no memory with an input.
        draft : bool, default False
            Whether the tokens are drafts: at most `drafts` for each row.
        lengths : array of int, (batch,), optional
            Number of each row's drafts, from 0 to the length of the tokens axis; the tokens past this number are not
            read. Default: all.

        Returns
        -------
        array, (batch, [tokens,] heads, V)
            Outputs: an array of v's framework, device and dtype, or `out`. Padding rows, and tokens past a row's
            drafts, are zeros.

        Raises
        ------
        ValueError
            Naming the argument, before any state is touched: a wrong shape or device, a gate above 0, NaN or infinite,
            a number beyond the backend's type, a slot out of range or named twice, too many drafts, an `out` that
            overlaps itself, a PyTorch tensor that requires gradients outside of ``torch.no_grad()``.
        TypeError
            If an argument is not a real floating-point array, or its type is wider than the head's activation type.
        """
        if draft is not False and draft is not True:
            check_bool("draft", draft)
            draft = bool(draft)
        with self._lock.held():
            direct = self._arrays.direct
            if direct is not None and not draft and lengths is None:
                done = direct(q, k, v, g, beta, out, slots)
                if done is not None:
                    return done
            given = Tokens(q, k, v, g, beta)
            if interop.gradients_enabled():
                interop.check_gradients(**given._asdict(), out=out)
            try:
                shapes = q.shape, k.shape, v.shape, g.shape, None if beta is None else beta.shape
            except AttributeError:
                shapes = None  # which `check_tokens` refuses
            if shapes is None or shapes != self._seen:
                self._several = check_tokens(self.layer, *given)
                self._seen = shapes
            if out is not None:
                interop.check_out(out, tuple(v.shape))
            if draft:
                return self._draft(given, slots, out, lengths)
            if lengths is not None:
                raise ValueError("lengths: expected None without draft=True, got an array")
            with self._arrays.call(out, v, q, k) as call:
                tokens, index, written = call.inputs(given, slots, out, self._several, self.num_slots)
                self._engine.step(tokens, index, written)
                return call.result(written, v, out)

    def _draft(self, given: Tokens, slots: Any, out: Any, lengths: Any) -> Any:
        """Decode a draft, whose shapes `step` has checked."""
        batch, count = given.v.shape[0], given.v.shape[1] if self._several else 1
        if not 1 <= count <= self.drafts:
            room = f"1 to {self.drafts} tokens a row" if self.drafts else f"False, {self._no_drafts}"
            raise ValueError(f"draft: expected {room}, got {count} tokens")
        with self._arrays.call(out, given.v, given.q, given.k) as call:
            index = call.slots(slots, batch, self.num_slots)
            counts = call.lengths(lengths, index, count)
            tokens, index, written = call.inputs(given, slots, out, self._several, self.num_slots, counts)
            self._engine.draft(tokens, counts, index, written)
            return call.result(written, given.v, out)

    def load_state(self, state: Any, slots: Any = None) -> None:
        """Set the states of some slots, such as the final states of a prefill; their buffered tokens are dropped.

        Parameters
        ----------
        state : array, (batch, heads, V, K)
            States, K last. On ``cuda``, states on the device are not checked for NaN.
        slots : array of int, (batch,), optional
            Slot of each row; padding skips a row. Default: row i goes to slot i.

        Raises
        ------
        ValueError
            If the shape does not fit, a state is not finite or beyond the range of the head's states, a slot is out of
            range or named twice, or a PyTorch tensor requires gradients outside of ``torch.no_grad()``.
        """
        check_state(self.layer, state)
        if interop.gradients_enabled():
            interop.check_gradients(state=state)
        with self._lock.held(), self._arrays.call(state, slots) as call:
            index = call.slots(slots, state.shape[0], self.num_slots)
            self._engine.load_state(call.states(state, index), index)

    def flush(self, slots: Any = None) -> None:
        """Fold the buffered tokens of some slots into their states now, at any window position.

        Parameters
        ----------
        slots : array of int, optional
            Which slots; padding is skipped. Default: all.
        """
        with self._lock.held(), self._arrays.call(slots) as call:
            self._engine.flush(call.slots(slots, None, self.num_slots))

    def reset(self, slots: Any = None) -> None:
        """Clear some slots, whatever their contents: zero state and sketch, empty ring, cursor at 0.

        Parameters
        ----------
        slots : array of int, optional
            Which slots; padding is skipped. Default: all.
        """
        with self._lock.held(), self._arrays.call(slots) as call:
            self._engine.reset(call.slots(slots, None, self.num_slots))


def check_capacity(num_slots: Any, name: str = "num_slots") -> int:
    """Check a head's slot count; `name` is the argument's name, for the message."""
    return check_integer(name, num_slots, 1, MAX_SLOTS)
