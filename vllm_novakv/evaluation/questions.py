"""Question files: multiple choice and mathematics as JSON lines, turned into items."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_novakv.evaluation.items import Item

CHOICE_INSTRUCTION = "Solve the problem and choose one option. End with a line of the form 'Answer: X', X its letter."
MATH_INSTRUCTION = "Solve the problem step by step and put the final answer into \\boxed{}."
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def load_questions(path: Path, limit: int | None = None) -> list[Item]:
    """Items of a JSON-lines file; lines with "choices" are multiple choice, the others mathematics.

    Example lines: `{"question": "2 + 2?", "choices": ["3", "4"], "answer": "B"}` and
    `{"question": "What is 1/2 + 1/4?", "answer": "3/4"}`. The answer to a choice is its letter or its index from 0;
    the answer to a problem is a string, a number, or a list of alternatives. An optional "id" names the item, an
    optional "task" what it is averaged with (default: the file's name without its ending).

    Args:
        path: the file, UTF-8.
        limit: keep the first so many; None keeps all.

    Returns:
        Items without prompt token ids, in file order.

    Raises:
        ValueError: a line is not a question, a name occurs twice, or the file holds none.

    Source: engineering choice.
    """
    items: list[Item] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if limit is not None and len(items) == limit:
            break
        if not line.strip():
            continue
        try:
            items.append(_parse(json.loads(line), f"{path.stem}/{number}", path.stem))
        except (ValueError, TypeError, LookupError) as error:
            raise ValueError(f"line {number} of {path.name} is not a question: {error!r}") from error
    if not items:
        raise ValueError(f"{path.name} holds no questions")
    if len({item.item_id for item in items}) != len(items):
        raise ValueError(f"{path.name} names two questions alike; give each its own id")
    return items


def _parse(entry: Mapping[str, Any], default_id: str, default_task: str) -> Item:
    question = str(entry["question"]).strip()
    item_id, task = str(entry.get("id", default_id)), str(entry.get("task", default_task))
    answer = entry["answer"]
    if "choices" not in entry:
        gold = tuple(str(text) for text in answer) if isinstance(answer, list) else (str(answer),)
        return Item(item_id, task, f"{MATH_INSTRUCTION}\n\n{question}", gold, "math")
    choices = [str(choice) for choice in entry["choices"]]
    letters = _LETTERS[: len(choices)]
    letter = letters[answer] if isinstance(answer, int) and answer >= 0 else str(answer).strip().upper()
    if len(letter) != 1 or letter not in letters:
        raise ValueError(f"answer {answer!r} is none of the {len(choices)} choices")
    options = "\n".join(f"{name}) {choice}" for name, choice in zip(letters, choices, strict=True))
    return Item(item_id, task, f"{CHOICE_INSTRUCTION}\n\n{question}\n\n{options}", (letter,), "choice")
