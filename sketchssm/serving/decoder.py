"""The head of one layer, and its operations for a layer of an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sketchssm.heads.exact import ExactHead
from sketchssm.heads.sketch import SketchHead
from sketchssm.heads.standard import ReplayHead, StandardHead
from sketchssm.layer.recurrence import Layer
from sketchssm.layer.slots import SlotPart, drafted
from sketchssm.plans.plan import SketchPlan
from sketchssm.serving.batches import DecodeRows, PrefillRows
from sketchssm.serving.blocks import BlockLayout, as_memory

NULL_BLOCK = 0
"""The engine's block of padding rows."""


@dataclass(frozen=True)
class Recipe:
    """Common arguments of all heads of one layer, on any memory."""

    system: str
    source: Layer | SketchPlan  # this process's share of the layer, or its plan
    backend: str = "cuda"
    window: int = 16  # for "replay"
    drafts: int = 0  # most draft tokens of a row; 0 without speculative decoding
    phase: int | None = None  # of the clock, any number from 0; None for no clock
    state_dtype: str = "float32"
    activation_dtype: str | None = "bfloat16"  # of q, k and v on "cuda"
    gate: Any = None  # of kda: parameters of the raw gates
    monitor: int = 0  # of sketches: measures one flush of so many
    tolerance: float | None = None  # of sketches: requests with larger errors continue with exact reads

    @property
    def _types(self) -> dict[str, Any]:
        return {"gate": self.gate, "activation_dtype": self.activation_dtype, "state_dtype": self.state_dtype}

    @property
    def _tokens(self) -> int:
        """Most tokens of a draft: a row's drafts and the token before them."""
        return 1 + self.drafts if self.drafts else 0

    def parts(self, source: Layer | SketchPlan | None = None) -> tuple[SlotPart, ...]:
        """Describe the memory of a slot of this process's share of the layer, or of another's."""
        source = self.source if source is None else source
        if isinstance(source, SketchPlan):
            return SketchHead.parts_of(source, self.backend, monitor=self.monitor, **self._types)
        if self.system == "replay":
            return ReplayHead.parts_of(source, self.backend, window=self.window, **self._types)
        return StandardHead.parts_of(source, self.backend, drafts=self._tokens, **self._types)

    def head(self, num_slots: int, memory: Mapping[str, Any] | None = None) -> ExactHead:
        """Make a head, on the given memory of the parts or its own."""
        common = {"memory": memory, "pad_slot": NULL_BLOCK, **self._types}
        source = self.source
        if isinstance(source, SketchPlan):
            phase = self._phase(source.window)
            common |= {"monitor": self.monitor, "tolerance": self.tolerance}
            return SketchHead(source, num_slots, self.backend, phase=phase, **common)
        if self.system == "replay":
            phase = self._phase(self.window)
            return ReplayHead(source, num_slots, self.backend, window=self.window, phase=phase, **common)
        return StandardHead(source, num_slots, self.backend, drafts=self._tokens, **common)

    def _phase(self, window: int) -> int | None:
        return None if self.phase is None else self.phase % window

    def warm(self, head: ExactHead, device: torch.device) -> None:
        """Load all kernels of a head, those of drafts included, as captured graphs need them."""
        head.warmup()
        if not self.drafts:
            return
        layer, kind = head.layer, getattr(torch, self.activation_dtype or "float32")
        tokens = 1, self._tokens
        q = torch.zeros(*tokens, layer.key_heads, layer.key_dim, dtype=kind, device=device)
        v = torch.zeros(*tokens, layer.heads, layer.value_dim, dtype=kind, device=device)
        g = torch.zeros(*tokens, layer.heads, *([layer.key_dim] if layer.channel_decays else []), device=device)
        beta = torch.zeros(*tokens, layer.heads, device=device) if layer.erases else None
        pad = torch.full((1,), NULL_BLOCK, dtype=torch.int32, device=device)
        head.step(q, q, v, g, beta, slots=pad, draft=True, lengths=torch.ones_like(pad))
        head.commit(torch.ones_like(pad), pad)


class LayerDecoder:
    """The head of one layer, on the blocks of an engine's pool.

    `states` are ``(blocks, heads, V, K)``, contiguous within a block. `side (blocks, bytes)` are the bytes behind the
    states, in which the other parts lie as `layout` says; None if slots hold only states. The slots of `head` are the
    blocks, of which block 0 is padding.
    """

    def __init__(self, recipe: Recipe, states: torch.Tensor, side: torch.Tensor | None, layout: BlockLayout) -> None:
        memory = {"state": as_memory(states)}
        if side is not None:
            memory |= {name: as_memory(view) for name, view in layout.views(side).items()}
        self.head = recipe.head(states.shape[0], memory)
        self._cursor = memory.get("cursor")

    def decode(self, q: Any, k: Any, v: Any, g: Any, beta: Any, rows: DecodeRows, out: Any) -> None:
        """Decode the tokens of some rows; with drafts, after the kept tokens of the rows' last drafts.

        Inputs are ``(tokens, ...)`` as for `DecodeHead.step`; outputs go to `out (tokens, heads, V)`.
        """
        if rows.lengths is None:
            self.head.step(q, k, v, g, beta, slots=rows.slots, out=out)
            return
        self._commit(rows.accepted, rows.slots)
        shape = rows.slots.shape[0], rows.width
        place: Callable[[Any], Any]
        if rows.gather is None:
            place = lambda x: None if x is None else x.unflatten(0, shape)  # noqa: E731
        else:
            place = lambda x: None if x is None else x.index_select(0, rows.gather).unflatten(0, shape)  # noqa: E731
        tokens = [place(x) for x in (q, k, v, g, beta)]
        settings = {"slots": rows.slots, "draft": True, "lengths": rows.lengths}
        if rows.gather is None:
            self.head.step(*tokens, out=out.unflatten(0, shape), **settings)
        else:
            drafts = self.head.step(*tokens, **settings)
            out.copy_(drafts.flatten(0, 1).index_select(0, rows.places))

    def restart(self, slots: torch.Tensor) -> None:
        """Begin requests whose first token will be decoded: their states are zero."""
        self.head.reset(slots)

    def move(self, sources: torch.Tensor, slots: torch.Tensor) -> None:
        """Go on in other blocks. Later requests may resume from `sources`, which keep their buffered tokens."""
        self.head.copy(sources, slots)

    def settle(self, rows: PrefillRows) -> None:
        """Make the states of rows exact in their blocks, before a prefill continues from them."""
        if rows.continued is None:
            return
        if rows.accepted is not None:
            self._commit(rows.accepted, rows.continued)
        self.head.flush(rows.continued)

    def adopt(self, rows: PrefillRows) -> None:
        """Take over the states that a prefill has left in the rows' blocks, and on the way in others."""
        self.head.adopt(rows.slots)
        if rows.passed is not None:
            self.head.adopt(rows.passed)

    def _commit(self, accepted: Any, slots: torch.Tensor) -> None:
        if self.head.backend != "cuda":  # kernels limit counts to the rows' drafts; other backends refuse them
            most = torch.from_numpy(drafted(self._cursor[slots.numpy()]))  # type: ignore[index]
            accepted = torch.minimum(accepted, most.to(accepted))
        self.head.commit(accepted, slots)
