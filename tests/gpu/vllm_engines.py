"""Engines of vLLM on a tiny model, without and with heads, one after the other; run by `test_vllm_engine.py`.

    PYTHONPATH=benchmarks:SITE python vllm_engines.py KIND GRAPHS FOLDER

Each engine serves the same requests with the same continuations (`benchmarks/vllm_forced.py`); a line of
``FOLDER/results`` has what an engine gave. GRAPHS is "none,decode" (eager, then graphs of decode steps without
compilation), "default" (vLLM's default) or "drafts" (speculative decoding with n-grams; the engines take their own
tokens, and at last vLLM without drafts tells how far these are from its likeliest).
"""

import gc
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import vllm_forced
import vllm_models
from vllm import LLM
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.v1.core.sched.scheduler import Scheduler

from sketchssm.layer.coefficients import CoefficientMap
from sketchssm.layer.recurrence import FULL_STATE, Layer
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
ROWS, TOKENS, BLOCKS = 16, 128, 40
REQUESTS = 68
GRAPHS = {
    "none": {"enforce_eager": True},
    "decode": {
        "compilation_config": {
            "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, ROWS],
        },
    },
    "default": {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, ROWS, 32, 64, TOKENS]}},
}  # fmt: skip
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
FEW_TOKENS = 32
"""Vocabulary of engines with drafts: n-grams come back soon, so that there are many drafts, some of them right."""
ENGINES = {
    "none,decode": [
        ("vllm", "none"), ("standard", "none"), ("standard", "decode"), ("replay", "decode"), ("sketch", "none"),
        ("sketch", "decode"), ("coarse", "none"),
    ],
    "default": [("vllm", "default"), ("standard", "default"), ("sketch", "default")],
    "drafts": [
        ("vllm", "decode"), ("standard", "none"), ("standard", "decode"), ("replay", "decode"), ("sketch", "none"),
        ("sketch", "decode"), ("coarse", "decode"),
    ],
}  # fmt: skip


def write_plans(kind, system, folder):
    """Plans of the recurrent layers: sketches of full rank and heads that read their state, or of rank 2."""
    layer = LAYERS[kind]
    if system == "coarse":
        plan = bench.random_plan(layer, 2, 16, "lowrank")
    else:
        ranks = np.resize([layer.key_dim, FULL_STATE], layer.heads)
        plan = bench.random_plan(layer, ranks, 16, CoefficientMap("ridge", ridge=0.0), sketch_dtype="float32")
    place = folder / system
    place.mkdir()
    for number in range(4):
        plan.save(place / f"layers.{number}.safetensors")
    return str(place)


def let_states_matter(model):
    """Give mamba2's states more weight in outputs than its skip connection has."""
    for module in model.modules():
        if hasattr(module, "D") and hasattr(module, "conv1d"):
            module.D.data.fill_(0.1)
            module.conv1d.weight.data.mul_(4)


def used():
    """Bytes of memory of the device in use by PyTorch and CuPy."""
    import cupy

    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() + cupy.get_default_memory_pool().used_bytes()


def start(graphs, model, **settings):
    """Start an engine; its time, the engine and its pool of blocks."""
    begin = time.perf_counter()
    llm = LLM(**{
        "model": model, "skip_tokenizer_init": True, "load_format": "dummy", "dtype": "bfloat16", "max_num_seqs": ROWS,
        "max_model_len": 512, "max_num_batched_tokens": TOKENS, "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": 1 << 30, "num_gpu_blocks_override": BLOCKS, "mamba_ssm_cache_dtype": "float32",
        "enable_prefix_caching": False, "disable_log_stats": True, "generation_config": "vllm", "seed": 0,
        "additional_config": {"gdn_prefill_backend": "triton"}, **GRAPHS[graphs], **settings,
    })  # fmt: skip
    engine = llm.llm_engine
    pool = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    return time.perf_counter() - begin, engine, pool


def serve(graphs, model, counts):
    """Start an engine and serve; what it gave, and a list with another pass for a control."""
    seconds, engine, pool = start(graphs, model, logits_processors=[vllm_forced.processor()])
    started = time.perf_counter()
    requests = vllm_forced.draw_requests(REQUESTS, (1, 161), (4, 65), 1024, 1)
    # prompts of one token, of a chunk, and of a chunk and one token
    requests[:3] = [(requests[i][0][:1] * n, requests[i][1]) for i, n in enumerate((1, TOKENS, TOKENS + 1))]
    own = "SKETCHSSM_VLLM" not in os.environ
    # First of all, in blocks of zeros: vLLM's gdn starts prompts of one token from the state that their block has.
    alone = vllm_forced.serve(engine, requests, 1) if own and graphs == "none" else None
    vllm_forced.serve(engine, requests[:ROWS], ROWS)
    before = used(), pool.get_num_free_blocks()
    counts.clear()
    logprobs = vllm_forced.serve(engine, requests, ROWS, aborted=range(5, REQUESTS, 17))
    result = {
        "logprobs": logprobs, "preemptions": counts["preemptions"], "memory": [before[0], used()],
        "free_blocks": [before[1], pool.get_num_free_blocks()], "start_seconds": seconds,
    }  # fmt: skip
    result |= {"again": vllm_forced.serve(engine, requests, 6)} if own else {}
    result |= {"alone": alone} if alone else {}
    result["seconds"] = time.perf_counter() - started
    engine.engine_core.shutdown()
    return result


