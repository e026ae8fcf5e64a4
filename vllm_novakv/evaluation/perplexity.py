"""Perplexity of a text in fixed windows, from the log-probabilities that a server gives to the tokens of a prompt.

Prefill attends to an exact key for a query at position p only if the key lies in the sink or among the recent tokens
before p, and to the quantized key otherwise, as decoding does. So the log-probabilities of a prompt measure the cache.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

PromptLogprobs = Callable[[Sequence[Sequence[int]]], Sequence[Sequence[float]]]
"""For each window of n token ids, the natural log-probabilities of its tokens 1..n-1 given those before: n-1 values."""


@dataclass(frozen=True)
class PerplexityResult:
    """Negative log-likelihoods (nats) of the windows of a text.

    Attributes:
        window_nll: summed negative log-likelihood of each window.
        window_tokens: predicted tokens of each window (one less than its length).
    """

    window_nll: tuple[float, ...]
    window_tokens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.window_tokens)

    @property
    def perplexity(self) -> float:
        """exp(Σ nll / Σ tokens)."""
        return math.exp(math.fsum(self.window_nll) / self.num_tokens)


def split_windows(token_ids: Sequence[int], window_tokens: int, max_windows: int | None = None) -> list[list[int]]:
    """Cut a token sequence into windows of equal length, evenly spread over it; what does not fill one is left out.

    Example: 10 tokens hold three windows of 3 tokens, starting at 0, 3 and 6 (the last token fills none); with at most
    two windows, the first and the last of them are kept.

    Args:
        token_ids: the text's tokens.
        window_tokens: tokens per window, at least 2.
        max_windows: keep at most this many, evenly spaced from the first to the last; None keeps all.

    Returns:
        The windows in text order.

    Raises:
        ValueError: the text does not fill one window, or a limit is too small.
    """
    if window_tokens < 2 or (max_windows is not None and max_windows < 1):
        raise ValueError(f"window_tokens={window_tokens}, max_windows={max_windows}: need at least 2 and 1")
    num_windows = len(token_ids) // window_tokens
    if num_windows == 0:
        raise ValueError(
            f"the text has {len(token_ids)} tokens and a window needs {window_tokens}; give a longer text or "
            "a smaller window"
        )
    picks = list(range(num_windows))
    if max_windows is not None and max_windows < num_windows:
        steps = max(1, max_windows - 1)
        picks = [round(i * (num_windows - 1) / steps) for i in range(max_windows)]
    return [list(token_ids[i * window_tokens : (i + 1) * window_tokens]) for i in picks]


def measure_perplexity(prompt_logprobs: PromptLogprobs, windows: Sequence[Sequence[int]]) -> PerplexityResult:
    """Perplexity exp(−(1/N) Σ ln p(token | tokens before it in its window)) over all windows.

    Args:
        prompt_logprobs: gives the log-probabilities of each window's tokens after the first.
        windows: token ids per window.

    Returns:
        Per-window sums, from which the perplexity follows.

    Raises:
        ValueError: there are no windows, or the callable's answer does not fit them or is not a log-probability.
    """
    answers = _checked_logprobs(prompt_logprobs, windows)
    return PerplexityResult(
        window_nll=tuple(-math.fsum(logprobs) for logprobs in answers),
        window_tokens=tuple(len(window) - 1 for window in windows),
    )


@dataclass(frozen=True)
class PositionBucket:
    """Predicted tokens of a range of positions, over all windows.

    Attributes:
        first: first position of the range.
        last: last position of the range; a window's first token, which nothing predicts, has position 0.
        nll: summed negative log-likelihood (nats).
        num_tokens: predicted tokens.
    """

    first: int
    last: int
    nll: float
    num_tokens: int

    @property
    def perplexity(self) -> float:
        """exp(nll / tokens)."""
        return math.exp(self.nll / self.num_tokens)


def measure_perplexity_by_position(
    prompt_logprobs: PromptLogprobs, windows: Sequence[Sequence[int]], bucket_tokens: int
) -> list[PositionBucket]:
    """Perplexity of the tokens at positions [i·n, (i+1)·n), n = bucket_tokens, over all windows.

    Position 0 is predicted by nothing, so the first bucket holds one token less per window.

    Args:
        prompt_logprobs: the model; it is called once with all windows.
        windows: token ids, at least two per window.
        bucket_tokens: positions per bucket, at least 1.

    Returns:
        Buckets in order of position; those without a token are left out.

    Raises:
        ValueError: see `measure_perplexity`, or bucket_tokens is less than 1.
    """
    if bucket_tokens < 1:
        raise ValueError(f"bucket_tokens={bucket_tokens} must be at least 1")
    losses: dict[int, list[float]] = {}
    for logprobs in _checked_logprobs(prompt_logprobs, windows):
        for position, logprob in enumerate(logprobs, start=1):
            losses.setdefault(position // bucket_tokens, []).append(-logprob)
    return [
        PositionBucket(
            first=max(1, bucket * bucket_tokens),
            last=(bucket + 1) * bucket_tokens - 1,
            nll=math.fsum(values),
            num_tokens=len(values),
        )
        for bucket, values in sorted(losses.items())
    ]


def _checked_logprobs(prompt_logprobs: PromptLogprobs, windows: Sequence[Sequence[int]]) -> Sequence[Sequence[float]]:
    if not windows:
        raise ValueError("no windows to measure; see split_windows")
    answers = prompt_logprobs(windows)
    if len(answers) != len(windows):
        raise ValueError(f"asked for {len(windows)} windows, got answers for {len(answers)}")
    for index, (window, logprobs) in enumerate(zip(windows, answers, strict=True)):
        if len(logprobs) != len(window) - 1:
            raise ValueError(f"window {index} of {len(window)} tokens needs one value less, got {len(logprobs)}")
        if not all(math.isfinite(value) and value <= 1e-6 for value in logprobs):
            raise ValueError(f"window {index} has values that are not log-probabilities (finite and at most 0)")
    return answers
