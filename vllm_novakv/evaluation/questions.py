"""Question files: multiple choice and mathematics as JSON lines, or GPQA's CSV, turned into items."""

import csv
import json
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from vllm_novakv.evaluation.items import Item

CHOICE_INSTRUCTION = "Solve the problem and choose one option. End with a line of the form 'Answer: X', X its letter."
MATH_INSTRUCTION = "Solve the problem step by step and put the final answer into \\boxed{}."
QUESTION_COLUMN = "Question"
OPTION_COLUMNS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")

ReadEntry = Callable[[], Mapping[str, Any]]
"""Parses one entry of a file; it is called where a failure can be told with the entry's number."""

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def load_questions(path: Path, limit: int | None = None, seed: int = 0) -> list[Item]:
    """Items of a file of questions, .jsonl or .csv.

    JSON lines: those with "choices" are multiple choice, the others mathematics. Example lines:
    `{"question": "2 + 2?", "choices": ["3", "4"], "answer": "B"}` and
    `{"question": "What is 1/2 + 1/4?", "answer": "3/4"}`. The answer to a choice is its letter or its index from 0;
    the answer to a problem is a string, a number, or a list of alternatives. An optional "id" names the item, an
    optional "task" what it is averaged with (default: the file's name without its ending).

    CSV in GPQA's columns, "Question", "Correct Answer" and "Incorrect Answer 1" to "3": multiple choice, the order of
    the options drawn for each row. Other columns are not read.

    Args:
        path: the file, UTF-8.
        limit: keep the first so many; None keeps all.
        seed: of the order of a .csv file's options; a row has the same order whatever the limit.

    Returns:
        Items without prompt token ids, in file order.

    Raises:
        ValueError: a line is not a question, a name occurs twice, or the file holds none.

    Source: engineering choice; the columns are those of arXiv 2311.12022 (GPQA).
    """
    entries = _read_csv(path, seed) if path.suffix.lower() == ".csv" else _read_json_lines(path)
    items: list[Item] = []
    for number, read_entry in entries:
        if limit is not None and len(items) == limit:
            break
        try:
            items.append(_parse(read_entry(), f"{path.stem}/{number}", path.stem))
        except (ValueError, TypeError, LookupError) as error:
            raise ValueError(f"line {number} of {path.name} is not a question: {error!r}") from error
    if not items:
        raise ValueError(f"{path.name} holds no questions")
    if len({item.item_id for item in items}) != len(items):
        raise ValueError(f"{path.name} names two questions alike; give each its own id")
    return items


def _read_json_lines(path: Path) -> Iterator[tuple[int, ReadEntry]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            yield number, partial(json.loads, line)


def _read_csv(path: Path, seed: int) -> Iterator[tuple[int, ReadEntry]]:
    # a byte order mark would become part of the first column's name
    with path.open(encoding="utf-8-sig", newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines), start=1):
            yield number, partial(_choices_of_row, row, random.Random(f"{seed}/{number}"))


def _choices_of_row(row: Mapping[str, str | None], order: random.Random) -> dict[str, Any]:
    missing = [column for column in (QUESTION_COLUMN, *OPTION_COLUMNS) if not (row.get(column) or "").strip()]
    if missing:
        raise ValueError(f"column {missing[0]!r} is missing or empty")
    options = [str(row[column]).strip() for column in OPTION_COLUMNS]
    places = list(range(len(options)))
    order.shuffle(places)
    # the right answer is option 0 before the shuffle
    return {
        "question": row[QUESTION_COLUMN],
        "choices": [options[place] for place in places],
        "answer": places.index(0),
    }


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
