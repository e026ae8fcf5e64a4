"""Every vLLM name that may move between releases, imported in one place (checked against 0.32 and 0.33).

The rest of ``vllm_novakv.backend`` imports from here. A shim carries its reason and the condition under which it can
go. The two wrapped platform methods live in ``plugin.py``, which must not import anything heavy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger as vllm_init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    BlockHashList,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
    resolve_block_hashes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheLayout,
    KVCacheSpec,
    KVQuantMode,
    SlidingWindowSpec,
    replace_as,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

if TYPE_CHECKING:
    from vllm_novakv.ops.flash_prefill import FlashAttention

__all__ = [
    "AsyncScheduler",
    "AttentionBackend",
    "AttentionBackendEnum",
    "AttentionCGSupport",
    "AttentionImpl",
    "AttentionLayer",
    "AttentionLayerBase",
    "AttentionMetadataBuilder",
    "AttentionSpec",
    "AttentionType",
    "BlockHashList",
    "BlockPool",
    "CommonAttentionMetadata",
    "FreeKVCacheBlockQueue",
    "FullAttentionManager",
    "FullAttentionSpec",
    "KVCacheBlock",
    "KVCacheLayout",
    "KVCacheManager",
    "KVCacheSpec",
    "KVQuantMode",
    "MultipleOf",
    "Request",
    "Scheduler",
    "SingleTypeKVCacheManager",
    "SlidingWindowSpec",
    "VllmConfig",
    "cached_blocks",
    "extract_layer_index",
    "flash_attention",
    "get_current_vllm_config",
    "get_forward_context",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "hash_and_group",
    "init_logger",
    "layer_metadata",
    "load_tokenizer",
    "names_per_cached_prefix",
    "num_uncached_free_blocks",
    "publish_prompt_lengths",
    "register_spec",
    "replace_as",
    "resolve_block_hashes",
    "split_decodes_and_prefills",
    "stock_backend_like",
    "vllm_version",
]


def init_logger(module_name: str) -> Any:
    """A logger below vLLM's own: vLLM configures handlers for names that begin with ``vllm.`` only."""
    return vllm_init_logger(f"vllm.{module_name}")


def register_spec(
    spec_cls: type[KVCacheSpec], manager_cls: type[SingleTypeKVCacheManager], base_spec_cls: type[KVCacheSpec]
) -> None:
    """Register a cache spec with its block manager.

    vLLM registers its own specs only while the registry is empty, so they must come first: otherwise the sliding-window
    layers of a mixed model would have no manager. Can go when ``KVCacheSpecRegistry.register`` does this itself.
    """
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(spec_cls, manager_cls, uniform_type_base_spec=base_spec_cls)


def num_uncached_free_blocks(block_pool: BlockPool, names_per_block: float = 1.0) -> int:
    """Free blocks that hold no cached prefix, estimated: cached blocks in use are subtracted too, duplicates are not.

    Reads the pool's hash table, which has no public size. Can go when the pool counts its cached free blocks.
    """
    return int(block_pool.get_num_free_blocks() - len(block_pool.cached_block_hash_to_block) / names_per_block)


def names_per_cached_prefix(block_pool: BlockPool) -> float:
    """Entries of the pool's hash table per cached block, duplicates counted once; looks at every block.

    Where parts of blocks have names too, a block has several entries. Can go with `num_uncached_free_blocks`.
    """
    num_prefixes = len({block.block_hash for block in block_pool.blocks if block.block_hash is not None})
    return len(block_pool.cached_block_hash_to_block) / num_prefixes if num_prefixes else 1.0


def cached_blocks(
    block_pool: BlockPool, page_hashes: Iterable[bytes | None], group: int
) -> list[tuple[KVCacheBlock, bytes]]:
    """All blocks that are cached under hashes of a group, each with its hash; None stands for no hash.

    Requests that ran side by side can leave several blocks of the same content. Reads the pool's hash table, which
    gives one of them only. Can go when there is a public look-up of all.
    """
    table = block_pool.cached_block_hash_to_block._cache
    blocks: list[tuple[KVCacheBlock, bytes]] = []
    for page_hash in page_hashes:
        found = None if page_hash is None else table.get(make_block_hash_with_group_id(page_hash, group))
        if found is None or page_hash is None:
            continue
        if isinstance(found, dict):
            blocks.extend((block, page_hash) for block in found.values())
        else:
            blocks.append((found, page_hash))
    return blocks


