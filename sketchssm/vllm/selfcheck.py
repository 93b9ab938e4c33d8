"""Check of a layer in a version of vLLM that the plugin was not tested with: decode steps against the recurrence."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from sketchssm.reference.recurrence import run
from sketchssm.serving.inputs import EPSILON

PROMPT, STEPS = 5, 3
BLOCK = 1
"""Block of the check, which runs before there are requests."""


def draw(layer: Any, tokens: int, generator: torch.Generator | None = None) -> dict[str, torch.Tensor]:
    """Random arguments of a request's tokens, by the names of the layer's method."""
    shape, states = layer.layer, layer.kv_cache[-1]

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(states.device, layer.activations or layer.model_config.dtype)

    if layer.activations is not None:
        return {name: random(tokens, shape.heads, shape.key_dim) for name in "qkv"}
    channels = layer.conv_weight().shape[0]
    if layer.kind == "mamba2":
        return {"projected_states": random(tokens, shape.heads * shape.value_dim + channels + shape.heads)}
    mixed = random(tokens, channels)
    if layer.kind == "gdn":
        return {"mixed_qkv": mixed, "b": random(tokens, shape.heads), "a": random(tokens, shape.heads)}
    gates = {"g1": random(1, tokens, shape.heads, shape.key_dim), "beta": random(1, tokens, shape.heads)}
    if layer.gate() is None:
        parts = dict(zip(("q_proj_states", "k_proj_states", "v_proj_states"), mixed.chunk(3, -1), strict=True))
        return {**parts, "g1": -gates["g1"].float().abs(), "beta": gates["beta"].float().sigmoid()}
    if not layer.norms:
        return {"qkv_proj_states": mixed, **gates}
    return {"mixed_qkv": mixed, **gates, "g2": random(tokens, shape.heads, shape.key_dim)}


def tokens_of(layer: Any, given: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    """Inputs ``q, k, v, g, beta (tokens, ...)`` of a whole request, in float64, and what mamba2 adds to outputs."""
    shape, double = layer.layer, {name: x.detach().double().cpu() for name, x in given.items()}
    if layer.activations is not None:
        q, k, v = (double[name].numpy() for name in "qkv")
        return q, k, v, -layer.tp_slope.double().cpu().view(1, -1).expand(len(q), -1).numpy(), None, 0
    keys, values = (shape.key_heads, shape.key_dim), (shape.heads, shape.value_dim)
    weight = layer.conv_weight().detach().double().cpu()
    width = shape.heads * shape.value_dim
    x = torch.cat([double[name] for name in double if name.startswith(("mixed", "q", "k", "v", "projected"))], -1)
    x = x[:, width : -shape.heads] if layer.kind == "mamba2" else x
    line = F.pad(x.T, (weight.shape[1] - 1, 0)).unfold(1, weight.shape[1], 1)
    x = (line * weight[:, None]).sum(-1).T
    x = F.silu(x if layer.conv1d.bias is None else x + layer.conv1d.bias.detach().double().cpu())
    order = (values, keys, keys) if layer.kind == "mamba2" else (keys, keys, values)
    parts = x.split([heads * dim for heads, dim in order], -1)
    parts = tuple(y.view(len(y), *size) for y, size in zip(parts, order, strict=True))
    bias = layer.dt_bias.detach().double().cpu()
    skip: Any = 0
    if layer.kind == "mamba2":
        x, k, q = parts
        step = F.softplus(double["projected_states"][:, -shape.heads :] + bias)
        v, g, beta = x * step[..., None], layer.A.detach().double().cpu() * step, None
        skip = layer.D.detach().double().cpu()[:, None] * x
    else:
        q, k, v = parts
        q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + EPSILON) for y in (q, k))
        q = q * shape.key_dim**-0.5
        if layer.kind == "gdn":
            g = -layer.A_log.detach().double().cpu().exp() * F.softplus(double["a"] + bias)
            beta = double["b"].sigmoid() * (2 if getattr(layer, "allow_neg_eigval", False) else 1)
        elif (gate := layer.gate()) is None:
            g, beta = double["g1"][0], double["beta"][0]
        else:
            g, beta = torch.from_numpy(gate.log_decays(double["g1"][0].numpy())), double["beta"][0].sigmoid()
    return *(None if y is None else y.numpy() for y in (q, k, v, g, beta)), skip


def recurrence(layer: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Outputs ``(tokens, heads, V)`` of a whole request, in float64; the norm within a layer in its own type."""
    *tokens, skip = tokens_of(layer, given)
    out = torch.from_numpy(run(layer.layer, *(None if y is None else y[None] for y in tokens))[0][0]) + skip
    if "g2" in given:
        out = layer.o_norm(out.to(given["g2"]), given["g2"]).double().cpu()
    return out


def check(layer: Any, builder: Any, config: Any) -> None:
    """Decode some tokens of a random request after a prefill; RuntimeError if outputs are not the recurrence's.

    Errors of a head that only approximates are left out: an exact head on the same pool decodes.
    """
    given = draw(layer, PROMPT + STEPS)
    wanted = recurrence(layer, given)
    shape, device = layer.layer, layer.kv_cache[-1].device
    kind = layer.activations or layer.model_config.dtype
    found, drafts = [], config.num_speculative_tokens or 0
    table = torch.full((1, 1 + drafts), BLOCK, dtype=torch.int32, device=device)
    aligned = getattr(builder, "mamba_aligned_state_indices", None)  # of the V2 runner's batch
    with layer.exact():
        for first, count in [(0, PROMPT), *((i, 1) for i in range(PROMPT, PROMPT + STEPS))]:
            starts = torch.tensor([0, count], dtype=torch.int32)
            lengths = torch.tensor([first + count], dtype=torch.int32)
            batch = CommonAttentionMetadata(
                query_start_loc=starts.to(device), query_start_loc_cpu=starts, seq_lens=lengths.to(device),
                num_reqs=1, num_actual_tokens=count, max_query_len=count, max_seq_len=first + count,
                block_table_tensor=table,
                slot_mapping=torch.zeros(count, dtype=torch.int64, device=device),
                is_prefilling=torch.tensor([first < PROMPT]), seq_lens_cpu_upper_bound=lengths,
            )  # fmt: skip
            if hasattr(builder, "mamba_aligned_state_indices"):
                builder.mamba_aligned_state_indices = table
            ones = torch.ones(1, dtype=torch.int32, device=device)
            metadata = builder.build(0, batch, *((ones, -ones.cpu()) if drafts else ()))
            out = torch.empty(count, shape.heads, shape.value_dim, dtype=kind, device=device)
            step = {name: x[:, first : first + count] if name in ("g1", "beta") else x[first : first + count]
                    for name, x in given.items()}  # fmt: skip
            with set_forward_context({layer.prefix: metadata}, config):
                layer.decode_call(step, out)
            found.append(out.double().cpu())
    if hasattr(builder, "mamba_aligned_state_indices"):
        builder.mamba_aligned_state_indices = aligned
    error = torch.cat(found) - wanted
    share = float(error.norm() / wanted.norm())
    most = 1e-3 if layer.model_config.dtype == torch.float32 else 0.05
    if not share <= most:
        raise RuntimeError(
            f"{layer.prefix}: expected outputs of the recurrence, got a difference of {share:.1%}: the plugin does "
            "not fit to this version of vLLM"
        )
