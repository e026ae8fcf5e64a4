"""RULER's eight needle tasks: sentences that give a key a value are hidden in a long text and asked for.

1. Draw keys and values; choose where each needle stands in the text.
2. Fill with sentences (a text's, a few repeated ones, or more needles) up to the wanted number of tokens.
3. Ask for the values of one key, or of several.

Which key, value and filler each task has is RULER's (arXiv 2404.06654, appendix B); the wording is our own, so scores
are comparable with each other, and only roughly with published ones.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from vllm_novakv.evaluation.items import Item
from vllm_novakv.evaluation.needle import SENTENCE_END, RenderChat
from vllm_novakv.evaluation.needle_words import NUM_WORD_PAIRS, Kind, draw_distinct

MAX_ANSWER_TOKENS = 128
"""Answer limit in tokens; four UUIDs and the words around them fit."""

NOISE = (
    "Rain falls on the roof.",
    "A train leaves the station.",
    "Somebody closes a window.",
    "The road goes on.",
    "Then it is evening again.",
)
NEEDLE = "The secret {kind} assigned to {key} is {value}."
INSTRUCTION = "Some secret {kind}s are hidden in the following text. Memorize them: you will be asked about them later."
ASK_ONE = "According to the text above, what is the secret {kind} assigned to {keys}? Give only the {kind}."
ASK_ALL = "According to the text above, what are all the secret {kind}s assigned to {keys}? List every one of them."
_SHOWN_KIND = {"word": "word", "number": "number", "uuid": "UUID"}

# a prompt may be this much shorter than asked for, except where one more sentence would already be too much
_LENGTH_TOLERANCE = 0.01
# needles are longer than this for every tokenizer, so that many distractors fill any prompt
_MIN_NEEDLE_TOKENS = 8


@dataclass(frozen=True)
class RulerTask:
    """One needle task.

    Attributes:
        filler: "noise" (a few sentences repeated), "text" (the haystack's sentences) or "needles" (other needles).
        key_kind: what keys look like.
        value_kind: what values look like.
        num_keys: keys with needles in the text, beside filler needles.
        num_values: needles, and so values, per key.
        num_queried: keys that the question asks for.
    """

    filler: Literal["noise", "text", "needles"]
    key_kind: Kind
    value_kind: Kind
    num_keys: int = 1
    num_values: int = 1
    num_queried: int = 1


TASKS = {
    "niah_single_1": RulerTask("noise", "word", "number"),
    "niah_single_2": RulerTask("text", "word", "number"),
    "niah_single_3": RulerTask("text", "word", "uuid"),
    "niah_multikey_1": RulerTask("text", "word", "number", num_keys=4),
    "niah_multikey_2": RulerTask("needles", "word", "number"),
    "niah_multikey_3": RulerTask("needles", "uuid", "uuid"),
    "niah_multivalue": RulerTask("text", "word", "number", num_values=4),
    "niah_multiquery": RulerTask("text", "word", "number", num_keys=4, num_queried=4),
}
"""The eight tasks by RULER's names."""


def build_ruler_items(
    name: str, haystack: str, render_chat: RenderChat, prompt_tokens: int, num_items: int, seed: int = 0
) -> list[Item]:
    """Prompts of one task at one length; the first needle of item i of n stands at depth (i + ½)/n, others anywhere.

    Args:
        name: key of `TASKS`.
        haystack: filler text; only its sentences are used, each at most once per prompt. Tasks whose filler is not
            "text" ignore it.
        render_chat: token ids of the chat prompt for a user message.
        prompt_tokens: longest prompt allowed, in tokens; the result is shorter by 1 % or one sentence at most.
        num_items: prompts to build.
        seed: of keys, values and places; the same seed gives the same prompts.

    Returns:
        Items with prompt token ids and metric "needle_recall"; `expected` holds every value asked for.

    Raises:
        ValueError: unknown task, no items, a length that leaves no room for the needles, or a haystack too short.

    Source: arXiv 2404.06654, appendix B.
    """
    if name not in TASKS:
        raise ValueError(f"task {name!r} is unknown; choose from {', '.join(TASKS)}")
    if num_items < 1:
        raise ValueError(f"num_items={num_items} must be at least 1")
    task = TASKS[name]
    sentences = [part.strip() for part in SENTENCE_END.split(haystack) if part.strip()] if task.filler == "text" else []
    items = []
    for index in range(num_items):
        # one generator per item: a run with more items repeats those of a shorter run, but for their depth
        generator = random.Random(f"{name}/{prompt_tokens}/{index}/{seed}")
        message, expected, token_ids = _build_prompt(
            task, sentences, render_chat, prompt_tokens, (index + 0.5) / num_items, generator
        )
        items.append(
            Item(
                item_id=f"{name}/{prompt_tokens}/{index}",
                task=name,
                message=message,
                expected=expected,
                metric="needle_recall",
                prompt_token_ids=tuple(token_ids),
            )
        )
    return items


def _build_prompt(
    task: RulerTask,
    sentences: Sequence[str],
    render_chat: RenderChat,
    prompt_tokens: int,
    first_depth: float,
    generator: random.Random,
) -> tuple[str, tuple[str, ...], Sequence[int]]:
    num_needles = task.num_keys * task.num_values
    num_fillers = _num_filler_needles(task, prompt_tokens)
    keys = draw_distinct(task.key_kind, task.num_keys + num_fillers, generator)
    values = draw_distinct(task.value_kind, num_needles + num_fillers, generator)
    kind = _SHOWN_KIND[task.value_kind]
    # value i belongs to key i // num_values
    needles = [NEEDLE.format(kind=kind, key=keys[i // task.num_values], value=values[i]) for i in range(num_needles)]
    depths = [first_depth, *(generator.random() for _ in range(num_needles - 1))]
    fillers = _fillers(task, sentences, prompt_tokens, generator)
    if task.filler == "needles":
        pairs = zip(keys[task.num_keys :], values[num_needles:], strict=True)
        fillers = [NEEDLE.format(kind=kind, key=key, value=value) for key, value in pairs]
    expected = tuple(values[: task.num_queried * task.num_values])
    question = ASK_ONE if len(expected) == 1 else ASK_ALL
    asked = _join_words(keys[: task.num_queried])
    head, tail = INSTRUCTION.format(kind=kind), question.format(kind=kind, keys=asked)

    def write(num_fillers: int) -> str:
        return f"{head}\n\n{' '.join(place_needles(fillers[:num_fillers], needles, depths))}\n\n{tail}"

    num_fitting = _largest_fitting(lambda count: len(render_chat(write(count))), prompt_tokens, len(fillers))
    message = write(num_fitting)
    return message, expected, render_chat(message)


def place_needles(fillers: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> list[str]:
    """Put each needle before the filler sentence at round(depth · number of fillers), 0 = start and 1 = end.

    Example: fillers A B C D, needles X Y at depths 0.5 and 0 give Y A B X C D.

    Args:
        fillers: sentences in text order.
        needles: sentences to add.
        depths: relative place of each needle, 0..1; needles at the same place keep their order.

    Returns:
        All sentences in order.
    """
    places = sorted((round(depth * len(fillers)), order) for order, depth in enumerate(depths))
    text: list[str] = []
    done = 0
    for place, order in places:
        text.extend(fillers[done:place])
        text.append(needles[order])
        done = place
    return [*text, *fillers[done:]]


def _fillers(task: RulerTask, sentences: Sequence[str], prompt_tokens: int, generator: random.Random) -> list[str]:
    if task.filler == "noise":
        # no sentence is shorter than three tokens
        return [NOISE[i % len(NOISE)] for i in range(prompt_tokens // 3)]
    if not sentences:
        return []
    start = generator.randrange(len(sentences))
    return [*sentences[start:], *sentences[:start]]


def _num_filler_needles(task: RulerTask, prompt_tokens: int) -> int:
    if task.filler != "needles":
        return 0
    enough = prompt_tokens // _MIN_NEEDLE_TOKENS
    return min(enough, NUM_WORD_PAIRS - task.num_keys) if task.key_kind == "word" else enough


def _largest_fitting(measure: Callable[[int], int], limit: int, available: int) -> int:
    """Filler sentences that fit into `limit` tokens, found by interpolation between what fits and what does not."""
    empty = measure(0)
    if empty > limit:
        raise ValueError(f"prompt_tokens={limit} leaves no text around the needles; {empty} are needed without any")
    fits, length, too_many = 0, empty, available + 1
    tokens_per_sentence = 20.0
    while limit - length > limit * _LENGTH_TOLERANCE and fits + 1 < too_many:
        wanted = fits + max(1, int((limit - length) / tokens_per_sentence))
        if wanted >= too_many:
            wanted = max(fits + 1, (fits + too_many) // 2)
        result = measure(wanted)
        if result > limit:
            too_many = wanted
        else:
            fits, length = wanted, result
        tokens_per_sentence = max(1.0, (result - empty) / wanted)
    if fits == available and limit - length > limit * _LENGTH_TOLERANCE:
        raise ValueError(f"the haystack's {available} sentences give {length} tokens; {limit} need a longer text")
    return fits


def _join_words(words: Sequence[str]) -> str:
    """Example: ("a", "b", "c") gives "a, b and c"."""
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} and {words[-1]}"
