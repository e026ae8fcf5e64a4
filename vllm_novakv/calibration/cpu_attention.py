"""Faster prefill attention for the calibration run on CPUs: softmax(q Kᵀ · scale) V for the one request in flight.

vLLM's generic CPU kernel reads a paged cache token by token. With a single request the keys and values are contiguous,
and PyTorch's flash attention is two to three times faster on long sequences, which decides whether a calibration takes
minutes. Only plain causal attention is replaced; anything else keeps vLLM's kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class CausalMask:
    """The additive mask of the current chunk, made once for all layers."""

    def __init__(self) -> None:
        self.key: tuple[int, int, torch.dtype] | None = None
        self.mask = torch.empty(0)

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """0 where a query may see a key, −∞ elsewhere.

        Args:
            start: position of the chunk's first query.
            stop: one past its last query, and the number of keys.
            dtype: of the attention.

        Returns:
            `[stop - start, stop]`; row i may see columns up to start + i.
        """
        if self.key != (start, stop, dtype):
            mask = torch.full((stop - start, stop), float("-inf"), dtype=dtype)
            self.key, self.mask = (start, stop, dtype), mask.triu_(diagonal=start + 1)
        return self.mask


class OneRequestAttention:
    """Stands in for `forward` of a layer's attention implementation while requests run one after the other.

    Args:
        impl: vLLM's CPU attention implementation of the layer; see `is_replaceable`.
        max_tokens: longest sequence.
        mask: shared by all layers.
    """

    def __init__(self, impl: Any, max_tokens: int, mask: CausalMask) -> None:
        self.impl = impl
        self.mask = mask
        self.max_tokens = max_tokens
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.stock_forward, self.stock_update = impl.forward, impl.do_kv_cache_update
        impl.forward, impl.do_kv_cache_update = self, _leave_cache_alone

    def __call__(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend one chunk; the signature is that of vLLM's `AttentionImpl.forward`.

        Args:
            layer: unused, as are `kv_cache` and the output scales.
            query: the chunk's queries `[num_tokens, num_heads, head_size]`.
            key: its keys `[num_tokens, num_kv_heads, head_size]`.
            value: its values, the same shape.
            kv_cache: unused.
            attn_metadata: gives the length of the sequence up to the end of the chunk.
            output: written, `[num_tokens, num_heads, head_size]`.
            output_scale: unused.
            output_block_scale: unused.

        Returns:
            `output`.

        Raises:
            RuntimeError: more than one request is in flight.
        """
        if attn_metadata is None:
            return output
        if attn_metadata.seq_lens.numel() != 1:
            raise RuntimeError("calibration runs one request at a time; another one entered the batch: report this")
        num_tokens = attn_metadata.num_actual_tokens
        stop = int(attn_metadata.seq_lens[0])
        start = stop - num_tokens
        if self.keys is None or self.values is None:
            # [num_kv_heads, max_tokens, head_size]
            self.keys = key.new_empty(key.shape[1], self.max_tokens, key.shape[2])
            self.values = torch.empty_like(self.keys)
        self.keys[:, start:stop] = key[:num_tokens].transpose(0, 1)
        self.values[:, start:stop] = value[:num_tokens].transpose(0, 1)
        attended = scaled_dot_product_attention(
            query[:num_tokens].transpose(0, 1).unsqueeze(0),
            self.keys[:, :stop].unsqueeze(0),
            self.values[:, :stop].unsqueeze(0),
            attn_mask=self.mask.rows(start, stop, query.dtype) if start else None,
            is_causal=not start,
            scale=self.impl.scale,
            enable_gqa=True,
        )
        output[:num_tokens] = attended.squeeze(0).transpose(0, 1)
        return output

    def restore(self) -> None:
        """Give the layer its own attention back and free the keys and values."""
        self.impl.forward, self.impl.do_kv_cache_update = self.stock_forward, self.stock_update
        self.keys = self.values = None


def is_replaceable(impl: Any) -> bool:
    """Whether a layer's attention is plain causal softmax attention of vLLM's generic CPU kernel.

    Args:
        impl: attention implementation of a full-attention decoder layer.

    Returns:
        False for learned sinks, ALiBi, a logit cap, a quantized cache, or another backend.
    """
    return (
        type(impl).__name__ == "CPUAttentionBackendImpl"
        and impl.sinks is None
        and impl.alibi_slopes is None
        and not impl.logits_soft_cap
        and not impl.is_fp8_kv_cache
    )


def _leave_cache_alone(*_args: Any, **_kwargs: Any) -> None:
    """The paged cache is not read, so it is not written either: its pages never take memory."""
