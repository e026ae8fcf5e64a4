"""Single-needle retrieval: one sentence with a number is hidden in a long text, and the model is asked for the number.

1. Cut the haystack to what fits beside needle, question and chat template.
2. Put the needle at the sentence boundary nearest to the wanted depth.
3. Wrap it in the chat template, let the model answer, look for the number in the answer.

Source: the single-needle task of RULER, arXiv 2404.06654.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_novakv.evaluation.statistics import Interval, wilson_interval

Tokenize = Callable[[str], Sequence[int]]
"""Token ids of a text."""
RenderChat = Callable[[str], Sequence[int]]
"""Token ids of a chat prompt whose only user message is the text, up to where the assistant begins to answer."""
Generate = Callable[[Sequence[Sequence[int]]], Sequence[str]]
"""Greedy answers to prompts given as token ids."""

CITIES = (
    "Aarhus",
    "Bergen",
    "Cusco",
    "Dakar",
    "Esfahan",
    "Fukuoka",
    "Galway",
    "Hobart",
    "Izmir",
    "Jaipur",
    "Kumasi",
    "Leipzig",
    "Mombasa",
    "Nantes",
    "Oaxaca",
    "Porto",
    "Quito",
    "Riga",
    "Salta",
    "Tampere",
    "Utrecht",
    "Valencia",
    "Windhoek",
    "Yerevan",
    "Zagreb",
)
INSTRUCTION = (
    "Somewhere in the text below stands the locker code of a station. Read the text, then answer the question."
)
NEEDLE = " The locker code of {city} station is {number}. "
QUESTION = "What is the locker code of {city} station? Reply with the number only."
SAMPLE_CHARACTERS = 200_000
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class NeedleCase:
    """One prompt with a hidden number.

    Attributes:
        prompt_token_ids: the whole chat prompt, at most the requested length.
        depth: where the needle was wanted, 0 = start and 1 = end of the text.
        answer: the number to find, as digits.
    """

    prompt_token_ids: tuple[int, ...]
    depth: float
    answer: str


@dataclass(frozen=True)
class NeedleResult:
    """Answers of a model to a list of cases, in their order."""

    depths: tuple[float, ...]
    expected: tuple[str, ...]
    answers: tuple[str, ...]

    @property
    def is_found(self) -> tuple[bool, ...]:
        return tuple(has_number(answer, number) for answer, number in zip(self.answers, self.expected, strict=True))

    @property
    def num_found(self) -> int:
        return sum(self.is_found)

    @property
    def rate(self) -> Interval:
        return wilson_interval(self.num_found, len(self.answers))


def has_number(answer: str, number: str) -> bool:
    """Whether a number stands in an answer as a whole, thousands separators allowed.

    Example: "It is 73,512." holds "73512"; "173512" does not.
    """
    plain = re.sub(r"(?<=\d),(?=\d{3})", "", answer)
    return re.search(rf"(?<!\d){re.escape(number)}(?!\d)", plain) is not None


def insert_at_depth(haystack: str, needle: str, depth: float) -> str:
    """Put a needle at the sentence boundary nearest to a relative depth.

    Example: `insert_at_depth("One. Two. Three.", " X. ", 0.5)` gives "One. Two. X. Three.": sentences begin at
    characters 0, 5 and 10, the text ends at 16, and 10 is nearest to the middle, 8.

    Args:
        haystack: text of at least one sentence.
        needle: text with its own spaces around it.
        depth: 0 (before everything) to 1 (after everything).

    Raises:
        ValueError: the depth is outside 0..1.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth={depth} must lie between 0 (start) and 1 (end)")
    boundaries = [0, *(match.end() for match in SENTENCE_END.finditer(haystack)), len(haystack)]
    target = depth * len(haystack)
    position = min(boundaries, key=lambda boundary: abs(boundary - target))
    return f"{haystack[:position].rstrip()}{needle}{haystack[position:]}".strip()


def build_needle_cases(
    haystack: str,
    tokenize: Tokenize,
    render_chat: RenderChat,
    prompt_tokens: int,
    num_cases: int,
    seed: int = 0,
) -> list[NeedleCase]:
    """Prompts of a given length with one needle each, at depths (i + ½)/n, i = 0..n−1.

    Args:
        haystack: filler text, at least as long as one prompt; each case starts at another place of it.
        tokenize: token ids of a text, used to measure its length.
        render_chat: token ids of the chat prompt for a user message.
        prompt_tokens: longest prompt allowed; the result is at most 2 % shorter.
        num_cases: prompts to build.
        seed: of the numbers, the cities and the places.

    Returns:
        The cases, shallow needles first.

    Raises:
        ValueError: the haystack is too short, or the length leaves no room for text around the needle.
    """
    if num_cases < 1:
        raise ValueError(f"num_cases={num_cases} must be at least 1")
    generator = random.Random(seed)
    sample = haystack[:SAMPLE_CHARACTERS]
    characters_per_token = len(sample) / max(1, len(tokenize(sample)))
    cases = []
    for index in range(num_cases):
        depth = (index + 0.5) / num_cases
        city = generator.choice(CITIES)
        number = str(generator.randrange(10_000, 100_000))
        start = generator.random()
        cases.append(
            _build_case(haystack, render_chat, prompt_tokens, characters_per_token, depth, city, number, start)
        )
    return cases


def _build_case(
    haystack: str,
    render_chat: RenderChat,
    prompt_tokens: int,
    characters_per_token: float,
    depth: float,
    city: str,
    number: str,
    start: float,
) -> NeedleCase:
    needle = NEEDLE.format(city=city, number=number)
    question = QUESTION.format(city=city)

    def render(num_characters: int) -> Sequence[int]:
        first = int(start * max(0, len(haystack) - num_characters))
        text = insert_at_depth(haystack[first : first + num_characters], needle, depth)
        return render_chat(f"{INSTRUCTION}\n\n{text}\n\n{question}")

    overhead = len(render(0))
    num_characters = int((prompt_tokens - overhead) * characters_per_token)
    if num_characters < len(needle):
        raise ValueError(f"prompt_tokens={prompt_tokens} leaves no text around the needle; {2 * overhead} is a minimum")
    token_ids = render(num_characters)
    # the text's density varies: correct the length by what is missing until it fits
    for _ in range(20):
        missing = prompt_tokens - len(token_ids)
        if 0 <= missing <= prompt_tokens * 0.02:
            break
        num_characters += int((missing - prompt_tokens * 0.005) * characters_per_token)
        if num_characters > len(haystack):
            raise ValueError(f"the haystack has {len(haystack)} characters; {prompt_tokens} tokens need more")
        token_ids = render(num_characters)
    return NeedleCase(prompt_token_ids=tuple(token_ids), depth=depth, answer=number)


def measure_needles(generate: Generate, cases: Sequence[NeedleCase]) -> NeedleResult:
    """Ask a model for every needle: rate = found / cases.

    Args:
        generate: greedy answers to prompts given as token ids.
        cases: see `build_needle_cases`.

    Raises:
        ValueError: the callable gives another number of answers than there are cases.
    """
    answers = generate([case.prompt_token_ids for case in cases])
    if len(answers) != len(cases):
        raise ValueError(f"asked {len(cases)} questions, got {len(answers)} answers")
    return NeedleResult(
        depths=tuple(case.depth for case in cases),
        expected=tuple(case.answer for case in cases),
        answers=tuple(answers),
    )
