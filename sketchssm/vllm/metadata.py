"""vLLM's metadata builders of recurrent layers, with the rows of a batch as heads need them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import vllm
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

from sketchssm.serving.batches import (
    DecodeRows,
    KnownTokens,
    PrefillRows,
    RowBuffers,
    Split,
    moved_rows,
    on_device,
    split_rows,
)
from sketchssm.serving.decoder import NULL_BLOCK
from sketchssm.serving.errors import ErrorLog
from sketchssm.serving.recording import NOTHING, Choice
from sketchssm.vllm import gauges, selfcheck
from sketchssm.vllm.registry import tested

logger = init_logger("vllm.sketchssm")


@dataclass
class BatchMetadata:
    """One step's batch, for the layers of a cache group."""

    split: Split
    moved: tuple[Any, Any]  # rows whose states are in another block than before, and the places of these blocks
    decode: DecodeRows | None  # rows that heads decode
    starts: Any  # first token of each of these rows, on the device; None without drafts
    prefill: PrefillRows | None  # rows that vLLM prefills
    inner: Any = None  # vLLM's own metadata of these rows
    seq_lens: Any = None  # tokens of each row's request after this step, on the device
    counts: Any = None  # tokens of each row, and of its request before this step, on the host
    followed: bool = False  # whether layers copy the tokens of followed rows, as all captured steps do
    chunks: Any = ()  # prefilled rows that are recorded: their tokens, their slots, and whether they go on
    choice: Choice | None = None  # what is recorded; None for a batch that is no requests'


