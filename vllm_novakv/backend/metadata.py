"""Per-step attention metadata of the two caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_novakv.backend.compat import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    AttentionSpec,
    CommonAttentionMetadata,
    KVCacheSpec,
    VllmConfig,
    split_decodes_and_prefills,
)
from vllm_novakv.config import HistoryFormat, NovaKVConfig


@dataclass(frozen=True)
class NovaKVMetadata:
    """One step's batch as one cache sees it: single-token requests first, then the others.

    Args:
        num_actual_tokens: tokens in the batch, padding excluded.
        num_decodes: requests with one query token, at the front.
        num_prefills: the other requests.
        query_start_loc: ``[num_reqs + 1]`` int32, first query token of each request.
        seq_lens: ``[num_reqs]`` int32, tokens of each request up to the end of this step.
        block_table: ``[num_reqs, max_blocks]`` int32.
        slot_mapping: ``[num_tokens]`` int64, -1 for padding.
    """

    num_actual_tokens: int
    num_decodes: int
    num_prefills: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class NovaKVMetadataBuilder(AttentionMetadataBuilder[NovaKVMetadata]):
    """Builds `NovaKVMetadata`; one builder serves the history's group, another the band's."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    reorder_batch_threshold: int | None = 1

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """Decode batches may be captured where the kernels run; the reference operations ask the device for lengths."""
        config = NovaKVConfig.from_additional_config(vllm_config.additional_config)
        is_compiled = config.history is HistoryFormat.QUANTIZED and vllm_config.device_config.device_type == "cuda"
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if is_compiled else AttentionCGSupport.NEVER

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> NovaKVMetadata:
        """Copy what the operations read; nothing is computed on the device."""
        common = common_attn_metadata
        num_decodes, num_prefills, _, _ = split_decodes_and_prefills(common, decode_threshold=1)
        return NovaKVMetadata(
            num_actual_tokens=common.num_actual_tokens,
            num_decodes=num_decodes,
            num_prefills=num_prefills,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
        )
