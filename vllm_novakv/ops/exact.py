"""Lossless history for tests of the plumbing: the reference operations with the codec taken out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
) -> None:
    """Write tokens to both caches without loss; arguments as in `vllm_novakv.ops.reference.store`."""
    num_slots = history_slot_mapping.shape[0]
    write_band(key[:num_slots], value[:num_slots], history_cache, history_slot_mapping)
    write_band(key[:num_slots], value[:num_slots], band_cache, band_slot_mapping)
