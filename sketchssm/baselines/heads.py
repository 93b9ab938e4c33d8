"""The two exact baselines: standard decode and buffered replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sketchssm.backends import load_engine
from sketchssm.head import DecodeHead, check_capacity, check_gate
from sketchssm.recurrence import Layer, check_window

if TYPE_CHECKING:
    from sketchssm.gates import GateInput

__all__ = ["ReplayHead", "StandardHead"]


class StandardHead(DecodeHead):
    """Standard decode: reads and writes every state at every token, as serving engines do by default.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    num_slots : int
        Number of state slots.
    backend : {"auto", "reference", "cpu", "cuda"}, default "auto"
        Where to run; see `SketchHead`.
    gate : GateInput, optional
        See `SketchHead`.
    activation_dtype, output_dtype : {"bfloat16", "float16", "float32"}, optional
        ``cuda`` only: types of q, k and v, and of outputs; see `SketchHead`.
    state : array, (num_slots, heads, V, K), optional
        ``cuda`` only: memory for the states; see `SketchHead`.
    """

    def __init__(
        self,
        layer: Layer,
        num_slots: int,
        backend: str = "auto",
        *,
        gate: GateInput | None = None,
        activation_dtype: str | None = None,
        output_dtype: str | None = None,
        state: Any = None,
    ) -> None:
        capacity = check_capacity(num_slots)
        check_gate(gate, layer)
        device: Any = {"activation_dtype": activation_dtype, "output_dtype": output_dtype, "state": state}
        super().__init__(layer, capacity, *load_engine("standard", backend, layer, capacity, gate=gate, **device))


class ReplayHead(DecodeHead):
    """Buffered replay: writes the state once per window, but reads the state and the buffered inputs at every token.

    ReplaySSM is the source of the scheme and of buffering raw inputs. Choices of this library: the triangular system
    of the delta rule is solved at the flush, each slot has a window of its own, and padding rows take no part. This
    head also stands for KVBuffer (arXiv 2605.19049), which buffers keys and the write of each token instead. In exact
    arithmetic outputs and states are the same at every token; a test compares the two. KVBuffer's speculative form,
    with a rollback, is left out.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    num_slots : int
        Number of state slots.
    backend : {"auto", "reference", "cpu", "cuda"}, default "auto"
        Where to run; see `SketchHead`.
    window : int, default 16
        Tokens from one flush to the next (W).
    gate : GateInput, optional
        See `SketchHead`.
    activation_dtype, output_dtype : {"bfloat16", "float16", "float32"}, optional
        ``cuda`` only: types of q, k and v, and of outputs; see `SketchHead`.
    state : array, (num_slots, heads, V, K), optional
        ``cuda`` only: memory for the states; see `SketchHead`.
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
        state: Any = None,
    ) -> None:
        width, capacity = check_window(window, least=1), check_capacity(num_slots)
        check_gate(gate, layer)
        device: Any = {"activation_dtype": activation_dtype, "output_dtype": output_dtype, "state": state}
        engine = load_engine("replay", backend, layer, capacity, width, gate=gate, **device)
        super().__init__(layer, capacity, *engine)
