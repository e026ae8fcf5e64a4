"""Per-step attention metadata of the two caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

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
from vllm_novakv.backend.specs import NovaHistorySpec
from vllm_novakv.config import HistoryFormat, NovaKVConfig

if TYPE_CHECKING:
    from vllm_novakv.ops.flash_prefill import PrefillPlan


@dataclass(frozen=True)
class NovaKVMetadata:
    """One step's batch as one cache sees it: single-token requests first, then the others.

    Args:
        num_actual_tokens: tokens in the batch, padding excluded.
        num_decodes: requests with one query token, at the front.
        num_prefills: the other requests.
        query_start_loc: ``[num_reqs + 1]`` int32, first query token of each request.
        seq_lens: ``[num_reqs]`` int32, tokens of each request up to the end of this step.
        prompt_lens: ``[num_reqs]`` int32, tokens of each request's prompt; None in the band's own metadata.
        prefill_plan: passes of the requests that are no decodes, where a FlashAttention kernel may compute them.
        block_table: ``[num_reqs, max_blocks]`` int32.
        slot_mapping: ``[num_tokens]`` int64, -1 for padding.
    """

    num_actual_tokens: int
    num_decodes: int
    num_prefills: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    prompt_lens: torch.Tensor | None
    prefill_plan: PrefillPlan | None
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


def max_requests(vllm_config: VllmConfig) -> int:
    """Most rows of a decode batch, those that pad it to a captured size included."""
    capture_size = vllm_config.compilation_config.max_cudagraph_capture_size or 0
    return max(vllm_config.scheduler_config.max_num_seqs, capture_size)


def _has_kernels(config: NovaKVConfig, device_type: str) -> bool:
    """Whether the compiled operations run; a CUDA graph can hold them, as they never ask the device for lengths."""
    return config.history is HistoryFormat.QUANTIZED and device_type == "cuda"


class NovaKVMetadataBuilder(AttentionMetadataBuilder[NovaKVMetadata]):
    """Builds `NovaKVMetadata`; one builder serves the history's group, another the band's."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    reorder_batch_threshold: int | None = 1

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """Decode batches may be captured where the kernels run."""
        config = NovaKVConfig.from_additional_config(vllm_config.additional_config)
        is_compiled = _has_kernels(config, vllm_config.device_config.device_type)
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if is_compiled else AttentionCGSupport.NEVER

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        config = NovaKVConfig.from_additional_config(vllm_config.additional_config)
        self._window = config.prompt_recent_tokens
        self._max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._has_kernels = _has_kernels(config, device.type)
        self._dtype = vllm_config.model_config.dtype
        self._prompt_lens: torch.Tensor | None = None
        if isinstance(kv_cache_spec, NovaHistorySpec):
            # one buffer for good, because a CUDA graph reads it
            self._prompt_lens = torch.zeros(max_requests(vllm_config), dtype=torch.int32, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> NovaKVMetadata:
        """Hand over what the operations read."""
        common = common_attn_metadata
        num_decodes, num_prefills, _, _ = split_decodes_and_prefills(common, decode_threshold=1)
        return NovaKVMetadata(
            num_actual_tokens=common.num_actual_tokens,
            num_decodes=num_decodes,
            num_prefills=num_prefills,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            prompt_lens=self._fill_prompt_lens(common),
            prefill_plan=self._plan_prefill(common, num_decodes, num_prefills),
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
        )

    def _fill_prompt_lens(self, common: CommonAttentionMetadata) -> torch.Tensor | None:
        if self._prompt_lens is None:
            return None
        prompt_lens = self._prompt_lens[: common.num_reqs]
        num_known = 0
        # vLLM's own batches, for warm-up or capture, have no prompts; and padded rows may have no entry
        if common.rswa_prefix_lens is not None:
            known = common.rswa_prefix_lens[: common.num_reqs]
            num_known = known.shape[0]
            prompt_lens[:num_known].copy_(known, non_blocking=True)
        if num_known < common.num_reqs:
            prompt_lens[num_known:].zero_()
        return prompt_lens

    def _plan_prefill(self, common: CommonAttentionMetadata, num_decodes: int, num_prefills: int) -> PrefillPlan | None:
        if self._prompt_lens is None or not self._has_kernels or num_prefills == 0:
            return None
        from vllm_novakv.ops.flash_prefill import is_planned, make_plan, scratch_tokens

        if not is_planned(self._dtype, self._window):
            return None
        rows = slice(num_decodes, num_decodes + num_prefills)
        seq_lens = common.seq_lens_cpu_upper_bound
        # exact for requests that are no decodes
        assert seq_lens is not None
        return make_plan(
            common.query_start_loc_cpu.diff()[rows].tolist(),
            seq_lens[rows].tolist(),
            self._window,
            scratch_tokens(self._max_tokens, self._window),
            self.device,
        )
