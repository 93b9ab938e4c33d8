"""The sums of one layer of a recording, and the tape of its rows that are followed while they decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from sketchssm.arrays.gates import GateInput
from sketchssm.calibrate.calibration import StoredBasis
from sketchssm.calibrate.joint_scores import JointScores
from sketchssm.calibrate.moments import Moments
from sketchssm.calibrate.sums import add_to_all
from sketchssm.calibrate.windows import Carry
from sketchssm.cuda import MAX_RANK
from sketchssm.layer.recurrence import Layer
from sketchssm.plans.basis import SketchBasis
from sketchssm.serving.following import ROWS, STEPS
from sketchssm.serving.inputs import log_decays
from sketchssm.serving.updates import Update

CHUNK = 1024
"""Most tokens of a chunk that are added."""


def columns_of(layer: Layer) -> int:
    """Columns of a layer's basis."""
    return min(MAX_RANK, layer.key_dim, layer.value_dim)


class LayerRecord:
    """Sums of one layer of a `Recording`. `gate` gives the parameters of raw gates, if the layer's head takes such.

    `whole` is the layer of which this process has a share.
    """

    basis: StoredBasis  # once there are enough moments

    def __init__(
        self,
        recording: Any,
        name: str,
        module: str,
        layer: Layer,
        gate: Callable[[], GateInput | None],
        whole: Layer,
    ) -> None:
        self.recording, self.name, self.module, self.layer, self._gate = recording, name, module, layer, gate
        self.whole = whole
        self.sums: dict[str, Any] = {"moments": Moments(layer, window=recording.window)}
        self.tokens = 0  # of the sums
        self.skipped = 0  # chunks and followed rows that sums refused
        self._tape: list[torch.Tensor] = []
        self._states: Any = None
        self._rows = 0

    @cached_property
    def _gate_input(self) -> GateInput | None:
        return self._gate()

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the tape, for queries, keys and values of a type, and use as much memory as a chunk will need.

        An engine calls it before it gives the rest of the memory to its pool.
        """
        if self._tape:
            return
        shapes = self.layer.token_shapes()
        self._tape = [
            torch.zeros(ROWS * STEPS + 1, *shape, dtype=dtype if name in "qkv" else torch.float32, device=device)
            for name, shape in shapes.items()
        ]
        self._states = torch.zeros(ROWS, *self.layer.state_shape, device=device)
        self.recording.device = device
        # What a copy needs is there before graphs are captured: kernels for log-decays and for raw gates.
        for kind in {torch.float32, dtype} if self.layer.channel_decays else {torch.float32}:
            self.write([x[:1].to(kind) if name == "g" else x[:1] for name, x in zip(shapes, self._tape, strict=True)])
        zeros = [torch.zeros(1, CHUNK, *shape, device=device) for shape in shapes.values()]
        basis = SketchBasis.random(self.layer, columns_of(self.layer), window=self.recording.window)
        for sums in (Moments(self.layer, window=basis.window), JointScores(basis)):
            sums.update(*zeros)

    def write(self, tokens: Sequence[torch.Tensor | None]) -> None:
        """Copy the tokens ``(tokens, ...)`` of followed rows to the tape."""
        self.recording.followed.write(self._tape, tokens)

    def begin(self, states: torch.Tensor) -> None:
        """Take the states ``(rows, heads, V, K)`` of rows that are followed from now on."""
        self._rows = len(states)
        self._states[: self._rows] = states

    def end(self, counts: list[int]) -> None:
        """Add the tokens of the followed rows, those of rows of equally many tokens together."""
        for count in sorted({*counts[: self._rows]} - {0}):
            rows = [i for i, own in enumerate(counts[: self._rows]) if own == count]
            tokens = [_rows(x[:-1].unflatten(0, (ROWS, STEPS)), rows)[:, :count] for x in self._tape]
            self._add(tokens, _rows(self._states, rows))

    def add(self, tokens: Sequence[torch.Tensor | None], state: torch.Tensor | None) -> None:
        """Add tokens ``(tokens, ...)`` of one row behind a state ``(1, heads, V, K)``; None for a zero state."""
        self._add([None if x is None else x[None] for x in tokens], state)

    def _add(self, tokens: Sequence[torch.Tensor | None], states: torch.Tensor | None) -> None:
        """Add tokens ``(rows, tokens, ...)`` behind states ``(rows, heads, V, K)``."""
        update = Update(self.recording.device)
        q, k, v, g, beta = (*tokens, None)[:5]
        if self._gate_input is not None:
            g = log_decays(g, self._gate_input)
        given: list[Any] = [x if x is None or x.is_cuda else x.float() for x in (q, k, v)]  # sums widen those of a GPU
        given += [None if x is None else x.float() for x in (g, beta)]
        carry = None if states is None else Carry(states.float())
        update.end(add_to_all(list(self.sums.values()), given, carry))
        self.recording.note(self, v.shape[0] * v.shape[1], update)  # type: ignore[union-attr]

    def count(self, tokens: int, good: bool) -> None:
        """Count tokens that sums have taken, or a chunk or followed row that they have refused."""
        if good:
            self.tokens += tokens
        else:
            self.skipped += 1
            self.recording.skip(self.skipped, self.name)


def _rows(x: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Some rows of an array, without an array of their numbers, for which a device is waited."""
    first, stop = rows[0], rows[-1] + 1
    return x[first:stop] if stop - first == len(rows) else torch.stack([x[row] for row in rows])
