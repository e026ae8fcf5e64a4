"""Scores of an answer against what was expected, each between 0 and 1: needles, multiple choice, mathematics."""

import re
from collections.abc import Callable, Mapping, Sequence

from vllm_novakv.evaluation.items import Metric
from vllm_novakv.evaluation.math_answers import extract_math_answer, is_equal_math

# "A" and "I" are words as well: before another word they count only if a reason follows
_LETTER = (
    r"(?:\\(?:boxed|text|textbf|mathrm|mathbf)\s*\{|[\s*_$({\[])*([A-Z])(?![\w'’])"
    r"(?:(?<![AI])|(?!\s+(?!because\b|since\b|as\b|due\b)\w))"
)
_AFTER_COLON = re.compile(rf"\banswer\b[^:.\n]{{0,40}}:{_LETTER}", re.IGNORECASE)
_AFTER_IS = re.compile(rf"\b[Aa]nswer\s+is{_LETTER}")
_BOXED = re.compile(r"\\boxed\s*\{(?:\\(?:text|textbf|mathrm|mathbf)\s*\{)?[\s(]*([A-Z])[\s)]*\}")
_ALONE = re.compile(r"[\s*_$({\[]*([A-Za-z])[\s*_$)}\].:,]*")
_LEADING = re.compile(r"[\s*_(\[]*([A-Z])[*_]*[).\]:]")


def needle_recall(answer: str, expected: Sequence[str]) -> float:
    """Share of the expected strings that stand in the answer, ignoring case.

    Example: "It was 12 and ABC" against ("12", "abc", "7", "8") gives 0.5.

    Args:
        answer: what the model said.
        expected: gold strings, at least one.

    Returns:
        Partial credit, 0..1.

    Raises:
        ValueError: nothing is expected.

    Source: arXiv 2608.04074, section 8.1 (RULER's own scoring).
    """
    if not expected:
        raise ValueError("an item without expected strings cannot be scored; give at least one")
    lowered = answer.lower()
    return sum(text.lower() in lowered for text in expected) / len(expected)


def extract_choice(answer: str) -> str | None:
    r"""The letter that a model chose: the last of "Answer: B", "the answer is (B)" and "\boxed{B}", else a lone letter.

    A lone letter is an answer of one letter ("B", "(b).") or one that begins with a marked letter ("B) 4 m").

    Example: "Answer: A? No. Answer: **C**" gives "C"; "A good question" gives None.

    Args:
        answer: what the model said.

    Returns:
        A capital letter, or None if no letter was named.

    Source: engineering choice, in the spirit of the simple-evals template that arXiv 2608.04074, section 8.1 names.
    """
    named = [match for pattern in (_AFTER_COLON, _AFTER_IS, _BOXED) for match in pattern.finditer(answer)]
    if named:
        return max(named, key=lambda match: match.start(1))[1].upper()
    match = _ALONE.fullmatch(answer) or _LEADING.match(answer)
    return match[1].upper() if match else None


def choice_score(answer: str, expected: Sequence[str]) -> float:
    """1 if the letter that the answer names is the expected one, else 0.

    Args:
        answer: what the model said.
        expected: the gold letter, as a sequence of one.

    Returns:
        0 or 1.
    """
    return float(extract_choice(answer) in expected)


def math_score(answer: str, expected: Sequence[str]) -> float:
    """1 if the final answer of a solution equals any of the expected ones, else 0.

    Args:
        answer: a solution; see `extract_math_answer`.
        expected: gold answers, alternatives of each other.

    Returns:
        0 or 1.
    """
    found = extract_math_answer(answer)
    return float(found is not None and any(is_equal_math(found, gold) for gold in expected))


METRICS: Mapping[Metric, Callable[[str, Sequence[str]], float]] = {
    "needle_recall": needle_recall,
    "choice": choice_score,
    "math": math_score,
}
"""Scorers by name."""
