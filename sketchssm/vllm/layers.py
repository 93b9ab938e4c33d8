"""Layers with heads for the rows of a batch that decode: first base classes, before classes of vLLM's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backends.linear_attn import LinearAttentionMetadata

from sketchssm.arrays.gates import GateInput
from sketchssm.layer.recurrence import Layer
from sketchssm.serving import inputs
from sketchssm.vllm.head_layer import HeadLayer
from sketchssm.vllm.metadata import BatchMetadata


class HeadMamba2(HeadLayer):
    """Mamba-2."""

    kind = "mamba2"

    @property
    def layer(self) -> Layer:
        """Kind and shape of this process's share of the layer."""
        world = self.tp_size
        return Layer("mamba2", self.num_heads // world, self.ssm_state_size, self.head_dim, self.n_groups // world)

    @property
    def whole(self) -> Layer:
        """The layer of all processes. Each has a copy of a group of all heads, which vLLM's norm counts once."""
        return replace(super().whole, key_heads=self.norm.n_groups)

    def conv_weight(self) -> Any:
        """Weights of the convolution; on a CPU, vLLM packs those of the module."""
        return self.conv_weights

    def decode_call(self, given: dict[str, Any], out: Any) -> None:
        """Call `conv_ssm_forward`."""
        self.conv_ssm_forward(**given, output=out.flatten(1))

    def conv_ssm_forward(self, projected_states: Any, output: Any) -> None:
        """Convolve, and advance the states.

        `projected_states (tokens, channels)` has output gates, inputs of the convolution, and raw steps.
        """
        batch = self._batch()
        if batch is None:
            super().conv_ssm_forward(projected_states, output)
            return
        n = batch.split.decode_tokens
        if batch.decode is not None:
            self._decode(projected_states[:n], output[:n], batch)
        if batch.prefill is not None:
            with self._prefill(batch, *self._parts(projected_states)):
                super().conv_ssm_forward(projected_states[n:], output[n:])

    def _parts(self, projected: Any) -> Any:
        """Inputs of the convolution, and raw steps."""
        return projected[:, self.tped_intermediate_size :].split([self.tped_conv_size, self.tped_dt_size], dim=-1)

    def _decode(self, projected: Any, output: Any, batch: BatchMetadata) -> None:
        mixed, dt = self._parts(projected)
        mixed = self._convolved(mixed, self.activation, batch)
        out = output.view(len(mixed), -1, self.head_dim)
        self._advance(self.inputs(mixed, dt), batch, out)
        inputs.add_skip(out, self._values(mixed), self.D)

    def _values(self, mixed: Any) -> Any:
        return self.split_hidden_states_B_C_fn(mixed)[0].view(len(mixed), -1, self.head_dim)

    def inputs(self, mixed: Any, *gates: Any) -> tuple[Any, ...]:
        """Convert tokens behind the convolution, and raw steps."""
        _, k, q = self.split_hidden_states_B_C_fn(mixed)
        q, k = (y.view(len(mixed), -1, self.ssm_state_size) for y in (q, k))
        v, g = inputs.mamba_inputs(self._values(mixed), gates[0], self.A, self.dt_bias)
        return q, k, v, g, None


class HeadGatedDeltaNet(HeadLayer):
    """Gated DeltaNet."""

    kind = "gdn"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.active:
            self.enable_fused_gdn_spec_decode = False  # Qwen's way past `_forward_core`

    @property
    def layer(self) -> Layer:
        """Kind and shape of this process's share of the layer."""
        world = self.tp_size
        heads, keys = self.num_v_heads // world, self.num_k_heads // world
        return Layer("gdn", heads, self.head_k_dim, self.head_v_dim, keys)

    def decode_call(self, given: dict[str, Any], out: Any) -> None:
        """Call `_forward_core`."""
        self._forward_core(**given, core_attn_out=out)

    def _forward_core(self, mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any) -> None:
        batch = self._batch()
        if batch is None:
            super()._forward_core(mixed_qkv, b, a, core_attn_out)
            return
        n = batch.split.decode_tokens
        if batch.decode is not None:
            mixed = self._convolved(mixed_qkv[:n], self.activation, batch)
            self._advance(self.inputs(mixed, b[:n], a[:n]), batch, core_attn_out[:n])
        if batch.prefill is not None:
            with self._prefill(batch, mixed_qkv, b, a):
                super()._forward_core(mixed_qkv[n:], b[n:], a[n:], core_attn_out[n:])

    def inputs(self, mixed: Any, *gates: Any) -> tuple[Any, ...]:
        """Convert tokens behind the convolution, and raw write gates and decays."""
        n, keys, values = mixed.shape[0], self.key_dim // self.tp_size, self.value_dim // self.tp_size
        q, k, v = mixed.split([keys, keys, values], dim=-1)
        q, k = inputs.normalised(*(x.view(n, -1, self.head_k_dim) for x in (q, k)))
        b, a = gates
        g, beta = inputs.delta_inputs(a, b, self.A_log, self.dt_bias)
        if getattr(self, "allow_neg_eigval", False):
            beta = 2 * beta
        return q, k, v.view(n, -1, self.head_v_dim), g, beta


class HeadKimiDelta(HeadLayer):
    """Kimi Delta Attention, whose layer norms outputs within `_forward`."""

    kind = "kda"
    norms = True

    @property
    def layer(self) -> Layer:
        """Kind and shape of this process's share of the layer."""
        return Layer("kda", self.local_num_heads, self.head_dim, self.head_dim)

    def gate(self) -> GateInput | None:
        """Parameters of the raw gates, as they are now."""
        return self._raw_gate(self.gate_lower_bound)

    def _raw_gate(self, bound: float | None) -> GateInput:
        """Parameters of raw gates, with a lower bound of the log-decays or without one."""
        rate, bias = (x.detach().double().cpu().numpy() for x in (self.A_log.flatten(), self.dt_bias))
        return GateInput(rate, bias, bound)

    def decode_call(self, given: dict[str, Any], out: Any) -> None:
        """Call `_forward`."""
        self._forward(**given, core_attn_out=out[None])

    @eager_break_during_capture
    def _forward(self, mixed_qkv: Any, g1: Any, g2: Any, beta: Any, core_attn_out: Any) -> None:
        batch = self._batch()
        if batch is None:
            super()._forward(mixed_qkv, g1, g2, beta, core_attn_out)
            return
        n = batch.split.decode_tokens
        if batch.decode is not None:
            out = core_attn_out[0, :n]
            self._decode(mixed_qkv[:n], g1[0, :n], beta[0, :n], out, batch)
            out.copy_(self.o_norm(out, g2[:n]))
        if batch.prefill is not None:
            with self._prefill(batch, mixed_qkv, g1[0], beta[0]):
                # vLLM norms in place and copies the result to itself: PyTorch allows that if strides are equal, and
                # those of core_attn_out[:, n:] are not what a reshape gives.
                super()._forward(mixed_qkv[n:], g1[:, n:], g2[n:], beta[:, n:], core_attn_out[0, n:][None])

    def _decode(self, mixed: Any, raw: Any, b: Any, out: Any, batch: BatchMetadata) -> None:
        # The layer's compiled code may still use the memory of its arguments: the convolution has memory of its own.
        mixed = self._convolved(mixed, "silu", batch, out=torch.empty_like(mixed))
        self._advance(self.inputs(mixed, raw, b), batch, out)

    def inputs(self, mixed: Any, *gates: Any) -> tuple[Any, ...]:
        """Convert tokens behind the convolution, and raw write gates; decays stay raw."""
        q, k, v = mixed.view(-1, 3, self.local_num_heads, self.head_dim).unbind(1)
        q, k = inputs.normalised(q, k)
        return q, k, v, gates[0], inputs.write_gates(gates[1])


class HeadGlmDelta(HeadKimiDelta):
    """Kimi Delta Attention of GLM, whose layer norms outputs behind `_forward` and has three convolutions."""

    norms = False
    conv1d = property(lambda self: self.q_conv1d)
    _merged_conv_weight: Any

    def gate(self) -> GateInput | None:
        """Parameters of the raw gates, as they are now."""
        return self._raw_gate(self.kda_lower_bound if self.kda_safe_gate else None)

    def conv_weight(self) -> Any:
        """Weights of the three convolutions."""
        if self._merged_conv_weight is None:
            parts = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
            self._merged_conv_weight = torch.cat([part.weight.flatten(1) for part in parts])
        return self._merged_conv_weight

    @eager_break_during_capture
    def _forward(self, qkv_proj_states: Any, g1: Any, beta: Any, core_attn_out: Any) -> None:
        batch = self._batch()
        above = super(HeadKimiDelta, self)._forward
        if batch is None:
            above(qkv_proj_states, g1, beta, core_attn_out)
            return
        n = batch.split.decode_tokens
        if batch.decode is not None:
            self._decode(qkv_proj_states[:n], g1[0, :n], beta[0, :n], core_attn_out[0, :n], batch)
        if batch.prefill is not None:
            with self._prefill(batch, qkv_proj_states, g1[0], beta[0]):
                above(qkv_proj_states[n:], g1[:, n:], beta[:, n:], core_attn_out[:, n:])


class HeadBailingDelta(HeadGlmDelta):
    """Kimi Delta Attention of Bailing, whose layer computes log-decays and write gates before `_forward`."""

    _merged_conv_weight: Any = None

    def gate(self) -> GateInput | None:
        """Return None: the head takes log-decays."""
        return None

    @eager_break_during_capture
    def _forward(
        self, q_proj_states: Any, k_proj_states: Any, v_proj_states: Any, g1: Any, beta: Any, core_attn_out: Any
    ) -> None:
        batch, given = self._batch(), (q_proj_states, k_proj_states, v_proj_states)
        above = super(HeadKimiDelta, self)._forward
        if batch is None:
            above(*given, g1, beta, core_attn_out)
            return
        n, mixed = batch.split.decode_tokens, torch.cat(given, -1)
        if batch.decode is not None:
            self._decode(mixed[:n], g1[0, :n], beta[0, :n], core_attn_out[0, :n], batch)
        if batch.prefill is not None:
            with self._prefill(batch, mixed, g1[0], beta[0]):
                above(*(x[n:] for x in given), g1[:, n:], beta[:, n:], core_attn_out[:, n:])

    def inputs(self, mixed: Any, *gates: Any) -> tuple[Any, ...]:
        """Convert tokens behind the convolution; log-decays and write gates stay."""
        return *super().inputs(mixed, *gates)[:4], gates[1]


class HeadLightning(HeadLayer):
    """Lightning attention: mamba2 with constant decays, in float32, without convolution; vLLM's states are transposed.

    Blocks hold states as heads have them, except while vLLM prefills their rows.
    """

    kind = "mamba2"
    activations = torch.float32

    @property
    def layer(self) -> Layer:
        """Kind and shape of this process's share of the layer."""
        return Layer("mamba2", self.tp_heads, self.head_dim, self.head_dim, self.tp_heads)

    def decode_call(self, given: dict[str, Any], out: Any) -> None:
        """Call `_decode_infer`."""
        found = self._decode_infer(**given, kv_cache=None, state_indices_tensor=None, attn_metadata=self._whole())
        out.copy_(found.view(out.shape))

    def _whole(self) -> LinearAttentionMetadata:
        """Metadata with which `_forward` gives all rows to `_decode_infer`, which takes the rows from the batch."""
        batch: Any = self._batch()
        tokens = int(batch.counts[0].sum())
        rows: Any = {"query_start_loc": None, "seq_lens": None, "state_indices_tensor": None}
        found = LinearAttentionMetadata(0, 0, batch.split.decodes + batch.split.prefills, tokens, **rows)
        found.batch = batch
        return found

    def _forward(self, hidden_states: Any, output: Any, positions: Any) -> None:
        batch = self._batch()
        if batch is None:
            super()._forward(hidden_states, output, positions)
            return
        context = get_forward_context().attn_metadata
        context[self.prefix] = self._whole()
        try:
            super()._forward(hidden_states, output, positions)
        finally:
            context[self.prefix] = batch

    def _decode_infer(
        self, q: Any, k: Any, v: Any, kv_cache: Any, state_indices_tensor: Any, attn_metadata: Any
    ) -> Any:
        batch = getattr(attn_metadata, "batch", None)
        if batch is None:  # rows that vLLM decodes with those that it prefills
            return super()._decode_infer(q, k, v, kv_cache, state_indices_tensor, attn_metadata)
        n, out = batch.split.decode_tokens, torch.empty(q.shape, dtype=q.dtype, device=q.device)
        mixed = torch.stack((q, k, v), 1)
        if batch.decode is not None:
            self._advance(self.inputs(mixed[:n]), batch, out[:n])
        if batch.prefill is not None:
            with self._prefill(batch, mixed):
                inner, states = batch.inner, self.kv_cache[-1]
                starts = inner.seq_lens == torch.diff(inner.query_start_loc)
                states[batch.prefill.slots[starts].long()] = 0
                given = (*(x[n:] for x in (q, k, v)), states, inner.state_indices_tensor, inner)
                out[n:] = self._prefill_and_mix_infer(*given).view(-1, *q.shape[1:])
        return out.flatten(1)

    @contextmanager
    def _prefill(self, batch: BatchMetadata, *given: Any) -> Iterator[None]:
        """Surround vLLM's prefill, for which states are transposed."""
        rows: Any = batch.prefill
        with super()._prefill(batch, *given):
            self._transpose(rows.continued)
            yield
            self._transpose(rows.slots)

    def _transpose(self, slots: Any) -> None:
        if slots is not None:
            states, rows = self.kv_cache[-1], slots.long()
            states[rows] = states[rows].transpose(-1, -2)

    def _chunk(self, mixed: Any, slot: Any, begun: bool) -> Any:
        return mixed

    def inputs(self, mixed: Any, *gates: Any) -> tuple[Any, ...]:
        """Take queries, keys and values ``(tokens, 3, heads, K)``, and constant decays."""
        q, k, v = (x.contiguous() for x in mixed.unbind(1))
        g = -self.tp_slope.flatten().to(q).expand(len(q), -1).contiguous()
        return q, k, v, g, None
