"""A `HybridLM` as a class of transformers with the same weights: Bamba (mamba2), Qwen3.5 (gdn) or Kimi-Linear (kda).

The classes run their own recurrences. Some differences to the model are not settings of the classes, so their code is
replaced: rotations by position and norms of queries and keys are removed, Bamba's norm of each group becomes one norm,
and Kimi-Linear's log-decays get the model's lower bound.
"""

import torch
import transformers
from torch import nn


def as_transformers(lm):
    """Make the model of transformers.

    Parameters
    ----------
    lm : HybridLM
        Model with weights; not changed.

    Returns
    -------
    PreTrainedModel
        Model in evaluation mode, without gradients, with the same logits to rounding.
    """
    make, mixer, names = CLASSES[lm.layer.kind]
    model = make(lm)
    inner = model.model
    load(inner.embed_tokens, weight=lm.emb.weight)
    model.lm_head.weight = inner.embed_tokens.weight  # Kimi-Linear does not tie them by itself
    last_norm, second_norm, mlp = names
    offset = 1 if lm.layer.kind == "gdn" else 0  # Qwen's norms multiply by 1 + weight
    load(getattr(inner, last_norm), weight=lm.nf.w - offset)
    for place, (block, layer) in enumerate(zip(lm.blocks, inner.layers, strict=True)):
        load(layer.input_layernorm, weight=block.n1.w - offset)
        load(getattr(layer, second_norm), weight=block.n2.w - offset)
        parts = getattr(layer, mlp)
        load(parts, **{f"{name}_proj.weight": getattr(block, name).weight for name in ("gate", "up", "down")})
        if place in lm.recurrent:
            mixer(layer, block.mix, lm.layer)
        else:
            attention(layer.self_attn, block.mix)
    if hasattr(inner, "rotary_emb"):
        inner.rotary_emb.inv_freq.zero_()  # no positions
    return model.eval().requires_grad_(False)


def load(module, **tensors):
    """Set all parameters of a module."""
    module.load_state_dict({name: x.detach().clone() for name, x in tensors.items()})


