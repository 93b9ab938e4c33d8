"""Drafts of standard decode: kernels that decode without writing states, and the ring of the drafts' raw inputs."""

from __future__ import annotations

from typing import Any

from sketchssm.cuda.device_slots import DeviceSlots
from sketchssm.cuda.kernel_parameters import KERNELS
from sketchssm.cuda.launch import Launcher
from sketchssm.cuda.modules import Variant, load
from sketchssm.cuda.pointer import Slots
from sketchssm.cuda.slots import part_of


def standard_draft_variant(step: Variant, drafts: int) -> Variant:
    """The draft kernels of a standard step."""
    return Variant("standard_draft", dict(step.constants) | {"DRAFTS": drafts})


class StandardDrafts:
    """The kernels of ``standard_draft.cu`` for one engine, whose slots have a ring."""

    def __init__(self, variant: Variant, slots: DeviceSlots, gate: Any) -> None:
        module = load(variant, late=True)
        fixed: list[Any] = [*part_of(slots.state), gate]
        for array in (*slots.ring, slots.cursor):
            fixed += part_of(array)
        self._draft, self._commit = (
            Launcher(module.get_function(name), tuple(fixed), KERNELS[name].letters, slots.limits)
            for name in ("standard_draft", "standard_commit")
        )

    def draft(self, grid: tuple[int, int], *inputs: int) -> None:
        """Launch the draft; see `Launcher`."""
        self._draft(*grid, *inputs)

    def commit(self, grid: tuple[int, int], accepted: Slots, slots: Slots) -> None:
        """Decode the first `accepted` drafts of each row; the cursor words keep their drafts."""
        self._commit(*grid, *slots.arguments, slots.shape[0], *accepted.number)
