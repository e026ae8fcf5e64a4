"""History in the model's type, with the codec taken out: for tests of the plumbing and for compared methods.

A compared method works on the way in: the history then holds what attention would read after decoding,
decode(encode(x)), rounded to the model's type. The band stays exact, as with our own format.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_novakv.baselines.interface import CacheCodec
from vllm_novakv.codec.layout import BLOCK_TOKENS
from vllm_novakv.ops.reference import write_band


@dataclass(frozen=True)
class ExactHistory:
    """Keys and values as they are.

    Args:
        cache: ``[num_blocks, num_kv_heads, 128, 2 * head_size]`` in the model's type.
    """

    cache: torch.Tensor

    def fold_query(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The queries themselves, offset 0."""
        return query, query.new_zeros(query.shape[:-1])

    def read(self, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks ``[R, n]`` → keys and values ``[R, H, n * 128, d]`` float32."""
        # [R, n, H, 128, 2d] -> [R, H, n * 128, 2d]
        entries = self.cache[block_ids].float().transpose(1, 2).flatten(2, 3)
        keys, values = entries.chunk(2, dim=-1)
        return keys, values

    def unfold_output(self, output: torch.Tensor) -> torch.Tensor:
        """The outputs themselves."""
        return output


def store_exact(
    key: torch.Tensor,
    value: torch.Tensor,
    history_cache: torch.Tensor,
    band_cache: torch.Tensor,
    history_slot_mapping: torch.Tensor,
    band_slot_mapping: torch.Tensor,
    baseline: CacheCodec | None = None,
) -> None:
    """Write tokens to both caches: to the band without loss, to the history through the compared method if any.

    A method that quantizes keys in groups of g tokens gets a group when its last token is written; until then its keys
    are exact, as in the method's own recent window. Groups lie inside blocks, so they begin at multiples of g.

    Args:
        baseline: the compared method; None stores the history without loss, too.
        Others as in `vllm_novakv.ops.reference.store`.

    Raises:
        ValueError: the method's groups do not fill a block.
    """
    num_slots = history_slot_mapping.shape[0]
    key, value = key[:num_slots], value[:num_slots]
    write_band(key, value, band_cache, band_slot_mapping)
    if baseline is None:
        write_band(key, value, history_cache, history_slot_mapping)
        return
    group_tokens = baseline.key_group_tokens
    if BLOCK_TOKENS % group_tokens:
        raise ValueError(f"key_group_tokens={group_tokens} does not divide a block of {BLOCK_TOKENS} tokens")
    history_key = baseline.quantize_keys(key) if group_tokens == 1 else key
    write_band(history_key, baseline.quantize_values(value), history_cache, history_slot_mapping)
    if group_tokens > 1:
        _quantize_full_groups(history_cache, history_slot_mapping, baseline)


def _quantize_full_groups(history_cache: torch.Tensor, slot_mapping: torch.Tensor, baseline: CacheCodec) -> None:
    """Quantize the keys of every group whose last token has just been written."""
    group_tokens = baseline.key_group_tokens
    is_last = (slot_mapping >= BLOCK_TOKENS) & (slot_mapping % group_tokens == group_tokens - 1)
    offsets = torch.arange(1 - group_tokens, 1, device=slot_mapping.device)
    slots = (slot_mapping[is_last, None] + offsets).flatten()
    place = (slots // BLOCK_TOKENS, slice(None), slots % BLOCK_TOKENS)
    # [num_groups * group_tokens, H, 2 * d]
    keys, values = history_cache[place].chunk(2, dim=-1)
    history_cache[place] = torch.cat([baseline.quantize_keys(keys), values], dim=-1)
