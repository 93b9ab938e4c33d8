"""Prefill in PyTorch, decode with a SketchHead.

The layer is a small Gated DeltaNet. `load_state` takes the states of the prefill; from then on the head keeps them.
The head takes and returns tensors. On the CPU it copies only tensors whose type it must change.
"""

import torch
from torch import nn
from torch.nn.functional import normalize, softplus

import sketchssm as ss

torch.manual_seed(0)
HIDDEN, HEADS, KEY_HEADS, K, V = 256, 4, 2, 64, 64


class GatedDeltaNet(nn.Module):
    """A recurrent layer: projections, gates, recurrence, output projection."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(HIDDEN, KEY_HEADS * K), nn.Linear(HIDDEN, KEY_HEADS * K)
        self.v, self.out = nn.Linear(HIDDEN, HEADS * V), nn.Linear(HEADS * V, HIDDEN)
        self.gates = nn.Linear(HIDDEN, 2 * HEADS)
        # queries and keys of real layers favour some channels, which makes a sketch accurate
        self.favour = nn.Buffer(0.93 ** torch.arange(K))

    def inputs(self, x):
        """Inputs of the recurrence from hidden vectors ``(..., HIDDEN)``; gates stay float32."""
        q, k = (normalize(layer(x).unflatten(-1, (KEY_HEADS, K)) * self.favour, dim=-1) for layer in (self.q, self.k))
        v = self.v(x).unflatten(-1, (HEADS, V))
        a, b = self.gates(x).float().chunk(2, dim=-1)
        return q / K**0.5, k, v, -softplus(a - 3), torch.sigmoid(b)

    def prefill(self, x, state):
        """The recurrence as a plain loop over ``(batch, tokens, HIDDEN)``; states ``(batch, heads, V, K)``."""
        q, k, v, g, beta = self.inputs(x)
        q, k = (y.float().repeat_interleave(HEADS // KEY_HEADS, dim=2) for y in (q, k))
        outputs = []
        for t in range(x.shape[1]):
            state = state * g[:, t, :, None, None].exp()
            write = beta[:, t, :, None] * (v[:, t].float() - (state @ k[:, t, :, :, None])[..., 0])
            state = state + write[..., None] * k[:, t, :, None, :]
            outputs.append((state @ q[:, t, :, :, None])[..., 0])
        return torch.stack(outputs, dim=1), state

    def decode(self, x, head, slots):
        """Decode one token per request; the head holds the states."""
        o = head.step(*self.inputs(x), slots=slots)
        return self.out(o.flatten(-2))


model = GatedDeltaNet().to(torch.bfloat16).requires_grad_(False)
text = torch.randn(6, 192, HIDDEN, dtype=torch.bfloat16)  # stands in for hidden vectors of calibration text

# Calibrate on the tensors themselves.
moments = ss.Moments("gdn", HEADS, K, V, KEY_HEADS, window=16)
moments.update(*model.inputs(text[:4]))
basis = ss.fit_basis(moments)
scores = ss.RankScores(basis)
scores.update(*model.inputs(text[4:]))
plan = ss.SketchPlan(basis, ss.allocate_ranks(scores, mean_rank=12))
print(plan)

# Three requests with a prompt each, in any slots.
slots = torch.tensor([5, 0, 2])
prompts, following = torch.randn(3, 40, HIDDEN).bfloat16(), torch.randn(3, 48, HIDDEN).bfloat16()
_, states = model.prefill(prompts, torch.zeros(3, HEADS, V, K))
head = ss.SketchHead(plan, num_slots=8, backend="cpu")
head.load_state(states, slots=slots)

expected, final = model.prefill(following, states)
hidden = torch.stack([model.decode(following[:, t], head, slots) for t in range(48)], dim=1)
expected = model.out(expected.bfloat16().flatten(-2))
assert hidden.dtype == torch.bfloat16
error = (hidden - expected).float().square().sum() / expected.float().square().sum()
print(f"48 tokens of 3 requests: squared error after the output projection {error:.5f}")

# 48 tokens are three whole windows, so the states are up to date; they are float32 and exact.
drift = (torch.from_numpy(head.state.copy())[slots] - final).norm() / final.norm()
assert drift < 1e-5
print(f"difference of the final states from PyTorch's own: {drift:.1e}")
print(f"state traffic: {plan.reduction:.1f}x less than standard decode")
