"""Request logs: both formats, broken lines, the analysis of a log and the command that prints it."""

import json
from xml.etree import ElementTree

import numpy as np
import pytest

from vllm_novakv import cli
from vllm_novakv.prefix.analyze import advise_pins, analyze, analyze_file, default_capacities, describe_analysis
from vllm_novakv.prefix.plot import BOTTOM
from vllm_novakv.prefix.policy import policy_names
from vllm_novakv.prefix.traces import LoggedRequest, parse_log, read_log


def lines(*entries):
    return [entry if isinstance(entry, bytes) else json.dumps(entry).encode() for entry in entries]


def trace(time_ms, hash_ids, **more):
    return {"timestamp": time_ms, "hash_ids": hash_ids, "input_length": 512 * len(hash_ids) - 12, **more}


def chat(*contents, **more):
    roles = ("system", "user", "assistant", "user")
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)], **more}


def test_trace_format():
    log = parse_log(lines(trace(1500, [7, 8], output_length=30), trace(500, [7]), b"", b"  \n"))
    assert log.num_broken == 0
    assert [request.arrival_s for request in log.requests] == [0.5, 1.5]
    assert log.requests[1] == LoggedRequest(1.5, (7, 8), 1012, 30, 512)
    assert not log.is_estimated


def test_openai_style_chats_share_what_their_texts_share():
    system = "You answer in one sentence. " * 4
    log = parse_log(
        lines(
            chat(system, "What is a river?", created=10, usage={"prompt_tokens": 40, "completion_tokens": 9}),
            {"body": chat(system, "What is a lake?"), "timestamp": "2026-01-01T00:00:00Z"},
            {"request": chat(system, "What is a river?", model="other")},
        ),
        block_tokens=4,
        characters_per_token=4.0,
    )
    assert log.num_broken == 0
    assert log.num_without_time == 1
    assert log.is_estimated
    first, second, other_model = log.requests
    assert first.output_tokens == 9
    common = sum(a == b for a, b in zip(first.keys, second.keys, strict=False))
    # equal texts up to "What is a ": the shared blocks of 16 characters, and none after the first difference
    shared_characters = len(f"system\n{system}\nuser\nWhat is a ")
    assert common == shared_characters // 16
    assert first.keys[common] != second.keys[common]
    assert not set(first.keys) & set(other_model.keys)
    assert log.counted_tokens == 40


@pytest.mark.parametrize(
    ("entry", "num_blocks", "num_tokens"),
    [
        pytest.param({"prompt": "x" * 100}, 7, 25, id="text"),
        pytest.param({"prompt": [5] * 10}, 3, 10, id="token-ids"),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "y" * 27}]}]}, 3, 9, id="parts"
        ),
        pytest.param({"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}, 1, 4, id="tool-calls"),
    ],
)
def test_prompts_become_blocks(entry, num_blocks, num_tokens):
    log = parse_log(lines(entry), block_tokens=4, characters_per_token=4.0)
    (request,) = log.requests
    assert (len(request.keys), request.num_tokens) == (num_blocks, num_tokens)


