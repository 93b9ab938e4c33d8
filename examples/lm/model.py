"""A small hybrid language model in plain PyTorch, which calls a given core for its recurrences.

Pre-norm blocks of a mixer and a SwiGLU; the configuration's pattern says which mixers are recurrent ("R": Mamba-2,
Gated DeltaNet or Kimi Delta Attention behind a short convolution) and which are causal softmax attention without
positions ("A"). The model keeps convolution tails, keys and values; the core keeps the recurrent states.
"""

import json

import torch
from recurrence import Chunked
from safetensors import safe_open
from torch import nn
from torch.nn import functional as F

import sketchssm as ss


class RMSNorm(nn.Module):
    """Division by the root mean square, times a weight."""

    def __init__(self, size):
        super().__init__()
        self.w = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return F.rms_norm(x, self.w.shape, self.w, 1e-5)


class Recurrent(nn.Module):
    """Projections, short convolution, recurrence and gated norm; the kinds differ in their gates."""

    def __init__(self, config, extra, normed):
        super().__init__()
        self.layer = layer_of(config)
        keys, values = self.layer.key_heads * self.layer.key_dim, self.layer.heads * self.layer.value_dim
        self.sizes = (keys, keys, values)
        self.inp = nn.Linear(config["d"], 2 * keys + values + extra, bias=False)
        self.out = nn.Linear(values, config["d"], bias=False)
        self.conv_w = nn.Parameter(torch.randn(2 * keys + values, config["conv"]) / config["conv"])
        self.conv_b = None
        self.A_log = nn.Parameter(torch.zeros(self.layer.heads))
        self.dt_bias = nn.Parameter(torch.full((self.layer.heads * self.layer.gate_channels,), -2.0))
        self.norm = RMSNorm(normed)

    def forward(self, x, place, core, cache):
        channels = sum(self.sizes)
        mixed, extra = self.inp(x).tensor_split([channels], dim=-1)
        before = self.conv_w.shape[1] - 1
        tail = cache.get(place, mixed.new_zeros(mixed.shape[0], before, channels))
        mixed = torch.cat([tail, mixed], 1)
        cache[place] = mixed[:, mixed.shape[1] - before :]
        mixed = F.silu(F.conv1d(mixed.mT, self.conv_w[:, None], self.conv_b, groups=channels).mT)
        q, k, v = mixed.split(self.sizes, -1)
        q, k = (y.unflatten(-1, (self.layer.key_heads, self.layer.key_dim)) for y in (q, k))
        v = v.unflatten(-1, (self.layer.heads, self.layer.value_dim))
        inputs, gate = self.inputs(q, k, v, extra)
        return self.out(self.gated(core(place, *inputs), v, gate))


class Mamba2(Recurrent):
    """Mamba-2: the values contain the time step; a skip term; the gate before one norm over all heads."""

    def __init__(self, config):
        values = config["H"] * config["V"]
        super().__init__(config, values + config["H"], values)
        self.conv_b = nn.Parameter(torch.zeros(sum(self.sizes)))
        self.D = nn.Parameter(torch.ones(config["H"]))

    def inputs(self, q, k, v, extra):
        gate, dt = extra.split([self.sizes[2], self.layer.heads], -1)
        dt = F.softplus(dt + self.dt_bias)
        return (q, k, v * dt[..., None], -self.A_log.exp() * dt, None), gate

    def gated(self, o, v, gate):
        return self.norm((o + self.D[:, None] * v).flatten(-2) * F.silu(gate))


class GatedDeltaNet(Recurrent):
    """Gated DeltaNet: unit keys and queries, one decay per head, a norm per head, then a SiLU gate."""

    def __init__(self, config):
        super().__init__(config, config["H"] * (config["V"] + 2), config["V"])

    def inputs(self, q, k, v, extra):
        gate, a, b = extra.split([self.sizes[2], self.layer.heads, self.layer.heads], -1)
        g = -self.A_log.exp() * F.softplus(a + self.dt_bias)
        return (unit(q) * q.shape[-1] ** -0.5, unit(k), v, g, b.sigmoid()), gate

    def gated(self, o, v, gate):
        return self.norm(o).flatten(-2) * F.silu(gate)


