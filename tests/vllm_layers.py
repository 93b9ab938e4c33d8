"""One layer of vLLM with its pool, on the CPU: vLLM's kernels are replaced by plain PyTorch. Can be imported only
where vLLM can be.
"""

import sys
import warnings
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from samples import LAYERS, plan_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm
    from vllm.forward_context import ForwardContext, override_forward_context
    from vllm.model_executor.layers.mamba import mamba_mixer2
    from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn, olmo_gdn_linear_attn, qwen_gdn_linear_attn
    from vllm.model_executor.layers.mamba.linear import bailing_linear_attn, minimax_linear_attn
    from vllm.model_executor.models import bailing_moe_v3
    from vllm.models.kimi_k3.nvidia import kda as kimi_k3
    from vllm.models.kimi_k3.nvidia import kda_metadata
    from vllm.models.kimi_k3.nvidia.ops.third_party import kda
    from vllm.utils import torch_utils
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends import gdn_attn, mamba_attn
    from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

    # GLM's package imports its model, which needs torchvision.
    package = ModuleType("vllm.models.glm5next")
    package.__path__ = [f"{vllm.__path__[0]}/models/glm5next"]
    sys.modules[package.__name__] = package
    from vllm.models.glm5next.common import kda as glm5next

    from sketchssm.vllm import head_layer, layers, registry, selfcheck

from sketchssm.layer.recurrence import Layer
from sketchssm.reference.recurrence import run
from sketchssm.serving.decoder import Recipe
from sketchssm.vllm.settings import Settings

BLOCKS, WIDTH, DRAFTS, BLOCK = 104, 4, 3, 8
# Inputs are float32, of which each output takes some dozens.
TOLERANCE = 2e-5


def conv_rows(x, weight, bias, before):
    """Convolution of one row ``(tokens, dim)`` behind the last tokens ``(dim, width - 1)``; the new last tokens."""
    line = torch.cat([before, x.T], dim=1)
    out = sum(line[:, i : i + x.shape[0]] * weight[:, i : i + 1] for i in range(weight.shape[1]))
    if bias is not None:
        out = out + bias[:, None]
    return F.silu(out).T, line[:, line.shape[1] - before.shape[1] :]


def conv_update(x, state, weight, bias, activation, conv_state_indices, out=None, **drafts):
    """With drafts, the state holds the last tokens before the first of the last step's tokens, and these tokens."""
    out = torch.empty_like(x) if out is None else out
    rows = len(conv_state_indices)
    starts = drafts.get("query_start_loc", torch.arange(rows + 1)).tolist()
    kept = drafts.get("num_accepted_tokens", torch.ones(rows)).int().tolist()
    assert drafts.get("max_query_len", 1) == (1 + DRAFTS if drafts else 1)
    for i, block in enumerate(conv_state_indices.tolist()):
        mine = slice(starts[i], starts[i + 1])
        before = state[block][:, kept[i] - 1 : kept[i] - 1 + WIDTH - 1].clone()
        if block and starts[i + 1] > starts[i]:
            out[mine], _ = conv_rows(x[mine], weight, bias, before)
            line = torch.cat([before, x[mine].T], dim=1)[:, 1:]
            state[block][:, : line.shape[1]] = line
    return out


def conv_prefill(
    x, weight, bias, activation, conv_states, has_initial_state, cache_indices, query_start_loc, **others
):
    out, starts = torch.empty_like(x.T), query_start_loc.tolist()
    for i, block in enumerate(cache_indices.tolist()):
        state = conv_states[block][:, : WIDTH - 1]
        before = state.clone() if has_initial_state[i] else torch.zeros_like(state)
        out[starts[i] : starts[i + 1]], state[:] = conv_rows(x.T[starts[i] : starts[i + 1]], weight, bias, before)
    return out.T


def scan(layer, q, k, v, g, beta, states, starts):
    """Rows of several tokens from their states: outputs and last states."""
    out, last = torch.empty(v.shape), []
    for i, state in enumerate(states):
        rows = slice(starts[i], starts[i + 1])
        tokens = (None if x is None else x[rows].double().numpy()[None] for x in (q, k, v, g, beta))
        one, final = run(layer, *tokens, state=state.double().numpy()[None])
        out[rows] = torch.from_numpy(one[0]).float()
        last.append(torch.from_numpy(final[0]))
    return out, torch.stack(last)


