"""Kernels of a decode step by kind, and host times, for `end_to_end.py`."""

import re
import time

KINDS = {
    "state": r"selective_scan_update|selective_state_update|fused_recurrent|fused_sigmoid_gating|read_step|flush_step"
    r"|standard_step|standard_draft|read_draft|set_slots|\bcommit",
    "inputs": r"\bmamba_inputs|\badd_skip|\bnormalised|\bdelta_inputs|\bwrite_tape|kda_gate|gdn_gating|post_conv",
    "convolution": r"causal_conv1d",
    "MoE": r"moe|topk|expert|grouped_gemm",
    "attention": r"flash|fmha|mla|attn|attention|reshape_and_cache|concat_and_cache",
    "weights": r"nvjet|gemm|cutlass|splitk|cublas",
}
"""Kernels by kind; the first pattern that matches counts."""


def kind_of(kernel):
    """Kind of a kernel by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE)), "other")


def shares(profiler, wall, steps):
    """Milliseconds of a step by kind of kernel, and the kernels that take most."""
    kernels, spans = {}, []
    for event in profiler.events():
        if "CUDA" not in str(event.device_type) or getattr(event, "is_user_annotation", False):
            continue
        begin, end = event.time_range.start, event.time_range.end
        spans.append((begin, end))
        have = kernels.setdefault(event.name, [0.0, 0])
        have[0] += (end - begin) / steps / 1e3
        have[1] += 1 / steps
    kinds = {}
    for name, (milliseconds, _) in kernels.items():
        kinds[kind_of(name)] = kinds.get(kind_of(name), 0.0) + milliseconds
    step = wall / steps * 1e3
    kinds["host"] = max(step - covered(spans) / steps / 1e3, 0.0)
    most = sorted(kernels.items(), key=lambda item: -item[1][0])[:30]
    return {
        "steps": steps,
        "step_ms": step,
        "kinds_ms": kinds,
        "kernels": [{"name": name[:120], "ms": ms, "launches": launches} for name, (ms, launches) in most],
    }


def covered(spans):
    """Length of the union of spans."""
    total, last = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(end - max(begin, last), 0.0)
        last = max(last, end)
    return total


METADATA_SECONDS = []
"""Times in which the model runner has described a batch to the layers, since the step's begin."""


def time_metadata():
    """Let the model runners note these times."""
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def timed(build):
        def described(*given, **others):
            begin = time.perf_counter()
            try:
                return build(*given, **others)
            finally:
                METADATA_SECONDS.append(time.perf_counter() - begin)

        return described

    GPUModelRunner._build_attention_metadata = timed(GPUModelRunner._build_attention_metadata)
    MambaHybridModelState.prepare_attn = timed(MambaHybridModelState.prepare_attn)
