"""What quantized keys and values do to attention when the band is read exactly, as in serving."""

import math
from dataclasses import dataclass, fields
from typing import Self

import torch


@dataclass(frozen=True)
class Band:
    """Tokens that a query reads exactly; the ones between are its history.

    Attributes:
        sink_tokens: first tokens of the sequence.
        recent_tokens: latest tokens, the query's own included.
    """

    sink_tokens: int = 64
    recent_tokens: int = 256

    def is_history(self, positions: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Which keys each query reads from the history: sink ≤ key ≤ position − recent.

        Example: sink 1, recent 2: the query at position 4 reads keys 1 and 2 from the history.

        Args:
            positions: int64 [num_queries], of the queries.
            num_tokens: keys.

        Returns:
            bool [num_queries, num_tokens].
        """
        place = torch.arange(num_tokens, device=positions.device)
        return (place >= self.sink_tokens) & (place <= positions.unsqueeze(1) - self.recent_tokens)


@dataclass(frozen=True)
class AttentionErrors:
    """Sums over queries and query heads, so that those of several sequences add up; the properties are the figures.

    Attributes:
        num_rows: queries times query heads.
        num_agreeing: rows whose best key stays the best.
        history_mass: softmax weight of the history.
        logit_energy: (q·k)² over causal pairs.
        logit_noise: (q·k − q·k̂)² over causal pairs; 0 in the band.
        output_energy: ‖o‖².
        key_noise: ‖o − ô‖² with quantized keys and exact values.
        value_noise: the same with exact keys and quantized values.
        output_noise: the same with both quantized.
    """

    num_rows: float = 0.0
    num_agreeing: float = 0.0
    history_mass: float = 0.0
    logit_energy: float = 0.0
    logit_noise: float = 0.0
    output_energy: float = 0.0
    key_noise: float = 0.0
    value_noise: float = 0.0
    output_noise: float = 0.0

    def __add__(self, other: Self) -> Self:
        return type(self)(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def figures(self) -> dict[str, float]:
        """Relative errors √(noise/energy), top-1 agreement and the history's mean share of the softmax weight."""
        return {
            "output_error": math.sqrt(self.output_noise / self.output_energy),
            "output_error_of_keys": math.sqrt(self.key_noise / self.output_energy),
            "output_error_of_values": math.sqrt(self.value_noise / self.output_energy),
            "logit_error": math.sqrt(self.logit_noise / self.logit_energy),
            "top1_agreement": self.num_agreeing / self.num_rows,
            "history_mass": self.history_mass / self.num_rows,
        }


def attention_errors(
    query: torch.Tensor,
    positions: torch.Tensor,
    exact: tuple[torch.Tensor, torch.Tensor],
    quantized: tuple[torch.Tensor, torch.Tensor],
    band: Band,
) -> AttentionErrors:
    """Errors of o = softmax(q K^T/√d) V when the history's keys and values are replaced by quantized ones.

    Args:
        query: float [num_queries, num_heads, head_size], after RoPE; consecutive heads share a KV head.
        positions: int64 [num_queries], of the queries; each sees the keys up to its own.
        exact: keys and values, float [num_tokens, num_kv_heads, head_size].
        quantized: the same after encode and decode; only what a query reads from the history is used.
        band: what is read exactly.

    Returns:
        The sums.

    Source: arXiv 2608.04074, equation 5, sections 8.1 and 11.3.
    """
    key, value = exact
    num_tokens, num_kv_heads, _ = key.shape
    is_future = torch.arange(num_tokens, device=key.device) > positions.unsqueeze(1)
    is_history = band.is_history(positions, num_tokens)
    total = AttentionErrors()
    for head, rows in enumerate(_rows_by_kv_head(query, num_kv_heads)):
        # [heads_per_kv_head, num_queries, num_tokens]
        scores = rows @ key[:, head].float().T
        noisy = torch.where(is_history, rows @ quantized[0][:, head].float().T, scores)
        causal = scores.masked_fill(is_future, 0.0)
        noise = (scores - noisy).masked_fill(is_future, 0.0)
        best = [logits.masked_fill(is_future, -math.inf).argmax(dim=-1) for logits in (scores, noisy)]
        weights, noisy_weights = _softmax(scores, is_future), _softmax(noisy, is_future)
        values, value_noise = value[:, head].float(), (quantized[1][:, head] - value[:, head]).float()
        output = weights @ values
        key_noise = noisy_weights @ values - output
        total += AttentionErrors(
            num_rows=rows.shape[0] * rows.shape[1],
            num_agreeing=float((best[0] == best[1]).sum()),
            history_mass=float((weights * is_history).sum(dtype=torch.float64)),
            logit_energy=_energy(causal),
            logit_noise=_energy(noise),
            output_energy=_energy(output),
            key_noise=_energy(key_noise),
            value_noise=_energy((weights * is_history) @ value_noise),
            output_noise=_energy(key_noise + (noisy_weights * is_history) @ value_noise),
        )
    return total


def key_importance(
    query: torch.Tensor, positions: torch.Tensor, key: torch.Tensor, value: torch.Tensor, band: Band
) -> tuple[torch.Tensor, torch.Tensor]:
    """How much attention reads each key from the history: Σ p_ij, and Σ p_ij² ‖v_j − o_i‖².

    The second is the squared change of the outputs, to first order, for errors of unit variance in the key's logits:
    ∂o_i/∂s_ij = p_ij (v_j − o_i).

    Args:
        query, positions, band: as in `attention_errors`.
        key, value: float [num_tokens, num_kv_heads, head_size].

    Returns:
        f32 [num_tokens, num_kv_heads] each, sums over the queries i that read key j from the history.

    Source: arXiv 2608.04074, section 11.2 (softmax perturbation); the weights are an engineering choice.
    """
    num_tokens, num_kv_heads, _ = key.shape
    is_future = torch.arange(num_tokens, device=key.device) > positions.unsqueeze(1)
    is_history = band.is_history(positions, num_tokens)
    mass, sensitivity = [], []
    for head, rows in enumerate(_rows_by_kv_head(query, num_kv_heads)):
        weights = _softmax(rows @ key[:, head].float().T, is_future)
        values = value[:, head].float()
        output = weights @ values
        distance = values.square().sum(dim=-1) - 2 * output @ values.T + output.square().sum(dim=-1, keepdim=True)
        mass.append((weights * is_history).sum(dim=(0, 1)))
        sensitivity.append((weights.square() * distance.clamp(min=0) * is_history).sum(dim=(0, 1)))
    return torch.stack(mass, dim=1), torch.stack(sensitivity, dim=1)


def _rows_by_kv_head(query: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """q/√d, f32 [num_kv_heads, heads_per_kv_head, num_queries, head_size]."""
    num_queries, num_heads, head_size = query.shape
    rows = query.float().transpose(0, 1) / math.sqrt(head_size)
    return rows.reshape(num_kv_heads, num_heads // num_kv_heads, num_queries, head_size)


def _softmax(scores: torch.Tensor, is_future: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(is_future, -math.inf).softmax(dim=-1)


def _energy(x: torch.Tensor) -> float:
    return float(x.square().sum(dtype=torch.float64))