def serve_drafts(graphs, model, counts):
    """Start an engine with speculative decoding and let it take its own tokens; what it gave. A request needs blocks
    for its drafts' states too. vLLM's gdn is wrong for prompts of one token.
    """
    seconds, engine, pool = start(graphs, model, speculative_config=SPECULATIVE, num_gpu_blocks_override=3 * BLOCKS)
    requests = vllm_forced.draw_requests(REQUESTS, (2, 161), (4, 65), FEW_TOKENS, 1)
    vllm_forced.generate(engine, requests[:ROWS], ROWS)
    before = used(), pool.get_num_free_blocks()
    counts.clear()
    tokens = vllm_forced.generate(engine, requests, ROWS, aborted=range(5, REQUESTS, 17))
    result = {
        "requests": [(prompt, chosen) for (prompt, _), chosen in zip(requests, tokens, strict=True) if chosen],
        "memory": [before[0], used()], "free_blocks": [before[1], pool.get_num_free_blocks()],
        "start_seconds": seconds, **{name: counts[name] for name in ("preemptions", "drafted", "accepted")},
    }  # fmt: skip
    engine.engine_core.shutdown()
    return result


def judge(model, results):
    """Distances of tokens to vLLM's likeliest ones, and the spread of log-probabilities."""
    _, engine, _ = start("none", model, logits_processors=[vllm_forced.processor()])
    for result in results:
        requests = result.pop("requests")
        logprobs = vllm_forced.serve(engine, requests, ROWS)
        result["spread"] = float(np.concatenate(logprobs).std())
        result["gaps"] = vllm_forced.serve(engine, requests, ROWS, gaps=True)
    engine.engine_core.shutdown()


def count_events():
    """Let vLLM's scheduler count preemptions, and drafted and accepted tokens."""
    counts = Counter()
    preempt, observe = Scheduler._preempt_request, Scheduler.make_spec_decoding_stats

    def preempted(self, *given, **others):
        counts["preemptions"] += 1
        return preempt(self, *given, **others)

    def observed(self, stats, num_draft_tokens, num_accepted_tokens, *given, **others):
        counts.update(drafted=num_draft_tokens, accepted=num_accepted_tokens)
        return observe(self, stats, num_draft_tokens, num_accepted_tokens, *given, **others)

    Scheduler._preempt_request, Scheduler.make_spec_decoding_stats = preempted, observed
    return counts


def main():
    kind, engines, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    few = {"vocab_size": FEW_TOKENS} if engines == "drafts" else {}
    (folder / "config.json").write_text(json.dumps(MODELS[kind] | COMMON | few))
    vllm_models.load_random_weights(let_states_matter)
    os.environ.pop("SKETCHSSM_VLLM", None)
    counts, results = count_events(), []
    for system, graphs in ENGINES[engines]:
        if system != "vllm":
            from sketchssm.vllm import register

            register()
            known = system in ("standard", "replay")
            plans = folder / system
            os.environ["SKETCHSSM_VLLM"] = (
                system if known else str(plans) if plans.exists() else write_plans(kind, system, folder)
            )
        how = serve_drafts if engines == "drafts" else serve
        results.append(how(graphs, str(folder), counts) | {"system": system, "graphs": graphs})
        if engines != "drafts":
            note(folder, results.pop())
        clean()
    if engines == "drafts":
        del os.environ["SKETCHSSM_VLLM"]
        judge(str(folder), results)
        for result in results:
            note(folder, result)
    os._exit(0)  # engines take long to end


def note(folder, result):
    """Append a result to the file."""
    with (folder / "results").open("a") as file:
        file.write(json.dumps(result) + "\n")
    print({name: x for name, x in result.items() if not isinstance(x, list) or len(x) < 3}, flush=True)


def clean():
    """Let the next engine start as the first one did."""
    cleanup_dist_env_and_memory()
    torch._dynamo.reset()


if __name__ == "__main__":
    main()
