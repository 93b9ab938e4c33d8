"""Cores, which compute the recurrences of a `HybridLM`.

A core is called as ``core(layer, q, k, v, g, beta)`` with tensors ``(batch, tokens, heads, dim)`` in the library's
conventions and returns the outputs ``(batch, tokens, heads, V)``. The core keeps the states, so a model that is called
with one piece of text after the other continues from its states.
"""

import torch

CHUNK = 16
"""Tokens per chunk; with a decay per channel the largest array grows with its square."""


def chunked(q, k, v, g, beta=None, state=None):
    """The recurrence in chunks, differentiable; returns outputs and final states ``(batch, heads, V, K)``.

    Within a chunk the writes w of the delta rule solve a unit triangular system, and decay enters only as exponentials
    of differences that are at most 0.
    """
    batch, length, heads, value_dim = v.shape
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    g = g if g.dim() == 4 else g[..., None]
    q, k, v, g = (x.transpose(1, 2) for x in (q, k, v, g))
    gate = None if beta is None else beta.transpose(1, 2)[..., None]
    state = v.new_zeros(batch, heads, value_dim, k.shape[-1]) if state is None else state
    outputs = []
    for start in range(0, length, CHUNK):
        part = slice(start, start + CHUNK)
        log = g[:, :, part].cumsum(-2)
        keys, queries, writes = k[:, :, part], q[:, :, part], v[:, :, part]
        ahead = torch.ones(keys.shape[-2], keys.shape[-2], dtype=torch.bool, device=v.device).triu(1)
        decay = (log[..., :, None, :] - log[..., None, :, :]).masked_fill(ahead[..., None], -torch.inf).exp()

        def products(x, keys=keys, decay=decay):
            """``x_i^T Diag(decay_ij) k_j`` for j <= i, zero elsewhere."""
            if decay.shape[-1] == 1:
                return (x @ keys.mT) * decay[..., 0]
            return torch.einsum("...ic,...ijc,...jc->...ij", x, decay, keys)

        if gate is not None:
            b = gate[:, :, part]
            writes = b * (writes - (keys * log.exp()) @ state.mT)
            writes = torch.linalg.solve_triangular(
                (b * products(keys)).tril(-1), writes, upper=False, unitriangular=True
            )
        outputs.append((queries * log.exp()) @ state.mT + products(queries) @ writes)
        last = log[..., -1:, :]
        state = state * last.exp() + writes.mT @ (keys * (last - log).exp())
    return torch.cat(outputs, 2).transpose(1, 2), state


class Chunked:
    """The exact recurrence in PyTorch, for prefill and gradients; `states` are the last states by layer."""

    def __init__(self):
        self.states = {}

    def __call__(self, layer, *inputs):
        o, self.states[layer] = chunked(*inputs, state=self.states.get(layer))
        return o


class Heads:
    """Decode heads of the library, one per recurrent layer; row i of a batch is slot i."""

    def __init__(self, heads):
        self.heads = heads

    def __call__(self, layer, *inputs):
        return self.heads[layer].step(*inputs)

    def reset(self):
        """Start again from zero states."""
        for head in self.heads.values():
            head.reset()

    def load(self, states):
        """Continue from the states of a prefill."""
        for layer, state in states.items():
            self.heads[layer].load_state(state)


class Recorder:
    """Record inputs and outputs of the exact recurrences; after a backward pass the outputs have gradients."""

    def __init__(self):
        self.core, self.inputs, self.outputs = Chunked(), {}, {}

    def __call__(self, layer, *inputs):
        o = self.core(layer, *inputs)
        self.inputs[layer] = tuple(x if x is None else x.detach() for x in inputs)
        self.outputs[layer] = o
        if o.requires_grad:
            o.retain_grad()
        return o
