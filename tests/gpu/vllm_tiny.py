"""Tiny models for vLLM, of each class of recurrent layers that has heads: configurations without checkpoints.

Two recurrent layers and one of attention, which has few tokens a block, so that requests grow by blocks.
"""

import vllm_models

from sketchssm.layer.recurrence import Layer

COMMON = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "max_position_embeddings": 4096, "dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
# Neither vLLM nor transformers 5.17 has a configuration of these models. That of Kimi-Linear takes any field, and vLLM
# expects multi-head latent attention behind its name.
LATENT = {
    "model_type": "kimi_linear", "num_hidden_layers": 3, "hidden_act": "silu", "q_lora_rank": None,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "num_nextn_predict_layers": 0, **HEADS,
}  # fmt: skip


def kimi(**others):
    """Kimi-Linear, with other settings of its recurrent layers."""
    recurrent = {"full_attn_layers": [2], "kda_layers": [1, 3], "head_dim": 64, "num_heads": 2}
    return vllm_models.kimi_linear() | HEADS | {
        "num_hidden_layers": 3, "linear_attn_config": recurrent | {"short_conv_kernel_size": 4} | others,
        "num_experts": None,
    }  # fmt: skip


MODELS = {
    "mamba2": vllm_models.nemotron_nano() | {
        "hybrid_override_pattern": "M*M-", "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
        "mamba_num_heads": 4, "mamba_head_dim": 64, "ssm_state_size": 64, "n_groups": 2,
    },
    # Every token takes all experts of the one MoE layer, which vLLM wants: rounding does not change routes.
    "gdn": vllm_models.qwen3_next() | {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "decoder_sparse_step": 3, "num_experts": 4,
        "num_experts_per_tok": 4, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
    },
    "kda": kimi(),
    # Heads of attention are 256 / 2 = 128 wide.
    "gdn-olmo": {
        "architectures": ["OlmoHybridForCausalLM"], "model_type": "olmo_hybrid", "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_attention_heads": 2,
        "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False,
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True,
    },
    # With the gate of Kimi K3 the text model has its layers.
    "kda-k3": kimi(use_full_rank_gate=True, gate_lower_bound=-5.0),
    "kda-glm": LATENT | {
        "architectures": ["Glm5NextForCausalLM"], "rms_norm_eps": 1e-5, "mlp_layer_types": ["dense"] * 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_head_dim": 64,
        "linear_num_heads": 2, "linear_conv_kernel_dim": 4, "linear_lower_bound": -5.0, "mla_use_nope": True,
        "index_topk": None, "index_kpool": None, "mhc": False, "swiglu_limit": None, "n_routed_experts": None,
        "num_experts": None, "n_shared_experts": None,
    },
    # The rotary embedding turns channels i and i + 8 of the first 16 = 0.25 * 64.
    "mamba2-bailing": LATENT | {
        "architectures": ["BailingMoeV2_5ForCausalLM"], "rms_norm_eps": 1e-6, "layer_group_size": 3, "num_experts": 0,
        "use_bias": False, "use_qkv_bias": False, "use_qk_norm": True, "linear_silu": False, "group_norm_size": 4,
        "partial_rotary_factor": 0.25, "rope_theta": 6000000.0,
    },
    "kda-bailing": LATENT | {
        "architectures": ["BailingMoeV3ForCausalLM"], "rms_norm_eps": 1e-5, "layer_group_size": 3,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"], "short_conv_kernel_size": 4,
        "no_kda_lora": True, "kda_safe_gate": True, "kda_lower_bound": -5.0, "rope_theta": 10000.0,
        "gated_attention_proj_granularity_type": None, "use_bias": False, "num_experts": None,
        "first_k_dense_replace": 3,
    },
}  # fmt: skip
LAYERS = {
    "mamba2": Layer("mamba2", 4, 64, 64, 2), "gdn": Layer("gdn", 4, 64, 64, 2), "kda": Layer("kda", 2, 64, 64),
    "gdn-olmo": Layer("gdn", 2, 64, 64), "kda-k3": Layer("kda", 2, 64, 64), "kda-glm": Layer("kda", 2, 64, 64),
    "mamba2-bailing": Layer("mamba2", 4, 64, 64), "kda-bailing": Layer("kda", 4, 64, 64),
}  # fmt: skip
ARGUMENTS = {"mamba2-bailing": {"mamba_cache_dtype": "float32"}}
"""More arguments of an engine. The type of the states of lightning attention follows this one alone."""
KEY_CHANNELS = 16
"""Channels of a head's keys that are not zero, so that a sketch of this rank is exact."""


def change_weights(model, name):
    """Keep KEY_CHANNELS of a head's keys, and give states some weight in the outputs and gates some memory."""
    layer = LAYERS[name]
    keys = layer.key_heads * layer.key_dim
    first = layer.heads * layer.value_dim if name == "mamba2" else keys  # behind values, or queries

    def cut(x):
        x.unflatten(0, (-1, layer.key_dim))[:, KEY_CHANNELS:] = 0

    for module in model.modules():
        if hasattr(module, "k_conv1d"):
            cut(module.k_conv1d.weight.data)
        elif hasattr(module, "conv1d"):
            for x in (module.conv1d.weight, getattr(module.conv1d, "bias", None)):
                if x is not None:
                    cut(x.data[first : first + keys])
        elif hasattr(module, "query_key_value"):
            cut(module.query_key_value.weight.data[first : first + keys])
        if hasattr(module, "D") and hasattr(module, "conv1d"):  # mamba2's skip connection
            module.D.data.fill_(0.1)
            module.conv1d.weight.data.mul_(4)
        if hasattr(module, "post_feedforward_layernorm"):  # OLMo's attention, whose outputs are normed
            module.post_attention_layernorm.weight.data.fill_(0.1)
            module.post_feedforward_layernorm.weight.data.fill_(0.1)
        bounds = (getattr(module, f"{x}lower_bound", None) for x in ("gate_", "kda_", ""))
        if any(x is not None for x in bounds) and hasattr(module, "A_log"):
            module.A_log.data.mul_(0.1)  # decays are -5 sigmoid(exp(A_log) (raw + dt_bias)): half would be 0
