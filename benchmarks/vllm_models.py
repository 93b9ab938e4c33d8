"""Hybrid models as configurations for vLLM, without checkpoints; their random weights; plans for their layers.

Nothing is downloaded. Weights are random, so a model's texts mean nothing and all experts of its MoE layers are used
equally often; speeds are those of the shapes. Gates decay as those of trained layers do.
"""

import json
from pathlib import Path

from sketchssm.study import bench

COMMON = {"dtype": "bfloat16", "torch_dtype": "bfloat16", "tie_word_embeddings": False}


def nemotron_nano():
    """Nemotron-Nano-9B-v2: 27 mamba2 layers, 25 MLPs and 4 attention layers."""
    pattern = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
    return {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern), "hidden_size": 4480, "intermediate_size": 15680, "vocab_size": 131072,
        "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": False,
        "mamba_num_heads": 128, "mamba_head_dim": 80, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
        "chunk_size": 128, "expand": 2, "use_conv_bias": True, "mamba_hidden_act": "silu", "mamba_proj_bias": False,
        "mlp_hidden_act": "relu2", "mlp_bias": False, "use_bias": False, "layer_norm_epsilon": 1e-5,
        "residual_in_fp32": False, "max_position_embeddings": 131072,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 12,
    }  # fmt: skip


def nemotron_super_layers():
    """Nemotron-Nano-9B-v2 with the mamba2 layers of Nemotron 3 Super: heads of 64 channels in place of 80."""
    return nemotron_nano() | {"mamba_head_dim": 64}


def qwen3_next():
    """A third of Qwen3-Next-80B-A3B, as the whole has 160 GB: 12 gdn layers, 4 attention layers, all 512 experts."""
    layers = 16
    return {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": layers,
        "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
        "full_attention_interval": 4, "hidden_size": 2048, "intermediate_size": 5120, "vocab_size": 151936,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25,
        "rope_theta": 10000000, "attention_bias": False, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "max_position_embeddings": 262144,
        "bos_token_id": 151643, "eos_token_id": 151645,
    }  # fmt: skip


def kimi_linear():
    """More than half of Kimi-Linear-48B-A3B, as the whole has 98 GB: 12 kda layers and 4 attention layers."""
    layers, full = 16, [4, 8, 12, 16]
    return {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "num_hidden_layers": layers,
        "hidden_size": 2304, "intermediate_size": 9216, "vocab_size": 163840, "num_attention_heads": 32,
        "num_key_value_heads": 32, "head_dim": 72, "hidden_act": "silu", "rms_norm_eps": 1e-5, "kv_lora_rank": 512,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True,
        "rope_theta": 10000.0,
        "linear_attn_config": {
            "full_attn_layers": full, "kda_layers": [i for i in range(1, layers + 1) if i not in full],
            "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
        },
        "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024,
        "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1,
        "first_k_dense_replace": 1, "routed_scaling_factor": 2.446, "use_grouped_topk": True, "num_expert_group": 1,
        "topk_group": 1, "num_nextn_predict_layers": 0, "max_position_embeddings": 1048576,
        "model_max_length": 1048576, "pad_token_id": 163839, "bos_token_id": 163584, "eos_token_id": 163586,
    }  # fmt: skip


MODELS = {
    "nemotron-nano-9b-v2": nemotron_nano, "nemotron-3-super": nemotron_super_layers, "qwen3-next": qwen3_next,
    "kimi-linear": kimi_linear,
}  # fmt: skip
"""Configurations by the names that their layers have in `sketchssm.study.bench.SHAPES`."""


def write_model(name, folder):
    """Write a model's folder, which is its configuration alone."""
    place = Path(folder) / name
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(COMMON | MODELS[name](), indent=1))
    return str(place)


def write_plans(name, folder, mean_rank, map, sketch_dtype="bfloat16", residual_bits=0):
    """Write a random plan for each layer, with the mean rank and the spread of ranks of the benchmarks."""
    place = Path(folder) / f"{name}-{map}-{mean_rank}-{sketch_dtype}-{residual_bits}"
    place.mkdir(parents=True, exist_ok=True)
    layer = bench.SHAPES[name]
    ranks = bench.spread_ranks(layer.heads, mean_rank)
    plan = bench.random_plan(layer, ranks, 16, map, 0, sketch_dtype, residual_bits)
    for number in range(MODELS[name]()["num_hidden_layers"]):
        plan.save(place / f"layers.{number}.safetensors")
    return str(place)


def set_weights(model):
    """Give a model weights of usual size, and gates with time constants from some tokens to a thousand."""
    import torch

    draw = torch.Generator(device="cuda").manual_seed(1)

    def uniform(like, low, high):
        return torch.empty(like.shape, device=like.device).uniform_(low, high, generator=draw)

    for module in model.modules():
        kind = type(module).__name__
        for name, weight in module.named_parameters(recurse=False):
            if not weight.is_cuda or not weight.is_floating_point():
                continue
            if "Norm" in kind and weight.ndim == 1:
                weight.data.fill_(0.0 if kind.startswith("Gemma") else 1.0)
            elif name == "A":  # the negative rate itself
                weight.data.copy_(-uniform(weight, 0.0, 2.77).exp())
            elif name == "A_log":
                weight.data.copy_(uniform(weight, 0.0, 2.77))
            elif name == "dt_bias":  # steps from 0.001 to 0.1
                step = uniform(weight, -6.9, -2.3).exp()
                weight.data.copy_(step + torch.log(-torch.expm1(-step)))
            elif name == "D":
                weight.data.fill_(1.0)
            elif weight.ndim >= 2 and weight.dtype in (torch.bfloat16, torch.float16, torch.float32):
                narrow = "conv" in kind.lower() or weight.shape[-1] <= 8
                weight.data.normal_(0.0, 0.25 if narrow else 0.02, generator=draw)
    torch.cuda.synchronize()


def load_random_weights(change=None):
    """Let vLLM's dummy loader set these weights; `change` is called with the model afterwards."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    load = DummyModelLoader.load_weights

    def load_weights(self, model, *given, **others):
        load(self, model, *given, **others)
        set_weights(model)  # before there are heads, which take the gates' parameters over
        if change is not None:
            change(model)

    DummyModelLoader.load_weights = load_weights