class HeadRows:
    """Common part of the builders of all kinds; the first base class, before vLLM's builder."""

    vllm_config: Any
    kv_cache_spec: Any

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        self.vllm_config = vllm_config
        self._names = list(layer_names)
        self._drafts = vllm_config.num_speculative_tokens or 0
        if self._drafts:
            self.supports_update_block_table = False  # which has no counts
            if vllm_config.use_v2_model_runner and not counted(self):
                raise no_counts(self, self._drafts)
        self._mode = vllm_config.cache_config.mamba_cache_mode
        most = vllm_config.scheduler_config.max_num_seqs
        captured = vllm_config.compilation_config.max_cudagraph_capture_size
        self._checked = tested(vllm.__version__)
        self._recording = True
        self._buffers = RowBuffers(max(most, captured or 0), self._drafts, device)
        self._known = KnownTokens()
        self._errors = ErrorLog(logger.info, gauges.show)
        if not self._checked:  # vLLM makes builders before it binds pools
            for name in layer_names:
                vllm_config.compilation_config.static_forward_context[name].__dict__["on_pool"] = self.check

    def check(self, layer: Any) -> None:
        """Check a layer with a pool in a version that was not tested, unless another layer of the group was."""
        if not self._checked:
            self._checked = True
            with self._unrecorded(), torch.no_grad():
                selfcheck.check(layer, self, self.vllm_config)

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
        if not self._checked and self._layers():  # in a version that binds pools first
            self.check(self._layers()[0])
        if self._drafts and num_accepted_tokens is None:
            raise no_counts(self, self._drafts)
        batch = common_attn_metadata
        starts = batch.query_start_loc_cpu.numpy()
        lengths = np.diff(starts)
        computed = batch.seq_lens_cpu_upper_bound.numpy() - lengths
        if not self._drafts:
            split = split_rows(lengths, computed)
        else:
            drafted = None if num_decode_draft_tokens_cpu is None else num_decode_draft_tokens_cpu.numpy()
            split = split_rows(lengths, computed, batch.is_prefilling.numpy(), self._drafts, drafted)
        slots = self._slots(batch.block_table_tensor, batch.seq_lens)
        moved: Any = ((), ())
        if self._mode == "align":
            moved = moved_rows(lengths, computed, self.kv_cache_spec.block_size)
            self._move(moved, batch.block_table_tensor, slots)
        n = split.decodes
        accepted = self._known.kept(num_accepted_tokens, slots) if self._drafts else None
        decode = prefill = inner = None
        if n:
            decode = self._buffers.fill(slots[:n], lengths[:n], None if accepted is None else accepted[:n])
            self._restart(split, slots)
            self._report(slots[:n], lengths[:n])
            if split.whole.size:
                counts = on_device(lengths[split.whole], slots)
                blocks = self._layers()[0].kv_cache[0].shape[0]
                self._known.note(slots[on_device(split.whole, slots)], counts, blocks)
        if split.prefills:
            self._leave_out(n)
            inner = super().build(0, rows_behind(batch, split, lengths))  # type: ignore[misc]
            prefill = PrefillRows.behind(split, slots, accepted, blocks_passed(inner), self._known.noted)
        begins = batch.query_start_loc[: n + 1] if self._drafts else None
        counts = lengths, computed
        recorded = self._record(self._choose(split, counts), split, counts, slots, batch.block_table_tensor)
        return BatchMetadata(split, moved, decode, begins, prefill, inner, batch.seq_lens, counts, *recorded)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> BatchMetadata:
        """Describe a batch of decoding rows for the capture of a graph."""
        lengths = torch.diff(common_attn_metadata.query_start_loc)
        with self._unrecorded():
            found = self.build(0, common_attn_metadata, lengths, (lengths - 1).cpu())
        if found.decode is None or found.decode.gather is not None or found.prefill is not None:
            raise RuntimeError("capture: expected rows of equally many tokens that all decode")
        return found

    def update_block_table(self, metadata: BatchMetadata, blk_table: Any, slot_mapping: Any) -> BatchMetadata:
        """Describe the same batch for another cache group, with its blocks ``(rows, blocks)`` of each row."""
        split, slots = metadata.split, self._slots(blk_table, metadata.seq_lens)
        n = split.decodes
        decode = prefill = inner = None
        self._move(metadata.moved, blk_table, slots)
        if n:
            decode = self._buffers.fill(slots[:n], np.ones(n, dtype=np.int32))
            self._restart(split, slots)
            self._report(slots[:n], metadata.counts[0][:n])
        if split.prefills:
            self._leave_out(n)
            inner = super().update_block_table(  # type: ignore[misc]
                metadata.inner, blk_table[n:], slot_mapping[split.decode_tokens :]
            )
            prefill = PrefillRows.behind(split, slots, passed=blocks_passed(inner))
        counts = metadata.counts
        recorded = self._record(metadata.choice, split, counts, slots, blk_table)
        return BatchMetadata(split, metadata.moved, decode, None, prefill, inner, metadata.seq_lens, counts, *recorded)

    def _leave_out(self, rows: int) -> None:
        """Leave the first rows out of what the V2 runner gives: the blocks of all rows of this step."""
        aligned = getattr(self, "mamba_aligned_state_indices", None)
        if aligned is not None:
            self.mamba_aligned_state_indices = aligned[rows:]

    @contextmanager
    def _unrecorded(self) -> Iterator[None]:
        """Describe batches that are no requests', while the block runs."""
        self._recording = False
        try:
            yield
        finally:
            self._recording = True

    def _choose(self, split: Split, counts: Any) -> Choice | None:
        """Let a calibration choose what is recorded of the batch; None if it is no requests'."""
        record = self._layer_record()
        if record is None or not self._recording:
            return None
        with record.recording.working():
            return record.recording.choose(self, *counts, split.decodes)

    def _record(
        self, choice: Choice | None, split: Split, counts: Any, slots: Any, table: Any
    ) -> tuple[bool, Any, Choice | None]:
        """Begin and end what is chosen; the last fields of `BatchMetadata`."""
        record = None if choice is NOTHING else self._layer_record()
        if record is None or choice is None:
            return record is not None, (), choice
        lengths, computed = counts
        with record.recording.working():
            for layer in self._layers() if choice.end is not None else ():
                layer.record.end(choice.end)
            if choice.begin is not None:
                blocks = slots[on_device(choice.begin, slots)]
                if choice.lead is self:
                    record.recording.followed.begin(blocks, on_device(computed[choice.begin], slots))
                for layer in self._layers():
                    layer.record.begin(layer.kv_cache[-1][blocks])
            if choice.lead is self:
                single = np.arange(len(lengths)) < split.decodes * (lengths == 1)
                places = np.maximum(computed - 1, 0) // self.kv_cache_spec.block_size
                own, last = on_device(np.stack([np.where(single, computed, -1), places]).astype(np.int64), slots)
                before = slots
                if self._mode == "align" and choice.begin is None:  # a state that begins is in its block of this step
                    before = table.gather(1, last[:, None])[:, 0]
                record.recording.followed.step(before, slots, own)
        if not choice.chunks:
            return choice.lead is not None, (), choice
        starts = np.cumsum(lengths) - lengths
        chunks = [
            (slice(starts[row], starts[row] + tokens), slots[row : row + 1].long(), begun)
            for row, tokens, begun in choice.chunks
        ]
        return choice.lead is not None, chunks, choice

    def _layer_record(self) -> Any:
        """Sums of the group's first layer, while a calibration is recorded."""
        layers = self._layers()
        return layers[0].record if layers else None

    def _report(self, slots: Any, lengths: Any) -> None:
        """Log now and then what heads have measured in the requests of the rows that have tokens."""
        layers = self._layers() if self._recording else []
        if layers and layers[0].recipe.monitor and self._errors.due:
            own = slots[on_device(np.flatnonzero(lengths), slots)]
            own = own[own != NULL_BLOCK]  # of idle replicas' steps, and of graphs that are captured
            if len(own):
                self._errors.write({layer.prefix: layer.decoder.head for layer in layers}, own)

    def _slots(self, table: Any, seq_lens: Any) -> Any:
        """Block of each row's state."""
        return mamba_get_block_table_tensor(table, seq_lens, self.kv_cache_spec, self._mode)[:, 0]

    def _layers(self) -> list[Any]:
        """Layers of the group that have decoders."""
        layers = self.vllm_config.compilation_config.static_forward_context
        return [layers[name] for name in self._names if layers[name].decoder is not None]

    def _move(self, moved: tuple[Any, Any], table: Any, slots: Any) -> None:
        """Let states go on in other blocks. vLLM has moved the states of the convolution."""
        if not len(moved[0]):
            return
        rows, places = (on_device(x, slots) for x in moved)
        sources, targets = table[rows, places].contiguous(), slots[rows].contiguous()
        for layer in self._layers():
            layer.decoder.move(sources, targets)

    def _restart(self, split: Split, slots: Any) -> None:
        """Begin requests of one token from zero: nothing has written their blocks."""
        if not split.fresh.size:
            return
        rows = slots[on_device(split.fresh, slots)]
        for layer in self._layers():
            layer.decoder.restart(rows)
            layer.kv_cache[0][rows.long()] = 0


