"""Perplexity, needles, intervals and records against answers computed by hand."""

import json
import math
import random
import re

import numpy as np
import pytest

from vllm_novakv.evaluation import record
from vllm_novakv.evaluation.needle import (
    NeedleResult,
    build_needle_cases,
    has_number,
    insert_at_depth,
    measure_needles,
)
from vllm_novakv.evaluation.perplexity import PerplexityResult, measure_perplexity, split_windows
from vllm_novakv.evaluation.record import portable_argument, write_record
from vllm_novakv.evaluation.statistics import paired_perplexity_ratio, summarize, wilson_interval


def test_uniform_model_has_the_vocabulary_size_as_perplexity():
    vocab_size = 49_152
    windows = split_windows(list(range(5_000)), window_tokens=1_000)
    result = measure_perplexity(lambda ws: [[-math.log(vocab_size)] * (len(w) - 1) for w in ws], windows)
    assert result.perplexity == pytest.approx(vocab_size, rel=1e-12)
    assert result.num_tokens == 5 * 999


def test_perplexity_of_two_known_probabilities():
    # probabilities 1/2, 1/8 and 1/4: the geometric mean is 1/4
    result = measure_perplexity(lambda _: [[math.log(1 / 2), math.log(1 / 8)], [math.log(1 / 4)]], [[1, 2, 3], [4, 5]])
    assert result.perplexity == pytest.approx(4.0)
    assert result.window_tokens == (2, 1)
    assert result.window_nll == pytest.approx((math.log(16), math.log(4)))


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        pytest.param([[-1.0]], "needs one value less", id="too-few-values"),
        pytest.param([], "got answers for 0", id="too-few-windows"),
        pytest.param([[-1.0, 0.5]], "not log-probabilities", id="positive"),
        pytest.param([[-1.0, float("nan")]], "not log-probabilities", id="nan"),
        pytest.param([[-1.0, float("-inf")]], "not log-probabilities", id="infinite"),
    ],
)
def test_perplexity_refuses_answers_that_cannot_be_right(answers, words):
    with pytest.raises(ValueError, match=words):
        measure_perplexity(lambda _: answers, [[1, 2, 3]])


def test_windows_are_consecutive_and_the_rest_is_left_out():
    assert split_windows(range(10), 3) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_limited_windows_are_spread_from_first_to_last():
    assert split_windows(range(10), 3, max_windows=2) == [[0, 1, 2], [6, 7, 8]]
    assert [window[0] for window in split_windows(range(100), 10, max_windows=4)] == [0, 30, 60, 90]
    assert split_windows(range(10), 3, max_windows=1) == [[0, 1, 2]]
    assert len(split_windows(range(10), 3, max_windows=99)) == 3


def test_text_shorter_than_a_window_is_refused():
    with pytest.raises(ValueError, match="has 4 tokens and a window needs 5"):
        split_windows(range(4), 5)


@pytest.mark.parametrize(
    ("answer", "is_found"),
    [
        ("73512", True),
        ("The code is 73,512.", True),
        ("173512", False),
        ("735124", False),
        ("7351", False),
        ("", False),
    ],
)
def test_number_must_stand_alone_in_the_answer(answer, is_found):
    assert has_number(answer, "73512") is is_found


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (0.0, "X. One. Two. Three."),
        (0.25, "One. X. Two. Three."),
        (0.5, "One. Two. X. Three."),
        (1.0, "One. Two. Three. X."),
    ],
)
def test_needle_goes_to_the_nearest_sentence_boundary(depth, expected):
    assert insert_at_depth("One. Two. Three.", " X. ", depth) == expected


def test_depth_outside_the_text_is_refused():
    with pytest.raises(ValueError, match=r"depth=1\.5"):
        insert_at_depth("One.", " X. ", 1.5)


def words_as_tokens(text: str) -> list[int]:
    """A tokenizer whose every token is a word or a sign; the id only has to be reversible in `TEXTS`."""
    return [TEXTS.setdefault(word, len(TEXTS)) for word in re.findall(r"\w+|\S", text)]


TEXTS: dict[str, int] = {}


def haystack_of(num_sentences: int) -> str:
    generator = random.Random(1)
    sentences = [
        " ".join(generator.choice(["rain", "river", "stone", "cloud", "a"]) for _ in range(generator.randrange(4, 20)))
        for _ in range(num_sentences)
    ]
    return ". ".join(sentences) + "."


@pytest.mark.parametrize("prompt_tokens", [200, 1_000, 4_096])
def test_needle_prompts_have_the_wanted_length_and_depth(prompt_tokens):
    cases = build_needle_cases(
        haystack_of(2_000), words_as_tokens, words_as_tokens, prompt_tokens=prompt_tokens, num_cases=10
    )
    assert [case.depth for case in cases] == pytest.approx([0.05 + 0.1 * i for i in range(10)])
    assert len({case.answer for case in cases}) == 10
    for case in cases:
        assert prompt_tokens * 0.97 <= len(case.prompt_token_ids) <= prompt_tokens
        place = case.prompt_token_ids.index(TEXTS[case.answer]) / len(case.prompt_token_ids)
        assert place == pytest.approx(case.depth, abs=0.25 if prompt_tokens == 200 else 0.05)


