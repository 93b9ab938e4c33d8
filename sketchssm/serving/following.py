"""Rows of a batch that are followed while they decode.

Decode steps may run in captured graphs. There, each layer copies the tokens of followed rows to a tape at a fixed
address. `Followed` has the tokens' rows and places, which it finds on the device: only the blocks tell which request
a row is of.
"""

from __future__ import annotations

import torch

ROWS, STEPS = 4, 64
"""Rows that are followed at once, and tokens of each."""


class Followed:
    """Rows of one group of layers that are followed while they decode; all arrays are on the device.

    `sources (ROWS,)` are rows of the batch, and `places (ROWS,)` their tokens' places on the tape; the last place of a
    tape is for rows that are not there.
    """

    def __init__(self, device: torch.device) -> None:
        self.sources, self._blocks, self._starts, self._counts = (
            torch.zeros(ROWS, dtype=torch.int64, device=device) for _ in range(4)
        )
        self._lanes = torch.arange(ROWS, device=device)
        self.places = torch.full_like(self.sources, ROWS * STEPS)

    def begin(self, blocks: torch.Tensor, computed: torch.Tensor) -> None:
        """Follow rows with `computed` tokens, whose states are in some blocks."""
        for mine, given, rest in ((self._blocks, blocks, -1), (self._starts, computed, 0)):
            mine.fill_(rest)
            mine[: len(given)] = given.to(mine)
        self._counts.zero_()

    def step(self, before: torch.Tensor, after: torch.Tensor, computed: torch.Tensor, single: torch.Tensor) -> None:
        """Find the rows in a batch by the block of each row's state before and after the step.

        `computed (rows,)` are tokens before the step, and `single` tells rows of one token that decode. If a row has
        another number of tokens behind a state in the block, or another row's state goes there, the request has ended.
        """
        before, after = before.to(self._blocks), after.to(self._blocks)
        there = before == self._blocks[:, None]
        row = there.to(torch.uint8).argmax(1)
        next = there.any(1) & single[row] & (computed[row] == self._starts + self._counts)
        taken = (there | (after == self._blocks[:, None])).any(1)
        self._blocks.copy_(torch.where(next, after[row], self._blocks.masked_fill(taken, -1)))
        self.sources.copy_(row.masked_fill(~next, 0))
        self.places.copy_(torch.where(next, self._lanes * STEPS + self._counts, ROWS * STEPS))
        self._counts += next

    def end(self) -> list[int]:
        """Follow none from now on; tokens of each row that were followed."""
        self._blocks.fill_(-1)
        self.sources.zero_()
        self.places.fill_(ROWS * STEPS)
        return self._counts.tolist()
