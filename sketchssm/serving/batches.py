"""The rows of a batch: rows that decode, that are prefilled, and that begin a request. Decisions are made on the host.

Engines order the rows of a batch: requests that decode come first, then continued prefills, then new requests. A row's
`length` is the number of its tokens in the batch, `computed` the number of its tokens before. Heads decode the first
rows of a batch; all others are left to the engine's own prefill.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Split:
    """Kinds of the rows of a batch."""

    decodes: int  # number of first rows that heads decode, padding included
    decode_tokens: int  # tokens of these rows
    fresh: Array  # rows among them that begin with a prompt of one token: their state is zero
    whole: Array  # rows among them with several tokens that are no drafts: all are kept (`KnownTokens`)
    prefills: int  # number of rows behind
    continued: Array  # rows behind that continue a request: their blocks must hold exact states


def split_rows(
    lengths: Array, computed: Array, prefilling: Array | None = None, drafts: int = 0, drafted: Array | None = None
) -> Split:
    """Split the rows of a batch.

    Without speculative decoding a row of one token decodes, whatever its phase: an engine may replay the graph of a
    decode step for a batch of such rows. With it, rows of up to ``1 + drafts`` tokens behind the prompt decode. If all
    rows have ``1 + drafts`` tokens, all decode, as engines replay a graph for them too.

    For each row, `lengths` has its tokens (0 for padding), `computed` the tokens of its request before this step,
    `prefilling` whether tokens of its prompt have not been computed (needed with `drafts`, the most draft tokens of a
    row), and `drafted` its draft tokens (-1 for none).
    """
    decoding = lengths <= 1
    whole = np.zeros(len(lengths), dtype=bool)
    if drafts:
        short = lengths <= 1 + drafts
        decoding = (lengths == 0) | (short & ~np.asarray(prefilling))
        if ((lengths == 1 + drafts) | (lengths == 0)).all():
            decoding = short
        trial = whole if drafted is None else (drafted >= 0) & (lengths == 1 + drafted)
        whole = decoding & (lengths > 1) & ~trial
    decodes = len(lengths) if decoding.all() else int(np.argmin(decoding))
    begun = computed > 0
    return Split(
        decodes,
        int(lengths[:decodes].sum()),
        np.flatnonzero(~begun[:decodes] & (lengths[:decodes] > 0)),
        np.flatnonzero(whole[:decodes]),
        len(lengths) - decodes,
        decodes + np.flatnonzero(begun[decodes:] & (lengths[decodes:] > 0)),
    )


def on_device(x: Array, like: torch.Tensor) -> torch.Tensor:
    """Copy an array of the host to a tensor's device; the host does not wait for the device's work."""
    return torch.from_numpy(x).to(like.device, non_blocking=True)


def moved_rows(lengths: Array, computed: Array, block: int) -> tuple[Array, Array]:
    """Find the rows whose states move to another block in this step, and the place of each one's last block.

    With prefix caching, a state of ``n`` tokens is in the block at place ``(n - 1) // block`` of its request's table.
    For `lengths` and `computed` see `split_rows`.
    """
    last = (computed - 1) // block
    rows = np.flatnonzero((computed > 0) & (lengths > 0) & ((computed + lengths - 1) // block != last))
    return rows, last[rows]


@dataclass(frozen=True)
class DecodeRows:
    """Rows that a head decodes; `lengths` and `accepted` are None without drafts."""

    slots: torch.Tensor  # padding included
    tokens: int  # of all rows
    width: int = 1  # most tokens of a row
    lengths: torch.Tensor | None = None  # tokens of each row, on the device
    accepted: torch.Tensor | None = None  # how many tokens of each row's last draft are kept
    gather: torch.Tensor | None = None  # token of each place of (rows, width); None if all rows are full
    places: torch.Tensor | None = None  # place of each token, the reverse of `gather`


@dataclass(frozen=True)
class PrefillRows:
    """Rows that the engine prefills."""

    slots: torch.Tensor
    continued: torch.Tensor | None = None  # slots of rows that continue a request; other slots may hold anything
    accepted: torch.Tensor | None = None  # how many tokens of the last draft of each of them are kept
    passed: torch.Tensor | None = None  # more slots in which the prefill leaves states, for later requests
    decoded: bool = False  # whether tokens before those of some of them may have been decoded like drafts

    @classmethod
    def behind(
        cls,
        split: Split,
        slots: torch.Tensor,
        accepted: torch.Tensor | None = None,
        passed: torch.Tensor | None = None,
        decoded: bool = False,
    ) -> PrefillRows:
        """Take the rows behind the decoding ones, from slots and accepted counts of all rows of the batch."""
        behind = slots[split.decodes :].contiguous()
        if not split.continued.size:
            return cls(behind, passed=passed)
        index = on_device(split.continued, slots)
        kept = None if accepted is None else accepted[index].clamp(min=1)
        return cls(behind, slots[index], kept, passed, decoded)


class KnownTokens:
    """Rows with tokens of the prompt that were decoded like drafts: all of their tokens are kept.

    Engines count only sampled tokens, so their counts are wrong for these rows. The correct counts are kept until the
    row's next step.
    """

    def __init__(self) -> None:
        self._counts: torch.Tensor | None = None

    @property
    def noted(self) -> bool:
        """Whether there have been such rows."""
        return self._counts is not None

    def note(self, slots: torch.Tensor, lengths: torch.Tensor, blocks: int) -> None:
        """Note slots and numbers of tokens of rows that were whole (`Split`), in a pool of `blocks`."""
        if self._counts is None:
            self._counts = torch.zeros(blocks, dtype=torch.int32, device=slots.device)
        self._counts[slots.long()] = lengths.to(torch.int32)

    def kept(self, accepted: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Correct counts of kept tokens of each row's last step, and forget the counts noted for the slots."""
        if self._counts is None:
            return accepted
        index = slots.long()
        known = self._counts[index].to(accepted)
        self._counts[index] = 0
        return torch.where(known > 0, known, accepted)


class RowBuffers:
    """Slots, lengths and accepted counts at fixed addresses, as captured graphs need them.

    `rows` is the most rows of a batch, `drafts` the most draft tokens of a row.
    """

    def __init__(self, rows: int, drafts: int, device: torch.device) -> None:
        self._drafts = drafts
        self._slots, self._lengths, self._accepted = (
            torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(3)
        )

    def fill(self, slots: torch.Tensor, lengths: Array, accepted: torch.Tensor | None = None) -> DecodeRows:
        """Set the buffers, and describe the rows with views of them. `lengths` are on the host."""
        rows, tokens = len(lengths), int(lengths.sum())
        own = self._slots[:rows]
        own.copy_(slots, non_blocking=True)
        if accepted is None:
            return DecodeRows(own[:tokens], tokens)  # padding stands at the end
        kept, counts = self._accepted[:rows], self._lengths[:rows]
        kept.copy_(accepted, non_blocking=True)
        kept.clamp_(min=1)  # a row's first token is never on trial
        counts.copy_(torch.from_numpy(np.ascontiguousarray(lengths, dtype=np.int32)), non_blocking=True)
        width = max(int(lengths.max(initial=0)), 1)
        if tokens == rows * width:
            return DecodeRows(own, tokens, width, counts, kept)
        starts, inside = np.cumsum(lengths) - lengths, np.arange(width)
        places = np.flatnonzero((inside < lengths[:, None]).reshape(-1))
        gather = np.minimum(starts[:, None] + inside, max(tokens - 1, 0)).reshape(-1)
        gather, places = (on_device(x, own) for x in (gather, places))
        return DecodeRows(own, tokens, width, counts, kept, gather, places)