def unit(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def decays(module, raw):
    """Log-decays of kda from raw gates."""
    x = raw + module.dt_bias.view(raw.shape[1:])
    if module.gate_lower_bound is None:
        return -module.A_log.exp()[:, None] * F.softplus(x)
    return module.gate_lower_bound * torch.sigmoid(module.A_log.exp()[:, None] * x)


CLASSES = {
    "mamba2": mamba_mixer2.MambaMixer2,
    "gdn": qwen_gdn_linear_attn.QwenGatedDeltaNetAttention,
    "kda": kimi_gdn_linear_attn.KimiGatedDeltaNetAttention,
    "gdn-olmo": olmo_gdn_linear_attn.OlmoHybridGatedDeltaNetAttention,
    "kda-k3": kimi_k3.KimiK3DeltaAttention,
    "kda-glm": glm5next.Glm5NextLinearAttention,
    "mamba2-bailing": bailing_linear_attn.BailingMoELinearAttention,
    "kda-bailing": bailing_moe_v3.BailingMoeV3KimiDeltaAttention,
}
"""One layer of each class with heads; a name begins with the kind."""
MODULES = (mamba_mixer2, qwen_gdn_linear_attn, kimi_gdn_linear_attn, olmo_gdn_linear_attn, kimi_k3, glm5next,
           bailing_moe_v3)  # fmt: skip


def forward_context(metadata, config=None):
    """As vLLM's `set_forward_context`, of a small configuration."""
    return override_forward_context(
        ForwardContext(no_compile_layers={}, attn_metadata=metadata, slot_mapping={}, skip_compiled=False)
    )


def with_heads(layer):
    """The class that the plugin makes of one of vLLM's."""
    head = getattr(layers, registry.CLASSES[layer.__name__].head)
    return type(head.__name__, (head, layer), {})


def norm_in_place(out, gate):
    """The gate of a norm, written over the memory of its input as vLLM's kernel does."""
    flat = out.contiguous().reshape(-1, out.shape[-1])
    flat *= gate.sigmoid().reshape(flat.shape)
    return flat.reshape(out.shape)


class Fixture:
    """One layer with its pool and builder, and how to run a batch through the layer."""

    def __init__(self, name, system, generator, drafts=0, mode="none"):
        kind = name.partition("-")[0]
        lightning = kind == "mamba2" != name
        self.kind, self.layer = kind, square(LAYERS[kind]) if kind == "kda" or lightning else LAYERS[kind]
        shape = self.layer
        self.generator = generator
        self.random = lambda *size: torch.randn(*size, generator=generator)
        own = with_heads(CLASSES[name])
        module = torch.nn.Module.__new__(own)
        torch.nn.Module.__init__(module)
        heads, keys, k_dim, v_dim = shape.heads, shape.key_heads, shape.key_dim, shape.value_dim
        channels = 2 * keys * k_dim + heads * v_dim
        weight = self.random(channels, 1, WIDTH) / 2
        convolutions = [SimpleNamespace(weight=x, bias=None) for x in weight.chunk(3)]
        source = plan_of(np.random.default_rng(0), shape, 2) if system == "sketch" else shape
        bound = -5.0 if system == "replay" or name in ("kda-glm", "kda-bailing") else None
        vars(module).update(
            kda_prefill_backend="triton", kda_decode_backend="triton", kda_spec_decode_backend="triton",
            decode_conv1d_weight=None, decode_norm_weight=None, use_recoverssm=False,
            allow_neg_eigval=name == "gdn-olmo",
            q_conv1d=convolutions[0], k_conv1d=convolutions[1], v_conv1d=convolutions[2], _merged_conv_weight=None,
            kda_safe_gate=True, kda_lower_bound=bound, safe_gate=True, lower_bound=bound, _conv_state_dim_first=False,
            prefix="model.layers.0.mixer", tp_size=1, backend="reference", activation="silu",
            _drafts=drafts, _ordinal=0,
            _settings=Settings(system), _window=1 if system == "standard" else 16, _shares=[source], _share=source,
            model_config=SimpleNamespace(dtype=torch.float32), num_spec=0, enable_packed_recurrent_decode=False,
            cache_config=SimpleNamespace(
                mamba_block_size=BLOCK, mamba_cache_mode=mode, mamba_page_size_padded=None, use_replayssm=False,
                use_kda_recoverssm=False, replayssm_buffer_len=None, hash_block_size=None,
                cache_hit_alignment_tokens=None,
            ),
            use_replayssm=False, mamba_config=SimpleNamespace(backend=None), _checkpoint_alignment=None,
            num_heads=heads, ssm_state_size=k_dim, head_dim=v_dim if kind == "mamba2" else k_dim, n_groups=keys,
            local_num_heads=heads, num_k_heads=keys, num_v_heads=heads, head_k_dim=k_dim, head_v_dim=v_dim,
            key_dim=keys * k_dim, value_dim=heads * v_dim, tped_intermediate_size=heads * v_dim,
            tped_conv_size=channels, tped_dt_size=heads, conv1d=SimpleNamespace(weight=weight, bias=None),
            conv_weights=weight[:, 0], local_projection_size=heads * k_dim,
            o_norm=norm_in_place, gate_lower_bound=bound,
            A=-torch.rand(heads, generator=generator), A_log=torch.rand(heads, generator=generator).log(),
            D=self.random(heads), is_blackwell=False, num_accepted_tokens=None,
            dt_bias=self.random(heads * k_dim if kind == "kda" else heads),
            split_hidden_states_B_C_fn=lambda x: x.split([heads * v_dim, keys * k_dim, keys * k_dim], dim=-1),
            get_state_shape=lambda: ((WIDTH - 1 + drafts, channels), shape.state_shape),
            get_state_dtype=lambda: (torch.float32, torch.float64),
        )  # fmt: skip
        self.call = module.decode_call
        if lightning:
            self._lightning(module)
        if name == "gdn":
            module.__dict__["chunk_gated_delta_rule"] = self._chunk_gdn
        # Heads that compute in float64 keep their states in float64, which is no type of states elsewhere.
        gate = own.gate(module)
        module.__dict__["recipe"] = Recipe(
            system,
            source,
            "reference",
            16,
            drafts,
            None,
            activation_dtype=None,
            gate=gate,
            monitor=int(system == "sketch"),
        )
        self.module = module
        speculative = (
            SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False, use_eagle_block_drop=lambda: False)
            if drafts
            else None
        )
        config = SimpleNamespace(
            num_speculative_tokens=drafts, speculative_config=speculative, additional_config={},
            cache_config=module.cache_config, mamba_config=module.mamba_config, use_v2_model_runner=name == "kda-k3",
            num_hash_lookahead_tokens=0, scheduler_config=SimpleNamespace(max_num_seqs=8),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
            model_config=SimpleNamespace(get_mamba_chunk_size=lambda: 4, max_model_len=256),
            compilation_config=SimpleNamespace(
                max_cudagraph_capture_size=8, static_forward_context={module.prefix: module},
                cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: True),
            ),
        )  # fmt: skip
        self.config = config
        spec = type(module).get_kv_cache_spec(module, config)
        parts = [torch.uint8] if system != "standard" or drafts else []
        assert spec.dtypes == (*([] if lightning else [torch.float32]), torch.float64, *parts)
        self._bind(spec)
        self.builder = module.get_attn_backend().get_builder_cls()(spec, [module.prefix], config, torch.device("cpu"))

    def _lightning(self, module):
        """A layer whose hidden states are q, k and v, and which projects and norms nothing."""
        heads, dim = self.layer.heads, self.layer.key_dim
        same = lambda x: (x, None)  # noqa: E731
        vars(module).update(
            tp_heads=heads, head_dim=dim, tp_slope=torch.rand(heads, generator=self.generator).view(-1, 1, 1),
            q_size_per_rank=heads * dim, kv_size_per_rank=heads * dim, query_key_value=same, linear_silu=False,
            use_qk_norm=False, linear_rope=False, linear_scale=True, scaling=1.0, group_norm_size=2, BLOCK=256,
            layer_idx=0, tp_kv_heads=heads, g_proj=same, g_norm=lambda x, gate: x, dense=same,
            get_state_shape=lambda: (self.layer.state_shape,), get_state_dtype=lambda: (torch.float64,),
        )  # fmt: skip

        self.call = lambda given, out: module._forward(
            torch.cat([given[x].flatten(1) for x in "qkv"], -1), out.flatten(1), None
        )

    def _bind(self, spec):
        """Bind a pool as vLLM's runners do."""
        page = -(-spec.page_size_bytes // 64) * 64
        raw = torch.full((BLOCKS, 1, 1, page), -1, dtype=torch.int8)
        self.module.bind_kv_cache(raw[..., : spec.page_size_bytes])
        raw[1:] = -1  # nothing in a block is valid before a request has it; block 0 is padding

    def _chunk_gdn(self, q, k, v, g, beta, initial_state, cu_seqlens, **others):
        out, last = scan(
            self.layer, q[0] * q.shape[-1] ** -0.5, k[0], v[0], g[0], beta[0], initial_state, cu_seqlens.tolist()
        )
        return out[None], last

    def inputs(self, tokens):
        """Random activations of a request, by the names of the layer's method."""
        return selfcheck.draw(self.module, tokens, self.generator)

    def oracle(self, given):
        """Outputs of a whole request."""
        return selfcheck.recurrence(self.module, given).float()

    def step(self, rows, accepted=None, drafted=None, late=0):
        """Run rows (given, blocks, first token, tokens, prompt) as a batch; their outputs.

        `late` are tokens by which the host overestimates rows behind their prompts: vLLM with drafts of a model begins
        a step before it knows how many of the last step's drafts were accepted.
        """
        tables = [[blocks] if isinstance(blocks, int) else blocks for _, blocks, *_ in rows]
        for table, (_, _, first, count, _) in zip(tables, rows, strict=True):
            source, place = (first - 1) // BLOCK, (first + count - 1) // BLOCK
            if len(table) > 1 and first and source != place:  # vLLM copies the states of convolution and recurrence
                for states in self.module.kv_cache:
                    states[table[place]] = states[table[source]]
        lengths = torch.tensor([count for *_, count, _ in rows])
        computed = torch.tensor([first for _, _, first, *_ in rows])
        prompts = torch.tensor([prompt for *_, prompt in rows])
        starts = F.pad(lengths.cumsum(0), (1, 0)).int()
        tokens = int(lengths.sum())
        batch = CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts,
            seq_lens=(computed + lengths).int(), num_reqs=len(rows),
            num_actual_tokens=tokens, max_query_len=int(lengths.max()), max_seq_len=256,
            block_table_tensor=torch.tensor(tables, dtype=torch.int32),
            slot_mapping=torch.zeros(tokens, dtype=torch.int64),
            is_prefilling=torch.tensor([first < prompt for _, _, first, _, prompt in rows]),
            seq_lens_cpu_upper_bound=(computed + lengths + late * (computed >= prompts)).int(),
        )  # fmt: skip
        if self.config.use_v2_model_runner and self.module.cache_config.mamba_cache_mode == "align":
            spec = self.builder.kv_cache_spec  # as the V2 runner does, for builders that want it
            blocks = mamba_get_block_table_tensor(batch.block_table_tensor, batch.seq_lens, spec, "align")
            self.builder.mamba_aligned_state_indices = blocks
        counts = [None if x is None else torch.tensor(x, dtype=torch.int32) for x in (accepted, drafted)]
        meta = self.builder.build(0, batch, *counts)
        axis = {name: 1 if x.shape[0] == 1 and x.ndim > 2 else 0 for name, x in rows[0][0].items()}
        given = {
            name: torch.cat([g[name].narrow(at, f, n) for g, _, f, n, _ in rows], dim=at) for name, at in axis.items()
        }
        shape = self.layer
        out = torch.full((tokens, shape.heads, shape.value_dim), torch.nan)
        with forward_context({self.module.prefix: meta}):
            self.call(given, out)
        return meta, out.split(lengths.tolist())


