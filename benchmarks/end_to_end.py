"""Throughput of whole models in vLLM, without and with heads, on one GPU.

    python benchmarks/end_to_end.py --site /tmp/vl/site --models nemotron-nano-9b-v2 --batch 256 \
        --json benchmarks/results/end-to-end.json --plot end-to-end.png

`--site` is a folder with vLLM. Each model runs once for each system, each time in a process of its own: `vllm` (no
plugin), `vllm-replay` (vLLM's own replay), `standard`, `record` (`standard` while a calibration is recorded), `replay`
and `sketch` (random plans of the mean rank of the benchmarks). The environment chooses vLLM's model runner
(VLLM_USE_V2_MODEL_RUNNER). A run has these parts:

* decode: `--batch` requests with prompts of `--prompt` tokens decode together; tokens/s and times of the steps in
  which all of them decode.
* mix: three times as many requests of random lengths, `--batch` at a time, as in continuous batching. `step_ms`: all
  steps; `decode_step_ms`: steps in which `--batch` requests decode; `mixed_step_ms`: with a request's first token.
* profile: kernels of some decode steps by kind. `host` is the time in which no kernel runs. Kernels may overlap.
* agree: log-probabilities of decode steps, compared with those of vLLM's prefill (`vllm_agreement.py`).

`metadata_ms` is the host time of a step in which the batch is described to the layers. `blocks_needed` is the number
of blocks that `--batch` requests need; with fewer `blocks`, only some of the requests decode together.

With `--extra '{"tensor_parallel_size": 2}'` the model runs in processes of its own, where nothing is profiled. With
`--processes`, as in vLLM's default, scheduler and model run in one process and requests and outputs in another; then
`metadata_ms`, `blocks_needed` and the parts profile and agree are missing.

Weights are random (`vllm_models.py`). Requests are the same for all systems; `tokens_equal` is the share of output
tokens that are vLLM's own, among the first 32 of each request. Random weights make near ties between tokens, so that
rounding alone changes many tokens; `agree` does not depend on ties.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from reports import about, write  # noqa: E402
from vllm_agreement import differences, draw_requests, serve, summary  # noqa: E402
from vllm_profile import KINDS, METADATA_SECONDS, shares, time_metadata  # noqa: E402

SYSTEMS = ("vllm", "vllm-replay", "standard", "record", "replay", "sketch")
MARK = "END_TO_END "
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine and model in one process, so that one profile sees all
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_USE_RUST_FRONTEND": "0",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",  # multicast fails where the fabric manager does not allow it
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}


def spread(seconds):
    """Times in milliseconds: quantiles, and the slowest."""
    import numpy as np

    if not seconds:
        return {}
    times = np.sort(np.asarray(seconds)) * 1e3
    return {f"p{q}": float(np.percentile(times, q)) for q in (50, 90, 99)} | {"slowest": float(times[-1])}


def requests_of(count, mix, vocabulary, seed, decode, length=16):
    """Prompts and numbers of output tokens."""
    import numpy as np

    rng = np.random.default_rng(seed)
    for _ in range(count):
        prompt = int(rng.integers(16, 257)) if mix else length
        yield (
            rng.integers(1000, vocabulary - 1000, size=prompt).tolist(),
            int(rng.integers(64, 321)) if mix else decode,
        )


def drive(llm, batch, decode, seed, mix=False, profile=0, length=16):
    """Serve requests step by step; times, and the first tokens of each output."""
    import torch
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    count = 3 * batch if mix else batch
    made = {}
    drawn = requests_of(count, mix, engine.model_config.get_vocab_size(), seed, decode, length)
    for i, (prompt, tokens) in enumerate(drawn):
        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        engine.add_request(f"{seed}-{i}", {"prompt_token_ids": prompt}, params)
        made[f"{seed}-{i}"] = []
    begin = last = time.perf_counter()
    steps, full, joined, full_tokens, profiler, report = [], [], [], 0, None, None
    finished, profiled_steps, metadata = 0, 0, []
    while engine.has_unfinished_requests():
        before, begun = sum(map(len, made.values())), sum(map(bool, made.values()))
        whole = not mix and not finished and min(map(len, made.values())) >= 3
        # With too few blocks no step has all requests: profile some steps in the middle then.
        due = whole or 3 * before > count * decode
        METADATA_SECONDS.clear()
        if profile and due and profiler is None and report is None:
            torch.cuda.synchronize()
            profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            profiler.__enter__()
            last = profiled = time.perf_counter()
            profiled_tokens = 0
        for output in engine.step():
            finished += output.finished
            for one in output.outputs:
                made[output.request_id.rsplit("/", 1)[-1]].extend(one.token_ids)
        now = time.perf_counter()
        steps.append(now - last)
        tokens = sum(map(len, made.values())) - before
        if mix and sum(map(bool, made.values())) > begun:
            joined.append(now - last)
        elif (whole and not finished) or (mix and tokens == batch):
            full.append(now - last)
            full_tokens += tokens
            metadata.append(sum(METADATA_SECONDS))
        last = now
        if profiler is not None:
            profiled_steps, profiled_tokens = profiled_steps + 1, profiled_tokens + tokens
            if profiled_steps >= profile:
                torch.cuda.synchronize()
                wall = time.perf_counter() - profiled
                profiler.__exit__(None, None, None)
                report = shares(profiler, wall, profiled_steps) | {"rows": profiled_tokens / profiled_steps}
                profiler, last = None, time.perf_counter()
    if profiler is not None:
        profiler.__exit__(None, None, None)
    total = sum(map(len, made.values()))
    result = {"requests": count, "tokens": total, "seconds": last - begin}
    kinds = {"step_ms": steps, "decode_step_ms": full, "mixed_step_ms": joined} if mix else {"step_ms": full or steps}
    for kind, times in kinds.items():
        result[kind] = spread(times) | {"steps": len(times), "seconds": sum(times)}
    result["tokens_per_s"] = full_tokens / sum(full) if full and not mix else total / (last - begin)
    result |= {"metadata_ms": spread(metadata)} if any(metadata) else {}
    result["first_tokens"] = [tokens[:32] for tokens in made.values()]
    return result | ({"profile": report} if report else {})


def blocks_of(groups, requests, tokens):
    """Blocks that some requests of some tokens each need, and the block of padding."""
    specs = [group.kv_cache_spec for group in groups]
    return 1 + requests * sum(
        -(-tokens // spec.block_size) + getattr(spec, "num_speculative_blocks", 0) for spec in specs
    )


def add_plugins(work, plugins):
    """Let all processes of vLLM load functions, as those of an installed package."""
    place = Path(work) / "plugins"
    package = place / "end_to_end-0.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: end-to-end\nVersion: 0\n")
    lines = [f"{name} = {function}" for name, function in plugins.items()]
    (package / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines, ""]))
    sys.path.insert(0, str(place))
    own = [str(place), str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, own))


def one(args):
    """Run one model with one system in this process; prints results as lines."""
    import torch
    import vllm
    import vllm_models
    from vllm import LLM

    from sketchssm.vllm import register

    name, agree = args.models, args.parts == "agree"
    settings = {"tensor_parallel_size": 1} | json.loads(args.extra)
    plugins = {"random_weights": "vllm_models:load_random_weights"}
    plugged = not args.system.startswith("vllm")
    if plugged:
        plans = args.system
        if args.system == "record":
            plans = f"record:{args.work}/{name}-{os.getpid()}.safetensors"
        elif args.system == "sketch":
            from sketchssm.study import bench

            mean_rank = args.mean_rank or bench.MEAN_RANKS[name]
            plans = vllm_models.write_plans(
                name, args.work, mean_rank, args.map, args.sketch_dtype, args.residual_bits
            )
        os.environ["SKETCHSSM_VLLM"] = json.dumps({"plans": plans} | json.loads(args.plugin))
        plugins["sketchssm"] = "sketchssm.vllm:register"
    if args.processes or settings["tensor_parallel_size"] > 1:  # processes of vLLM load their plugins themselves
        add_plugins(args.work, plugins)
    else:
        vllm_models.load_random_weights()
        if plugged:
            register()
    time_metadata()
    # Larger graphs than for pure decode steps are of mixed steps' pieces. vLLM's own list has more sizes, up to 512.
    mixed = range(args.batch, max(args.batch, min(2 * args.batch, 512)) + 1, 64)
    compilation = {"cudagraph_capture_sizes": sorted({1, 2, 4, 8, *range(16, args.batch, 16), *mixed})}
    if args.graphs == "decode":
        compilation = {
            "cudagraph_capture_sizes": [args.batch], "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY",
        }  # fmt: skip
    settings = {
        "model": vllm_models.write_model(name, args.work), "skip_tokenizer_init": True, "load_format": "dummy",
        "dtype": "bfloat16", "max_num_seqs": args.batch, "max_model_len": max(2048, args.prompt + args.decode + 64),
        "max_num_batched_tokens": 8192, "use_replayssm": args.system == "vllm-replay",
        "gpu_memory_utilization": args.memory, "mamba_ssm_cache_dtype": "float32", "enable_prefix_caching": False,
        "disable_log_stats": True, "generation_config": "vllm", "seed": 0, "compilation_config": compilation,
        "additional_config": {"gdn_prefill_backend": "triton"},
        "enforce_eager": args.graphs == "none",
    } | settings  # fmt: skip
    if args.graphs == "none":
        del settings["compilation_config"]
    free = torch.cuda.mem_get_info()[0]
    begin = time.perf_counter()
    llm = LLM(**settings)
    config = llm.llm_engine.vllm_config
    vocabulary = config.model_config.get_vocab_size()
    longest = args.prompt + max(args.decode, args.profile + 8)
    if "mix" in args.parts:
        mixed = (len(prompt) + tokens for prompt, tokens in requests_of(3 * args.batch, True, vocabulary, 3, 0))
        longest = max(longest, *mixed)
    head = {
        "model": name, "system": args.system, "batch": args.batch, "graphs": args.graphs,
        "start_seconds": time.perf_counter() - begin, "vllm": vllm.__version__, "prompt": args.prompt,
        "runner": 2 if config.use_v2_model_runner else 1, "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(), "block_tokens": config.cache_config.block_size,
        "blocks": config.cache_config.num_gpu_blocks, "state_page": config.cache_config.mamba_page_size_padded,
        "memory_taken": free - torch.cuda.mem_get_info()[0],
    }  # fmt: skip
    if not args.processes:
        groups = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
        head["blocks_needed"] = blocks_of(groups, args.batch, longest)
        if head["blocks"] < head["blocks_needed"]:
            print(
                f"{name}, {args.system}: {args.batch} requests need {head['blocks_needed']} blocks, there are "
                f"{head['blocks']}: not all decode together. Give more memory (--memory) or a smaller --batch.",
                flush=True,
            )
    if agree:
        requests = draw_requests(args.batch, (16, 65), (32, 33), vocabulary, 5)
        served = serve(llm.llm_engine, requests, args.batch)
        wrong, _, spread = differences(llm.llm_engine, requests, served, args.batch)
        print(MARK + json.dumps(head | {"part": "agree", "agreement": summary(wrong, spread)}), flush=True)
        return
    drive(llm, args.batch, 24, 1)
    parts = {
        "decode": (2, {"length": args.prompt}),
        "mix": (3, {"mix": True}),
        "profile": (4, {"profile": args.profile, "length": args.prompt}),
    }
    for part, (seed, how) in parts.items():
        if part in args.parts:
            result = {"part": part} | drive(llm, args.batch, max(args.decode, args.profile + 8), seed, **how)
            print(MARK + json.dumps(head | result), flush=True)


def run_all(args):
    """Run all models and systems, each in a process; write results as they come."""
    results = []
    for name in args.models.split(","):
        for system in args.systems.split(","):
            for parts in engines_of(args.parts):
                command = [sys.executable, __file__, *sys.argv[1:], "--models", name, "--system", system]
                print(f"{name}, {system}: {parts}", flush=True)
                child = subprocess.Popen(
                    [*command, "--parts", parts], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
                for line in child.stdout:
                    if not line.startswith(MARK):
                        sys.stdout.write(line)
                        continue
                    results.append(json.loads(line.removeprefix(MARK)))
                    finish(results, args)
                    told = {key: x for key, x in results[-1].items() if key not in (BULKY, "profile")}
                    print(json.dumps(told | {"kinds_ms": results[-1].get("profile", {}).get("kinds_ms")}), flush=True)
                if child.wait():
                    print(f"{name}, {system}: exit {child.returncode}", flush=True)
    return results


BULKY = "first_tokens"
"""Field of results that is used only for comparisons."""


def engines_of(parts):
    """Parts that share an engine, as words with commas."""
    timed = ",".join(part for part in parts.split(",") if part != "agree")
    return [timed] * bool(timed) + ["agree"] * ("agree" in parts.split(","))


def finish(results, args):
    """Compare tokens with vLLM's, and write what there is."""
    for result in results:
        wanted = [r for r in results if r["system"] == "vllm" and all(r[k] == result[k] for k in ("model", "part"))]
        if wanted and "first_tokens" in result:
            pairs = list(zip(result["first_tokens"], wanted[0]["first_tokens"], strict=True))
            same = sum(x == y for one, other in pairs for x, y in zip(one, other, strict=True))
            result["tokens_equal"] = same / max(sum(len(one) for one, _ in pairs), 1)
    if not args.json:
        return
    shown = [{key: x for key, x in result.items() if key != BULKY} for result in results]
    device = next((result["gpu"] for result in results if "gpu" in result), "unknown")
    weights = {"weights": "random; experts of MoE layers are used equally often"}
    write(about(device, args.commit) | weights | {"results": shown}, Path(args.json))


