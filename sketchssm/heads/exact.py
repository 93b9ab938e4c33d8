"""Heads with exact states, and their operations for servers: drafts, copies, pools, a clock."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sketchssm.arrays import interop
from sketchssm.arrays.options import EngineOptions
from sketchssm.heads.backends import load_engine
from sketchssm.heads.head import DecodeHead, check_capacity
from sketchssm.heads.registry import System
from sketchssm.heads.snapshot import Snapshot, gate_digest
from sketchssm.layer.checks import check_integer
from sketchssm.layer.recurrence import Layer
from sketchssm.layer.slots import POSITION, SlotPart

if TYPE_CHECKING:
    from sketchssm.plans.plan import SketchPlan


class ExactHead(DecodeHead):
    """Common interface of the heads with exact states; construct a subclass.

    Parameters
    ----------
    system : System
        Which system.
    source : Layer or SketchPlan
        The layer, or the plan of a sketch.
    num_slots : int
        Number of state slots.
    backend : {"auto", "reference", "cpu", "cuda"}
        Where to run; see `SketchHead`.
    *args
        Further arguments of the engine.
    options : EngineOptions
        Options of the engine.

    Attributes
    ----------
    pad_slot : int
        Slot number that means padding.
    state_dtype : str
        Type of the states.
    phase : int or None
        Position at which the clock started; None without a clock.
    """

    _lasting = POSITION
    """Bits of a cursor word that snapshots carry."""

    def __init__(
        self,
        system: System,
        source: Layer | SketchPlan,
        num_slots: int,
        backend: str,
        *args: Any,
        options: EngineOptions,
    ) -> None:
        capacity = check_capacity(num_slots)
        layer: Any = getattr(source, "layer", source)
        if options.gate is not None:
            options.gate.check(layer)
        name, engine = load_engine(system, backend, source, capacity, *args, options=options)
        super().__init__(layer, capacity, name, engine)
        self.pad_slot, self.state_dtype, self.phase = int(options.pad_slot), options.state_dtype, options.phase
        self.drafts: int = engine.drafts
        self._gate = options.gate
        self._fingerprint = None if isinstance(source, Layer) else source.fingerprint

    def _shown(self) -> dict[str, Any]:
        return super()._shown() | ({} if self.phase is None else {"phase": self.phase})

    @property
    def parts(self) -> tuple[SlotPart, ...]:
        """All memory of a slot, part by part. On ``cuda`` the activation type must be known (see `warmup`)."""
        with self._lock.held():
            return tuple(self._engine.parts)

    def commit(self, accepted: Any, slots: Any = None) -> None:
        """Keep the first tokens of each row's draft, and drop the rest.

        States, outputs and later steps are the same as if only the accepted tokens had been decoded. ``cuda`` does not
        compare counts with the row's number of drafts, but limits them to this number. On ``cuda``, counts on the host
        must be 0 to 8. If the slots are on the device, this includes padding rows, because the host does not know
        them.

        Parameters
        ----------
        accepted : array of int, (batch,)
            How many tokens to keep; any number in padding rows.
        slots : array of int, (batch,), optional
            Slot of each row. Default: row i uses slot i.

        Raises
        ------
        ValueError
            If a count is below 0 or above the slot's drafts (on ``cuda`` above 8), or a slot is out of range or named
            twice.
        """
        if not self.drafts:
            raise ValueError(f"accepted: expected no call, {self._no_drafts}")
        batch = _count("accepted", accepted)
        with self._lock.held(), self._arrays.call(accepted, slots) as call:
            index = call.slots(slots, batch, self.num_slots)
            self._engine.commit(call.accepted(accepted, index, self._engine.memory["cursor"]), index)

    def adopt(self, slots: Any = None) -> None:
        """Begin windows on states that are already in the head's memory, such as states of a prefill into a pool.

        Reads the states once. Buffered tokens and drafts are dropped.

        Parameters
        ----------
        slots : array of int, optional
            Which slots; padding is skipped. Default: all.
        """
        with self._lock.held(), self._arrays.call(slots) as call:
            self._engine.adopt(call.slots(slots, None, self.num_slots))

    def copy(self, src: Any, dst: Any) -> None:
        """Copy the contents of slots, except drafts, which the sources keep.

        All sources are read before any destination is written, so rows may exchange slots.

        Parameters
        ----------
        src, dst : array of int, (count,)
            Slots to read, which may repeat, and slots to write. A row with padding in either is skipped.

        Raises
        ------
        ValueError
            If the counts differ, a slot is out of range, or a slot of `dst` is named twice.
        """
        count = _count("src", src)
        _count("dst", dst)
        with self._lock.held(), self._arrays.call(src, dst) as call:
            sources = call.slots(src, count, self.num_slots, "src", True)
            self._engine.copy(sources, call.slots(dst, count, self.num_slots, "dst"))

    def snapshot(self, slots: Any = None) -> Snapshot:
        """Copy the contents of slots, except drafts, which they keep, to the host; waits for the device.

        Parameters
        ----------
        slots : array of int, (count,), optional
            Which slots, none of them padding. Default: all.

        Returns
        -------
        Snapshot
            The slots in this order, and their owner.
        """
        with self._lock.held(), self._arrays.call(slots) as call:
            owner, memory = self._owner(), self._engine.memory
            index = self._own_slots(call, slots)
            arrays = {name: call.fetch(memory[name], index) for name, *_ in owner["parts"]}
        if "cursor" in arrays:
            arrays["cursor"] &= self._lasting
        return Snapshot(arrays, owner)

    def restore(self, snapshot: Snapshot, slots: Any = None) -> None:
        """Put the slots of a snapshot into slots of this head; the old contents of these slots are dropped.

        System, backend, layer, window, plan, gate, formats, monitor and types of the memory must be those of the
        snapshot's head. Decoding continues at the same window positions.

        Parameters
        ----------
        snapshot : Snapshot
            From `snapshot`, of this head or another one.
        slots : array of int, (count,), optional
            Slot of each row of the snapshot; padding skips a row. Default: row i goes to slot i.

        Raises
        ------
        TypeError
            If `snapshot` is no `Snapshot`.
        ValueError
            If the snapshot has a different owner, or a slot is out of range or named twice.
        """
        if not isinstance(snapshot, Snapshot):
            raise TypeError(f"snapshot: expected a Snapshot, got {type(snapshot).__name__}")
        with self._lock.held(), self._arrays.call(slots) as call:
            snapshot.check(self._owner())
            index = call.host_slots(slots, len(snapshot), self.num_slots)
            live = index >= 0
            for name, rows in snapshot.arrays.items():
                if name == "cursor":
                    rows = rows & self._lasting
                call.store(self._engine.memory[name], index[live], rows[live])
            self._engine.rejoin(call.slots(slots, len(snapshot), self.num_slots))

    def _own_slots(self, call: Any, slots: Any) -> Any:
        """Check slots of a call, none of them padding, and return them on the host."""
        index = call.host_slots(slots, None, self.num_slots)
        if (index < 0).any():
            raise ValueError(f"slots: expected 0 to {self.num_slots - 1}, got {self.pad_slot} (padding)")
        return index

    def _owner(self) -> dict[str, Any]:
        """Describe what this head's slots belong to, in types of JSON: equal for heads that may exchange slots."""
        return {
            "system": type(self).__name__,
            "backend": self.backend,
            "layer": asdict(self.layer),
            "window": self.window,
            "plan": self._fingerprint,
            "gate": None if self._gate is None else gate_digest(self._gate),
            "state_dtype": self.state_dtype,
            "parts": [[part.name, list(part.shape), part.dtype] for part in self._engine.parts],
        }

    def left_out(self) -> int:
        """Return the number of rows left out since the last call; waits for the device.

        On ``cuda`` a row is left out, and its output is zeros, if its slot is on the device and out of range or named
        twice in its call. Slots on the host are checked when the call is made.

        Returns
        -------
        int
            Number of rows; 0 on the other backends.
        """
        with self._lock.held(), self._arrays.call():
            return int(self._engine.left_out())


def _count(name: str, array: Any) -> int:
    """Rows of a call, by the argument that must be there."""
    if isinstance(array, list | tuple | range):
        array = interop.to_host(array, name)
    shape: tuple[int, ...] = getattr(array, "shape", ())
    if len(shape) != 1:
        raise ValueError(f"{name}: expected one integer for each row, got shape {tuple(shape)}")
    return int(shape[0])


def check_phase(phase: Any, window: int) -> int | None:
    """Check the position at which a clock begins; None is no clock."""
    return None if phase is None else check_integer("phase", phase, 0, window - 1, " or None")