def test_needle_prompts_repeat_with_their_seed():
    def build(seed):
        return build_needle_cases(haystack_of(200), words_as_tokens, words_as_tokens, 400, num_cases=3, seed=seed)

    assert build(1) == build(1)
    assert build(1) != build(2)


@pytest.mark.parametrize(
    ("num_sentences", "prompt_tokens", "words"), [(20, 5_000, "haystack has"), (200, 30, "leaves no text")]
)
def test_impossible_needle_lengths_are_refused(num_sentences, prompt_tokens, words):
    with pytest.raises(ValueError, match=words):
        build_needle_cases(haystack_of(num_sentences), words_as_tokens, words_as_tokens, prompt_tokens, num_cases=2)


def test_a_reader_finds_every_needle_and_a_mute_model_none():
    names = {}
    cases = build_needle_cases(haystack_of(200), words_as_tokens, words_as_tokens, 300, num_cases=4)
    names.update({token: word for word, token in TEXTS.items()})

    def read(prompts):
        return [" ".join(word for token in prompt if (word := names[token]).isdigit()) for prompt in prompts]

    result = measure_needles(read, cases)
    assert result.num_found == 4
    assert result.rate.estimate == 1.0
    assert measure_needles(lambda prompts: [""] * len(prompts), cases).num_found == 0
    with pytest.raises(ValueError, match="asked 4 questions, got 1"):
        measure_needles(lambda _: [""], cases)


def test_needle_result_counts_each_case():
    result = NeedleResult(depths=(0.1, 0.9), expected=("12345", "54321"), answers=("12345", "12345"))
    assert result.is_found == (True, False)


def test_wilson_interval_against_published_values():
    # 8 of 10 and 20 of 20: textbook values of the score interval at 95 %
    eight = wilson_interval(8, 10)
    assert (eight.estimate, eight.low, eight.high) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)
    full = wilson_interval(20, 20)
    assert (full.low, full.high) == pytest.approx((0.8389, 1.0), abs=1e-4)
    with pytest.raises(ValueError, match="3 successes in 2"):
        wilson_interval(3, 2)


def test_paired_ratio_of_a_constant_shift_is_exact():
    # every window loses 0.01 nats per token: the ratio is e^0.01 with no spread, however much windows differ
    tokens = [100, 200, 300]
    baseline = [250.0, 900.0, 700.0]
    candidate = [nll + 0.01 * count for nll, count in zip(baseline, tokens, strict=True)]
    ratio = paired_perplexity_ratio(baseline, candidate, tokens)
    assert (ratio.estimate, ratio.low, ratio.high) == pytest.approx([math.exp(0.01)] * 3)


def test_paired_ratio_agrees_with_the_perplexities():
    generator = np.random.default_rng(3)
    baseline, candidate = generator.uniform(100, 300, 8), generator.uniform(100, 300, 8)
    tokens = (100,) * 8
    ratio = paired_perplexity_ratio(baseline.tolist(), candidate.tolist(), tokens)
    b, c = (PerplexityResult(window_nll=tuple(nll), window_tokens=tokens) for nll in (baseline, candidate))
    assert ratio.estimate == pytest.approx(c.perplexity / b.perplexity)
    assert ratio.low < ratio.estimate < ratio.high
    with pytest.raises(ValueError, match="paired"):
        paired_perplexity_ratio([1.0], [1.0, 2.0], [1])


def test_summary_is_median_and_extremes():
    spread = summarize([3.0, 1.0, 10.0])
    assert (spread.median, spread.minimum, spread.maximum) == (3.0, 1.0, 10.0)
    with pytest.raises(ValueError, match="no values"):
        summarize([])


def test_records_never_overwrite_and_hold_what_is_needed_to_repeat(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "describe_commit", lambda: "abc")
    paths = [
        write_record(tmp_path, "demo", {"seed": 1}, {"value": i}, ["run.py", "--text", "/data/essays.txt"])
        for i in range(3)
    ]
    assert len(set(paths)) == 3
    stored = [json.loads(path.read_text()) for path in paths]
    assert [entry["results"]["value"] for entry in stored] == [0, 1, 2]
    assert stored[0]["command"] == "run.py --text essays.txt"
    assert stored[0]["environment"]["versions"]["python"]
    assert stored[0]["environment"]["cpu"]["threads"] >= 1
    assert stored[0]["environment"]["commit"] == "abc"


def test_record_refuses_nan_and_leaves_no_file(tmp_path):
    with pytest.raises(ValueError, match="cannot be written as JSON"):
        write_record(tmp_path, "demo", {}, {"value": float("nan")})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        pytest.param("--seed", "--seed", id="option"),
        pytest.param("org/model", "org/model", id="relative"),
        pytest.param("{base}/out/x.json", "out/x.json", id="inside"),
        pytest.param("/data/text.txt", "text.txt", id="outside"),
        pytest.param("../other/text.txt", "text.txt", id="parent"),
        pytest.param("--text=/data/text.txt", "--text=text.txt", id="option-with-value"),
    ],
)
def test_arguments_are_recorded_without_the_machine_s_paths(tmp_path, argument, expected):
    assert portable_argument(argument.format(base=tmp_path), tmp_path) == expected
