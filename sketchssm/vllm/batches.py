"""The rows of a batch: rows that decode, that are prefilled, and that begin a request. Decisions are made on the host.

vLLM orders the rows of a batch: requests that decode come first, then continued prefills, then new requests. A row's
`length` is the number of its tokens in the batch, `computed` the number of its tokens before. Heads decode the first
rows of a batch; all others are left to vLLM's own prefill.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["DecodeRows", "KnownTokens", "PrefillRows", "RowBuffers", "Split", "split_rows"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Split:
    """Kinds of the rows of a batch.

    Parameters
    ----------
    decodes : int
        Number of first rows that heads decode, padding included.
    decode_tokens : int
        Tokens of these rows.
    fresh : ndarray of int
        Rows among them that begin a request with a prompt of one token: their state is zero.
    whole : ndarray of int
        Rows among them with several tokens that are no drafts: all tokens are kept (`KnownTokens`).
    prefills : int
        Number of rows behind.
    continued : ndarray of int
        Rows behind that continue a request, by their numbers in the batch: their blocks must hold exact states.
    """

    decodes: int
    decode_tokens: int
    fresh: Array
    whole: Array
    prefills: int
    continued: Array


def split_rows(
    lengths: Array, computed: Array, prefilling: Array | None = None, drafts: int = 0, drafted: Array | None = None
) -> Split:
    """Split the rows of a batch.

    Without speculative decoding a row of one token decodes, whatever its phase: vLLM may replay the graph of a decode
    step for a batch of such rows. With it, rows of up to ``1 + drafts`` tokens behind the prompt decode. If all rows
    have ``1 + drafts`` tokens, all decode, as vLLM replays a graph for them too.

    Parameters
    ----------
    lengths : ndarray of int, (rows,)
        Tokens of each row; 0 for padding.
    computed : ndarray of int, (rows,)
        Tokens of each row's request before this step.
    prefilling : ndarray of bool, (rows,), optional
        Whether tokens of the request's prompt have not been computed. Needed with `drafts`.
    drafts : int, default 0
        Most draft tokens of a row.
    drafted : ndarray of int, (rows,), optional
        Draft tokens of each row; -1 for none. Default: no row has drafts.

    Returns
    -------
    Split
        The rows.
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


@dataclass(frozen=True)
class DecodeRows:
    """Rows that a head decodes.

    Parameters
    ----------
    slots : torch.Tensor of int, (rows,)
        Slots, padding included.
    tokens : int
        Tokens of all rows.
    width : int, default 1
        Most tokens of a row.
    lengths : torch.Tensor of int, (rows,), optional
        Tokens of each row, on the device. None without drafts.
    accepted : torch.Tensor of int, (rows,), optional
        How many tokens of the row's last draft are kept. None without drafts.
    gather : torch.Tensor of int64, (rows * width,), optional
        Token of each place of ``(rows, width)``; any token where the row has none. None if all rows have `width`
        tokens.
    places : torch.Tensor of int64, (tokens,), optional
        Place of each token, the reverse of `gather`.
    """

    slots: torch.Tensor
    tokens: int
    width: int = 1
    lengths: torch.Tensor | None = None
    accepted: torch.Tensor | None = None
    gather: torch.Tensor | None = None
    places: torch.Tensor | None = None


@dataclass(frozen=True)
class PrefillRows:
    """Rows that vLLM prefills.

    Parameters
    ----------
    slots : torch.Tensor of int, (rows,)
        Slots.
    continued : torch.Tensor of int, optional
        Slots of the rows that continue a request. None without such rows. Other slots may hold anything.
    accepted : torch.Tensor of int, optional
        How many tokens of the last draft of each row of `continued` are kept. None without drafts.
    """

    slots: torch.Tensor
    continued: torch.Tensor | None = None
    accepted: torch.Tensor | None = None

    @classmethod
    def behind(cls, split: Split, slots: torch.Tensor, accepted: torch.Tensor | None = None) -> PrefillRows:
        """Take the rows behind the decoding ones.

        Parameters
        ----------
        split : Split
            How the rows of the batch are treated.
        slots : torch.Tensor of int, (rows,)
            Slots of all rows of the batch.
        accepted : torch.Tensor of int, (rows,), optional
            How many tokens of each row's last draft are kept. None without drafts.

        Returns
        -------
        PrefillRows
            The rows.
        """
        behind = slots[split.decodes :].contiguous()
        if not split.continued.size:
            return cls(behind)
        index = torch.from_numpy(split.continued).to(slots.device, non_blocking=True)
        return cls(behind, slots[index], None if accepted is None else accepted[index].clamp(min=1))


