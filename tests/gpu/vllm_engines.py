"""Engines of vLLM on a tiny model, without and with heads, one after the other; run by `test_vllm_engine.py`.

    PYTHONPATH=benchmarks:SITE python vllm_engines.py KIND ENGINES FOLDER [SECONDS]

Each engine serves the same requests and judges its own log-probabilities (`benchmarks/vllm_agreement.py`); a line of
``FOLDER/results`` has what an engine gave. No engine begins after SECONDS. ENGINES is "graphs" (eager, and graphs of
decode steps without compilation), "default" (vLLM's default), or speculative decoding with n-grams ("drafts") or with
a draft model of one layer ("mtp"). The environment chooses the model runner, with SKETCHSSM_REQUESTS the number of
requests (68), and with SKETCHSSM_SYSTEMS some systems, such as "sketch,residual".
"""

import gc
import json
import os
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import vllm_agreement
import vllm_models
from vllm import LLM
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler

from sketchssm.layer.coefficients import CoefficientMap
from sketchssm.layer.recurrence import FULL_STATE, Layer
from sketchssm.plans.basis import SketchBasis
from sketchssm.plans.plan import SketchPlan
from sketchssm.study import bench

COMMON = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "max_position_embeddings": 4096, "dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
# Two recurrent layers around one of attention. Attention has few tokens a block, so that requests grow by blocks.
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
    "kda": vllm_models.kimi_linear() | {
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64,
        "linear_attn_config": {
            "full_attn_layers": [2], "kda_layers": [1, 3], "head_dim": 64, "num_heads": 2, "short_conv_kernel_size": 4,
        },
        "num_experts": None,
    },
}  # fmt: skip
LAYERS = {"mamba2": Layer("mamba2", 4, 64, 64, 2), "gdn": Layer("gdn", 4, 64, 64, 2), "kda": Layer("kda", 2, 64, 64)}
KEY_CHANNELS = 16
"""Channels of a head's keys that are not zero, so that a sketch of this rank is exact."""
ROWS, TOKENS, REQUESTS = 16, 128, int(os.environ.get("SKETCHSSM_REQUESTS", "68"))
GRAPHS = {
    "none": {"enforce_eager": True},
    "decode": {
        "compilation_config": {
            "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, ROWS],
        },
    },
    "default": {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, ROWS, 32, 64, TOKENS]}},
}  # fmt: skip
SPECULATIVE = {
    "drafts": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
}
BLOCKS = {False: 60, True: 120}
"""Blocks of engines without and with drafts: so few that requests are preempted."""
FEW_TOKENS = 32
"""Vocabulary of engines with drafts: n-grams come back soon, and some drafts are right."""
ENGINES = {
    "graphs": [
        ("vllm", "none"), ("sketch", "decode"), ("replay", "decode"), ("standard", "decode"), ("coarse", "none"),
        ("residual", "decode"), ("sketch", "none"),
    ],
    "default": [("sketch", "default")],
    "drafts": [("vllm", "decode"), ("sketch", "decode"), ("standard", "decode"), ("coarse", "decode")],
    "mtp": [("vllm", "decode"), ("sketch", "decode"), ("standard", "decode"), ("coarse", "decode")],
}  # fmt: skip


def write_plans(kind, system, folder):
    """Plans of the recurrent layers: exact with heads that read their state, of rank 2, or with residuals."""
    layer = LAYERS[kind]
    if system == "coarse":
        plan = bench.random_plan(layer, 2, 16, "lowrank")
    elif system == "residual":
        plan = bench.random_plan(layer, 12, 16, "subspace", residual_bits=3)
    else:
        basis = SketchBasis.random(layer, KEY_CHANNELS)
        basis.omega[...] = np.eye(*basis.omega.shape[1:])
        ranks = np.resize([KEY_CHANNELS, FULL_STATE], layer.heads)
        plan = SketchPlan(basis, ranks, 16, CoefficientMap("ridge", ridge=0.0), "float32")
    place = folder / system
    place.mkdir()
    for number in range(4):
        plan.save(place / f"layers.{number}.safetensors")
    return str(place)


def change_weights(model, kind):
    """Keep KEY_CHANNELS of a head's keys, and give mamba2's states more weight than its skip connection has."""
    layer = LAYERS[kind]
    keys = layer.key_heads * layer.key_dim  # behind values (mamba2) or queries
    first = layer.heads * layer.value_dim if kind == "mamba2" else keys
    for module in model.modules():
        if hasattr(module, "conv1d"):
            for x in (module.conv1d.weight, getattr(module.conv1d, "bias", None)):
                if x is not None:
                    x.data[first : first + keys].unflatten(0, (-1, layer.key_dim))[:, KEY_CHANNELS:] = 0
        if hasattr(module, "D") and hasattr(module, "conv1d"):
            module.D.data.fill_(0.1)
            module.conv1d.weight.data.mul_(4)


def used():
    """Bytes of memory of the device in use by PyTorch and CuPy."""
    import cupy

    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() + cupy.get_default_memory_pool().used_bytes()


