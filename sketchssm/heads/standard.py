"""The two exact baselines: standard decode and replay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sketchssm.arrays.options import EngineOptions
from sketchssm.heads.backends import load_parts
from sketchssm.heads.exact import ExactHead, check_phase
from sketchssm.heads.registry import REPLAY, STANDARD
from sketchssm.layer.recurrence import PAD_SLOT, Layer, check_window
from sketchssm.layer.slots import SlotPart

if TYPE_CHECKING:
    from sketchssm.arrays.gates import GateInput


class StandardHead(ExactHead):
    """Standard decode: reads and writes every state at every token, as serving engines do by default.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    num_slots : int
        Number of state slots.
    backend, gate, activation_dtype, output_dtype, pad_slot, memory : optional
        See `SketchHead`.
    state_dtype : {"float32", "bfloat16", "float16"}, default "float32"
        Type of the states. A 16-bit type rounds a state at every token.
    drafts : int, default 0
        Most tokens of a row's draft, 0 to 8, for which every slot has a ring.
    """

    _no_drafts = "as this StandardHead was made without drafts="

    def __init__(
        self,
        layer: Layer,
        num_slots: int,
        backend: str = "auto",
        *,
        gate: GateInput | None = None,
        activation_dtype: str | None = None,
        output_dtype: str | None = None,
        pad_slot: int = PAD_SLOT,
        memory: Mapping[str, Any] | None = None,
        state_dtype: str = "float32",
        drafts: int = 0,
    ) -> None:
        options = EngineOptions(
            gate, activation_dtype, output_dtype, state_dtype, memory, drafts=drafts, pad_slot=pad_slot
        )
        super().__init__(STANDARD, layer, num_slots, backend, options=options)

    @staticmethod
    def parts_of(
        layer: Layer,
        backend: str = "auto",
        *,
        gate: GateInput | None = None,
        activation_dtype: str | None = None,
        state_dtype: str = "float32",
        drafts: int = 0,
    ) -> tuple[SlotPart, ...]:
        """Describe the memory of a slot; see `SketchHead.parts_of`.

        Parameters
        ----------
        layer : Layer
            Kind and shape.
        backend, gate, activation_dtype, state_dtype, drafts : optional
            As for the head.

        Returns
        -------
        tuple of SlotPart
            The head's `parts`.
        """
        options = EngineOptions(gate, activation_dtype, state_dtype=state_dtype, drafts=drafts)
        return load_parts(STANDARD, backend, layer, options=options)


class ReplayHead(ExactHead):
    """Replay: writes the state once per window, but reads the state and the buffered inputs at every token.

    The scheme and the buffer of raw inputs are from ReplaySSM. Choices of this library: the flush solves the
    triangular system of the delta rule, each slot has its own window, and padding rows are skipped. This head also
    represents KVBuffer (arXiv 2605.19049), which buffers keys and the write of each token instead. In exact arithmetic
    outputs and states are the same at every token; a test compares the two. KVBuffer's speculative form, with a
    rollback, is left out.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    num_slots : int
        Number of state slots.
    backend : str, optional
        See `SketchHead`.
    window : int, default 16
        Tokens from one flush to the next (W).
    gate, activation_dtype, output_dtype, pad_slot, memory, state_dtype, phase : optional
        See `SketchHead`.
    """

    def __init__(
        self,
        layer: Layer,
        num_slots: int,
        backend: str = "auto",
        *,
        window: int = 16,
        gate: GateInput | None = None,
        activation_dtype: str | None = None,
        output_dtype: str | None = None,
        pad_slot: int = PAD_SLOT,
        memory: Mapping[str, Any] | None = None,
        state_dtype: str = "float32",
        phase: int | None = None,
    ) -> None:
        width = check_window(window, least=1)
        options = EngineOptions(
            gate, activation_dtype, output_dtype, state_dtype, memory, check_phase(phase, width), pad_slot=pad_slot
        )
        super().__init__(REPLAY, layer, num_slots, backend, width, options=options)

    @staticmethod
    def parts_of(
        layer: Layer,
        backend: str = "auto",
        *,
        window: int = 16,
        gate: GateInput | None = None,
        activation_dtype: str | None = None,
        state_dtype: str = "float32",
    ) -> tuple[SlotPart, ...]:
        """Describe the memory of a slot; see `SketchHead.parts_of`.

        Parameters
        ----------
        layer : Layer
            Kind and shape.
        backend, window, gate, activation_dtype, state_dtype : optional
            As for the head.

        Returns
        -------
        tuple of SlotPart
            The head's `parts`.
        """
        options = EngineOptions(gate, activation_dtype, state_dtype=state_dtype)
        return load_parts(REPLAY, backend, layer, check_window(window, least=1), options=options)
