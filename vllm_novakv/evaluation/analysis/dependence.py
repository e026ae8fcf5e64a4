"""Total correlation of a group's coordinates: how far they are from independent, beyond second order.

Source: arXiv 2608.04074, section 14.4 ("Residual dependence").
"""

import math

import torch

_BLOCK_DISTANCES = 1 << 24


def joint_entropy(points: torch.Tensor, num_neighbors: int = 3) -> float:
    """Kozachenko-Leonenko estimate ψ(n) − ψ(k) + log c_d + (d/n) Σ log ε_i of a differential entropy.

    ε_i is the distance of point i to its k-th neighbour, c_d the volume of the unit ball.

    Args:
        points: float [n, d], no point more than k times.
        num_neighbors: k, below n.

    Returns:
        Entropy in bits.

    Raises:
        ValueError: k is not below n, or more than k points coincide.

    Source: Kozachenko and Leonenko (1987).
    """
    num_points, dim = points.shape
    if not 1 <= num_neighbors < num_points:
        raise ValueError(f"num_neighbors={num_neighbors} must be at least 1 and below the {num_points} points")
    wide = points.double()
    if int(wide.unique(dim=0, return_counts=True)[1].max()) > num_neighbors:
        raise ValueError(f"more than {num_neighbors} points coincide; a density needs distinct points")
    half_norms = wide.square().sum(dim=-1) / 2
    squares = []
    rows = max(1, _BLOCK_DISTANCES // num_points)
    for start in range(0, num_points, rows):
        block = wide[start : start + rows]
        # ‖x − y‖²/2 of [block, all]; a point is no neighbour of itself
        half = half_norms[start : start + len(block)].unsqueeze(1) + half_norms - block @ wide.mT
        half[torch.arange(len(block)), torch.arange(start, start + len(block))] = torch.inf
        squares.append(2 * half.topk(num_neighbors, dim=-1, largest=False).values[:, -1])
    # rounding can leave a tiny distance below zero
    log_distances = torch.cat(squares).clamp(min=1e-30).log() / 2
    log_ball = dim / 2 * math.log(math.pi) - math.lgamma(1 + dim / 2)
    nats = _digamma(num_points) - _digamma(num_neighbors) + log_ball + dim * float(log_distances.mean())
    return nats / math.log(2)


def marginal_entropy(samples: torch.Tensor, spacing: int = 4) -> float:
    """m-spacing estimate (1/(n − m)) Σ log((n + 1)/m (x_(i+m) − x_(i))) + log m − ψ(m) of a differential entropy.

    Args:
        samples: float [n], without more than m equal ones.
        spacing: m, below n. A small one loses little of the tails, and ψ(m) takes away its bias.

    Returns:
        Entropy in bits.

    Raises:
        ValueError: m is not below n, or more than m samples coincide.

    Source: Beirlant, Dudewicz, Györfi and van der Meulen (1997), section 4.
    """
    num_samples = samples.shape[0]
    if not 1 <= spacing < num_samples:
        raise ValueError(f"spacing={spacing} must be at least 1 and below the {num_samples} samples")
    ordered = samples.double().sort().values
    gaps = ordered[spacing:] - ordered[:-spacing]
    if not bool((gaps > 0).all()):
        raise ValueError(f"more than {spacing} samples coincide; a density needs distinct samples")
    # log((n + 1)/m · gap) + log m = log((n + 1) · gap)
    nats = float(((num_samples + 1) * gaps).log().mean()) - _digamma(spacing)
    return nats / math.log(2)


def total_correlation(points: torch.Tensor, num_neighbors: int = 3) -> float:
    """TC = Σ_j h(x_j) − h(x): 0 for independent coordinates, up to the error of the estimates.

    Coordinates are brought to unit variance first, which changes neither side's difference and helps the estimates.

    Args:
        points: float [n, d].
        num_neighbors: see `joint_entropy`.

    Returns:
        Total correlation in bits; slightly negative values are estimation errors.

    Raises:
        ValueError: see `joint_entropy`, or a coordinate is constant.
    """
    deviation = points.double().std(dim=0, correction=0)
    if not bool((deviation > 0).all()):
        raise ValueError("a coordinate is constant; leave it out")
    scaled = points.double() / deviation
    marginals = math.fsum(marginal_entropy(column) for column in scaled.T)
    return marginals - joint_entropy(scaled, num_neighbors)


def _digamma(count: int) -> float:
    return float(torch.digamma(torch.tensor(float(count), dtype=torch.float64)))
