"""The operations of one layer: PyTorch reference on a CPU and in exact mode, compiled kernels on a CUDA device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Protocol

import torch

from vllm_novakv.backend.compat import flash_attention, init_logger
from vllm_novakv.codec.layout import BLOCK_TOKENS
from vllm_novakv.codec.quantizer import LayerCodec
from vllm_novakv.config import BAND_BLOCK_TOKENS
from vllm_novakv.ops.exact import ExactHistory, store_exact
from vllm_novakv.ops.reference import History, QuantizedHistory, paged_decode, prefill, store

if TYPE_CHECKING:
    from vllm_novakv.baselines.interface import CacheCodec
    from vllm_novakv.ops.flash_prefill import FlashAttention, PrefillPlan, PrefillWorkspace
    from vllm_novakv.ops.paged_decode import DecodeWorkspace
    from vllm_novakv.ops.tables import KernelTables

logger = init_logger(__name__)


@dataclass(frozen=True)
class AttentionOptions:
    """What stays the same from step to step.

    Args:
        scale: factor of the logits.
        sink_tokens: first tokens that are exact.
        recent_tokens, prompt_recent_tokens: exact window of a generated token and of a prompt token.
        logits_soft_cap: c of c·tanh(logit / c); 0 for none.
        sinks: ``[num_heads]`` learned sink logits; the parameter itself, whose values arrive with the weights.
    """

    scale: float
    sink_tokens: int
    recent_tokens: int
    prompt_recent_tokens: int
    logits_soft_cap: float
    sinks: torch.Tensor | None

    def as_arguments(self) -> tuple[float, int, int, int, float, torch.Tensor | None]:
        """In the order in which the operations take them."""
        windows = (self.sink_tokens, self.recent_tokens, self.prompt_recent_tokens)
        return (self.scale, *windows, self.logits_soft_cap, self.sinks)


class OpSet(Protocol):
    """Operations on a layer's caches; tensors as in `vllm_novakv.ops.reference`."""

    def store(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        history_cache: torch.Tensor,
        band_cache: torch.Tensor,
        history_slots: torch.Tensor,
        band_slots: torch.Tensor,
    ) -> None:
        """Write tokens to both caches."""

    def decode(
        self,
        output: torch.Tensor,
        query: torch.Tensor,
        history_cache: torch.Tensor,
        band_cache: torch.Tensor,
        history_block_table: torch.Tensor,
        band_block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        prompt_lens: torch.Tensor,
        options: AttentionOptions,
    ) -> None:
        """Attend with one query token per request into ``output``."""

    def prefill(
        self,
        output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        history_cache: torch.Tensor,
        band_cache: torch.Tensor,
        history_block_table: torch.Tensor,
        band_block_table: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        prompt_lens: torch.Tensor,
        plan: PrefillPlan | None,
        options: AttentionOptions,
    ) -> None:
        """Attend with chunks of query tokens into ``output``; the plan is of this batch, for those who need one."""


@dataclass(frozen=True)
class ReferenceOps:
    """PyTorch operations, on any device; without a codec the history is exact.

    Args:
        codec: the layer's codec, or None in exact mode.
        exact_dtype: type of the history's elements in exact mode.
        baseline: compared method that the history passes through in exact mode, if any.
    """

    codec: LayerCodec | None
    exact_dtype: torch.dtype
    baseline: CacheCodec | None = None

    def _history(self, cache: torch.Tensor) -> History:
        if self.codec is None:
            return ExactHistory(cache.view(self.exact_dtype))
        return QuantizedHistory(cache, self.codec)

    def store(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        history_cache: torch.Tensor,
        band_cache: torch.Tensor,
        history_slots: torch.Tensor,
        band_slots: torch.Tensor,
    ) -> None:
        """See `OpSet`."""
        if self.codec is None:
            history = history_cache.view(self.exact_dtype)
            store_exact(key, value, history, band_cache, history_slots, band_slots, self.baseline)
        else:
            store(key, value, history_cache, band_cache, history_slots, band_slots, self.codec)

    def decode(
        self,
        output: torch.Tensor,
        query: torch.Tensor,
        history_cache: torch.Tensor,
        band_cache: torch.Tensor,
        history_block_table: torch.Tensor,
        band_block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        prompt_lens: torch.Tensor,
        options: AttentionOptions,
    ) -> None:
        """See `OpSet`."""
        history = self._history(history_cache)
        output[:] = paged_decode(
            query,
            history,
            band_cache,
            history_block_table,
            band_block_table,
            seq_lens,
            prompt_lens,
            *options.as_arguments(),
        )

    def prefill(
        self,
        output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        history_cache: torch.Tensor,
        band_cache: torch.Tensor,
        history_block_table: torch.Tensor,
        band_block_table: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        prompt_lens: torch.Tensor,
        plan: PrefillPlan | None,
        options: AttentionOptions,
    ) -> None:
        """See `OpSet`."""
        history = self._history(history_cache)
        output[:] = prefill(
            query,
            key,
            value,
            history,
            band_cache,
            history_block_table,
            band_block_table,
            query_start_loc,
            seq_lens,
            prompt_lens,
            *options.as_arguments(),
        )


