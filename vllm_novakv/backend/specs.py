"""The two paged caches of a quantized layer, as vLLM sees them.

history: all tokens, packed 2-bit records, blocks of 128 tokens. band: BF16 keys and values of the first ``sink`` and
the latest tokens, blocks of 16. Both are declared as uint8 so that vLLM does not zero each new block for mixed
precision.
Importing this module registers the specs; a process that unpickles one imports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from vllm_novakv.backend.band_geometry import BandGeometry
from vllm_novakv.backend.band_manager import BandManager
from vllm_novakv.backend.compat import (
    AttentionSpec,
    FullAttentionSpec,
    KVQuantMode,
    VllmConfig,
    register_spec,
    replace_as,
)
from vllm_novakv.backend.history_manager import HistoryManager
from vllm_novakv.codec.layout import BLOCK_TOKENS
from vllm_novakv.config import BAND_BLOCK_TOKENS


@dataclass(frozen=True, kw_only=True)
class NovaHistorySpec(FullAttentionSpec):
    """Packed history of one layer: ``[num_blocks, num_kv_heads, 128, record_bytes]`` uint8.

    It has no fields of its own, so ``FullAttentionSpec.merge`` keeps working.
    """


@dataclass(frozen=True, kw_only=True)
class NovaBandSpec(AttentionSpec):
    """BF16 band of one layer: ``[num_blocks, num_kv_heads, 16, 2 * head_size]``, declared in bytes.

    Not a sliding-window spec: vLLM clears every block-table entry below such a window, and the sink would vanish.

    Args:
        sink_tokens, recent_tokens, prompt_recent_tokens: see `BandGeometry`.
        max_steps_in_flight: steps that the scheduler may have scheduled before the first of them has finished.
        max_model_len: longest sequence, tokens.
        max_chunk_tokens: most tokens of a step.
        history_record_bytes: bytes of one history record, for the start-up log.
        num_layers: quantized layers of this rank, for the start-up log.
    """

    sink_tokens: int
    recent_tokens: int
    prompt_recent_tokens: int
    max_steps_in_flight: int
    max_model_len: int
    max_chunk_tokens: int
    history_record_bytes: int
    num_layers: int

    @property
    def geometry(self) -> BandGeometry:
        """Block arithmetic of this band."""
        return BandGeometry(self.sink_tokens, self.recent_tokens, self.prompt_recent_tokens)

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes that one request of the longest length holds: at most while the pool is sized, decoding afterwards.

        A prompt that is being computed holds more for one or two steps (`BandGeometry.peak_blocks`). The pool must have
        that, so vLLM's start-up check (and ``--max-model-len auto``) counts it. It is needed once and not per request,
        so the capacity that vLLM reports afterwards spreads it over all requests: n requests of r blocks each and e
        blocks once fill N blocks, as n requests of r + r e / (N - e) do. Between the two, vLLM notes the pool's size.
        """
        max_model_len, num_blocks = vllm_config.model_config.max_model_len, vllm_config.cache_config.num_gpu_blocks
        if num_blocks is None:
            return self.peak_blocks(max_model_len, is_resumed=True) * self.page_size_bytes
        steady = self.geometry.steady_blocks(max_model_len)
        once = self.peak_blocks(max_model_len, is_resumed=False) - steady
        request = -(-max_model_len // BLOCK_TOKENS) + steady
        share = -(-request * once // (num_blocks - once)) if num_blocks > once else 0
        return (steady + share) * self.page_size_bytes

    def peak_blocks(self, num_tokens: int, is_resumed: bool) -> int:
        """Most blocks that a prompt of ``num_tokens`` tokens holds; resumed after a prefix hit, or from its start."""
        is_one_chunk = num_tokens <= self.max_chunk_tokens and not is_resumed
        return self.geometry.peak_blocks(num_tokens, 1 if is_one_chunk else 1 + self.max_steps_in_flight)

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """Specs of one group are equal by construction."""
        if any(spec != specs[0] for spec in specs):
            raise ValueError("band specs of one KV cache group differ")
        return specs[0]


@dataclass(frozen=True)
class CacheShape:
    """Sizes from which both specs of a layer follow.

    Args:
        record_bytes: bytes of one history token and KV head.
        band_element_bytes: bytes of one band element (2 for BF16).
        has_equal_pages: pad both pages to one size (vLLM's plain layout); otherwise leave them unpadded, for layouts
            that put the block outermost.
    """

    record_bytes: int
    band_element_bytes: int = 2
    has_equal_pages: bool = True

    def band_content_bytes(self, head_size: int) -> int:
        """Bytes of one band token and KV head: key and value."""
        return 2 * head_size * self.band_element_bytes

    def page_bytes(self, num_kv_heads: int, head_size: int) -> int | None:
        """The common page size, or ``None`` where pages stay unpadded."""
        if not self.has_equal_pages:
            return None
        history = num_kv_heads * BLOCK_TOKENS * self.record_bytes
        band = num_kv_heads * BAND_BLOCK_TOKENS * self.band_content_bytes(head_size)
        return max(history, band)

    def history_spec(self, spec: FullAttentionSpec) -> NovaHistorySpec:
        """Turn the layer's dense spec into the packed one.

        vLLM probes per-token sizes with ``block_size=1``; such a probe gets an unpadded block of one token.
        """
        is_probe = spec.block_size == 1
        return replace_as(
            spec,
            NovaHistorySpec,
            block_size=1 if is_probe else BLOCK_TOKENS,
            dtype=torch.uint8,
            kv_quant_mode=KVQuantMode.NONE,
            state_content_bytes=self.record_bytes,
            page_size_padded=None if is_probe else self.page_bytes(spec.num_kv_heads, spec.head_size),
        )


register_spec(NovaHistorySpec, HistoryManager, FullAttentionSpec)
register_spec(NovaBandSpec, BandManager, NovaBandSpec)
