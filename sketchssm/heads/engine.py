"""Protocols of engines and of their arrays.

A head (`sketchssm.heads.head.DecodeHead`) checks a call. The engine's `Arrays` convert the caller's arrays for the
engine, and results for the caller. The engine owns the memory of one layer's slots and does the arithmetic.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from sketchssm.layer.recurrence import Tokens
from sketchssm.layer.slots import PartsOf, SlotPart


class Call(Protocol):
    """Conversions of one call's arrays, while the engine's device and the caller's stream are current."""

    def slots(self, slots: Any, batch: int | None, capacity: int, name: str = "slots", repeats: bool = False) -> Any:
        """Check slots and convert them to the engine's; a `batch` of None takes any number of them, by default all.

        `name` is the argument's, and `repeats` allows rows of one slot.
        """

    def lengths(self, lengths: Any, slots: Any, tokens: int) -> Any:
        """Check and convert the lengths of drafts, at most `tokens`, by default all of them.

        `slots` are a result of `slots`.
        """

    def accepted(self, accepted: Any, slots: Any, cursor: Any) -> Any:
        """Check and convert counts of accepted tokens, at most the drafted tokens in the slots' cursor words."""

    def inputs(
        self, given: Tokens, slots: Any, out: Any, several: bool, capacity: int, lengths: Any = None
    ) -> tuple[Tokens, Any, Any]:
        """Check and convert a step's arguments: tokens ``(batch, tokens, ...)``, slots, and the array to be written.

        `several` says that the caller's arrays have a tokens axis. `lengths` are a result of `lengths`: tokens past
        them may hold anything.
        """

    def states(self, state: Any, slots: Any) -> Any:
        """Check and convert states to be loaded."""

    def host_slots(self, slots: Any, batch: int | None, capacity: int) -> npt.NDArray[np.int64]:
        """Check slots like `slots`, and return them on the host; -1 is padding."""

    def handed_out(self, array: Any) -> Any:
        """Return an array that the call has made; the caller's stream outside of the call waits for the array."""

    def fetch(self, array: Any, slots: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Copy some slots of the engine's memory to the host; bfloat16 as uint16 bits."""

    def store(self, array: Any, slots: npt.NDArray[np.int64], rows: npt.NDArray[Any]) -> None:
        """Write rows of `fetch` to some slots of the engine's memory."""

    def result(self, written: Any, v: Any, out: Any) -> Any:
        """Return the written outputs as `out`, or as v's kind of array, shape and dtype."""


class Arrays(Protocol):
    """Converts a caller's arrays for an engine, and the engine's results for the caller."""

    direct: Any
    """Fast path for a step of one token, or None. It takes q, k, v, g, beta, out and slots, and returns the outputs,
    or None for a call that it declines."""

    def call(self, *arrays: Any) -> AbstractContextManager[Call]:
        """Begin a call, on the stream of the first array on the engine's device."""

    def view(self, state: Any) -> Any:
        """View of an engine's own array for the caller, read-only where that is possible."""


class Engine(Protocol):
    """A backend's memory and arithmetic for one head.

    All arrays are the backend's own (on ``cuda`` pointers) and already checked. On the host they are C-contiguous,
    slots are unique, in range, or -1 for padding rows, and counts of tokens are in range. On ``cuda``, slots and
    counts on the device are not checked yet.
    """

    arrays: Any
    """The engine's `Arrays`."""

    @property
    def state(self) -> Any:
        """``(slots, heads, V, K)``: states as of each slot's last flush; exact, or the system's approximation."""

    @property
    def position(self) -> Any:
        """``(slots,)`` int32: tokens buffered since each slot's last flush, without drafts."""

    @property
    def window(self) -> int:
        """Tokens of a window (W), from one flush to the next; 1 if every token writes the state."""

    def warmup(self, activation_dtype: str | None = None, drafts: bool = False) -> None:
        """Compile all kernels, those of drafts on request; engines with one activation type ignore the type."""

    def step(self, tokens: Tokens, slots: Any, out: Any) -> None:
        """Run ``(batch, tokens, ...)`` inputs, token by token, and write ``out (batch, tokens, heads, V)``.

        Drafts of the slots are dropped first. A token whose slot is due, or at position W - 1, flushes the slot. Then
        the clock advances by the same rule as a slot. When the clock is at W - 1, the clock and all slots of the call
        become due. A call without rows does nothing.
        """

    def load_state(self, state: Any, slots: Any) -> None:
        """Set states ``(batch, heads, V, K)``, and begin windows as `adopt` does. `state` may be the head's own."""

    def flush(self, slots: Any) -> None:
        """Fold the slots' buffered tokens into their states, and begin windows as `adopt` does."""

    def reset(self, slots: Any) -> None:
        """Clear the slots: zero state, empty ring."""


class ExactEngine(Engine, Protocol):
    """The engine of a head with exact states.

    The constructor takes the layer or the plan, the number of slots, arguments of its own, and `EngineOptions`.
    """

    supports: ClassVar[frozenset[str]]
    """Options that may differ from the defaults."""

    @property
    def parts(self) -> tuple[SlotPart, ...]:
        """All memory of a slot."""

    @property
    def memory(self) -> dict[str, Any]:
        """Memory of each part by name, ``(slots, *shape)``."""

    @property
    def drafts(self) -> int:
        """Most tokens of a draft: ``min(8, W - 1)`` with a window, else the constructor's ``drafts``."""

    parts_of: ClassVar[PartsOf]
    """Returns `parts` of an engine of these constructor arguments (without the number of slots)."""

    def draft(self, tokens: Tokens, lengths: Any, slots: Any, out: Any) -> None:
        """Decode drafts ``(batch, tokens, ...)``, ``lengths[i]`` tokens of row i; outputs past the lengths are zeros.

        First, each slot that is due, or has no room for its row's drafts (a window has room for W - 1 tokens), folds
        its committed tokens. If the clock is due, or has no room for n drafts (the tokens axis), all slots of the call
        fold. The drafts are buffered past the position. The position does not change; the cursor word holds the number
        of drafts. The virtual row drafts n tokens.
        """

    def commit(self, accepted: Any, slots: Any) -> None:
        """Keep the first ``accepted[i]`` drafted tokens of each row's slot, at least 0 and at most all.

        The virtual row keeps all of its n drafts. If it then has no room for n more, it and the slots become due.
        """

    def adopt(self, slots: Any) -> None:
        """Begin windows on the states in memory: sketch the states, position 0, due if the clock is due."""

    def copy(self, src: Any, dst: Any) -> None:
        """Copy all parts of the slots, as if all were read before any is written; drafts are not copied.

        If either slot of a pair is padding, nothing is copied. Slots of `src` may repeat.
        """

    def rejoin(self, slots: Any) -> None:
        """Begin with slots that the caller has written: keep positions, drop drafts, due if the clock is due."""

    def left_out(self) -> int:
        """Return the number of rows left out since the last call, because their slot on the device was wrong.

        Waits for the device. Host engines return 0.
        """
