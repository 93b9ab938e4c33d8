"""Lightning attention of MiniMax, whose modeling file has the recurrence inline in the mixer's forward.

`forward` does what the mixer does, and calls the recurrence through two functions of this file. While a patched layer
runs, these are replaced like the functions of other modeling files.
"""

from __future__ import annotations

from typing import Any

import torch

BLOCK = 64
"""Tokens that `lightning_prefill` computes at once."""


def lightning_prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slope_rate: torch.Tensor,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and final states ``(batch, heads, K, V)`` of tokens ``(batch, tokens, heads, K or V)``."""
    q, k, v = (x.transpose(1, 2).float() for x in (query, key, value))
    rate = slope_rate.reshape(-1, 1, 1).float()
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]) if initial_state is None else initial_state.float()
    outputs = []
    for first in range(0, q.shape[2], BLOCK):
        own_q, own_k, own_v = (x[:, :, first : first + BLOCK] for x in (q, k, v))
        place = torch.arange(own_q.shape[2], device=q.device)
        apart = (place[:, None] - place).tril()
        scores = (own_q @ own_k.transpose(-1, -2) * torch.exp(-rate * apart)).tril()
        since = torch.exp(-rate * (place[:, None] + 1))
        outputs.append(scores @ own_v + (own_q * since) @ state)
        left = torch.exp(-rate * (len(place) - 1 - place)[:, None])
        state = torch.exp(-rate * len(place)) * state + (own_k * left).transpose(-1, -2) @ own_v
    return torch.cat(outputs, 2).transpose(1, 2).to(value.dtype), state.to(value.dtype)


def lightning_decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slope_rate: torch.Tensor,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`lightning_prefill` of one token after a state."""
    return lightning_prefill(query, key, value, slope_rate, initial_state)


def forward(
    module: Any,
    hidden_states: torch.Tensor,
    position_embeddings: Any = None,
    attention_mask: torch.Tensor | None = None,
    cache: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward of a `MiniMaxLightningAttention`, with the recurrence in functions; before 5.24 it has other names."""
    cache = past_key_values if cache is None else cache
    mixed = module.act_fn(module.qkv_proj(hidden_states))
    if attention_mask is not None:
        mixed = (mixed * attention_mask[:, :, None]).to(mixed.dtype)
    heads = mixed.unflatten(-1, (module.num_attention_heads, 3 * module.head_dim))
    query, key, value = heads.split(module.head_dim, -1)
    state = None if cache is None else cache.get_linear_cache(module.layer_idx)
    run = lightning_prefill if state is None or query.shape[1] > 1 else lightning_decode
    out, state = run(query, key, value, slope_rate=module.slope_rate, initial_state=state)
    if cache is not None:
        cache.set_linear_cache(module.layer_idx, state)
    out = module.norm(out.flatten(2))
    return module.out_proj(torch.sigmoid(module.output_gate(hidden_states)) * out), state


class LinearPlace:
    """State of one layer in a `MiniMaxCache`, with the methods of the layers of other caches."""

    def __init__(self, states: list[Any], index: int) -> None:
        self._states, self._index = states, index

    @property
    def recurrent_states(self) -> list[torch.Tensor | None]:
        """State ``(batch, heads, K, V)``, or None before the prompt."""
        return [self._states[self._index]]

    def reorder_cache(self, rows: torch.Tensor) -> None:
        """Let rows of the state continue others."""
        self._states[self._index] = self._states[self._index].index_select(0, rows)

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to drop tokens, as the cache itself does."""
        raise RuntimeError("MiniMaxCache does not support `crop` method")


def place_of(cache: Any, index: int) -> LinearPlace:
    """Return the place of a layer in a `MiniMaxCache`, which keeps it; a deep copy of the cache has a copy."""
    places = vars(cache).setdefault("_sketchssm_places", {})
    return places.setdefault(index, LinearPlace(cache.linear_cache, index))