def counted(builder: Any) -> bool:
    """Whether vLLM's V2 runner gives a builder the counts of kept drafts; in an unknown version a step tells."""
    try:
        from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridAttnMetadata
    except ImportError:
        return True
    return bool(MambaHybridAttnMetadata(torch.zeros(1, dtype=torch.bool)).get_extra_attn_kwargs(builder, 1))


def no_counts(builder: Any, drafts: int) -> ValueError:
    """Error of an engine whose runner does not tell how many drafts were kept."""
    own = type(builder).__bases__[-1].__name__
    return ValueError(
        f"speculative_config: expected None, as vLLM's runner gives a {own} no counts of kept drafts, got {drafts} "
        "draft tokens"
    )


def blocks_passed(inner: Any) -> Any:
    """Find the blocks in which a prefill leaves states before its last token; None if there are none."""
    found = getattr(inner, "checkpoint_meta", None) or getattr(inner, "checkpoint", None)
    return None if found is None else found.state_indices.contiguous()


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
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )


@cache
def with_heads(backend: Any) -> Any:
    """Make a backend whose builder describes batches for heads, from a backend of vLLM's."""
    builder = backend.get_builder_cls()
    # The host splits a batch: graphs hold decode steps only, and the host's numbers of tokens must be the device's.
    graphs = min(builder._cudagraph_support, AttentionCGSupport.UNIFORM_BATCH, key=lambda support: support.value)
    own = type(f"Head{builder.__name__}", (HeadRows, builder), {"_cudagraph_support": graphs})
    replaced = {
        "get_builder_cls": staticmethod(lambda: own),
        "supports_device_cpu_query_lens_mismatch": classmethod(lambda cls: False),
    }
    return type(f"Head{backend.__name__}", (backend,), replaced)
