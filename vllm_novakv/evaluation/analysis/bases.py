"""The key bases of the comparison: identity, KLT, query eigenbasis, OSCAR and ours, for one KV head."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from vllm_novakv.baselines.rotations import oscar_rotation
from vllm_novakv.codec.transform import key_transforms


@dataclass(frozen=True)
class KeyStatistics:
    """What a basis of one KV head is derived from.

    Attributes:
        key_mean: f64 [head_size], k̄.
        key_covariance: f64 [head_size, head_size], mean of (k − k̄)^T (k − k̄).
        query_moment: f64 [head_size, head_size], mean of q^T q over tokens and the query heads of the KV head.
    """

    key_mean: torch.Tensor
    key_covariance: torch.Tensor
    query_moment: torch.Tensor


@dataclass(frozen=True)
class Basis:
    """An invertible basis: r = (k − k̄) R, k = r R^{-1} + k̄.

    Attributes:
        forward: f64 [head_size, head_size], R.
        inverse: f64 [head_size, head_size], R^{-1}.
    """

    forward: torch.Tensor
    inverse: torch.Tensor


def key_statistics(keys: torch.Tensor, queries: torch.Tensor) -> KeyStatistics:
    """Moments of the keys and queries of one KV head.

    Args:
        keys: float [num_tokens, head_size], after RoPE.
        queries: float [num_queries, head_size], after RoPE, of all query heads that share the KV head.

    Returns:
        KeyStatistics, in float64.
    """
    wide = keys.double()
    centered = wide - wide.mean(dim=0)
    return KeyStatistics(
        key_mean=wide.mean(dim=0),
        key_covariance=centered.mT @ centered / keys.shape[0],
        query_moment=queries.double().mT @ queries.double() / queries.shape[0],
    )


def _orthogonal(rotation: torch.Tensor) -> Basis:
    return Basis(rotation, rotation.mT)


def _eigenbasis(moment: torch.Tensor) -> Basis:
    return _orthogonal(torch.linalg.eigh(moment).eigenvectors.flip(-1))


def _ours(statistics: KeyStatistics) -> Basis:
    # groups of one: partitions are chosen later, from the variances
    transforms = key_transforms(statistics.query_moment, statistics.key_covariance, group_size=1)
    return Basis(transforms.key_transform, transforms.key_transform_inv_t.mT)


BASES: Mapping[str, Callable[[KeyStatistics], Basis]] = {
    "identity": lambda statistics: _orthogonal(torch.eye(statistics.key_mean.shape[0], dtype=torch.float64)),
    "klt": lambda statistics: _eigenbasis(statistics.key_covariance),
    "query": lambda statistics: _eigenbasis(statistics.query_moment),
    "oscar": lambda statistics: _orthogonal(oscar_rotation(statistics.query_moment.unsqueeze(0))[0].double()),
    "ours": _ours,
}
"""Bases by name.

Source: arXiv 2608.04074, section 5 ("Transform analysis") and theorem 1.
"""
