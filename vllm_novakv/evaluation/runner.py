"""Run items through a model and keep everything in a directory of their own: see `run_directory`.

A run that was interrupted continues where it stopped; a finished run is read back; a directory of another run is
refused.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vllm_novakv.evaluation import run_directory
from vllm_novakv.evaluation.items import Item
from vllm_novakv.evaluation.needle import Generate
from vllm_novakv.evaluation.scoring import METRICS
from vllm_novakv.evaluation.statistics import Interval, bootstrap_mean, bootstrap_task_mean

PREDICTIONS_NAME = "predictions.jsonl"

Answer = Callable[[Sequence[Item], int], Sequence[str]]
"""Answers to items, in their order; the number is the sample's, to be used as a seed where answers are random."""


@dataclass(frozen=True)
class Prediction:
    """One answer of a model.

    Attributes:
        item_id: of the item.
        task: of the item.
        sample: 0 .. num_samples - 1.
        answer: the model's text.
        score: 0..1, by the item's metric.
    """

    item_id: str
    task: str
    sample: int
    answer: str
    score: float


@dataclass(frozen=True)
class RunResult:
    """All answers of a run, in the order of items and samples.

    Attributes:
        predictions: one per item and sample.
        task_scores: mean score of each task, 0..1, with its 95 % interval over items.
        mean: mean of the tasks, each with equal weight, with its interval.
    """

    predictions: tuple[Prediction, ...]
    task_scores: Mapping[str, Interval]
    mean: Interval


def answer_with_tokens(generate: Generate) -> Answer:
    """Turn a callable over token ids (greedy, as `needle.Generate`) into one over items.

    Args:
        generate: greedy answers to prompts given as token ids.

    Returns:
        A callable that ignores the sample number.
    """

    def answer(items: Sequence[Item], sample: int) -> Sequence[str]:
        prompts = [item.prompt_token_ids for item in items]
        missing = [item.item_id for item in items if item.prompt_token_ids is None]
        if missing:
            raise ValueError(f"item {missing[0]} has no token ids; render its message with the chat template first")
        return generate([prompt for prompt in prompts if prompt is not None])

    return answer


def run_items(
    answer: Answer,
    items: Sequence[Item],
    directory: Path,
    config: Mapping[str, Any],
    num_samples: int = 1,
    batch_size: int = 32,
    show_progress: bool = True,
) -> RunResult:
    """Ask a model every item `num_samples` times and score the answers; continue a run that was interrupted.

    Args:
        answer: the model.
        items: what to ask; ids are unique.
        directory: of this run alone; created if missing.
        config: everything that was chosen (JSON values), such as the model and the cache.
        num_samples: answers per item.
        batch_size: items per call; answers are on disk after each.
        show_progress: show a progress bar on the terminal.

    Returns:
        Answers and scores.

    Raises:
        ValueError: no items or two with one id, a directory of another run, or a model that gives another number of
            answers than it was asked for.

    Source: engineering choice.
    """
    if not items or num_samples < 1 or batch_size < 1:
        raise ValueError(
            f"{len(items)} items, num_samples={num_samples}, batch_size={batch_size}: need at least 1 each"
        )
    by_id = {item.item_id: item for item in items}
    if len(by_id) != len(items):
        raise ValueError(f"{len(items)} items have only {len(by_id)} different ids; give each its own")
    identity = {"config": dict(config), "num_samples": num_samples, "items_sha256": _digest(items)}
    run_directory.claim(directory, identity)
    path = directory / PREDICTIONS_NAME
    done = {(prediction.item_id, prediction.sample): prediction for prediction in read_predictions(path)}
    with tqdm(total=len(items) * num_samples, initial=len(done), disable=not show_progress, unit="answer") as progress:
        for sample in range(num_samples):
            open_items = [item for item in items if (item.item_id, sample) not in done]
            for start in range(0, len(open_items), batch_size):
                batch = open_items[start : start + batch_size]
                predictions = _ask(answer, batch, sample)
                run_directory.append_lines(path, map(dataclasses.asdict, predictions))
                done.update({(prediction.item_id, sample): prediction for prediction in predictions})
                progress.update(len(batch))
    result = _summarize(items, [done[item.item_id, sample] for item in items for sample in range(num_samples)])
    _write_scores(directory / run_directory.SCORES_NAME, result)
    return result


def _ask(answer: Answer, batch: Sequence[Item], sample: int) -> list[Prediction]:
    answers = answer(batch, sample)
    if len(answers) != len(batch):
        raise ValueError(f"asked {len(batch)} questions, got {len(answers)} answers")
    return [
        Prediction(item.item_id, item.task, sample, text, METRICS[item.metric](text, item.expected))
        for item, text in zip(batch, answers, strict=True)
    ]


def _summarize(items: Sequence[Item], predictions: Sequence[Prediction]) -> RunResult:
    num_samples = len(predictions) // len(items)
    scores: dict[str, list[float]] = {}
    for index, item in enumerate(items):
        samples = predictions[index * num_samples : (index + 1) * num_samples]
        # an item is the unit of the interval: its samples are not independent of each other
        scores.setdefault(item.task, []).append(math.fsum(p.score for p in samples) / num_samples)
    return RunResult(
        predictions=tuple(predictions),
        task_scores={task: bootstrap_mean(values) for task, values in scores.items()},
        mean=bootstrap_task_mean(list(scores.values())),
    )


def _digest(items: Iterable[Item]) -> str:
    digest = hashlib.sha256()
    for item in items:
        digest.update(json.dumps(dataclasses.asdict(item), sort_keys=True).encode())
    return digest.hexdigest()


def read_predictions(path: Path) -> list[Prediction]:
    """Answers of a predictions.jsonl, in the order in which they came; see `run_directory.read_lines`."""
    return [Prediction(**line) for line in run_directory.read_lines(path)]


def _write_scores(path: Path, result: RunResult) -> None:
    if path.exists():
        return
    scores = {
        "mean": dataclasses.asdict(result.mean),
        "tasks": {task: dataclasses.asdict(interval) for task, interval in result.task_scores.items()},
    }
    run_directory.write_new(path, scores)
