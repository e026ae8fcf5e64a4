"""Checks that the launchers of the attention kernels share."""

from __future__ import annotations

import torch

from vllm_novakv.codec.layout import BLOCK_TOKENS
from vllm_novakv.ops.tables import PackedHistory

MAX_GROUP = 16
"""Query heads that may share a KV head."""

_QUERY_TYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_attention_inputs(
    query: torch.Tensor,
    history: PackedHistory,
    band_cache: torch.Tensor,
    history_block_table: torch.Tensor,
    band_block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    prompt_lens: torch.Tensor,
) -> None:
    """Refuse tensors that the kernels would misread; arguments as in `paged_decode`.

    Raises:
        ValueError: a shape, type, device or stride is not as the operations document.
    """
    codec, cache = history.tables.codec, history.cache
    heads, size = codec.num_kv_heads, codec.head_size
    require(query.dtype in _QUERY_TYPES, "query", query, "fp16, bf16 or f32")
    require(
        query.dim() == 3 and query.shape[2] == size and query.shape[1] % heads == 0 and query.stride(2) == 1,
        "query",
        query,
        f"[num_tokens, a multiple of {heads}, {size}], last dimension contiguous",
    )
    check_caches(cache, band_cache, history.tables.codec.layout.record_bytes, heads, size)
    num_requests = seq_lens.shape[0]
    for name, table in (("history_block_table", history_block_table), ("band_block_table", band_block_table)):
        require(
            table.dim() == 2 and table.shape[0] >= num_requests and table.dtype == torch.int32 and table.stride(1) == 1,
            name,
            table,
            f"int32 [{num_requests}, max_blocks], rows contiguous",
        )
    for name, lengths in (("seq_lens", seq_lens), ("prompt_lens", prompt_lens)):
        require(
            lengths.dtype == torch.int32 and lengths.shape[0] >= num_requests and lengths.is_contiguous(),
            name,
            lengths,
            f"int32 [{num_requests}], contiguous",
        )
    device_tensors = {"query": query, "band_cache": band_cache, "seq_lens": seq_lens, "prompt_lens": prompt_lens}
    for name, tensor in device_tensors.items():
        require(tensor.device == cache.device, name, tensor, f"on {cache.device}, where the history is")


def check_caches(
    history_cache: torch.Tensor, band_cache: torch.Tensor, record_bytes: int, heads: int, size: int
) -> None:
    """Refuse caches whose tokens are not contiguous within a block and head.

    Raises:
        ValueError: a shape, type or stride is not as the operations document.
    """
    require(
        history_cache.dtype == torch.uint8
        and tuple(history_cache.shape[1:]) == (heads, BLOCK_TOKENS, record_bytes)
        and history_cache.stride()[2:] == (record_bytes, 1)
        and history_cache.stride(0) % 16 == 0
        and history_cache.stride(1) % 16 == 0,
        "history cache",
        history_cache,
        f"uint8 [num_blocks, {heads}, {BLOCK_TOKENS}, {record_bytes}], last two dimensions contiguous, strides of "
        "whole 16 bytes",
    )
    require(
        band_cache.dtype in (torch.bfloat16, torch.float32)
        and band_cache.dim() == 4
        and band_cache.shape[1] == heads
        and band_cache.shape[3] == 2 * size
        and band_cache.stride(3) == 1,
        "band cache",
        band_cache,
        f"bf16 [num_blocks, {heads}, block_tokens, {2 * size}], last dimension contiguous",
    )


def heads_per_kv_head(num_heads: int, num_kv_heads: int) -> int:
    """Query heads that share a KV head.

    Raises:
        ValueError: they are more than the kernels take.
    """
    group = num_heads // num_kv_heads
    if group > MAX_GROUP:
        raise ValueError(f"{num_heads} query heads share {num_kv_heads} KV heads; at most {MAX_GROUP} may share one")
    return group


def check_rows(name: str, tensor: torch.Tensor, dims: int) -> None:
    """Refuse a tensor whose rows, over its first dims dimensions, kernels cannot read four elements at a time.

    Raises:
        ValueError: a row does not begin at a multiple of four elements.
    """
    is_aligned = tensor.data_ptr() % (4 * tensor.element_size()) == 0
    is_aligned &= all(stride % 4 == 0 for stride in tensor.stride()[:dims])
    require(is_aligned, name, tensor, "rows that begin at multiples of four elements")


def require(is_met: bool, name: str, tensor: torch.Tensor, rule: str) -> None:
    """Raise a ValueError that shows what the tensor is and what it must be."""
    if not is_met:
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())} on {tensor.device}; "
            f"the kernel takes {rule}"
        )
