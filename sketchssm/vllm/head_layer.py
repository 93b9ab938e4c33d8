"""What vLLM's recurrent layers of all kinds share: heads for the rows of a batch that decode."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update
from vllm.platforms import current_platform

from sketchssm.arrays.gates import GateInput
from sketchssm.layer.recurrence import Layer
from sketchssm.plans.plan import SketchPlan
from sketchssm.serving.blocks import BlockLayout
from sketchssm.serving.decoder import LayerDecoder, Recipe
from sketchssm.serving.inputs import convolved
from sketchssm.serving.layer_record import LayerRecord
from sketchssm.serving.plans import plan_of, sharded
from sketchssm.serving.recording import Recording
from sketchssm.vllm.metadata import BatchMetadata, logger, with_heads
from sketchssm.vllm.settings import EngineFacts, Settings, check_engine, plans_at


def settings_of(vllm_config: Any) -> Settings | None:
    """Read the plugin's settings for an engine; None if the plugin is off."""
    return Settings.find(os.environ, vllm_config.additional_config)


def side_bytes(vllm_config: Any) -> int:
    """Bytes (a multiple of 16) that the plugin adds to each block: the most that any layer of the model needs."""
    sizes = (layer.layout.bytes for layer in heads_of(vllm_config) if layer.active)
    return max((-(-size // 16) * 16 for size in sizes), default=0)


def with_side(spec: Any, size: int) -> Any:
    """Add bytes behind the states to a description of blocks."""
    return replace(spec, shapes=(*spec.shapes, (size,)), dtypes=(*spec.dtypes, torch.uint8))


def heads_of(vllm_config: Any) -> list[Any]:
    """Layers of the model that may have heads, in the order in which they were made."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    return [layer for layer in layers if isinstance(layer, HeadLayer)]


def is_first_replica(parallel_config: Any) -> bool:
    """Whether an engine is the first of data parallel replicas, which all have the rank 0 if the model is dense."""
    return not parallel_config.data_parallel_index


def recording_of(vllm_config: Any, settings: Settings) -> Recording:
    """Make the recording of an engine's process."""
    assert settings.record is not None
    parallel = vllm_config.parallel_config
    tensor, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    rank = get_pp_group().rank_in_group * tensor + get_tensor_model_parallel_rank()
    model = vllm_config.model_config.architecture
    tell = lambda words: logger.info("sketchssm: calibration: %s", words)  # noqa: E731
    return Recording(
        settings.record, model, settings.window, settings.tokens, settings.share, tell, rank, tensor * stages
    )


class HeadLayer(MambaBase):  # type: ignore[misc]
    """Common part of the layers of all kinds; before vLLM's layer among the base classes.

    `decoder` is the layer's head on vLLM's pool; None until the pool exists. `record` are the layer's sums, while a
    calibration is recorded.
    """

    kind: str
    activations: torch.dtype | None = None  # of q, k and v, if not the model's
    decoder: Any = None
    record: LayerRecord | None = None
    _settings: Settings | None = None  # without settings the layer is as vLLM's own
    on_pool: Any = None  # is called with the layer when it has a pool
    backend: str  # of heads

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        settings = settings_of(config)
        if settings is None:
            return
        self._settings = settings
        self._drafts = config.num_speculative_tokens or 0
        self._window = 1 if settings.system == "standard" else settings.window
        self._shares: list[Any] = [self.layer]
        if settings.system == "sketch":
            plan = plan_of(plans_at(settings.plans, settings.mean_rank, settings.reduction), self.prefix)
            self._shares = sharded(plan, self.layer, self.prefix, self.tp_size)
            self._window = plan.window
        self.backend = platform = current_platform.device_name  # the type of ROCm's devices is "cuda"
        check_engine(
            EngineFacts(
                platform,
                config.cache_config.mamba_cache_mode,
                self.kind,
                self._drafts,
                self._window,
                config.kv_transfer_config is not None,
                bool(config.parallel_config.use_ubatching),
                bool(config.cache_config.use_replayssm),
                settings.window if settings.record else 0,
                settings.monitor,
                config.mamba_config.enable_stochastic_rounding,
                extra.get("decode_backend", "auto") if isinstance(extra := config.additional_config, dict) else "auto",
            )
        )
        others = heads_of(config)[:-1]
        self._ordinal = len(others)
        try:  # before the weights are loaded
            for share in self._shares:
                self._recipe(share, None).parts()
        except ValueError as error:
            raise type(error)(f"{self.prefix}: {error}") from error
        self._share = self._shares[get_tensor_model_parallel_rank() % len(self._shares)]
        if settings.record is not None and is_first_replica(config.parallel_config):
            recording = others[0].record.recording if others else recording_of(config, settings)
            self.record = recording.layer(
                self.prefix, type(self).__bases__[-1].__name__, self.layer, self.gate, self.whole
            )

    @property
    def active(self) -> bool:
        """Whether the layer decodes with a head."""
        return self._settings is not None

    @property
    @abstractmethod
    def layer(self) -> Layer:
        """Kind and shape of this process's share of the layer."""

    @property
    def whole(self) -> Layer:
        """Kind and shape of the layer of all processes."""
        world = self.tp_size
        return replace(self.layer, heads=world * self.layer.heads, key_heads=world * self.layer.key_heads)

    def gate(self) -> GateInput | None:
        """Parameters of raw gates, for kda."""
        return None

    @cached_property
    def recipe(self) -> Recipe:
        """Common arguments of the layer's heads. The weights must have been loaded."""
        return self._recipe(self._share, self.gate())

    def _recipe(self, share: Layer | SketchPlan, gate: GateInput | None) -> Recipe:
        settings = self._settings
        assert settings is not None
        model, states = (str(kind).removeprefix("torch.") for kind in (self._activations, self.get_state_dtype()[-1]))
        return Recipe(
            settings.system,
            share,
            self.backend,
            settings.window,
            self._drafts,
            self._ordinal if settings.phases and self._window > 1 else None,
            states,
            model if self.backend == "cuda" else None,
            gate,
            settings.monitor,
            settings.tolerance,
        )

    @cached_property
    def layout(self) -> BlockLayout:
        """Where the parts of a slot lie in a block. All processes of a tensor-parallel group have the largest."""
        sizes = self._state_bytes
        if sum(sizes[:-1]) % 16:
            raise ValueError(f"{self.prefix}: expected a state at a multiple of 16 bytes, got {sum(sizes[:-1])}")
        return max(
            (BlockLayout.behind(sum(sizes), self.recipe.parts(share)) for share in self._shares),
            key=lambda layout: layout.bytes,
        )

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """Describe the layer's blocks, with the parts behind the states."""
        spec = super().get_kv_cache_spec(vllm_config)
        extra = side_bytes(vllm_config) if self.active else 0
        return with_side(spec, extra) if extra else spec

    def get_attn_backend(self) -> Any:
        """Backend whose builders describe batches for heads."""
        backend = super().get_attn_backend()
        return with_heads(backend) if self.active else backend

    @property
    def kv_cache(self) -> Any:
        """States of convolution, if the layer has one, and recurrence, ``(blocks, ...)`` each."""
        return self.__dict__.get("_states", ())

    @kv_cache.setter
    def kv_cache(self, states: Any) -> None:
        """Take or leave the pool; the head on the former pool is dropped."""
        self.__dict__.update(_states=states, decoder=None)

    def bind_kv_cache(self, kv_cache: Any) -> None:
        """Take the pool, ``(blocks, 1, 1, bytes)``, and make the layer's head on it."""
        super().bind_kv_cache(kv_cache)
        if not self.active:
            return
        states, own = self.kv_cache[-1], self._own_layout
        side = kv_cache.flatten(1)[:, sum(self._state_bytes) :].view(torch.uint8)
        if self._ordinal == 0:
            share = 100 * self.layout.share
            logger.info("sketchssm: %s heads, %.1f%% of the states' bytes beside them", self.recipe.system, share)
        decoder = LayerDecoder(self.recipe, states, side if own.bytes else None, own)
        self.recipe.warm(decoder.head, states.device)
        self._allocate(states.device)
        self.__dict__.update(decoder=decoder, _side=side, _measured=True)
        if self.on_pool is not None:
            self.on_pool(self)

    def _allocate(self, device: torch.device) -> None:
        if self.record is not None:
            self.record.allocate(self._activations, device)

    @property
    def _activations(self) -> torch.dtype:
        return self.activations or self.model_config.dtype

    @property
    def _own_layout(self) -> BlockLayout:
        """Layout of this process's own share."""
        return BlockLayout.behind(sum(self._state_bytes), self.recipe.parts())

    @property
    def _state_bytes(self) -> list[int]:
        """Bytes of the states of convolution and recurrence in a block."""
        return [
            prod(shape) * kind.itemsize
            for shape, kind in zip(self.get_state_shape(), self.get_state_dtype(), strict=True)
        ]

    def _batch(self) -> BatchMetadata | None:
        """Batch of the current step; None while vLLM measures its memory, and without settings."""
        if not self.active:
            return None
        found = (get_forward_context().attn_metadata or {}).get(self.prefix)
        if found is not None:
            return found
        if self.__dict__.get("_measured") is None:
            # A head of one slot: vLLM then knows of the memory of kernels and plans.
            self.__dict__["_measured"] = head = self.recipe.head(1)
            self.recipe.warm(head, torch.device(current_platform.device_type))
            self._allocate(torch.device(current_platform.device_type))
        return None

    @contextmanager
    def _prefill(self, batch: BatchMetadata, *given: Any) -> Iterator[None]:
        """Surround vLLM's own forward pass over the rows behind the decoding ones.

        `given` are all rows' inputs of the convolution and raw gates.
        """
        decoder, rows = self.decoder, batch.prefill
        assert rows is not None
        decoder.settle(rows)
        if rows.decoded and len(self.kv_cache) > 1:
            self._shift(rows.continued, rows.accepted)
        self._add(batch, *given)
        found = get_forward_context().attn_metadata
        found[self.prefix] = batch.inner
        try:
            yield
        finally:
            found[self.prefix] = batch
        decoder.adopt(rows)

    def _shift(self, slots: Any, accepted: Any) -> None:
        """Bring the last tokens of rows, decoded like drafts, to where vLLM's convolution of a prefill has them."""
        states, rows, width = self._conv_states(), slots.long(), self.conv_weight().shape[1] - 1
        places = (accepted.long() - 1)[:, None, None] + torch.arange(width, device=rows.device)
        states[rows, :, :width] = states[rows].gather(2, places.expand(-1, states.shape[1], -1))

    def _add(self, batch: BatchMetadata, mixed: Any, *gates: Any) -> None:
        """Add the tokens of some prefilled rows to the sums."""
        for tokens, slot, begun in batch.chunks:
            assert self.record is not None
            with self.record.recording.working():
                inputs = self.inputs(self._chunk(mixed[tokens], slot, begun), *(gate[tokens] for gate in gates))
                self.record.add(inputs, self.kv_cache[-1][slot] if begun else None)

    def _chunk(self, mixed: Any, slot: Any, begun: bool) -> Any:
        """Convolve tokens ``(tokens, channels)`` of a row that is prefilled."""
        weight = self.conv_weight()
        before = self._conv_states()[slot][0, :, : weight.shape[1] - 1].T
        before = before.to(mixed) if begun else mixed.new_zeros(before.shape)
        return convolved(mixed, before, weight, self.conv1d.bias)

    def _advance(self, tokens: tuple[Any, ...], batch: BatchMetadata, out: Any) -> None:
        """Decode tokens ``q, k, v, g, beta``; outputs go to `out (tokens, heads, V)`."""
        if batch.followed:
            assert self.record is not None
            with self.record.recording.working():
                self.record.write(tokens)
        self.decoder.decode(*tokens, batch.decode, out)

    @abstractmethod
    def inputs(self, mixed: Any, *gates: Any) -> tuple[Any, ...]:
        """Convert tokens behind the convolution ``(tokens, channels)`` and raw gates to ``q, k, v, g, beta``."""

    def _conv_states(self) -> Any:
        """States of the convolution, ``(blocks, channels, width - 1 or more)``."""
        return self.kv_cache[0] if is_conv_state_dim_first() else self.kv_cache[0].transpose(-1, -2)

    def conv_weight(self) -> Any:
        """Weights of the convolution, ``(channels, width)``."""
        return self.conv1d.weight.flatten(1)

    @abstractmethod
    def decode_call(self, given: dict[str, Any], out: Any) -> None:
        """Call the method with the layer's convolution and recurrence; outputs go to `out (tokens, heads, V)`."""

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Decode with a head that does not approximate, on the same pool, while the block runs."""
        decoder = self.decoder
        if isinstance(self.recipe.source, SketchPlan):
            recipe = replace(self.recipe, system="standard", source=self.layer, phase=None)
            layout = BlockLayout.behind(sum(self._state_bytes), recipe.parts())
            side = self.__dict__["_side"] if layout.bytes else None
            self.__dict__["decoder"] = LayerDecoder(recipe, self.kv_cache[-1], side, layout)
        try:
            yield
        finally:
            self.__dict__["decoder"] = decoder

    def _convolved(self, x: Any, activation: Any, batch: BatchMetadata, **others: Any) -> Any:
        """Convolution of the decoding rows."""
        rows: Any = batch.decode
        drafts = {}
        if rows.lengths is not None:
            drafts = {
                "num_accepted_tokens": rows.accepted,
                "query_start_loc": batch.starts,
                "max_query_len": 1 + self._drafts,
            }
        return causal_conv1d_update(
            x,
            self._conv_states(),
            self.conv_weight(),
            self.conv1d.bias,
            activation,
            conv_state_indices=rows.slots,
            **drafts,
            **others,
        )