def hash_and_group(block: KVCacheBlock) -> tuple[bytes, int]:
    """The hash under which a block is cached, and the group that it belongs to."""
    return get_block_hash(block.block_hash), get_group_id(block.block_hash)


def flash_attention(head_size: int) -> FlashAttention | None:
    """vLLM's FlashAttention for a head size, or ``None`` on a platform that has none.

    Its module and its version numbers are vLLM's own. Can go when there is one public function.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return None
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    version = get_flash_attn_version(head_size=head_size)
    if version is None:
        return None

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_bounds: torch.Tensor,
        key_bounds: torch.Tensor,
        max_query_len: int,
        max_key_len: int,
        scale: float,
        is_causal: bool,
        window: int | None,
        output: torch.Tensor,
    ) -> torch.Tensor:
        _, log_sums = flash_attn_varlen_func(
            query,
            key,
            value,
            max_seqlen_q=max_query_len,
            cu_seqlens_q=query_bounds,
            max_seqlen_k=max_key_len,
            cu_seqlens_k=key_bounds,
            softmax_scale=scale,
            causal=is_causal,
            window_size=None if window is None else [window - 1, 0],
            return_softmax_lse=True,
            out=output,
            # a row's sums do not depend on who else is in the batch, and no scratch is allocated
            num_splits=1,
            fa_version=version,
        )
        return cast("torch.Tensor", log_sums)

    return attend


def publish_prompt_lengths(vllm_config: VllmConfig, is_wanted: bool) -> None:
    """Make vLLM put every request's prompt length into the attention metadata, as ``rswa_prefix_lens``.

    Both model runners do so only for models with reference sliding-window attention, so the width of such a window is
    set here. Other backends read it when their metadata builders are made: want it after that. Can go when prompt
    lengths are always there.
    """
    vllm_config.model_config.model_arch_config.rswa_window = 1 if is_wanted else None


def layer_metadata(layer_name: str) -> tuple[Any, Any]:
    """Attention metadata and slot mapping of a layer in the current forward pass, ``None`` during profiling.

    vLLM's ``get_attention_context`` wants a slot mapping that is a dict and fails in the profiling pass, where there is
    none. Can go when it accepts that.
    """
    context = get_forward_context()
    metadata = context.attn_metadata
    if isinstance(metadata, list):
        metadata = metadata[0]
    slots = context.slot_mapping
    return (
        metadata.get(layer_name) if isinstance(metadata, dict) else None,
        slots.get(layer_name) if isinstance(slots, dict) else None,
    )


def stock_backend_like(vllm_config: VllmConfig, layer: Any) -> type[AttentionBackend]:
    """The backend that vLLM would choose for ``layer`` if none had been selected.

    0.32 cannot tell a skipped layer from a quantized one when it selects backends, so the choice is repeated after
    loading. Can go when 0.33 is the oldest supported release: there a cache type of our own marks the skipped layers.
    """
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    attention = vllm_config.attention_config
    selected, per_kind = attention.backend, attention.backend_per_kind
    attention.backend, attention.backend_per_kind = None, {}
    try:
        with set_current_vllm_config(vllm_config):
            return get_attn_backend(
                layer.head_size,
                layer.dtype,
                layer.kv_cache_dtype,
                has_sink=getattr(layer.impl, "sinks", None) is not None,
                num_heads=layer.num_heads,
            )
    finally:
        attention.backend, attention.backend_per_kind = selected, per_kind


def load_tokenizer(model_config: Any) -> Any:
    """The served model's tokenizer, by vLLM's own rules. Its module moves; can go when it has a fixed place."""
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(model_config)


def vllm_version() -> str:
    """Version of the running vLLM; the CPU wheel is a distribution of another name, so metadata cannot be asked."""
    import vllm

    return str(vllm.__version__)