@dataclass(frozen=True, eq=False)
class FlashPrefill:
    """A FlashAttention kernel with its scratch, which all layers share."""

    attend: FlashAttention
    workspace: PrefillWorkspace


@dataclass(frozen=True, eq=False)
class KernelOps:
    """Compiled operations on a CUDA device.

    Args:
        tables: the layer's kernel tables.
        workspace: decode scratch, shared by all layers.
        flash: FlashAttention for prompts; where there is none, the Triton operation computes them alone.
    """

    tables: KernelTables
    workspace: DecodeWorkspace
    flash: FlashPrefill | None

    def store(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        history_cache: torch.Tensor,
        band_cache: torch.Tensor,
        history_slots: torch.Tensor,
        band_slots: torch.Tensor,
    ) -> None:
        """See `OpSet`."""
        from vllm_novakv.ops.store import store

        store(key, value, history_cache, band_cache, history_slots, band_slots, self.tables)

    def decode(
        self,
        output: torch.Tensor,
        query: torch.Tensor,
        history_cache: torch.Tensor,
        band_cache: torch.Tensor,
        history_block_table: torch.Tensor,
        band_block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        prompt_lens: torch.Tensor,
        options: AttentionOptions,
    ) -> None:
        """See `OpSet`."""
        from vllm_novakv.ops.paged_decode import paged_decode
        from vllm_novakv.ops.tables import PackedHistory

        history = PackedHistory(history_cache, self.tables.codec, self.tables)
        paged_decode(
            query,
            history,
            band_cache,
            history_block_table,
            band_block_table,
            seq_lens,
            prompt_lens,
            *options.as_arguments(),
            output=output,
            workspace=self.workspace,
        )

    def prefill(
        self,
        output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        history_cache: torch.Tensor,
        band_cache: torch.Tensor,
        history_block_table: torch.Tensor,
        band_block_table: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        prompt_lens: torch.Tensor,
        plan: PrefillPlan | None,
        options: AttentionOptions,
    ) -> None:
        """See `OpSet`."""
        from vllm_novakv.ops.flash_prefill import flash_prefill
        from vllm_novakv.ops.prefill import prefill
        from vllm_novakv.ops.tables import PackedHistory

        history = PackedHistory(history_cache, self.tables.codec, self.tables)
        if self.flash is not None:
            assert plan is not None
            flash_prefill(
                query,
                key,
                value,
                history,
                band_cache,
                history_block_table,
                band_block_table,
                query_start_loc,
                seq_lens,
                options.scale,
                options.sink_tokens,
                options.prompt_recent_tokens,
                options.sinks,
                output,
                plan,
                self.flash.workspace,
                self.flash.attend,
            )
        prefill(
            query,
            key,
            value,
            history,
            band_cache,
            history_block_table,
            band_block_table,
            query_start_loc,
            seq_lens,
            prompt_lens,
            *options.as_arguments(),
            output=output,
            skip_prompt=self.flash is not None,
        )


def select_ops(
    codec: LayerCodec | None,
    exact_dtype: torch.dtype,
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    max_requests: int,
    max_tokens: int,
    options: AttentionOptions,
    baseline: CacheCodec | None = None,
) -> OpSet:
    """The operations for a layer on a device; compiles and runs every kernel variant that serving will need.

    Args:
        codec: the layer's codec, or None in exact mode.
        exact_dtype: type of the history's elements in exact mode.
        device: where the caches will be.
        dtype: the model's type.
        num_heads: query heads of this rank.
        max_requests: most requests in a step.
        max_tokens: most tokens in a step.
        options: the layer's constant arguments.
        baseline: compared method that the history passes through in exact mode, if any.
    """
    if codec is None or device.type != "cuda":
        return ReferenceOps(codec, exact_dtype, baseline)
    from vllm_novakv.ops.tables import KernelTables

    workspace = _shared_workspace(max_requests, num_heads, codec.num_kv_heads, codec.head_size, device)
    flash = _flash_prefill(codec, dtype, num_heads, max_tokens, options, device)
    ops = KernelOps(KernelTables.build(codec), workspace, flash)
    key = (num_heads, codec.num_kv_heads, codec.head_size, codec.num_centroids, ops.tables.is_e5m2, dtype, device)
    windows = (options.sink_tokens, options.recent_tokens, options.prompt_recent_tokens)
    constants = (*windows, options.logits_soft_cap > 0, options.sinks is not None)
    if _first_time(*key, *constants):
        _warm_up(ops, dtype, num_heads, max_requests, max_tokens, options)
    return ops