def test_token_prompts_share_whole_blocks():
    log = parse_log(lines({"prompt": [1, 2, 3, 4, 5, 6]}, {"prompt": [1, 2, 3, 4, 9]}), block_tokens=2)
    first, second = (request.keys for request in log.requests)
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert not log.is_estimated


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(b'{"timestamp": 3', id="cut-off"),
        pytest.param(b"\xff\xfe\x00", id="not-utf-8"),
        pytest.param(b"[1, 2]", id="not-an-object"),
        pytest.param({"timestamp": 1}, id="no-prompt"),
        pytest.param(trace(1, []), id="no-blocks"),
        pytest.param(trace(1, [1, 1]), id="block-twice"),
        pytest.param(trace(1, ["a"]), id="text-ids"),
        pytest.param(trace(1, [1, 2]) | {"input_length": 5}, id="length-differs"),
        pytest.param(trace(1, [1]) | {"input_length": -1}, id="negative-length"),
        pytest.param(trace(1, [1], output_length=2.5), id="fraction-of-a-token"),
        pytest.param(trace("yesterday", [1]), id="no-time"),
        pytest.param(b'{"timestamp": NaN, "hash_ids": [1]}', id="nan-time"),
        pytest.param(trace(True, [1]), id="boolean-time"),
        pytest.param({"messages": "hello"}, id="messages-are-text"),
        pytest.param({"messages": []}, id="no-messages"),
        pytest.param({"messages": [{"role": "user", "content": 7}]}, id="content-is-a-number"),
        pytest.param({"prompt": ["a", "b"]}, id="several-prompts"),
        pytest.param({"prompt": ""}, id="empty-prompt"),
        pytest.param(b'{"a":' * 100_000, id="deep"),
    ],
)
def test_broken_lines_are_counted_and_the_others_read(broken):
    log = parse_log(lines(trace(1000, [1]), broken, trace(2000, [1, 2])))
    assert log.num_broken == 1
    assert log.problems[0].startswith("line 2: ")
    assert [request.keys for request in log.requests] == [(1,), (1, 2)]


def test_only_the_first_problems_are_kept():
    log = parse_log([b"{"] * 1000)
    assert (log.num_broken, len(log.problems), log.requests) == (1000, 5, [])


def prompts_with_a_rare_system_prompt(num_requests=400):
    """Prompts that never repeat, and every 20th begins with the same 12 blocks, too rarely for LRU."""
    source = np.random.default_rng(0)
    keys = iter(range(1000, 100_000))
    requests = []
    for number in range(num_requests):
        path = tuple(range(12)) if number % 20 == 0 else ()
        path += tuple(next(keys) for _ in range(int(source.integers(3, 9))))
        requests.append(LoggedRequest(float(number), path, 16 * len(path), 0, 16))
    return requests


def test_pins_are_found_and_help():
    requests = prompts_with_a_rare_system_prompt()
    advice = advise_pins(requests, capacity_blocks=60)
    (pin,) = advice.pins
    assert (pin.num_blocks, pin.num_tokens, pin.num_requests, pin.last_key) == (12, 192, 20, 11)
    # used 20 times, computed once by need
    assert pin.recomputed_blocks == 19 * 12
    assert advice.hit_rate_without == 0.0
    second_half = sum(request.num_tokens for request in requests[200:])
    assert advice.hit_rate_with == pytest.approx(10 * 192 / second_half)


def test_prefixes_that_will_not_return_are_not_pinned():
    requests = prompts_with_a_rare_system_prompt()
    late = [r for r in requests[200:] if r.keys[0] != 0]
    assert advise_pins(requests[: len(late)] + late, capacity_blocks=60).pins == ()


def test_analysis_by_hand():
    log = parse_log(lines(trace(0, [1, 2]), trace(1000, [3]), trace(2000, [1, 2, 4]), trace(3000, [3])))
    analysis = analyze(log, capacities=[3, 4])
    assert (analysis.num_requests, analysis.num_distinct_blocks, analysis.longest_blocks) == (4, 4, 3)
    # of 1012 + 500 + 1524 + 500 tokens the third prompt repeats two blocks and the fourth its partial one
    assert analysis.sharing == pytest.approx((1024 + 500) / 3536)
    assert analysis.token_hit_rate[4]["lru"] == pytest.approx((1024 + 500) / 3536)
    # with 3 blocks the third prompt fills the cache
    assert analysis.token_hit_rate[3]["lru"] == pytest.approx(1024 / 3536)
    assert analysis.token_hit_rate[3]["optimum"] == pytest.approx(1024 / 3536)
    assert analysis.advice is None
    assert json.loads(json.dumps(analysis.as_json()))["num_requests"] == 4


