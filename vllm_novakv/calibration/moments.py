"""Streaming second moments of one attention layer, in float64 and in memory that does not grow with the text.

The transforms need four quantities per KV head: M_q, the key mean, the centred key scatter and M_o. Each chunk of
tokens gives its own exact moments; two sets are merged with the pairwise update of means and scatters, so neither the
keys nor any (tokens × tokens) matrix is ever kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerMoments:
    """Moments of `num_tokens` tokens of one layer, per KV head.

    Attributes:
        num_tokens: how many tokens were summed.
        query_moment: M_q = Σ_tokens Σ_heads qᵀq over the query heads that share the KV head,
            `[num_kv_heads, head_size, head_size] f64`.
        key_mean: k̄, `[num_kv_heads, head_size] f64`.
        key_scatter: S̃_k = Σ (k − k̄)ᵀ(k − k̄), `[num_kv_heads, head_size, head_size] f64`.
        output_moment: M_o = Σ_tokens Σ_heads oᵀo, `[num_kv_heads, head_size, head_size] f64`.

    Source: arXiv 2608.04074, section 7.3 and algorithm 2; M_o from attention outputs: equation 37; sums over the query
    heads of a KV head: section 12.5.
    """

    num_tokens: int
    query_moment: Tensor
    key_mean: Tensor
    key_scatter: Tensor
    output_moment: Tensor

    def merge(self, other: LayerMoments) -> LayerMoments:
        """Moments of both sets of tokens: S = S_a + S_b + δᵀδ·n_a·n_b/n with δ = k̄_b − k̄_a, n = n_a + n_b.

        Args:
            other: moments of other tokens of the same layer, same shapes and device.

        Returns:
            The moments of the union. Either side may be empty.

        Source: Chan, Golub and LeVeque's pairwise update, used because subtracting n·k̄ᵀk̄ from Σkᵀk cancels badly for
        keys, whose mean is large beside their spread.
        """
        total = self.num_tokens + other.num_tokens
        if total == 0:
            return self
        delta = other.key_mean - self.key_mean
        weight = self.num_tokens * other.num_tokens / total
        return LayerMoments(
            num_tokens=total,
            query_moment=self.query_moment + other.query_moment,
            key_mean=self.key_mean + delta * (other.num_tokens / total),
            key_scatter=self.key_scatter + other.key_scatter + weight * delta.unsqueeze(2) * delta.unsqueeze(1),
            output_moment=self.output_moment + other.output_moment,
        )


def empty_moments(num_kv_heads: int, head_size: int, device: torch.device) -> LayerMoments:
    """Moments of no tokens: all zero, the neutral element of `merge`.

    Args:
        num_kv_heads: number of KV heads of the layer.
        head_size: dimensions per head.
        device: where the float64 sums live.

    Returns:
        Zero moments.

    Source: engineering choice: lets a stream be a fold over its chunks.
    """

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=device)

    square = (num_kv_heads, head_size, head_size)
    return LayerMoments(0, zeros(*square), zeros(num_kv_heads, head_size), zeros(*square), zeros(*square))


def chunk_moments(query: Tensor, key: Tensor, output: Tensor) -> LayerMoments:
    """Moments of one chunk: M_q = Σ qᵀq, k̄ = mean k, S̃_k = Σ (k − k̄)ᵀ(k − k̄), M_o = Σ oᵀo.

    Args:
        query: post-RoPE queries `[num_tokens, num_heads, head_size]`, any float type; query head h reads KV head
            h // (num_heads // num_kv_heads).
        key: post-RoPE keys `[num_tokens, num_kv_heads, head_size]`, any float type.
        output: attention outputs before the output projection `[num_tokens, num_heads, head_size]`, any float type.

    Returns:
        The moments of these tokens, on the device of the inputs.

    Raises:
        ValueError: the number of query heads is not a multiple of the number of KV heads, or there are no tokens.

    Source: arXiv 2608.04074, algorithm 2 and section 12.5.
    """
    num_tokens, num_kv_heads, _ = key.shape
    if num_tokens == 0:
        raise ValueError("the chunk holds 0 tokens; at least 1 is needed: use empty_moments for an empty stream")
    if query.shape[1] % num_kv_heads != 0:
        raise ValueError(
            f"{query.shape[1]} query heads cannot share {num_kv_heads} KV heads; "
            "the first number must be a multiple of the second: pass the heads of one layer on one rank"
        )
    # [num_kv_heads, num_tokens, head_size]
    key_f64 = key.to(torch.float64).transpose(0, 1)
    mean = key_f64.mean(dim=1)
    centred = key_f64 - mean.unsqueeze(1)
    return LayerMoments(
        num_tokens=num_tokens,
        query_moment=_grouped_moment(query, num_kv_heads),
        key_mean=mean,
        key_scatter=centred.transpose(1, 2) @ centred,
        output_moment=_grouped_moment(output, num_kv_heads),
    )


def _grouped_moment(rows: Tensor, num_kv_heads: int) -> Tensor:
    """Σ xᵀx over tokens and over the query heads of each KV head, `[num_kv_heads, head_size, head_size] f64`."""
    num_tokens, num_heads, head_size = rows.shape
    # [num_kv_heads, num_tokens * heads_per_kv_head, head_size]
    grouped = rows.to(torch.float64).view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_size)
    grouped = grouped.transpose(0, 1).reshape(num_kv_heads, -1, head_size)
    return grouped.transpose(1, 2) @ grouped