class KimiDelta(Recurrent):
    """Kimi Delta Attention: low-rank projections give a decay per channel and the sigmoid gate."""

    def __init__(self, config):
        heads, size = config["H"], config["K"]
        super().__init__(config, heads + 2 * size, config["V"])
        self.f2 = nn.Linear(size, heads * size, bias=False)
        self.g2 = nn.Linear(size, heads * config["V"], bias=False)

    def inputs(self, q, k, v, extra):
        b, a, gate = extra.split([self.layer.heads, self.layer.key_dim, self.layer.key_dim], -1)
        raw = (self.f2(a) + self.dt_bias).unflatten(-1, (self.layer.heads, self.layer.key_dim))
        g = (-self.A_log.exp()[:, None] * F.softplus(raw)).clamp_min(-5.0)
        return (unit(q) * q.shape[-1] ** -0.5, unit(k), v, g, b.sigmoid()), self.g2(gate)

    def gated(self, o, v, gate):
        return self.norm(o).flatten(-2) * gate.sigmoid()


class Attention(nn.Module):
    """Causal softmax attention without positions."""

    def __init__(self, config):
        super().__init__()
        self.heads = config["attn_heads"]
        self.qkv = nn.Linear(config["d"], 3 * config["d"], bias=False)
        self.out = nn.Linear(config["d"], config["d"], bias=False)

    def forward(self, x, place, core, cache):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if place in cache:
            k, v = (torch.cat(pair, 2) for pair in zip(cache[place], (k, v), strict=True))
        cache[place] = k, v
        new, whole = q.shape[2], k.shape[2]
        seen = torch.ones(new, whole, dtype=torch.bool, device=x.device).tril(whole - new)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """A mixer and a SwiGLU, each with a norm before it and a residual around it."""

    def __init__(self, config, mixer):
        super().__init__()
        size, inner = config["d"], config["ff"]
        self.n1, self.n2, self.mix = RMSNorm(size), RMSNorm(size), mixer
        self.gate, self.up = (nn.Linear(size, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, size, bias=False)

    def forward(self, x, place, core, cache):
        x = x + self.mix(self.n1(x), place, core, cache)
        y = self.n2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


RECURRENT = {"mamba2": Mamba2, "gdn": GatedDeltaNet, "kda": KimiDelta}


class HybridLM(nn.Module):
    """The model. Parameters have the names of the weight file.

    `config` has the kind as ``family``, the shape of the recurrence as ``H, Hk, K, V``, ``conv`` taps, and ``d``,
    ``ff``, ``vocab``, ``attn_heads``, ``pattern``.
    """

    def __init__(self, config):
        super().__init__()
        self.layer = layer_of(config)
        if config.get("window"):
            raise ValueError(f"window: expected attention over all tokens, got a window of {config['window']}")
        self.emb = nn.Embedding(config["vocab"], config["d"])
        mixers = {"R": RECURRENT[config["family"]], "A": Attention}
        self.blocks = nn.ModuleList(Block(config, mixers[letter](config)) for letter in config["pattern"])
        self.nf = RMSNorm(config["d"])
        self.recurrent = [place for place, letter in enumerate(config["pattern"]) if letter == "R"]

    @classmethod
    def load(cls, path):
        """Read a safetensors file with the configuration in its metadata; int8 matrices have a ``.scale`` per row."""
        with safe_open(path, "pt") as file:
            model = cls(json.loads(file.metadata()["config"]))
            stored = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 (no mapping)
        scales = {name.removesuffix(".scale"): stored.pop(name) for name in list(stored) if name.endswith(".scale")}
        model.load_state_dict({name: x * scales[name][:, None] if name in scales else x for name, x in stored.items()})
        return model.eval().requires_grad_(False)

    def forward(self, ids, core=None, cache=None):
        """Hidden vectors ``(batch, tokens, d)``, which `head` converts to logits of the next tokens.

        `core` runs the recurrences, in chunks from zero states by default. A `cache` (a dict, empty at first) keeps
        the model's other caches (convolution tails, keys and values), so that the next call continues from these
        tokens.
        """
        core = Chunked() if core is None else core
        cache = {} if cache is None else cache
        x = self.emb(ids.to(self.device))
        for place, block in enumerate(self.blocks):
            x = block(x, place, core, cache)
        return self.nf(x)

    @property
    def device(self):
        """Where the weights are."""
        return self.emb.weight.device

    def head(self, hidden):
        """Logits ``(..., vocab)``."""
        return hidden @ self.emb.weight.T


def layer_of(config):
    """Kind and shape of a configuration's recurrence."""
    return ss.Layer(config["family"], config["H"], config["K"], config["V"], config["Hk"])


def unit(x):
    """Vectors scaled to norm one."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
