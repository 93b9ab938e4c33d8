"""Rows of a batch that are followed while they decode.

Decode steps may run in captured graphs. There, each layer copies the tokens of followed rows to a tape at a fixed
address. `Followed` has the tokens' rows and places, which it finds on the device: only the blocks tell which request
a row is of.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

ROWS, STEPS = 4, 256
"""Rows that are followed at once, and tokens of each: adding 1024 tokens takes hardly longer than adding 100."""


class Followed:
    """Rows that are followed while they decode, of all layers; all arrays are on the device.

    `sources (ROWS,)` are rows of the batch, and `places (ROWS,)` their tokens' places on the tapes; the last place of
    a tape is for rows that are not there.
    """

    def __init__(self, device: torch.device) -> None:
        self._first = torch.arange(0, ROWS * STEPS, STEPS, device=device)
        self._blocks = torch.full((ROWS,), -1, dtype=torch.int32, device=device)
        self._next = torch.zeros(2, ROWS, dtype=torch.int64, device=device)  # tokens before the next one, its place
        self._nowhere = torch.tensor(ROWS * STEPS, device=device)
        self.sources, self.places = torch.zeros_like(self._first), torch.full_like(self._first, ROWS * STEPS)

    def begin(self, blocks: torch.Tensor, computed: torch.Tensor) -> None:
        """Follow rows with `computed` tokens, whose states are in some blocks of one group of layers."""
        self._blocks.fill_(-1)
        self._blocks[: len(blocks)] = blocks.to(self._blocks)
        self._next[0, : len(blocks)] = computed.to(self._next)
        self._next[1] = self._first

    def step(self, before: torch.Tensor, after: torch.Tensor, computed: torch.Tensor) -> None:
        """Find the rows in a batch by the block of each row's state before and after the step, in the same group.

        `computed (rows,)` are tokens before the step, -1 for rows that do not decode one token. If a row has another
        number of tokens behind a state in the block, or another row's state goes there, the request has ended.
        """
        blocks, after = self._blocks[:, None], after.to(self._blocks)
        there = before == blocks
        found, row = (there & (computed == self._next[0][:, None])).max(1)
        self._blocks.masked_fill_((there | (after == blocks)).any(1), -1)
        torch.where(found, after[row], self._blocks, out=self._blocks)
        torch.mul(row, found, out=self.sources)
        torch.where(found, self._next[1], self._nowhere, out=self.places)
        self._next += found

    def write(self, tape: Sequence[torch.Tensor], tokens: Sequence[torch.Tensor | None]) -> None:
        """Copy the rows' tokens ``(tokens, ...)`` to a layer's tape; on a GPU, in one launch."""
        if self.places.is_cuda:
            from sketchssm.serving import kernels

            kernels.write_tape(tape, tokens, self.sources, self.places)
            return
        for to, x in zip(tape, tokens, strict=False):
            if x is not None:
                to.index_copy_(0, self.places, x.index_select(0, self.sources).to(to.dtype))

    def end(self) -> list[int]:
        """Follow none from now on; tokens of each row that were followed."""
        self._blocks.fill_(-1)
        self.sources.zero_()
        self.places.fill_(ROWS * STEPS)
        counts: list[int] = (self._next[1] - self._first).tolist()
        return counts
