"""Reading prompt files and cutting them into sequences."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from vllm_novakv.calibration.prompts import (
    DEFAULT_PROMPTS,
    SAMPLES_PER_CENTROID,
    TextPlan,
    check_token_counts,
    heldout_tokens,
    plan_text,
    read_prompts,
)

QUESTION_HEADER = (
    "Pre-Revision Question,Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3"
)


def write(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def by_character(text: str) -> list[int]:
    return [ord(character) for character in text]


def plan(
    num_chars: int, num_tokens: int | None, seq_len: int, prefix: tuple[int, ...] = (), min_tokens: int = 16
) -> TextPlan:
    text = "".join(chr(1000 + index) for index in range(num_chars))
    return plan_text([text], by_character, prefix, num_tokens, seq_len, min_tokens)


# reading


def test_read_prompts_takes_a_txt_file_whole(tmp_path: Path) -> None:
    assert read_prompts(write(tmp_path, "a.txt", "\nfirst\n\nsecond ünï\n")) == ["first\n\nsecond ünï"]


def test_read_prompts_takes_jsonl_strings_and_objects(tmp_path: Path) -> None:
    lines = [json.dumps("plain"), "", json.dumps({"id": 3, "text": "from text"}), json.dumps({"Prompt": "from prompt"})]
    assert read_prompts(write(tmp_path, "a.jsonl", "\n".join(lines))) == ["plain", "from text", "from prompt"]


def test_read_prompts_prefers_question_to_prompt_to_text(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", 'text,prompt,question\nt,p,"q, quoted"\nt2,p2,\n')
    assert read_prompts(path) == ["q, quoted"]


def test_read_prompts_joins_chosen_columns_in_the_order_given(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "a,b,c\n1,2,3\n4,,6\n")
    assert read_prompts(path, ("c", "a")) == ["3\n1", "6\n4"]


def test_read_prompts_shows_options_without_the_answer(tmp_path: Path) -> None:
    rows = "".join(f"old,Why {index}?,right{index},w{index}a,w{index}b,w{index}c\n" for index in range(40))
    path = write(tmp_path, "a.csv", f"{QUESTION_HEADER}\n{rows}")
    prompts = read_prompts(path, seed=3)
    places = set()
    for index, prompt in enumerate(prompts):
        question, *options = prompt.split("\n")
        assert question == f"Why {index}?"
        assert [option[:3] for option in options] == ["A) ", "B) ", "C) ", "D) "]
        assert sorted(option[3:] for option in options) == sorted([f"right{index}", *(f"w{index}{x}" for x in "abc")])
        places.add([option[3:] for option in options].index(f"right{index}"))
    assert places == {0, 1, 2, 3}
    assert read_prompts(path, seed=3) == prompts
    assert read_prompts(path, seed=4) != prompts


@pytest.mark.parametrize(
    ("name", "content", "columns", "message"),
    [
        ("a.txt", "", None, "holds no text"),
        ("a.txt", " \n\t\n", None, "holds no text"),
        ("a.jsonl", "\n\n", None, "holds no text"),
        ("a.csv", "text\n", None, "holds no text"),
        ("a.pdf", "x", None, "ends in '.pdf'"),
        ("a.txt", "x", ("text",), "--prompt-columns does not apply"),
        ("a.jsonl", '"ok"\n{"text": ', None, "line 2 is not JSON"),
        ("a.jsonl", "[1]\n", None, "line 1 is a JSON list"),
        ("a.jsonl", '{"body": "x"}\n', None, "has none of the columns question, prompt, text; it has body"),
        ("a.csv", "a,b\n1,2\n", ("a", "z"), "has no column z; it has a, b"),
    ],
    ids=[
        "empty-txt",
        "blank-txt",
        "blank-jsonl",
        "header-only",
        "ending",
        "txt-columns",
        "json",
        "list",
        "none",
        "absent",
    ],
)
def test_read_prompts_refuses(
    tmp_path: Path, name: str, content: str, columns: tuple[str, ...] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_prompts(write(tmp_path, name, content), columns)


def test_read_prompts_refuses_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        read_prompts(tmp_path / "none.txt")


def test_read_prompts_refuses_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match="UTF-8"):
        read_prompts(path)


def test_default_prompts_ship_and_are_long() -> None:
    (text,) = read_prompts(DEFAULT_PROMPTS)
    # 34,816 tokens (32,768 and the held-out text) at 3.1 characters per token, few for a text of this mix
    assert len(text) > 3.1 * 34_816


# cutting


def test_plan_text_cuts_sequences_then_the_heldout_text() -> None:
    result = plan(num_chars=400, num_tokens=100, seq_len=48)
    assert [len(sequence) for sequence in result.sequences] == [48, 48, 4]
    # the held-out text of 256 tokens is cut to one sequence
    assert len(result.heldout) == 48
    joined = [token for sequence in (*result.sequences, result.heldout) for token in sequence]
    assert joined == list(range(1000, 1148))


def test_plan_text_counts_the_prefix_as_part_of_every_sequence() -> None:
    result = plan(num_chars=500, num_tokens=96, seq_len=48, prefix=(7,))
    assert [sequence[0] for sequence in result.sequences] == [7, 7]
    assert [len(sequence) for sequence in result.sequences] == [48, 48]
    assert result.heldout[0] == 7
    assert result.heldout[1] == 1000 + 2 * 47


def test_plan_text_separates_prompts_by_a_blank_line() -> None:
    result = plan_text(["ab", "cd", "x" * 300], by_character, (), 16, 16, 16)
    assert "".join(map(chr, result.sequences[0])) == "ab\n\ncd\n\nxxxxxxxx"


@pytest.mark.parametrize("num_chars", [300, 1000, 5000, 34_816, 40_000, 200_000], ids=lambda n: f"text{n}")
@pytest.mark.parametrize("prefix", [(), (7,)], ids=["plain", "bos"])
def test_plan_text_without_a_count_uses_all_text_but_the_heldout(num_chars: int, prefix: tuple[int, ...]) -> None:
    result = plan(num_chars, None, 4096, prefix)
    used = sum(len(sequence) for sequence in result.sequences)
    assert len(result.heldout) == heldout_tokens(used)
    text_tokens = sum(len(sequence) - len(prefix) for sequence in (*result.sequences, result.heldout))
    if used == 131_072:
        assert text_tokens <= num_chars
    else:
        assert num_chars - 8 <= text_tokens <= num_chars


def test_plan_text_fits_exactly() -> None:
    assert len(plan(32_768 + 2048, 32_768, 8192).heldout) == 2048


def test_plan_text_refuses_a_text_that_is_too_short() -> None:
    with pytest.raises(ValueError, match=r"give 34815 tokens; --num-tokens 32768 needs 32768 and 2048 more") as error:
        plan(32_768 + 2047, 32_768, 8192)
    assert "--num-tokens 32767 or less" in str(error.value)


def test_plan_text_refuses_a_text_that_is_too_short_for_any_fit() -> None:
    with pytest.raises(ValueError, match=r"give 300 tokens; a fit needs at least 4096"):
        plan(300, None, 8192, min_tokens=4096)


@pytest.mark.parametrize(
    ("num_tokens", "max_samples", "option"),
    [(4095, 131_072, "--num-tokens 4095"), (None, 4095, "--max-samples 4095")],
    ids=["tokens", "samples"],
)
def test_check_token_counts_refuses_too_few_for_256_centroids(
    num_tokens: int | None, max_samples: int, option: str
) -> None:
    with pytest.raises(ValueError, match=f"{option} is too small for 256 centroids.*4096 in all"):
        check_token_counts(num_tokens, max_samples, 256)


def test_check_token_counts_accepts_the_least() -> None:
    check_token_counts(SAMPLES_PER_CENTROID * 256, SAMPLES_PER_CENTROID * 256, 256)
    check_token_counts(None, 131_072, 256)
