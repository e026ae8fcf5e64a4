"""Ways to cut transform coordinates into groups, and the volumes of the groups."""

import torch

from vllm_novakv.codec.transform import EIGENVALUE_FLOOR, grouped_column_order

PARTITIONS = ("sorted", "random", "equalizing")
"""Names of the partitions.

Source: arXiv 2608.04074, section 7.4.
"""


def partition(name: str, variances: torch.Tensor, group_size: int, seed: int = 0) -> torch.Tensor:
    """Coordinates of each group, after sorting by descending variance.

    "sorted" groups consecutive ranks, "random" draws one partition from the seed, "equalizing" deals rank i to group
    i mod L.

    Example: variances (1, 8, 4, 2), group size 2: sorted gives {1, 2}, {3, 0}; equalizing gives {1, 3}, {2, 0}.

    Args:
        name: one of `PARTITIONS`.
        variances: float [d], of each coordinate.
        group_size: g, divides d.
        seed: of the random partition.

    Returns:
        int64 [d/g, g], indices into the coordinates.

    Raises:
        ValueError: unknown name, or g does not divide d.

    Source: arXiv 2608.04074, section 7.4.
    """
    size = variances.shape[0]
    dealt = grouped_column_order(size, group_size)
    ranked = variances.double().cpu().argsort(descending=True, stable=True)
    if name == "sorted":
        order = torch.arange(size)
    elif name == "random":
        order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    elif name == "equalizing":
        order = dealt
    else:
        raise ValueError(f"partition {name!r} is unknown; choose from {', '.join(PARTITIONS)}")
    return ranked[order].view(-1, group_size)


def log2_volumes(variances: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """log₂ v_l = Σ_{i in group l} log₂ σ_i².

    Args:
        variances: float [d].
        groups: int64 [L, g], see `partition`.

    Returns:
        f64 [L], in bits.

    Source: arXiv 2608.04074, section 4.
    """
    return variances.double().cpu().clamp(min=EIGENVALUE_FLOOR).log2()[groups].sum(dim=-1)


def normalized_log10_volumes(variances: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """log₁₀(v_l / v_equal), v_equal = (Π σ_i²)^{g/d}: 0 for every group of a partition that equalizes exactly.

    Args:
        variances: float [d].
        groups: int64 [L, g].

    Returns:
        f64 [L], in decades: the horizontal axis of a histogram of volumes.

    Source: arXiv 2608.04074, section 10 (equation 9).
    """
    bits = log2_volumes(variances, groups)
    return (bits - bits.mean()) * torch.tensor(2.0, dtype=torch.float64).log10()
