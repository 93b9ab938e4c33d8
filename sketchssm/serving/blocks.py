"""Parts of a slot behind the state of a block: their places, their bytes, and views of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from sketchssm.layer.slots import SlotPart


@dataclass(frozen=True)
class BlockLayout:
    """Places of the parts of a slot (except the state) in the bytes behind the state."""

    parts: tuple[SlotPart, ...]
    offsets: tuple[int, ...]  # first byte of each part, counted from the end of the engine's own states
    bytes: int  # of all parts with their padding; 0 without parts
    state_bytes: int  # of a slot

    @classmethod
    def behind(cls, start: int, parts: Iterable[SlotPart]) -> BlockLayout:
        """Lay out a head's parts, one of which is the state, behind `start` bytes of the engine's own states."""
        side, offsets, end, state = [], [], start, 0
        for part in parts:
            if part.name == "state":
                state = part.bytes
                continue
            first = -(-end // part.alignment) * part.alignment
            side.append(part)
            offsets.append(first - start)
            end = first + part.bytes
        return cls(tuple(side), tuple(offsets), end - start, state)

    @property
    def share(self) -> float:
        """Bytes behind the states, as a share of the states' bytes."""
        return self.bytes / self.state_bytes

    def views(self, side: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views ``(blocks, *shape)`` of the parts by name; bfloat16 as its bits.

        `side (blocks, bytes)` are the bytes behind the states; there may be more of them than the layout has.
        """
        found = {}
        for part, offset in zip(self.parts, self.offsets, strict=True):
            # of bfloat16 the bits, which every version of CuPy takes
            kind = torch.uint16 if part.dtype == "bfloat16" else getattr(torch, part.dtype)
            flat = side[:, offset : offset + part.bytes].view(kind)
            found[part.name] = flat.view(side.shape[0], *part.shape) if part.shape else flat[:, 0]
        return found


def as_memory(tensor: torch.Tensor) -> Any:
    """Memory in the form for heads: a tensor on a device, or a NumPy array for a tensor on the host."""
    return tensor if tensor.is_cuda else tensor.numpy()
