"""Calibration text: read a prompt file, turn it into sequences of tokens, and keep the last part for measuring.

read_prompts    .txt, .jsonl or .csv file -> prompts (strings)
plan_text       prompts and a tokenizer -> sequences for the fit and one held-out sequence
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_PROMPTS = Path(__file__).with_name("default_prompts.txt")
DEFAULT_MAX_TOKENS = 131_072
DEFAULT_SEQ_LEN = 32_768
DEFAULT_SEQ_LEN_CPU = 4096

SAMPLES_PER_CENTROID = 16
"""Fewest tokens per centroid that k-means may train on: below this, codebooks memorise their samples."""

_MIN_HELDOUT_TOKENS = 256
_MAX_HELDOUT_TOKENS = 2048
_HELDOUT_RATIO = 16

_QUESTION_COLUMNS = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
_TEXT_COLUMNS = ("question", "prompt", "text")
_OPTION_LETTERS = "ABCD"


@dataclass(frozen=True)
class TextPlan:
    """Token ids for a run.

    Attributes:
        sequences: for the fit; every one but the last has the sequence length.
        heldout: one sequence of the text that follows.
        num_available: tokens that the whole text gives.
    """

    sequences: tuple[tuple[int, ...], ...]
    heldout: tuple[int, ...]
    num_available: int


def read_prompts(path: Path, columns: Sequence[str] | None = None, seed: int = 0) -> list[str]:
    """Read the prompts of a file.

    - `.txt`: the whole file is one prompt.
    - `.jsonl`: one prompt per line; a line is a string or an object.
    - `.csv`: one prompt per row; the first row names the columns.

    A row or object becomes the chosen columns, joined by newlines. Without a choice: a multiple-choice question
    (columns Question, Correct Answer, Incorrect Answer 1 to 3) becomes the question with its options A to D, whose
    order is drawn from the seed so that it says nothing about the answer; otherwise the first column named question,
    prompt or text.

    Args:
        path: the file, UTF-8.
        columns: column names, spelled as in the file; None for the default.
        seed: of the order of options.

    Returns:
        The prompts that are not blank, in file order.

    Raises:
        ValueError: missing, unreadable or empty file, unknown ending, unknown column, or a malformed line.

    Source: arXiv 2608.04074, section 5 (calibration): questions with their options, no answers.
    """
    if not path.is_file():
        raise ValueError(f"prompt file {path} does not exist; --prompts needs a .txt, .jsonl or .csv file")
    suffix = path.suffix.lower()
    if suffix not in (".txt", ".jsonl", ".csv"):
        raise ValueError(f"prompt file {path} ends in {suffix!r}; --prompts reads .txt, .jsonl and .csv: convert it")
    if columns is not None and suffix == ".txt":
        raise ValueError(f"--prompt-columns does not apply to {path}: a .txt file is read whole; leave the option out")
    try:
        if suffix == ".txt":
            prompts: Iterator[str] = iter([path.read_text(encoding="utf-8")])
        elif suffix == ".jsonl":
            prompts = _read_jsonl(path, columns, random.Random(seed))
        else:
            prompts = _read_csv(path, columns, random.Random(seed))
        kept = [prompt.strip() for prompt in prompts if prompt.strip()]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(
            f"prompt file {path} cannot be read ({error}); it must be readable UTF-8 text: check the path and encoding"
        ) from error
    if not kept:
        raise ValueError(f"prompt file {path} holds no text; calibration needs thousands of tokens: use another file")
    return kept


def _read_jsonl(path: Path, columns: Sequence[str] | None, order: random.Random) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path} line {number} is not JSON ({error}); a .jsonl file holds one JSON value per line: fix it"
                ) from error
            if isinstance(row, str) and columns is None:
                yield row
            elif isinstance(row, dict):
                yield _prompt_of_row(row, columns, order, f"{path} line {number}")
            else:
                allowed = "an object, as --prompt-columns asks for" if columns else "an object or a string"
                raise ValueError(
                    f"{path} line {number} is a JSON {type(row).__name__}; a line must be {allowed}: fix the line"
                )


def _read_csv(path: Path, columns: Sequence[str] | None, order: random.Random) -> Iterator[str]:
    csv.field_size_limit(1 << 24)
    with path.open(encoding="utf-8-sig", newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines), start=1):
            yield _prompt_of_row(row, columns, order, f"{path} row {number}")


def _prompt_of_row(row: dict[str, Any], columns: Sequence[str] | None, order: random.Random, where: str) -> str:
    """Text of one row; the random order advances once per multiple-choice row."""
    if columns is not None:
        missing = [column for column in columns if column not in row]
        if missing:
            raise ValueError(
                f"{where} has no column {', '.join(missing)}; it has {_listed(row)}: "
                "choose among them with --prompt-columns"
            )
        return "\n".join(str(row[column] or "").strip() for column in columns)
    if all(column in row for column in _QUESTION_COLUMNS):
        question, *options = (str(row[column] or "").strip() for column in _QUESTION_COLUMNS)
        order.shuffle(options)
        lettered = (f"{letter}) {option}" for letter, option in zip(_OPTION_LETTERS, options, strict=True))
        return "\n".join((question, *lettered))
    by_lower_name = {str(name).lower(): name for name in reversed(row)}
    for column in _TEXT_COLUMNS:
        if column in by_lower_name:
            return str(row[by_lower_name[column]] or "")
    raise ValueError(
        f"{where} has none of the columns {', '.join(_TEXT_COLUMNS)}; it has {_listed(row)}: "
        "choose some with --prompt-columns"
    )


def _listed(row: dict[str, Any], limit: int = 12) -> str:
    names = [str(name) for name in row]
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def heldout_tokens(num_tokens: int) -> int:
    """Size of the held-out text: num_tokens / 16, between 256 and 2,048.

    Args:
        num_tokens: tokens that the fit uses.

    Returns:
        Tokens.

    Source: engineering choice: enough query-key pairs for stable figures at a twentieth of the run.
    """
    return min(_MAX_HELDOUT_TOKENS, max(_MIN_HELDOUT_TOKENS, num_tokens // _HELDOUT_RATIO))


def check_token_counts(num_tokens: int | None, max_samples: int, num_centroids: int) -> None:
    """Refuse a fit that is too small for its codebooks: min(num_tokens, max_samples) ≥ 16 · num_centroids.

    Args:
        num_tokens: tokens asked for; None if the text decides.
        max_samples: most tokens per head that k-means may use.
        num_centroids: codebook size.

    Raises:
        ValueError: too few.

    Source: engineering choice, see `SAMPLES_PER_CENTROID`.
    """
    needed = SAMPLES_PER_CENTROID * num_centroids
    for name, count in (("--num-tokens", num_tokens), ("--max-samples", max_samples)):
        if count is not None and count < needed:
            raise ValueError(
                f"{name} {count} is too small for {num_centroids} centroids; k-means needs at least "
                f"{SAMPLES_PER_CENTROID} tokens per centroid, {needed} in all: raise {name} (32768 is a good start)"
            )


def plan_text(
    prompts: Sequence[str],
    encode: Callable[[str], Sequence[int]],
    prefix: Sequence[int],
    num_tokens: int | None,
    seq_len: int,
    min_tokens: int,
) -> TextPlan:
    """Concatenate prompts and cut them: [sequences of seq_len tokens | held-out sequence].

    Prompts are separated by a blank line. Every sequence begins with `prefix`, which counts as part of it.

    Example: 20 tokens of text, `prefix` of 1, `num_tokens` 12, `seq_len` 8 give sequences of 8 (7 of text) and 4 (3 of
    text); the held-out sequence starts at token 10 of the text.

    Args:
        prompts: texts, in order.
        encode: text to token ids, without special tokens.
        prefix: ids that the tokenizer puts before every text (a beginning-of-text token), or none.
        num_tokens: tokens for the fit; None takes what the text gives, at most 131,072.
        seq_len: tokens per sequence, prefix included.
        min_tokens: fewest tokens that a fit may use.

    Returns:
        The sequences.

    Raises:
        ValueError: the text is shorter than needed, or sequences are too short.

    Source: arXiv 2608.04074, section 5 (calibration): prompts concatenated so that keys cover the RoPE positions.
    """
    room = seq_len - len(prefix)
    if room < 1:
        raise ValueError(f"--seq-len {seq_len} leaves no room beside {len(prefix)} special tokens: raise --seq-len")
    text = _encoded(prompts, encode, None if num_tokens is None else num_tokens + heldout_tokens(num_tokens))
    wanted = num_tokens if num_tokens is not None else _affordable_tokens(len(text), room, len(prefix))
    num_heldout = min(heldout_tokens(wanted), seq_len)
    if num_tokens is None and wanted < min_tokens:
        raise ValueError(
            f"the prompts give {len(text)} tokens; a fit needs at least {min_tokens} and {num_heldout} more for "
            "measuring: use a longer prompt file"
        )
    lengths = [seq_len] * (wanted // seq_len) + ([wanted % seq_len] if wanted % seq_len > len(prefix) else [])
    text_lengths = [length - len(prefix) for length in (*lengths, num_heldout)]
    if len(text) < sum(text_lengths):
        raise ValueError(
            f"the prompts give {len(text)} tokens; --num-tokens {wanted} needs {wanted} and {num_heldout} more for "
            f"measuring: use a longer prompt file or --num-tokens {max(0, len(text) - num_heldout)} or less"
        )
    sequences = []
    start = 0
    for length in text_lengths:
        sequences.append((*prefix, *text[start : start + length]))
        start += length
    return TextPlan(tuple(sequences[:-1]), sequences[-1], len(text))


def _encoded(prompts: Sequence[str], encode: Callable[[str], Sequence[int]], enough: int | None) -> list[int]:
    """Token ids of the prompts, up to the prompt that makes them enough."""
    ids: list[int] = []
    for index, prompt in enumerate(prompts):
        ids.extend(encode(prompt if index == 0 else f"\n\n{prompt}"))
        if len(ids) >= (enough if enough is not None else DEFAULT_MAX_TOKENS + _MAX_HELDOUT_TOKENS):
            break
    return ids


def _affordable_tokens(num_text_tokens: int, room: int, num_prefix: int) -> int:
    """Most tokens (prefixes included) for the fit such that the held-out text is left over."""
    total = num_text_tokens + (num_text_tokens // room) * num_prefix
    by_ratio = total * _HELDOUT_RATIO // (_HELDOUT_RATIO + 1)
    return max(0, min(DEFAULT_MAX_TOKENS, total - _MIN_HELDOUT_TOKENS, max(by_ratio, total - _MAX_HELDOUT_TOKENS)))
