"""An engine of vLLM on the CPU with a tiny model of random weights; run by `test_vllm_serve.py`.

    PYTHONPATH=benchmarks python vllm_serve.py FOLDER ARGUMENTS

The model is written into FOLDER, if there is none. ARGUMENTS are in JSON: more arguments of vLLM's LLM, "requests",
their number, and "type", a key of `CONFIGS`. The file ``FOLDER/result`` then has how log-probabilities of decode steps
agree with the engine's own prefill, and counters. If the engine records ``FOLDER/recorded``, it first serves some rows
of text alone, from which transformers makes the calibration ``FOLDER/transformers``.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

COMMON = {
    "hidden_size": 64, "intermediate_size": 64, "vocab_size": 512, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32, "mamba_n_groups": 1, "mamba_chunk_size": 16,
}  # fmt: skip
CONFIGS = {
    "nemotron_h": COMMON | {
        "hybrid_override_pattern": "M*M-", "num_hidden_layers": 4, "head_dim": 32, "mamba_num_heads": 8,
        "mamba_head_dim": 16, "ssm_state_size": 32, "n_groups": 2, "chunk_size": 16,
    },
    "granitemoehybrid": COMMON | MAMBA | {
        "layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3, "shared_intermediate_size": 64,
        "num_local_experts": 0, "num_experts_per_tok": 0,
    },
    "falcon_h1": COMMON | MAMBA | {"num_hidden_layers": 2, "mamba_d_ssm": 128, "head_dim": 32},
    "zamba2": COMMON | {
        "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"], "mamba_d_state": 32,
        "mamba_ngroups": 2, "n_mamba_heads": 8, "chunk_size": 16, "num_mem_blocks": 1, "num_key_value_heads": 2,
    },
    "mamba2": {name: x for name, x in COMMON.items() if name not in ("intermediate_size", "num_attention_heads")} | {
        "num_heads": 8, "head_dim": 16, "state_size": 32, "n_groups": 2, "chunk_size": 16, "num_hidden_layers": 2,
    },
}  # fmt: skip


def write_model(folder, kind):
    """Write a checkpoint in which outputs depend on states from some tokens to some hundred before."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **CONFIGS[kind]), dtype=torch.float32)
    ranges = {"A_log": (-3, 1), "dt_bias": (-3, 0), "D": (0.3, 0.3)}
    for name, weight in model.named_parameters():
        low, high = ranges.get(name.rsplit(".", 1)[-1], (1, 1))
        if weight.ndim == 1:
            weight.data.uniform_(low, high)
        else:
            weight.data.normal_(0.0, 1.0 if "embed" in name else weight[0].numel() ** -0.5)
    model.save_pretrained(folder)


ROWS = [np.random.default_rng(i).integers(0, 500, size=256 if i < 4 else 128).tolist() for i in range(6)]


def record(llm, folder):
    """Serve rows, of which the first four decode as many tokens as a row is followed, until the engine has written a
    calibration. The first four are enough for the bases, as a file is touched.
    """
    import vllm_agreement
    from transformers import AutoModelForCausalLM

    from sketchssm.serving.following import STEPS
    from sketchssm.transformers import collect

    tokens = []
    for i, row in enumerate(ROWS):
        served = vllm_agreement.serve(llm.llm_engine, [(row, STEPS + 1 if i < 4 else 1)], 1)
        tokens.append(np.array(row + served[0][0][:-1]))
        if i == 3:
            vllm_agreement.serve(llm.llm_engine, [([1], 4)], 1)
            (folder / "recorded.finish").touch()
            time.sleep(1.1)  # it is looked for once a second
        if i in (3, 5):  # steps of a request that is too short to be recorded
            vllm_agreement.serve(llm.llm_engine, [([1], 4)], 1)
            time.sleep(3)  # for a thread of the engine
    end = time.monotonic() + 60
    while not (folder / "recorded").exists():
        assert time.monotonic() < end, "no calibration was written"
        time.sleep(0.1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    collect(model, tokens, method="error").save(folder / "transformers")


def main():
    folder, arguments = Path(sys.argv[1]), json.loads(sys.argv[2])
    kind = arguments.pop("type", "nemotron_h")
    if not (folder / "config.json").exists():
        write_model(folder, kind)
    import vllm_agreement
    from vllm import LLM

    count = arguments.pop("requests", 60)
    llm = LLM(
        **{
            "model": str(folder), "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 1024,
            "max_num_seqs": 16, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 24, "seed": 0,
            "generation_config": "vllm", "disable_log_stats": False, **arguments,
        }
    )  # fmt: skip
    if "record:" in os.environ["SKETCHSSM_VLLM"]:
        record(llm, folder)
    requests = vllm_agreement.draw_requests(count, (1, 241), (4, 161), 500, 1, shared=200)
    # prompts of one token, of a chunk, and of a chunk and one token
    requests[1:4] = [(requests[i][0][:1] * n, requests[i][1]) for i, n in ((1, 1), (2, 128), (3, 129))]
    vllm_agreement.serve(llm.llm_engine, requests[:16], 16)
    served = vllm_agreement.serve(llm.llm_engine, requests, 16, aborted=range(5, count, 17))
    wrong, _, spread = vllm_agreement.differences(llm.llm_engine, requests, served, 16)
    counters = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    result = vllm_agreement.summary(wrong, spread)
    for name in ("num_preemptions", "prefix_cache_hits"):
        result[name] = float(np.nan_to_num(counters[f"vllm:{name}"]))
    (folder / "result").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