def _flash_prefill(
    codec: LayerCodec,
    dtype: torch.dtype,
    num_heads: int,
    max_tokens: int,
    options: AttentionOptions,
    device: torch.device,
) -> FlashPrefill | None:
    """FlashAttention for a layer's prompts, where it can serve them: it knows no soft cap of our logits."""
    from vllm_novakv.ops.flash_prefill import is_planned

    attend = flash_attention(codec.head_size)
    if attend is None or options.logits_soft_cap or not is_planned(dtype, options.prompt_recent_tokens):
        logger.info_once("NOVAKV: prompts are computed by the Triton operation; FlashAttention cannot serve this model")
        return None
    heads = (num_heads, codec.num_kv_heads, codec.head_size)
    return FlashPrefill(
        attend, _shared_prefill_workspace(max_tokens, options.prompt_recent_tokens, *heads, dtype, device)
    )


@lru_cache(maxsize=8)
def _shared_prefill_workspace(
    max_tokens: int,
    window: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> PrefillWorkspace:
    from vllm_novakv.ops.flash_prefill import PrefillWorkspace

    return PrefillWorkspace.allocate(max_tokens, window, num_heads, num_kv_heads, head_size, dtype, device)


@lru_cache(maxsize=8)
def _shared_workspace(
    max_requests: int, num_heads: int, num_kv_heads: int, head_size: int, device: torch.device
) -> DecodeWorkspace:
    from vllm_novakv.ops.paged_decode import DecodeWorkspace

    return DecodeWorkspace.allocate(max_requests, num_heads, num_kv_heads, head_size, device)


def _first_time(*variant: object) -> bool:
    """Whether no layer of this kind has been warmed up in this process."""
    misses = _seen.cache_info().misses
    _seen(*variant)
    return _seen.cache_info().misses > misses


@cache
def _seen(*variant: object) -> None:
    return None


def _warm_up(
    ops: KernelOps,
    dtype: torch.dtype,
    num_heads: int,
    max_requests: int,
    max_tokens: int,
    options: AttentionOptions,
) -> None:
    """Compile every kernel variant on caches of two blocks, so that no request waits for a compiler."""
    codec = ops.tables.codec
    heads, size, device = codec.num_kv_heads, codec.head_size, codec.key_mean.device
    logger.info("NOVAKV: compiling the kernels for head size %d, %d:%d heads", size, num_heads, heads)
    history_cache = torch.zeros(2, heads, BLOCK_TOKENS, codec.layout.record_bytes, dtype=torch.uint8, device=device)
    band_cache = torch.zeros(2, heads, BAND_BLOCK_TOKENS, 2 * size, dtype=torch.bfloat16, device=device)
    # the store has a variant for few tokens and one for many; decode, one for small batches
    tokens = min(1024, max_tokens)
    # as the layers of a fused projection hand them over: rows longer than their part
    qkv = torch.zeros(tokens, num_heads + 2 * heads, size, dtype=dtype, device=device)
    query, key, value = qkv.split([num_heads, heads, heads], dim=1)
    output = torch.empty(tokens, num_heads, size, dtype=dtype, device=device)
    slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
    band_slots = slots.clone()
    slots[0], band_slots[0] = BLOCK_TOKENS, BAND_BLOCK_TOKENS
    table = torch.ones(tokens, 16, dtype=torch.int32, device=device)
    ones = torch.ones(tokens, dtype=torch.int32, device=device)
    starts = torch.arange(3, dtype=torch.int32, device=device)
    for count in (1, tokens):
        ops.store(key, value, history_cache, band_cache, slots[:count], band_slots[:count])
    for count in {1, min(max_requests, tokens)}:
        tables = (table[:count], table[:count], ones[:count], ones[:count])
        ops.decode(output[:count], query[:count], history_cache, band_cache, *tables, options)
    plan = None
    if ops.flash is not None:
        from vllm_novakv.ops.flash_prefill import make_plan

        # a near and a far pass of one key each
        plan = make_plan([1, 1], [2, 2], 1, ops.flash.workspace.capacity, device)
    lengths = 2 * ones[:2]
    arguments = (history_cache, band_cache, table[:2], table[:2], starts, lengths, lengths, plan, options)
    ops.prefill(output[:2], query[:2], key[:2], value[:2], *arguments)
    torch.cuda.synchronize(device)
