"""Drafts of standard decode: kernels that decode without writing states, and the ring of the drafts' raw inputs."""

from __future__ import annotations

from typing import Any

from sketchssm.cuda.commits import Committer
from sketchssm.cuda.launch import Launcher
from sketchssm.cuda.modules import Variant, load
from sketchssm.cuda.pointer import Slots
from sketchssm.cuda.slots import part_of

__all__ = ["StandardDrafts", "standard_draft_variant"]


def standard_draft_variant(step: Variant, drafts: int) -> Variant:
    """The draft kernels of a standard step."""
    return Variant("standard_draft", dict(step.constants) | {"DRAFTS": drafts})


class StandardDrafts:
    """The kernels of ``standard_draft.cu`` for one engine.

    Parameters
    ----------
    variant : Variant
        See `standard_draft_variant`.
    state, gate : array
        As for the engine's step.
    ring : tuple of cupy.ndarray
        Keys, values, gates and betas of a slot's drafts.
    cursor : cupy.ndarray of int32, (slots,)
        Cursor words.
    slot_limits : tuple
        Slot number of padding, and number of slots.
    inputs : str
        Arguments of the engine's step, up to the slots.
    """

    def __init__(
        self,
        variant: Variant,
        state: Any,
        gate: Any,
        ring: tuple[Any, ...],
        cursor: Any,
        slot_limits: tuple[Any, ...],
        inputs: str,
    ) -> None:
        module = load(variant, late=True)
        fixed: list[Any] = [*part_of(state), gate]
        for array in (*ring, cursor):
            fixed += part_of(array)
        slots = "Qiiii"  # address, flags, scan, rows
        last = slot_limits
        self._draft = Launcher(module.get_function("standard_draft"), tuple(fixed), inputs + slots + "iQi", last)
        self._commit = Launcher(module.get_function("standard_commit"), tuple(fixed), slots + "Qi", last)
        self._clear = Committer(cursor, None, 1, slot_limits)

    def draft(self, grid: tuple[int, int], *inputs: int) -> None:
        """Launch the draft; see `Launcher`."""
        self._draft(*grid, *inputs)

    def commit(self, grid: tuple[int, int], accepted: Slots, slots: Slots) -> None:
        """Decode the first `accepted` drafts of each row, and drop the rest."""
        self._commit(*grid, *slots.arguments, slots.shape[0], *accepted.number)
        self.drop(slots)

    def drop(self, slots: Slots) -> None:
        """Drop the drafts of slots."""
        self._clear(None, slots.again())