def test_prompts_larger_than_the_cache_are_left_out():
    log = parse_log(lines(trace(0, [1]), trace(1, [5, 6, 7]), trace(2, [1])))
    analysis = analyze(log, capacities=[2])
    assert analysis.token_hit_rate[2] == dict.fromkeys(analysis.token_hit_rate[2], 0.5)
    assert "left out" in describe_analysis(analysis)


def test_mixed_block_sizes_are_refused():
    log = parse_log(lines(trace(0, [1]), {"prompt": "text"}))
    with pytest.raises(ValueError, match="mixes blocks"):
        analyze(log)


def test_default_capacities_hold_the_longest_prompt():
    assert default_capacities(100_000, 10) == [13_000, 25_000, 50_000]
    assert default_capacities(10, 40) == [80]


def test_command_prints_the_analysis(tmp_path, capsys):
    path = tmp_path / "log.jsonl"
    entries = [chat("Be brief. " * 200, f"Question {i % 7}?", created=i) for i in range(60)]
    path.write_bytes(b"\n".join([*lines(*entries), b"{broken"]))
    assert cli.main(["prefix", "analyze", str(path)]) == 0
    output = capsys.readouterr()
    assert "requests          60 in 59 s" in output.out
    assert "broken lines      1" in output.out
    assert "line 61" in output.out
    assert "tokens (estimated)" in output.out
    assert "expected-reuse" in output.out
    assert "replaying" in output.err
    assert cli.main(["prefix", "analyze", str(path), "--json", "--capacities", "9", "20"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["token_hit_rate"]) == ["9", "20"]
    assert result["sharing"] > 0.9


def test_plot_shows_every_policy_at_its_height(tmp_path, capsys):
    path, picture = tmp_path / "log.jsonl", tmp_path / "hits.svg"
    path.write_bytes(b"\n".join(lines(trace(0, [1, 2]), trace(1, [3]), trace(2, [1, 2, 4]), trace(3, [3]))))
    arguments = ["prefix", "analyze", str(path), "--capacities", "3", "4", "--plot"]
    assert cli.main([*arguments, str(picture)]) == 0
    root = ElementTree.parse(picture).getroot()
    names = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    curves = list(root.iter("{http://www.w3.org/2000/svg}polyline"))
    assert {*policy_names(), "optimum"} <= set(names)
    assert len(curves) == len(policy_names()) + 1
    first = [tuple(map(float, point.split(","))) for point in curves[0].get("points").split()]
    rates = analyze_file(path, [3, 4]).token_hit_rate
    heights = [BOTTOM - y for _, y in first]
    assert heights[0] / heights[1] == pytest.approx(rates[3]["lru"] / rates[4]["lru"], rel=0.02)
    assert first[0][0] < first[1][0]
    assert cli.main([*arguments, str(tmp_path / "missing" / "hits.svg")]) == 1
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "arguments", "words"),
    [
        pytest.param(None, [], "cannot be read", id="missing"),
        pytest.param(b"", [], "the file is empty", id="empty"),
        pytest.param(b"nonsense\n", [], "line 1", id="no-line-can-be-read"),
        pytest.param(b'{"prompt": "x"}', ["--capacities", "0"], "positive", id="no-capacity"),
        pytest.param(b'{"prompt": "x"}', ["--block-tokens", "0"], "positive", id="no-block"),
        pytest.param(b'{"prompt": "x"}', ["--characters-per-token", "nan"], "positive", id="no-characters"),
    ],
)
def test_command_refuses_what_it_cannot_use(tmp_path, capsys, content, arguments, words):
    path = tmp_path / "log.jsonl"
    if content is not None:
        path.write_bytes(content)
    assert cli.main(["prefix", "analyze", str(path), *arguments]) == 1
    assert words in capsys.readouterr().err


def test_file_and_lines_give_the_same(tmp_path):
    path = tmp_path / "log.jsonl"
    entries = lines(trace(0, [1, 2]), trace(5, [1, 2, 3]))
    path.write_bytes(b"\n".join(entries))
    assert read_log(path).requests == parse_log(entries).requests
    assert analyze_file(path).num_requests == 2
