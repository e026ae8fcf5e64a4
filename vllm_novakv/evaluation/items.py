"""One question of an evaluation, whatever the task: what is asked, what is expected, how answers are scored."""

from dataclasses import dataclass
from typing import Literal

Metric = Literal["needle_recall", "choice", "math"]


@dataclass(frozen=True)
class Item:
    """A question with its expected answer.

    Attributes:
        item_id: unique within a run, e.g. "niah_single_1/8192/3".
        task: what the item's score is averaged with, e.g. "niah_single_1".
        message: the user message; an endpoint that applies the chat template itself gets this.
        expected: gold answers; the metric says whether one or all of them are wanted.
        metric: name in `scoring.METRICS`.
        prompt_token_ids: the same message as a whole chat prompt, for engines that take token ids; None where the
            prompt was not rendered.
    """

    item_id: str
    task: str
    message: str
    expected: tuple[str, ...]
    metric: Metric
    prompt_token_ids: tuple[int, ...] | None = None
