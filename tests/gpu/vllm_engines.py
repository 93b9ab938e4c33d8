"""Engines of vLLM on a tiny model, without and with heads, one after the other; run by `test_vllm_engine.py`.

    PYTHONPATH=benchmarks:SITE python vllm_engines.py MODEL ENGINES FOLDER [SECONDS]

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
from vllm_tiny import ARGUMENTS, COMMON, KEY_CHANNELS, LAYERS, MODELS, change_weights

from sketchssm.layer.coefficients import CoefficientMap
from sketchssm.layer.recurrence import FULL_STATE
from sketchssm.plans.basis import SketchBasis
from sketchssm.plans.plan import SketchPlan
from sketchssm.study import bench

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
BLOCKS = {None: 60, "ngram": 120, "mtp": 100}
"""Blocks of engines, by method of drafts: so few that requests are preempted."""
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


def write_plans(name, system, folder):
    """Plans of the recurrent layers: exact with heads that read their state, of rank 2, or with residuals."""
    layer = LAYERS[name]
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


def used():
    """Bytes of memory of the device in use by PyTorch and CuPy."""
    import cupy

    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() + cupy.get_default_memory_pool().used_bytes()


def serve(graphs, model, counts, speculative, **more):
    """Start an engine and serve: log-probabilities against the engine's own prefill, memory, events."""
    begin, drafts = time.perf_counter(), None if speculative is None else speculative["method"]
    caching = {"speculative_config": speculative, "enable_prefix_caching": False} if drafts else {}
    llm = LLM(**{
        "model": model, "skip_tokenizer_init": True, "load_format": "dummy", "dtype": "bfloat16", "max_num_seqs": ROWS,
        "max_model_len": 1024, "max_num_batched_tokens": TOKENS, "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": 1 << 30, "num_gpu_blocks_override": BLOCKS[drafts],
        "mamba_ssm_cache_dtype": "float32", "enable_prefix_caching": True, "disable_log_stats": True,
        "generation_config": "vllm", "seed": 0, "additional_config": {"gdn_prefill_backend": "triton"},
        **GRAPHS[graphs], **caching, **more,
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
    """Let vLLM's scheduler count preemptions, tokens taken from the cache, and drafted and accepted tokens."""
    counts = Counter()
    allocate = KVCacheManager.allocate_slots
    preempt, observe = Scheduler._preempt_request, Scheduler.make_spec_decoding_stats

    def preempted(self, *given, **others):
        counts["preemptions"] += 1
        return preempt(self, *given, **others)

    def observed(self, stats, num_draft_tokens, num_accepted_tokens, *given, **others):
        counts.update(drafted=num_draft_tokens, accepted=num_accepted_tokens)
        return observe(self, stats, num_draft_tokens, num_accepted_tokens, *given, **others)

    def allocated(self, request, num_new_tokens, num_new_computed_tokens=0, *given, **others):
        result = allocate(self, request, num_new_tokens, num_new_computed_tokens, *given, **others)
        if result is not None:  # a request that waits for blocks finds the same tokens at each step
            counts["cached_tokens"] += num_new_computed_tokens
        return result

    Scheduler._preempt_request, Scheduler.make_spec_decoding_stats = preempted, observed
    KVCacheManager.allocate_slots = allocated
    return counts


def main():
    begin = time.perf_counter()
    name, engines, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    limit = float(sys.argv[4]) if len(sys.argv) > 4 else np.inf
    few = {"vocab_size": FEW_TOKENS} if engines in SPECULATIVE else {}
    if engines == "mtp":
        few["decoder_sparse_step"] = 1  # vLLM wants experts in the draft model, too, whose layer has number 0
    (folder / "config.json").write_text(json.dumps(MODELS[name] | COMMON | few))
    vllm_models.load_random_weights(lambda model: change_weights(model, name))
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
                system if known else str(plans) if plans.exists() else write_plans(name, system, folder)
            )
        try:
            result = serve(graphs, str(folder), counts, SPECULATIVE.get(engines), **ARGUMENTS.get(name, {}))
        except Exception:
            result = {"error": traceback.format_exc()[-1500:]}
        with (folder / "results").open("a") as file:
            file.write(json.dumps(result | {"system": system, "graphs": graphs}) + "\n")
        print({"model": name, "system": system, "graphs": graphs} | result, flush=True)
        clean()
    os._exit(0)  # engines take long to end


def clean():
    """Let the next engine start as the first one did."""
    cleanup_dist_env_and_memory()
    torch._dynamo.reset()


if __name__ == "__main__":
    main()