def shared(lm):
    """Common settings of the classes."""
    config = {
        "vocab_size": lm.emb.num_embeddings,
        "hidden_size": lm.emb.embedding_dim,
        "intermediate_size": lm.blocks[0].gate.out_features,
        "num_hidden_layers": len(lm.blocks),
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    heads = next((block.mix.heads for i, block in enumerate(lm.blocks) if i not in lm.recurrent), 1)
    kinds = ["linear_attention" if i in lm.recurrent else "full_attention" for i in range(len(lm.blocks))]
    return config | {"num_attention_heads": heads, "num_key_value_heads": heads}, kinds, lm.blocks[lm.recurrent[0]].mix


def bamba(lm):
    """Bamba with random weights."""
    config, kinds, mix = shared(lm)
    values = lm.layer.heads * lm.layer.value_dim
    return transformers.BambaForCausalLM(
        transformers.BambaConfig(
            **config,
            attn_layer_indices=[i for i, kind in enumerate(kinds) if kind == "full_attention"],
            mamba_n_heads=lm.layer.heads,
            mamba_d_head=lm.layer.value_dim,
            mamba_n_groups=lm.layer.key_heads,
            mamba_d_state=lm.layer.key_dim,
            mamba_d_conv=mix.conv_w.shape[1],
            mamba_expand=values // lm.emb.embedding_dim,
            mamba_chunk_size=16,
        )
    )


def bamba_mixer(layer, mix, shape):
    """Mamba-2: projections in the order gate, values, keys, queries, time steps."""
    q, k, v, z, dt = mix.inp.weight.split([*mix.sizes, mix.sizes[2], shape.heads])
    order = torch.arange(sum(mix.sizes)).split(mix.sizes)
    order = torch.cat(order[::-1])
    load(
        layer.mamba,
        **{
            "in_proj.weight": torch.cat([z, v, k, q, dt]),
            "conv1d.weight": mix.conv_w[order, None],
            "conv1d.bias": mix.conv_b[order],
            "dt_bias": mix.dt_bias,
            "A_log": mix.A_log,
            "D": mix.D,
            "norm.weight": mix.norm.w,
            "out_proj.weight": mix.out.weight,
        },
    )
    layer.mamba.norm.group_size = mix.sizes[2]  # one norm over all heads


def qwen(lm):
    """Qwen3.5 (text) with random weights."""
    config, kinds, mix = shared(lm)
    return transformers.Qwen3_5ForCausalLM(
        transformers.Qwen3_5TextConfig(
            **config,
            layer_types=kinds,
            head_dim=config["hidden_size"] // config["num_attention_heads"],
            linear_num_key_heads=lm.layer.key_heads,
            linear_num_value_heads=lm.layer.heads,
            linear_key_head_dim=lm.layer.key_dim,
            linear_value_head_dim=lm.layer.value_dim,
            linear_conv_kernel_dim=mix.conv_w.shape[1],
        )
    )


def qwen_mixer(layer, mix, shape):
    """Gated DeltaNet."""
    inputs, z, a, b = mix.inp.weight.split([sum(mix.sizes), mix.sizes[2], shape.heads, shape.heads])
    load(
        layer.linear_attn,
        **{
            "in_proj_qkv.weight": inputs,
            "in_proj_z.weight": z,
            "in_proj_a.weight": a,
            "in_proj_b.weight": b,
            "conv1d.weight": mix.conv_w[:, None],
            "dt_bias": mix.dt_bias,
            "A_log": mix.A_log,
            "norm.weight": mix.norm.w,
            "out_proj.weight": mix.out.weight,
        },
    )


def kimi(lm):
    """Kimi-Linear with random weights and dense MLPs."""
    config, kinds, mix = shared(lm)
    size = config["hidden_size"] // config["num_attention_heads"]
    return transformers.KimiLinearForCausalLM(
        transformers.KimiLinearConfig(
            **config,
            layer_types=kinds,
            mlp_layer_types=["dense"] * len(kinds),
            kv_lora_rank=config["hidden_size"],
            qk_rope_head_dim=size,
            qk_nope_head_dim=size,
            v_head_dim=size,
            linear_num_heads=lm.layer.heads,
            linear_head_dim=lm.layer.key_dim,
            linear_conv_kernel_dim=mix.conv_w.shape[1],
        )
    )


def kimi_mixer(layer, mix, shape):
    """Kimi Delta Attention."""
    q, k, v, b, a, gate = mix.inp.weight.split([*mix.sizes, shape.heads, shape.key_dim, shape.key_dim])
    load(
        layer.self_attn,
        **{
            "q_proj.weight": q,
            "k_proj.weight": k,
            "v_proj.weight": v,
            "b_proj.weight": b,
            "conv1d.weight": mix.conv_w[:, None],
            "forget_gate.f_a_proj.weight": a,
            "forget_gate.f_b_proj.weight": mix.f2.weight,
            "forget_gate.dt_bias": mix.dt_bias,
            "forget_gate.A_log": mix.A_log.view(1, 1, -1, 1),
            "g_a_proj.weight": gate,
            "g_b_proj.weight": mix.g2.weight,
            "o_norm.weight": mix.norm.w,
            "o_proj.weight": mix.out.weight,
        },
    )
    layer.self_attn.forget_gate.register_forward_hook(lambda module, given, g: g.clamp_min(-5.0))


def attention(module, mix):
    """Softmax attention: Bamba's, Qwen's with a gate of a half, or Kimi's without compression."""
    q, k, v = (x.clone() for x in mix.qkv.weight.chunk(3))
    tensors = {"o_proj.weight": mix.out.weight}
    if isinstance(module, transformers.models.kimi_linear.modeling_kimi_linear.KimiLinearAttention):
        module.kv_a_layernorm = nn.Identity()
        heads, size = mix.heads, q.shape[0] // mix.heads
        q, k, v = (x.unflatten(0, (heads, size)) for x in (q, k, v))
        tensors |= {
            # half of each query meets the part of the keys that all heads share, which is zero
            "q_proj.weight": torch.cat([q * 2**0.5, torch.zeros_like(q)], 1).flatten(0, 1),
            "kv_a_proj_with_mqa.weight": torch.eye(module.kv_lora_rank + size, module.kv_lora_rank),
            "kv_b_proj.weight": torch.cat([k, v], 1).flatten(0, 1),
        }
        tensors["kv_a_proj_with_mqa.weight"][module.kv_lora_rank :] = 0
    else:
        if hasattr(module, "q_norm"):
            module.q_norm, module.k_norm = nn.Identity(), nn.Identity()
            q = q.unflatten(0, (mix.heads, -1))
            q = torch.cat([q, torch.zeros_like(q)], 1).flatten(0, 1)
            v = 2 * v
        tensors |= {"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v}
    load(module, **tensors)


CLASSES = {
    "mamba2": (bamba, bamba_mixer, ("final_layernorm", "pre_ff_layernorm", "feed_forward")),
    "gdn": (qwen, qwen_mixer, ("norm", "post_attention_layernorm", "mlp")),
    "kda": (kimi, kimi_mixer, ("norm", "post_attention_layernorm", "mlp")),
}
"""By kind of layer: the class with random weights, how a mixer is loaded, and names of the last norm, the second norm
of a block and its MLP."""
