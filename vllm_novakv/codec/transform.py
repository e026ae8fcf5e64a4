"""From calibration moments to the bases: R_K and R_K^{-T} for keys, R_V for values, all in float64.

Row vectors; x R acts on the right. A linear map of the keys changes what a squared error means: with R_K R_K^T = M_q
the error of the transformed key is the error of the logits, ‖(k − k̂) R_K‖² = (k − k̂) M_q (k − k̂)^T.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

EIGENVALUE_FLOOR = 1e-30
"""Smallest eigenvalue of M_q that is used as it is."""

RELATIVE_EIGENVALUE_FLOOR = 1e-8
"""The same, relative to the largest eigenvalue."""


class KeyTransforms(NamedTuple):
    """The key bases of one KV head (or of several: leading dimensions are kept).

    key_transform: f64 [..., head_size, head_size], R_K; group l owns columns l g to (l + 1) g − 1.
    key_transform_inv_t: f64 [..., head_size, head_size], R_K^{-T}, columns in the same order.
    eigenvalues: f64 [..., head_size], Λ in descending order (rank order, not column order), at least 0.
    """

    key_transform: torch.Tensor
    key_transform_inv_t: torch.Tensor
    eigenvalues: torch.Tensor


def grouped_column_order(head_size: int, group_size: int) -> torch.Tensor:
    """Rank of the coordinate in each column: rank i is dealt to group i mod L, and groups are laid side by side.

    Example: head_size 8, group_size 4 (L = 2) gives 0 2 4 6 | 1 3 5 7.

    Args:
        head_size: number of coordinates d.
        group_size: coordinates per group g; divides head_size.

    Returns:
        int64 [head_size]; column l g + m holds rank l + m L.

    Raises:
        ValueError: group_size does not divide head_size.

    Source: arXiv:2608.04074, section 4 and algorithm 2 line 7.
    """
    if group_size < 1 or head_size % group_size:
        raise ValueError(f"head_size={head_size} is not divisible by group_size={group_size}; choose a divisor")
    return torch.arange(head_size).view(group_size, head_size // group_size).T.flatten()


def key_transforms(query_moment: torch.Tensor, key_scatter: torch.Tensor, group_size: int) -> KeyTransforms:
    """R_K = M_q^{1/2} E and R_K^{-T} = M_q^{-1/2} E, where M_q^{1/2} S̃_k M_q^{1/2} = E Λ E^T, columns grouped.

    1. eigenvalues of M_q are floored
    2. E, Λ: eigenvectors in descending order of eigenvalues
    3. the grouping is folded into the columns

    A common factor of M_q changes R_K and R_K^{-T} by inverse factors and no code; with M_q the *mean* of q^T q,
    q R_K^{-T} has unit variance over the calibration text, a range that fits every float type.

    Args:
        query_moment: f64 [..., head_size, head_size], M_q = Σ q^T q over the query heads that share the KV head.
        key_scatter: f64 [..., head_size, head_size], S̃_k = Σ (k − k̄)^T (k − k̄).
        group_size: key elements per group; divides head_size.

    Returns:
        KeyTransforms.

    Raises:
        ValueError: a moment is not float64, not square, not finite, or M_q is zero.

    Source: arXiv:2608.04074, theorem 1, section 7.3, algorithm 2; the relative floor is an engineering choice.
    """
    _check_moment("query_moment", query_moment)
    _check_moment("key_scatter", key_scatter)
    order = grouped_column_order(query_moment.shape[-1], group_size).to(query_moment.device)
    query_eigenvalues, query_vectors = torch.linalg.eigh(_symmetric(query_moment))
    largest = query_eigenvalues[..., -1:]
    if bool((largest <= 0).any()):
        raise ValueError("query_moment is zero: no query was seen; calibrate with more tokens")
    # The absolute floor alone leaves factors of 1e15 between R_K and R_K^{-T} when the queries span a subspace, and
    # then no stored precision can hold both. The relative floor bounds cond(R_K) by 1e4; a direction it touches
    # carries less than 1e-8 of the strongest direction's query energy.
    floor = torch.clamp(largest * RELATIVE_EIGENVALUE_FLOOR, min=EIGENVALUE_FLOOR)
    root = query_eigenvalues.maximum(floor).sqrt()
    query_root = _congruence(query_vectors, root)
    query_root_inverse = _congruence(query_vectors, root.reciprocal())
    eigenvalues, vectors = torch.linalg.eigh(_symmetric(query_root @ _symmetric(key_scatter) @ query_root))
    vectors = vectors.flip(-1)
    return KeyTransforms(
        key_transform=(query_root @ vectors)[..., order],
        key_transform_inv_t=(query_root_inverse @ vectors)[..., order],
        eigenvalues=eigenvalues.flip(-1).clamp(min=0.0),
    )


def value_transform(output_moment: torch.Tensor) -> torch.Tensor:
    """R_V = E H/√d: eigenvectors of M_o, then a Hadamard rotation that gives every coordinate the same variance.

    Args:
        output_moment: f64 [..., head_size, head_size], M_o = Σ o^T o over attention outputs before the projection;
            head_size is a power of two.

    Returns:
        f64 [..., head_size, head_size], orthogonal.

    Raises:
        ValueError: the moment is not float64, not square or not finite, or head_size is not a power of two.

    Source: arXiv:2608.04074, corollary 1 and section 8.5 (decorrelation followed by a Hadamard transform).
    """
    _check_moment("output_moment", output_moment)
    _, vectors = torch.linalg.eigh(_symmetric(output_moment))
    return torch.matmul(vectors.flip(-1), hadamard(output_moment.shape[-1]).to(output_moment.device))


def hadamard(size: int) -> torch.Tensor:
    """Normalised Hadamard matrix H_2n = [[H_n, H_n], [H_n, −H_n]]/√2, symmetric and orthogonal.

    Example: size 2 gives [[1, 1], [1, −1]]/√2.

    Args:
        size: number of rows, a power of two.

    Returns:
        f64 [size, size].

    Raises:
        ValueError: size is not a power of two.

    Source: Sylvester's construction.
    """
    if size < 1 or size & (size - 1):
        raise ValueError(f"size={size} is not a power of two; a Hadamard rotation needs 64, 128 or 256")
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    return matrix / math.sqrt(size)


def group_volumes(eigenvalues: torch.Tensor, group_size: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """log₂ v_l = Σ_{i in group l} log₂ λ_i for three ways to group coordinates.

    "sorted" groups consecutive ranks, "random" draws one partition from the seed, "equalizing" deals rank i to group
    i mod L, which is what `key_transforms` folds in.

    Args:
        eigenvalues: f64 [head_size], variances of the transformed coordinates in any order.
        group_size: coordinates per group; divides head_size.
        seed: of the random partition.

    Returns:
        {"sorted", "random", "equalizing"}: f64 [num_groups] each, in bits.

    Raises:
        ValueError: group_size does not divide head_size.

    Source: arXiv:2608.04074, sections 7.4 and 10.
    """
    size = eigenvalues.shape[-1]
    dealt = grouped_column_order(size, group_size)
    logs = eigenvalues.double().cpu().clamp(min=EIGENVALUE_FLOOR).log2().sort(descending=True).values
    shuffled = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    orders = {"sorted": torch.arange(size), "random": shuffled, "equalizing": dealt}
    return {name: logs[order].view(-1, group_size).sum(dim=-1) for name, order in orders.items()}


def volume_spread_bits(log2_volumes: torch.Tensor, group_size: int) -> float:
    """(max − min of log₂ v_l)/(2g): bits per element between the ideal rates of the largest and smallest group.

    Example: log₂ volumes 8 and 0 with group_size 4 differ by 1 bit per element.

    Args:
        log2_volumes: f64 [num_groups], from `group_volumes`.
        group_size: coordinates per group.

    Returns:
        The spread in bits per element; 0 for a partition that equalizes exactly.

    Source: arXiv:2608.04074, theorem 2 (equation 8).
    """
    return float(log2_volumes.max() - log2_volumes.min()) / (2 * group_size)


def _check_moment(name: str, moment: torch.Tensor) -> None:
    if moment.dtype != torch.float64 or moment.dim() < 2 or moment.shape[-1] != moment.shape[-2]:
        raise ValueError(
            f"{name} is {moment.dtype} {list(moment.shape)}; moments are torch.float64 [..., head_size, head_size]"
        )
    if not bool(torch.isfinite(moment).all()):
        raise ValueError(f"{name} has non-finite entries; the model produced NaN or infinity on the calibration text")


def _symmetric(matrix: torch.Tensor) -> torch.Tensor:
    return (matrix + matrix.mT) / 2


def _congruence(vectors: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.matmul(vectors * values.unsqueeze(-2), vectors.mT)
