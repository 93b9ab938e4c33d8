"""An engine of vLLM on the CPU with a tiny Nemotron-H of random weights; run by `test_vllm_serve.py`.

    PYTHONPATH=benchmarks python vllm_serve.py FOLDER ARGUMENTS

The model is written into FOLDER, if there is none. ARGUMENTS are more arguments of vLLM's LLM, in JSON. The file
``FOLDER/result`` then has how log-probabilities of decode steps agree with the engine's own prefill, and counters.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

CONFIG = {
    "hybrid_override_pattern": "M*M-", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 64,
    "vocab_size": 512, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "mamba_num_heads": 8,
    "mamba_head_dim": 16, "ssm_state_size": 32, "n_groups": 2, "chunk_size": 16, "max_position_embeddings": 1024,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def write_model(folder):
    """Write a checkpoint in which outputs depend on states from some tokens to some hundred before."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("nemotron_h", **CONFIG), dtype=torch.float32)
    ranges = {"A_log": (-3, 1), "dt_bias": (-3, 0), "D": (0.3, 0.3)}
    for name, weight in model.named_parameters():
        low, high = ranges.get(name.rsplit(".", 1)[-1], (1, 1))
        if weight.ndim == 1:
            weight.data.uniform_(low, high)
        else:
            weight.data.normal_(0.0, 1.0 if "embed" in name else weight[0].numel() ** -0.5)
    model.save_pretrained(folder)


def main():
    folder, arguments = Path(sys.argv[1]), json.loads(sys.argv[2])
    if not (folder / "config.json").exists():
        write_model(folder)
    import vllm_agreement
    from vllm import LLM

    llm = LLM(
        **{
            "model": str(folder), "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 1024,
            "max_num_seqs": 16, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 24, "seed": 0,
            "generation_config": "vllm", "disable_log_stats": False, **arguments,
        }
    )  # fmt: skip
    requests = vllm_agreement.draw_requests(60, (1, 241), (4, 161), 500, 1, shared=200)
    # prompts of one token, of a chunk, and of a chunk and one token
    requests[1:4] = [(requests[i][0][:1] * n, requests[i][1]) for i, n in ((1, 1), (2, 128), (3, 129))]
    vllm_agreement.serve(llm.llm_engine, requests[:16], 16)
    served = vllm_agreement.serve(llm.llm_engine, requests, 16, aborted=range(5, 60, 17))
    wrong, _, spread = vllm_agreement.differences(llm.llm_engine, requests, served, 16)
    counters = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    result = vllm_agreement.summary(wrong, spread)
    for name in ("num_preemptions", "prefix_cache_hits"):
        result[name] = float(np.nan_to_num(counters[f"vllm:{name}"]))
    (folder / "result").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
