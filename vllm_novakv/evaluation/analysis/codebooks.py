"""Codebooks of coefficient groups by plain k-means, for analysis at any rate and group size."""

import torch

KMEANS_ITERATIONS = 25
"""Lloyd's iterations."""

_BLOCK_DISTANCES = 1 << 24


def num_centroids(bits: float, group_size: int) -> int:
    """2^{g·bits}.

    Raises:
        ValueError: g·bits is not a whole number.
    """
    total = bits * group_size
    if total != int(total):
        raise ValueError(f"bits={bits} with group_size={group_size} gives {total} bits per group; use a whole number")
    return int(2**total)


def gather_groups(coefficients: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """[num_tokens, d] to [L, num_tokens, g], by the groups' coordinates."""
    return coefficients[:, groups.to(coefficients.device)].transpose(0, 1)


def scatter_groups(grouped: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """The inverse of `gather_groups`: [L, num_tokens, g] to [num_tokens, d]."""
    flat = grouped.transpose(0, 1).flatten(1)
    result = torch.empty_like(flat)
    result[:, groups.flatten().to(flat.device)] = flat
    return result


def fit_codebooks(points: torch.Tensor, num_centroids: int, seed: int) -> torch.Tensor:
    """Lloyd's k-means for every group: 25 iterations from centroids drawn without replacement.

    An empty cluster moves to the point that is served worst.

    Args:
        points: f64 [L, num_points, g].
        num_centroids: per group, at most num_points.
        seed: of the draw.

    Returns:
        f64 [L, num_centroids, g].

    Raises:
        ValueError: there are fewer points than centroids.

    Source: arXiv 2608.04074, section 14.1.
    """
    num_points = points.shape[1]
    if num_centroids > num_points:
        raise ValueError(f"{num_points} points for {num_centroids} centroids; give more tokens or fewer bits")
    generator = torch.Generator().manual_seed(seed)
    return torch.stack(
        [_lloyd(group, torch.randperm(num_points, generator=generator)[:num_centroids]) for group in points]
    )


def spread_centroids(points: torch.Tensor, num_centroids: int, seed: int) -> torch.Tensor:
    """Initial centroids of k-means++: each next one is a point drawn with probability ∝ its squared distance to them.

    Args:
        points: float [L, num_points, g].
        num_centroids: per group, at most the number of distinct points.
        seed: of the draws.

    Returns:
        [L, num_centroids, g], points of the groups, in the type of `points`.

    Source: Arthur and Vassilvitskii (2007).
    """
    num_problems, num_points, _ = points.shape
    generator = torch.Generator().manual_seed(seed)
    problems = torch.arange(num_problems)
    chosen = [points[problems, torch.randint(num_points, (num_problems,), generator=generator)]]
    distance = torch.full(points.shape[:2], torch.inf, dtype=points.dtype)
    for _ in range(num_centroids - 1):
        distance = torch.minimum(distance, (points - chosen[-1].unsqueeze(1)).square().sum(dim=-1))
        place = torch.multinomial(distance, 1, generator=generator).squeeze(1)
        chosen.append(points[problems, place])
    return torch.stack(chosen, dim=1)


def nearest(points: torch.Tensor, codebooks: torch.Tensor) -> torch.Tensor:
    """The nearest centroid of every point.

    Args:
        points: f64 [L, num_points, g].
        codebooks: f64 [L, num_centroids, g].

    Returns:
        f64 [L, num_points, g].
    """
    return torch.stack([book[_assign(group, book)[0]] for group, book in zip(points, codebooks, strict=True)])


def _lloyd(points: torch.Tensor, initial: torch.Tensor) -> torch.Tensor:
    centroids = points[initial.to(points.device)]
    for _ in range(KMEANS_ITERATIONS):
        index, error = _assign(points, centroids)
        sums = torch.zeros_like(centroids).index_add_(0, index, points)
        counts = torch.bincount(index, minlength=centroids.shape[0])
        centroids = sums / counts.clamp(min=1).unsqueeze(-1)
        empty = counts == 0
        centroids[empty] = points[error.topk(int(empty.sum())).indices]
    return centroids


def _assign(points: torch.Tensor, centroids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index and squared distance of the nearest centroid, int64 and f64 [num_points]."""
    rows = max(1, _BLOCK_DISTANCES // centroids.shape[0])
    half_norms = centroids.square().sum(dim=-1) / 2
    blocks = [(block @ centroids.mT - half_norms).max(dim=-1) for block in points.split(rows)]
    index = torch.cat([block.indices for block in blocks])
    return index, (points - centroids[index]).square().sum(dim=-1)
