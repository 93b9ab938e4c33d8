"""vLLM's metadata builders of recurrent layers, with the rows of a batch as heads need them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend, GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend, Mamba2AttentionMetadataBuilder

from sketchssm.vllm.batches import DecodeRows, KnownTokens, PrefillRows, RowBuffers, Split, split_rows

__all__ = ["BatchMetadata", "HeadGDNBackend", "HeadMamba2Backend"]


@dataclass
class BatchMetadata:
    """One step's batch, for the layers of a cache group."""

    split: Split
    decode: DecodeRows | None  # rows that heads decode
    starts: Any  # first token of each of these rows, on the device; None without drafts
    prefill: PrefillRows | None  # rows that vLLM prefills
    inner: Any = None  # vLLM's own metadata of these rows


class HeadRows:
    """Common part of the builders of all kinds; the first base class, before vLLM's builder."""

    vllm_config: Any
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        self.vllm_config = vllm_config
        self._names = list(layer_names)
        self._drafts = vllm_config.num_speculative_tokens or 0
        self.supports_update_block_table = not self._drafts
        most = vllm_config.scheduler_config.max_num_seqs
        captured = vllm_config.compilation_config.max_cudagraph_capture_size
        self._buffers = RowBuffers(max(most, captured or 0), self._drafts, device)
        self._known = KnownTokens()

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        num_accepted_tokens: Any = None,
        num_decode_draft_tokens_cpu: Any = None,
        fast_build: bool = False,
        **others: Any,
    ) -> BatchMetadata:
        """Split the batch, and describe both parts.

        With drafts, `num_accepted_tokens` has the kept tokens of each row's last step, and
        `num_decode_draft_tokens_cpu` the draft tokens of each row, -1 for none. The other arguments but the batch are
        not used.
        """
        batch = common_attn_metadata
        starts = batch.query_start_loc_cpu.numpy()
        lengths = np.diff(starts)
        computed = batch.seq_lens_cpu_upper_bound.numpy() - lengths
        if not self._drafts:
            split = split_rows(lengths, computed)
        else:
            drafted = None if num_decode_draft_tokens_cpu is None else num_decode_draft_tokens_cpu.numpy()
            split = split_rows(lengths, computed, batch.is_prefilling.numpy(), self._drafts, drafted)
        slots = batch.block_table_tensor[:, 0]
        n = split.decodes
        accepted = self._known.kept(num_accepted_tokens, slots) if self._drafts else None
        decode = prefill = inner = None
        if n:
            decode = self._buffers.fill(slots[:n], lengths[:n], None if accepted is None else accepted[:n])
            self._restart(split, slots)
            if split.whole.size:
                counts = torch.from_numpy(lengths[split.whole]).to(slots.device)
                blocks = self._layers()[0].kv_cache[0].shape[0]
                self._known.note(slots[torch.from_numpy(split.whole).to(slots.device)], counts, blocks)
        if split.prefills:
            prefill = PrefillRows.behind(split, slots, accepted)
            inner = super().build(0, rows_behind(batch, split, lengths))  # type: ignore[misc]
        return BatchMetadata(split, decode, batch.query_start_loc[: n + 1] if self._drafts else None, prefill, inner)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> BatchMetadata:
        """Describe a batch of decoding rows for the capture of a graph."""
        lengths = torch.diff(common_attn_metadata.query_start_loc)
        found = self.build(0, common_attn_metadata, lengths, (lengths - 1).cpu())
        if found.decode is None or found.decode.gather is not None or found.prefill is not None:
            raise RuntimeError("capture: expected rows of equally many tokens that all decode")
        return found

    def update_block_table(self, metadata: BatchMetadata, blk_table: Any, slot_mapping: Any) -> BatchMetadata:
        """Describe the same batch for another cache group, with its blocks ``(rows, blocks)`` of each row."""
        split, slots = metadata.split, blk_table[:, 0]
        n = split.decodes
        decode = prefill = inner = None
        if n:
            decode = self._buffers.fill(slots[:n], np.ones(n, dtype=np.int32))
            self._restart(split, slots)
        if split.prefills:
            prefill = PrefillRows.behind(split, slots)
            inner = super().update_block_table(  # type: ignore[misc]
                metadata.inner, blk_table[n:], slot_mapping[split.decode_tokens :]
            )
        return BatchMetadata(split, decode, None, prefill, inner)

    def _layers(self) -> list[Any]:
        """Layers of the group that have decoders."""
        layers = self.vllm_config.compilation_config.static_forward_context
        return [layers[name] for name in self._names if layers[name].decoder is not None]

    def _restart(self, split: Split, slots: Any) -> None:
        """Begin requests of one token from zero: nothing has written their blocks."""
        if not split.fresh.size:
            return
        rows = slots[torch.from_numpy(split.fresh).to(slots.device)]
        for layer in self._layers():
            layer.decoder.restart(rows)
            layer.kv_cache[0][rows.long()] = 0


def rows_behind(batch: Any, split: Split, lengths: Any) -> Any:
    """Describe the rows that vLLM prefills as a batch of their own."""
    n, tokens = split.decodes, split.decode_tokens
    if not n:
        return batch

    def rows(x: Any) -> Any:
        return None if x is None else x[n:]

    return batch.replace(
        query_start_loc=batch.query_start_loc[n:] - tokens,
        query_start_loc_cpu=batch.query_start_loc_cpu[n:] - tokens,
        seq_lens=batch.seq_lens[n:],
        num_reqs=batch.num_reqs - n,
        num_actual_tokens=int(lengths[n:].sum()),
        max_query_len=int(lengths[n:].max()),
        block_table_tensor=batch.block_table_tensor[n:],
        slot_mapping=batch.slot_mapping[tokens:],
        is_prefilling=rows(batch.is_prefilling),
        seq_lens_cpu_upper_bound=rows(batch.seq_lens_cpu_upper_bound),
        positions=None if batch.positions is None else batch.positions[tokens:],
        _seq_lens_cpu=rows(batch._seq_lens_cpu),
        _num_computed_tokens_cpu=rows(batch._num_computed_tokens_cpu),
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )


class HeadMamba2Builder(HeadRows, Mamba2AttentionMetadataBuilder):  # type: ignore[misc]
    """Builder of mamba2's metadata."""


class HeadGDNBuilder(HeadRows, GDNAttentionMetadataBuilder):  # type: ignore[misc]
    """Builder of the metadata of gdn and kda."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.supports_update_block_table = False  # vLLM's own builder has no method for it


class HeadMamba2Backend(Mamba2AttentionBackend):  # type: ignore[misc]
    """Backend of mamba2."""

    @staticmethod
    def get_builder_cls() -> Any:
        """Class of the builder."""
        return HeadMamba2Builder


class HeadGDNBackend(GDNAttentionBackend):  # type: ignore[misc]
    """Backend of gdn and kda."""

    @staticmethod
    def get_builder_cls() -> Any:
        """Class of the builder."""
        return HeadGDNBuilder