def square(shape):
    """The layer with as many key heads as heads, and square states, as vLLM's kda and lightning attention have."""
    return type(shape)(shape.kind, shape.heads, shape.key_dim, shape.key_dim)


def patched(monkeypatch):
    """Replace vLLM's kernels by plain PyTorch; return a function that makes a `Fixture`."""

    def scan_mamba(x, dt, A, B, C, D, dt_bias, cu_seqlens, initial_states, out, **others):
        layer = LAYERS["mamba2"]
        step = F.softplus(dt + dt_bias)
        states = torch.zeros(len(cu_seqlens) - 1, *layer.state_shape) if initial_states is None else initial_states
        y, last = scan(layer, C, B, x * step[..., None], A * step, None, states, cu_seqlens.tolist())
        out.copy_(y + D[:, None] * x)
        if others.get("final_states_out") is not None:
            others["final_states_out"][others["final_state_indices"].long()] = last
        return last

    def prepare_gdn(conv_output, a, b, A_log, dt_bias, num_k_heads, head_k_dim, head_v_dim, **others):
        keys = num_k_heads * head_k_dim
        q, k, v = conv_output.split([keys, keys, conv_output.shape[1] - 2 * keys], dim=-1)
        q, k = (unit(x.reshape(len(x), -1, head_k_dim)) for x in (q, k))
        g = -A_log.exp() * F.softplus(a + dt_bias)
        return q, k, v.reshape(len(v), -1, head_v_dim), g, b.sigmoid()

    def chunk(layer, q, k, v, g, beta, initial_state, cu_seqlens):
        q, k = unit(q[0]) * q.shape[-1] ** -0.5, unit(k[0])
        out, last = scan(layer, q, k, v[0], g[0], beta[0], initial_state, cu_seqlens.tolist())
        return out[None], last

    def chunk_kda(q, k, v, raw_g, raw_beta, A_log, g_bias, lower_bound, initial_state, cu_seqlens, **others):
        g = decays(SimpleNamespace(A_log=A_log, dt_bias=g_bias, gate_lower_bound=lower_bound), raw_g[0])[None]
        return chunk(square(LAYERS["kda"]), q, k, v, g, raw_beta.sigmoid(), initial_state, cu_seqlens)

    def chunk_glm(q, k, v, raw_g, beta, A_log, g_bias, **others):
        return chunk_kda(q, k, v, raw_g, beta.logit(), A_log, g_bias, **others)

    def chunk_bailing(q, k, v, g, beta, initial_state, cu_seqlens, **others):
        return chunk(square(LAYERS["kda"]), q, k, v, g, beta, initial_state, cu_seqlens)

    def gates_olmo(A_log, a, b, dt_bias, negative):
        return (-A_log.exp() * F.softplus(a + dt_bias))[None], (1 + negative) * b.sigmoid()[None]

    def chunk_olmo(q, k, v, g, beta, initial_state, cu_seqlens, **others):
        return chunk(Layer("gdn", 4, 6, 5), q, k, v, g, beta, initial_state, cu_seqlens)

    def prefix_lightning(q, k, v, state, slope, block, **others):
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        layer, g = square(LAYERS["mamba2"]), -slope.flatten().expand(len(q), -1)
        out, last = scan(layer, q, k, v, g, None, state[None].transpose(-1, -2), [0, len(q)])
        state.copy_(last[0].transpose(-1, -2))
        return out.flatten(1)

    def scattered(states, rows, slots):
        states[slots.long()] = rows.to(states.dtype)

    def gathered(states, slots, begun):
        return torch.where(begun[:, None, None, None], states[slots.long()], 0)

    monkeypatch.setattr(head_layer, "causal_conv1d_update", conv_update)
    for module in MODULES:
        monkeypatch.setattr(module, "causal_conv1d_fn", conv_prefill)
        monkeypatch.setattr(module, "causal_conv1d_update", conv_update)
    monkeypatch.setattr(mamba_mixer2, "mamba_chunk_scan_combined_varlen", scan_mamba)
    monkeypatch.setattr(qwen_gdn_linear_attn, "fused_post_conv_prep", prepare_gdn)
    monkeypatch.setattr(kda, "chunk_kda_with_fused_gate", chunk_kda)
    for module in (kimi_gdn_linear_attn, kimi_k3, glm5next):
        monkeypatch.setattr(module, "gather_initial_states", gathered)
    monkeypatch.setattr(glm5next, "chunk_kda_with_fused_gate", chunk_glm)
    linear = minimax_linear_attn.MiniMaxText01LinearKernel
    monkeypatch.setattr(linear, "jit_linear_forward_prefix", staticmethod(prefix_lightning))
    monkeypatch.setattr(glm5next, "_cast_sigmoid", torch.sigmoid)
    monkeypatch.setattr(glm5next, "scatter_states", scattered)
    monkeypatch.setattr(bailing_moe_v3, "chunk_kda", chunk_bailing)
    monkeypatch.setattr(olmo_gdn_linear_attn, "fused_olmo_hybrid_gdn_gating", gates_olmo)
    monkeypatch.setattr(olmo_gdn_linear_attn, "chunk_gated_delta_rule", chunk_olmo)
    monkeypatch.setattr(torch_utils, "PIN_MEMORY", False)  # there is no device to pin memory for
    for module in (gdn_attn, mamba_attn, kda_metadata):  # what it computes is for vLLM's own convolution
        monkeypatch.setattr(module, "compute_causal_conv1d_metadata", lambda *given, **others: (None, None, None))
    monkeypatch.setattr(qwen_gdn_linear_attn, "_resolve_gdn_prefill_backend", lambda config: ("triton", "triton"))
    return lambda *args: Fixture(*args[:2], torch.Generator().manual_seed(1), *args[2:])