class KnownTokens:
    """Rows with tokens of the prompt that were decoded like drafts: all of their tokens are kept.

    vLLM counts only sampled tokens, so its counts are wrong for these rows. The correct counts are kept until the
    row's next step.
    """

    def __init__(self) -> None:
        self._counts: torch.Tensor | None = None

    def note(self, slots: torch.Tensor, lengths: torch.Tensor, blocks: int) -> None:
        """Note rows that were whole (`Split`).

        Parameters
        ----------
        slots, lengths : torch.Tensor of int, (rows,)
            Slots and numbers of tokens.
        blocks : int
            Number of blocks of the pool.
        """
        if self._counts is None:
            self._counts = torch.zeros(blocks, dtype=torch.int32, device=slots.device)
        self._counts[slots.long()] = lengths.to(torch.int32)

    def kept(self, accepted: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Tokens of each row's last step that are kept; the rows' counts are forgotten.

        Parameters
        ----------
        accepted : torch.Tensor of int, (rows,)
            vLLM's counts.
        slots : torch.Tensor of int, (rows,)
            Slots of this step's rows.

        Returns
        -------
        torch.Tensor of int, (rows,)
            The counts, corrected.
        """
        if self._counts is None:
            return accepted
        index = slots.long()
        known = self._counts[index].to(accepted)
        self._counts[index] = 0
        return torch.where(known > 0, known, accepted)


class RowBuffers:
    """Slots, lengths and accepted counts at fixed addresses, as captured graphs need them.

    Parameters
    ----------
    rows : int
        Most rows of a batch.
    drafts : int
        Most draft tokens of a row; 0 without speculative decoding.
    device : torch.device
        Where.
    """

    def __init__(self, rows: int, drafts: int, device: torch.device) -> None:
        self._drafts = drafts
        self._slots, self._lengths, self._accepted = (
            torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(3)
        )

    def fill(self, slots: torch.Tensor, lengths: Array, accepted: torch.Tensor | None = None) -> DecodeRows:
        """Set the buffers.

        Parameters
        ----------
        slots : torch.Tensor of int, (rows,)
            Slot of each row.
        lengths : ndarray of int, (rows,)
            Tokens of each row, on the host.
        accepted : torch.Tensor of int, (rows,), optional
            How many tokens of each row's last draft are kept. Needed with drafts.

        Returns
        -------
        DecodeRows
            The rows, with views of the buffers.
        """
        rows, tokens = len(lengths), int(lengths.sum())
        own = self._slots[:rows]
        own.copy_(slots, non_blocking=True)
        if accepted is None:
            return DecodeRows(own[:tokens], tokens)  # padding stands at the end
        kept, counts = self._accepted[:rows], self._lengths[:rows]
        kept.copy_(accepted, non_blocking=True)
        kept.clamp_(min=1)  # a row's first token is never on trial
        counts.copy_(torch.from_numpy(np.ascontiguousarray(lengths, dtype=np.int32)), non_blocking=True)
        width = 1 + self._drafts
        if tokens == rows * width:
            return DecodeRows(own, tokens, width, counts, kept)
        width = max(int(lengths.max(initial=0)), 1)
        starts, inside = np.cumsum(lengths) - lengths, np.arange(width)
        places = np.flatnonzero((inside < lengths[:, None]).reshape(-1))
        gather = np.minimum(starts[:, None] + inside, max(tokens - 1, 0)).reshape(-1)
        gather, places = (torch.from_numpy(x).to(own.device, non_blocking=True) for x in (gather, places))
        return DecodeRows(own, tokens, width, counts, kept, gather, places)