def serve(graphs, model, counts, speculative):
    """Start an engine and serve: log-probabilities against the engine's own prefill, memory, events."""
    begin, drafts = time.perf_counter(), speculative is not None
    caching = {"speculative_config": speculative, "enable_prefix_caching": False} if drafts else {}
    llm = LLM(**{
        "model": model, "skip_tokenizer_init": True, "load_format": "dummy", "dtype": "bfloat16", "max_num_seqs": ROWS,
        "max_model_len": 1024, "max_num_batched_tokens": TOKENS, "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": 1 << 30, "num_gpu_blocks_override": BLOCKS[drafts],
        "mamba_ssm_cache_dtype": "float32", "enable_prefix_caching": True, "disable_log_stats": True,
        "generation_config": "vllm", "seed": 0, "additional_config": {"gdn_prefill_backend": "triton"},
        **GRAPHS[graphs], **caching,
    })  # fmt: skip
    engine, seconds = llm.llm_engine, time.perf_counter() - begin
    pool = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    words = FEW_TOKENS if drafts else 1024
    requests = vllm_agreement.draw_requests(REQUESTS, (1, 161), (4, 65), words, 1, 0 if drafts else 300)
    # prompts of one token, of a chunk, and of a chunk and one token
    requests[1:4] = [(requests[i][0][:1] * n, requests[i][1]) for i, n in ((1, 1), (2, TOKENS), (3, TOKENS + 1))]
    vllm_agreement.serve(engine, requests[:ROWS], ROWS)
    before = used(), pool.get_num_free_blocks()
    counts.clear()
    served = vllm_agreement.serve(engine, requests, ROWS, aborted=range(5, REQUESTS, 17))
    result = {"memory": [before[0], used()], "free_blocks": [before[1], pool.get_num_free_blocks()]}
    result |= {name: counts[name] for name in ("preemptions", "cached_tokens", "drafted", "accepted")}
    wrong, gaps, spread = vllm_agreement.differences(engine, requests, served, ROWS)
    engine.engine_core.shutdown()
    result |= {"start_seconds": seconds, "seconds": time.perf_counter() - begin - seconds}
    result["runner"] = 2 if engine.vllm_config.use_v2_model_runner else 1
    return result | {"agreement": vllm_agreement.summary(gaps if drafts else wrong, spread)}


def count_events():
    """Let vLLM's scheduler count preemptions, tokens found in the cache, and drafted and accepted tokens."""
    counts = Counter()
    find = KVCacheManager.get_computed_blocks
    preempt, observe = Scheduler._preempt_request, Scheduler.make_spec_decoding_stats

    def preempted(self, *given, **others):
        counts["preemptions"] += 1
        return preempt(self, *given, **others)

    def observed(self, stats, num_draft_tokens, num_accepted_tokens, *given, **others):
        counts.update(drafted=num_draft_tokens, accepted=num_accepted_tokens)
        return observe(self, stats, num_draft_tokens, num_accepted_tokens, *given, **others)

    def found(self, *given, **others):
        result = find(self, *given, **others)
        counts["cached_tokens"] += result[1]
        return result

    Scheduler._preempt_request, Scheduler.make_spec_decoding_stats = preempted, observed
    KVCacheManager.get_computed_blocks = found
    return counts


def main():
    begin = time.perf_counter()
    kind, engines, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    limit = float(sys.argv[4]) if len(sys.argv) > 4 else np.inf
    few = {"vocab_size": FEW_TOKENS} if engines in SPECULATIVE else {}
    if engines == "mtp":
        few["decoder_sparse_step"] = 1  # vLLM wants experts in the draft model, too, whose layer has number 0
    (folder / "config.json").write_text(json.dumps(MODELS[kind] | COMMON | few))
    vllm_models.load_random_weights(lambda model: change_weights(model, kind))
    counts = count_events()
    systems = os.environ.get("SKETCHSSM_SYSTEMS")
    for system, graphs in ENGINES[engines]:
        if systems and system not in systems.split(","):
            continue
        if time.perf_counter() - begin > limit:
            break
        os.environ.pop("SKETCHSSM_VLLM", None)
        if system != "vllm":
            from sketchssm.vllm import register

            register()
            plans = folder / system
            known = system in ("standard", "replay")
            os.environ["SKETCHSSM_VLLM"] = (
                system if known else str(plans) if plans.exists() else write_plans(kind, system, folder)
            )
        try:
            result = serve(graphs, str(folder), counts, SPECULATIVE.get(engines))
        except Exception:
            result = {"error": traceback.format_exc()[-1500:]}
        with (folder / "results").open("a") as file:
            file.write(json.dumps(result | {"system": system, "graphs": graphs}) + "\n")
        print({"kind": kind, "system": system, "graphs": graphs} | result, flush=True)
        clean()
    os._exit(0)  # engines take long to end


def clean():
    """Let the next engine start as the first one did."""
    cleanup_dist_env_and_memory()
    torch._dynamo.reset()


if __name__ == "__main__":
    main()