def draw(results, path):
    """Bars of tokens/s, and of the time of a step by kind of kernel, one column for each model."""
    from sketchssm.study.plots import load_pyplot, save

    pyplot = load_pyplot()
    models = list(dict.fromkeys(r["model"] for r in results))
    figure, panels = pyplot.subplots(2, len(models), figsize=(4 * len(models), 6), squeeze=False, layout="constrained")
    for column, model in enumerate(models):
        mine = [r for r in results if r["model"] == model]
        systems = [s for s in SYSTEMS if any(r["system"] == s for r in mine)]
        top, bottom = panels[:, column]
        parts = [part for part in ("decode", "mix") if any(r["part"] == part for r in mine)]
        for i, part in enumerate(parts):
            rates = [
                next((r["tokens_per_s"] for r in mine if (r["system"], r["part"]) == (s, part)), 0) for s in systems
            ]
            bars = top.bar([x + 0.4 * i for x in range(len(systems))], rates, 0.4, label=part)
            first = rates[0] or 1
            top.bar_label(bars, [f"{rate / first:.2f}x" for rate in rates], fontsize=7)
        top.set(title=model, ylabel="tokens/s")
        top.set_xticks([x + 0.2 * (len(parts) - 1) for x in range(len(systems))], systems)
        top.legend(fontsize=8, loc="upper left")
        floor = [0.0] * len(systems)
        profiles = {r["system"]: r["profile"]["kinds_ms"] for r in mine if "profile" in r}
        for kind in (*KINDS, "other", "host"):
            heights = [profiles.get(s, {}).get(kind, 0.0) for s in systems]
            bottom.bar(range(len(systems)), heights, 0.6, bottom=floor, label=kind)
            floor = [x + y for x, y in zip(floor, heights, strict=True)]
        bottom.set(ylabel="decode step, ms")
        bottom.set_xticks(range(len(systems)), systems)
    panels[1, 0].legend(fontsize=7)
    save(figure, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", help="folder with vLLM, if Python does not find it")
    parser.add_argument("--models", default="nemotron-nano-9b-v2,qwen3-next,kimi-linear")
    parser.add_argument("--systems", default="vllm,vllm-replay,standard,replay,sketch")
    parser.add_argument("--parts", default="decode,mix,profile")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of the prompts of the part decode")
    parser.add_argument("--decode", type=int, default=192, help="output tokens of a request of the part decode")
    parser.add_argument("--profile", type=int, default=32, help="decode steps to profile")
    parser.add_argument("--map", default="ridge", help="coefficient map of the random plans")
    parser.add_argument("--mean-rank", type=int, help="of the random plans; by default that of the benchmarks")
    parser.add_argument("--sketch-dtype", default="bfloat16", help="format of the random plans' sketches")
    parser.add_argument("--residual-bits", type=int, default=0, help="of the random plans, with --map subspace")
    parser.add_argument(
        "--graphs", default="default", choices=("default", "decode", "none"),
        help="vLLM's default; graphs of decode steps without compilation; neither",
    )  # fmt: skip
    parser.add_argument("--memory", type=float, default=0.92, help="share of the device's memory")
    parser.add_argument("--extra", default="{}", help="JSON: more arguments of vllm.LLM")
    parser.add_argument("--plugin", default="{}", help="JSON: more settings of the plugin")
    parser.add_argument("--processes", action="store_true", help="as in vLLM's default: several processes")
    parser.add_argument("--work", default="/tmp/end-to-end", help="folder for models and plans")
    parser.add_argument("--commit", help="for the report, where this is no clone")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--plot", help="file for a picture")
    parser.add_argument("--system", choices=SYSTEMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.processes and {"profile", "agree"} & set(args.parts.split(",")):
        parser.error(f"--parts: expected decode and mix with --processes, got {args.parts}")
    if args.site:
        sys.path.insert(0, args.site)
        # vLLM starts processes of its own, which find vLLM and this package by the environment alone
        paths = [str(Path(__file__).parents[1]), args.site, os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if args.processes:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    if args.system:
        try:
            one(args)
            code = 0
        except Exception:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        os._exit(code)  # engines take long to end, and hold nothing that matters
    results = run_all(args)
    if args.plot and results:
        draw(results, args.plot)
    return 0 if results else 1


if __name__ == "__main__":
    sys.exit(main())
