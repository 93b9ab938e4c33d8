"""Tensor parallelism in PyTorch: each process decodes its own heads of a layer.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

On GPUs, one per process, the processes communicate through NCCL; on CPUs, through Gloo. Without torchrun the script
runs as a single process. Process r of n holds the value heads r * heads / n to (r + 1) * heads / n and their key
heads, as in vLLM and Megatron. Heads exchange nothing, so a layer needs no collective before its output projection.
Here the outputs are gathered and compared with those of one process that holds all heads.
"""

import os

import torch
from torch import distributed

import sketchssm as ss

TOKENS = 64
# On a CPU the arithmetic of a head does not depend on the other heads. On a GPU the order of some sums of a `ridge`
# map depends on the largest rank of the heads, and the maps are rounded to bfloat16: a few roundings of 2^-9.
TOLERANCE = {"cpu": 0.0, "cuda": 2.0**-7}

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))  # heads work on the current device
alone = {} if "RANK" in os.environ else {"store": distributed.HashStore(), "rank": 0, "world_size": 1}
distributed.init_process_group("nccl" if device == "cuda" else "gloo", **alone)
rank, world = distributed.get_rank(), distributed.get_world_size()

# Calibrate: each process takes some of the sequences, and all get the same moments.
traces = ss.Traces.shipped("gdn")
layer = traces.layer
moments = ss.Moments(layer, window=16)
moments.update(*(x[rank::world] for x in traces.fit_part()))
parts = [moments] * world
distributed.all_gather_object(parts, moments)
moments = sum(parts[1:], parts[0])

# One process makes the plan; the others read the file.
if rank == 0:
    basis = ss.fit_basis(moments)
    scores = ss.RankScores(basis)
    tokens, grad = traces.score_part()
    scores.update(*tokens, grad=grad)
    ss.SketchPlan(basis, ss.allocate_ranks(scores, mean_rank=8)).save("layer.safetensors")
distributed.barrier()
plan = ss.SketchPlan.load("layer.safetensors")

# Each process keeps the states of its own heads, for all requests.
heads, key_heads = layer.shard_heads(rank, world)
head = ss.SketchHead(plan.shard(rank, world), num_slots=4, backend=device)
whole = ss.SketchHead(plan, num_slots=4, backend=device)  # to compare with
for each in (head, whole):
    each.warmup("bfloat16")


def token(t):
    """Inputs of token t for all heads; gates stay float32."""
    q, k, v, g, beta = (torch.tensor(x[:, t], device=device) for x in traces.test)
    return q.bfloat16(), k.bfloat16(), v.bfloat16(), g.float(), beta.float()


generator = torch.Generator().manual_seed(0)
requests = traces.test.v.shape[0]
slots = torch.arange(requests, device=device)
states = torch.randn(requests, *layer.state_shape, generator=generator).to(device)  # of a prefill
head.load_state(states[:, heads].contiguous(), slots=slots)
whole.load_state(states, slots=slots)

for t in range(TOKENS):
    q, k, v, g, beta = token(t)
    # A tensor-parallel model has these slices already: each process projects to its own heads.
    q, k = (x[:, key_heads].contiguous() for x in (q, k))
    v, g, beta = (x[:, heads].contiguous() for x in (v, g, beta))
    output = head.step(q, k, v, g, beta, slots=slots)
    gathered = [torch.empty_like(output) for _ in range(world)]
    distributed.all_gather(gathered, output)
    expected = whole.step(*token(t), slots=slots)
    difference = torch.cat(gathered, dim=1).float() - expected.float()
    assert difference.norm() <= TOLERANCE[device] * expected.float().norm()

# 64 tokens are whole windows, so all states are up to date. They are equal to the last bit on every backend.
assert (head.state == whole.state[:, heads]).all()

shares = [None] * world
distributed.all_gather_object(shares, head.layer.heads)
if rank == 0:
    print(f"{TOKENS} tokens: {world} processes with {shares} heads have the outputs of one with {layer.heads} heads")
distributed.destroy_process_group()
