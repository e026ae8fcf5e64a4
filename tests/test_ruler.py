"""RULER's needle tasks: what a prompt holds, how long it is, that a seed repeats it, how answers are scored."""

import random
import re
import uuid

import pytest

from vllm_novakv.evaluation.needle_words import NUM_WORD_PAIRS, draw_distinct
from vllm_novakv.evaluation.ruler import NOISE, TASKS, build_ruler_items, place_needles
from vllm_novakv.evaluation.scoring import needle_recall

TEXT = "the boat went slowly along a grey shore while gulls cried over cold water and nobody spoke again"
SENTENCE = re.compile(r"The secret (\w+) assigned to (\S+) is (\S+)\.")


def words_as_tokens(text):
    """A tokenizer whose tokens are words and signs; ids are lengths, which is all that is needed here."""
    return [len(word) for word in re.findall(r"\w+|\S", text)]


def essay(num_sentences, seed=0):
    generator = random.Random(seed)
    return " ".join(
        " ".join(generator.choices(TEXT.split(), k=generator.randrange(6, 25))).capitalize() + "."
        for _ in range(num_sentences)
    )


def build(name, prompt_tokens=1_500, num_items=3, seed=0):
    return build_ruler_items(name, essay(400), words_as_tokens, prompt_tokens, num_items, seed)


@pytest.mark.parametrize("name", TASKS)
def test_every_task_hides_what_it_asks_for(name):
    task = TASKS[name]
    for item in build(name):
        needles = SENTENCE.findall(item.message)
        asked = item.message.rsplit("assigned to ", 1)[1]
        values = {value for _, key, value in needles if re.search(rf"\b{key}\b", asked)}
        assert set(item.expected) == values
        assert len(item.expected) == task.num_queried * task.num_values
        assert len({value for _, _, value in needles}) == len(needles)
        if task.filler == "needles":
            assert len(needles) > 20
        else:
            assert len(needles) == task.num_keys * task.num_values
        assert needle_recall(" and ".join(item.expected).upper(), item.expected) == 1.0


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("prompt_tokens", [400, 1_500, 3_000], ids="tok{}".format)
def test_prompts_have_the_wanted_length(name, prompt_tokens):
    for item in build(name, prompt_tokens, num_items=2):
        longest_sentence = 40
        assert prompt_tokens - max(longest_sentence, prompt_tokens * 0.01) <= len(item.prompt_token_ids)
        assert len(item.prompt_token_ids) <= prompt_tokens
        assert list(item.prompt_token_ids) == words_as_tokens(item.message)


def test_values_look_as_the_tasks_say():
    number = build("niah_single_1")[0].expected[0]
    assert re.fullmatch(r"[1-9]\d{6}", number)
    assert uuid.UUID(build("niah_single_3")[0].expected[0]).version == 4
    assert NOISE[0] in build("niah_single_1")[0].message
    assert "gulls" in build("niah_single_2")[0].message


def test_first_needle_stands_at_evenly_spread_depths():
    items = build("niah_single_2", prompt_tokens=3_000, num_items=10)
    for index, item in enumerate(items):
        depth = item.message.index(item.expected[0]) / len(item.message)
        assert depth == pytest.approx((index + 0.5) / 10, abs=0.05)


def test_the_same_seed_gives_the_same_prompts():
    for name in TASKS:
        assert build(name, 600, 2, seed=1) == build(name, 600, 2, seed=1)
        assert build(name, 600, 1, seed=1)[0].message != build(name, 600, 1, seed=2)[0].message


def test_needles_are_placed_by_depth():
    assert place_needles(list("ABCD"), ["X", "Y"], [0.5, 0.0]) == ["Y", "A", "B", "X", "C", "D"]
    assert place_needles([], ["X", "Y"], [0.9, 0.1]) == ["X", "Y"]
    assert place_needles(["A"], ["X"], [1.0]) == ["A", "X"]


@pytest.mark.parametrize(
    ("name", "prompt_tokens", "words"),
    [
        pytest.param("niah_single_2", 20, "leaves no text", id="too-short"),
        pytest.param("niah_single_2", 100_000, "need a longer text", id="haystack-too-short"),
        pytest.param("niah_double", 1_000, "unknown; choose from niah_single_1", id="unknown-task"),
    ],
)
def test_impossible_prompts_are_refused(name, prompt_tokens, words):
    with pytest.raises(ValueError, match=words):
        build(name, prompt_tokens)


def test_at_least_one_item_is_wanted():
    with pytest.raises(ValueError, match="num_items=0"):
        build("niah_single_1", num_items=0)


@pytest.mark.parametrize("kind", ["word", "number", "uuid"])
def test_drawn_strings_are_distinct_and_repeat_with_their_seed(kind):
    first = draw_distinct(kind, 2_000, random.Random(5))
    assert len(set(first)) == 2_000
    assert first == draw_distinct(kind, 2_000, random.Random(5))


def test_word_pairs_are_distinct_to_the_last():
    assert len(set(draw_distinct("word", NUM_WORD_PAIRS, random.Random(0)))) == NUM_WORD_PAIRS
    with pytest.raises(ValueError, match="different word pairs"):
        draw_distinct("word", NUM_WORD_PAIRS + 1, random.Random(0))
