"""Perplexity by position as a run of its own: resumable window by window, never overwritten (see `run_directory`)."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vllm_novakv.evaluation import run_directory
from vllm_novakv.evaluation.perplexity import PositionBucket, PromptLogprobs, measure_perplexity_by_position

WINDOWS_NAME = "windows.jsonl"


@dataclass(frozen=True)
class WindowLosses:
    """Losses of one window.

    Attributes:
        window: its index.
        buckets: by position, see `perplexity.measure_perplexity_by_position`.
    """

    window: int
    buckets: tuple[PositionBucket, ...]

    @property
    def nll(self) -> float:
        """Negative log-likelihood of the whole window, in nats."""
        return math.fsum(bucket.nll for bucket in self.buckets)

    @property
    def num_tokens(self) -> int:
        """Predicted tokens."""
        return sum(bucket.num_tokens for bucket in self.buckets)


def run_perplexity(
    prompt_logprobs: PromptLogprobs,
    windows: Sequence[Sequence[int]],
    bucket_tokens: int,
    directory: Path,
    config: Mapping[str, Any],
    show_progress: bool = True,
) -> list[WindowLosses]:
    """Measure every window and keep its losses by position; continue a run that was interrupted.

    Args:
        prompt_logprobs: the model; called with one window at a time.
        windows: token ids.
        bucket_tokens: positions per bucket.
        directory: of this run alone; created if missing.
        config: everything that was chosen (JSON values), such as the model and the cache.
        show_progress: show a progress bar on the terminal.

    Returns:
        The windows in order.

    Raises:
        ValueError: no windows, a directory of another run, or answers that are no log-probabilities.

    Source: engineering choice.
    """
    if not windows:
        raise ValueError("no windows to measure; see perplexity.split_windows")
    digest = hashlib.sha256(json.dumps([list(window) for window in windows]).encode()).hexdigest()
    identity = {"config": dict(config), "bucket_tokens": bucket_tokens, "windows_sha256": digest}
    run_directory.claim(directory, identity)
    path = directory / WINDOWS_NAME
    done = {losses.window: losses for losses in read_windows(path)}
    missing = [index for index in range(len(windows)) if index not in done]
    for index in tqdm(missing, initial=len(done), total=len(windows), disable=not show_progress, unit="window"):
        buckets = measure_perplexity_by_position(prompt_logprobs, [windows[index]], bucket_tokens)
        done[index] = WindowLosses(index, tuple(buckets))
        run_directory.append_lines(path, [dataclasses.asdict(done[index])])
    result = [done[index] for index in range(len(windows))]
    if not (directory / run_directory.SCORES_NAME).exists():
        by_position = [
            {"first": bucket.first, "last": bucket.last, "perplexity": bucket.perplexity}
            for bucket in sum_by_position(result)
        ]
        scores = {"perplexity": total_perplexity(result), "by_position": by_position}
        run_directory.write_new(directory / run_directory.SCORES_NAME, scores)
    return result


def read_windows(path: Path) -> list[WindowLosses]:
    """Windows of a windows.jsonl, in the order in which they were measured."""
    return [
        WindowLosses(line["window"], tuple(PositionBucket(**bucket) for bucket in line["buckets"]))
        for line in run_directory.read_lines(path)
    ]


def total_perplexity(windows: Sequence[WindowLosses]) -> float:
    """exp(Σ nll / Σ tokens) over all windows."""
    return math.exp(math.fsum(window.nll for window in windows) / sum(window.num_tokens for window in windows))


def sum_by_position(windows: Sequence[WindowLosses]) -> list[PositionBucket]:
    """One bucket for each range of positions, summed over the windows.

    Args:
        windows: measured with the same bucket_tokens.

    Returns:
        Buckets in order of position.
    """
    by_range: dict[tuple[int, int], list[PositionBucket]] = {}
    for window in windows:
        for bucket in window.buckets:
            by_range.setdefault((bucket.first, bucket.last), []).append(bucket)
    return [
        PositionBucket(first, last, math.fsum(part.nll for part in parts), sum(part.num_tokens for part in parts))
        for (first, last), parts in sorted(by_range.items())
    ]
