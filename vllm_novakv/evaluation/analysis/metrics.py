"""How far quantized keys are from the exact ones, as numbers and as attention sees it."""

import torch

_BLOCK_SCORES = 1 << 24


def mean_squared_error(keys: torch.Tensor, quantized: torch.Tensor) -> float:
    """Mean of (k − k̂)² over tokens and elements.

    Args:
        keys: float [num_tokens, head_size].
        quantized: the same shape.

    Returns:
        MSE per element.
    """
    return float((keys.double() - quantized.double()).square().mean())


def query_weighted_distortion(keys: torch.Tensor, quantized: torch.Tensor, query_moment: torch.Tensor) -> float:
    """Mean over tokens of (k − k̂) M_q (k − k̂)^T.

    With M_q the mean of q^T q this is the mean squared error of a logit, before the division by √d.

    Example: error (1, 2) and M_q = diag(3, 5) give 3 + 20 = 23.

    Args:
        keys: float [num_tokens, head_size].
        quantized: the same shape.
        query_moment: f64 [head_size, head_size].

    Returns:
        The distortion.

    Source: arXiv 2608.04074, equation 5.
    """
    error = keys.double() - quantized.double()
    return float(((error @ query_moment) * error).sum(dim=-1).mean())


def top1_agreement(
    queries: torch.Tensor,
    keys: torch.Tensor,
    quantized: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> float:
    """Share of queries whose highest-scoring key is the same with exact and with quantized keys.

    Args:
        queries: float [num_queries, head_size].
        keys: float [num_tokens, head_size].
        quantized: the same shape.
        positions: int64 [num_queries]; query i sees keys 0 .. positions[i]. None lets every query see every key.

    Returns:
        Agreement, 0..1.

    Raises:
        ValueError: there are no queries, or a position is outside the keys.

    Source: arXiv 2608.04074, section 8.1.
    """
    num_tokens = keys.shape[0]
    if queries.shape[0] == 0:
        raise ValueError("no queries; agreement needs at least one")
    if positions is not None and not bool(((positions >= 0) & (positions < num_tokens)).all()):
        raise ValueError(f"positions must lie in 0..{num_tokens - 1}, one for each query")
    rows = max(1, _BLOCK_SCORES // num_tokens)
    place = torch.arange(num_tokens, device=keys.device)
    num_same = 0
    for start in range(0, queries.shape[0], rows):
        block = queries[start : start + rows].double()
        best = []
        for candidates in (keys, quantized):
            scores = block @ candidates.double().mT
            if positions is not None:
                scores.masked_fill_(place > positions[start : start + rows].to(keys.device).unsqueeze(1), -torch.inf)
            best.append(scores.argmax(dim=-1))
        num_same += int((best[0] == best[1]).sum())
    return num_same / queries.shape[0]
