"""Runs of items: scores, resumption, directories that are never overwritten; question files and HTTP endpoints."""

import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from vllm_novakv.evaluation.endpoint import Endpoint
from vllm_novakv.evaluation.items import Item
from vllm_novakv.evaluation.perplexity import measure_perplexity
from vllm_novakv.evaluation.questions import load_questions
from vllm_novakv.evaluation.runner import answer_with_tokens, run_items

ITEMS = [
    Item("a/0", "a", "say 1", ("1",), "needle_recall", (1, 2)),
    Item("a/1", "a", "say 2", ("2",), "needle_recall", (3, 4)),
    Item("b/0", "b", "say 3 and 4", ("3", "4"), "needle_recall", (5, 6)),
]


def say_one_and_three(items, sample):
    return ["1 and 3" for _ in items]


def run(directory, answer=say_one_and_three, items=ITEMS, config=None, **options):
    return run_items(answer, items, directory, config or {"model": "m"}, show_progress=False, **options)


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_scores_are_means_of_items_and_of_tasks(tmp_path):
    # task a: one of two; task b: one of two values; so both tasks have 1/2
    result = run(tmp_path / "run")
    assert [prediction.score for prediction in result.predictions] == [1.0, 0.0, 0.5]
    assert result.task_scores["a"].estimate == 0.5
    assert result.task_scores["b"].estimate == 0.5
    assert result.mean.estimate == 0.5
    stored = json.loads((tmp_path / "run" / "scores.json").read_text())
    assert stored["mean"]["estimate"] == 0.5
    assert set(contents(tmp_path / "run")) == {"config.json", "predictions.jsonl", "scores.json"}


def test_samples_of_an_item_are_averaged_first(tmp_path):
    result = run(tmp_path / "run", lambda items, sample: [str(sample + 1)] * len(items), num_samples=2)
    assert [(p.item_id, p.sample, p.score) for p in result.predictions[:2]] == [("a/0", 0, 1.0), ("a/0", 1, 0.0)]
    assert result.task_scores["a"].estimate == 0.5


def test_a_finished_run_is_read_back_without_asking(tmp_path):
    first = run(tmp_path / "run")
    before = contents(tmp_path / "run")

    def refuse(items, sample):
        raise AssertionError("asked again")

    assert run(tmp_path / "run", refuse) == first
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize("torn", [b"", b'{"item_id": "b/0", "sam'], ids=["whole-lines", "torn-line"])
def test_an_interrupted_run_asks_only_what_is_missing(tmp_path, torn):
    asked = []

    def fail_at_the_second_batch(items, sample):
        if asked:
            raise ConnectionError("gone")
        asked.extend(item.item_id for item in items)
        return say_one_and_three(items, sample)

    with pytest.raises(ConnectionError):
        run(tmp_path / "run", fail_at_the_second_batch, batch_size=2)
    with (tmp_path / "run" / "predictions.jsonl").open("ab") as file:
        file.write(torn)
    asked_later = []

    def answer(items, sample):
        asked_later.extend(item.item_id for item in items)
        return say_one_and_three(items, sample)

    assert run(tmp_path / "run", answer, batch_size=2) == run(tmp_path / "other")
    assert (asked, asked_later) == (["a/0", "a/1"], ["b/0"])
    # what the interruption left behind does not spoil the file
    assert run(tmp_path / "run", answer, batch_size=2) == run(tmp_path / "other")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"config": {"model": "other"}}, "config differ", id="config"),
        pytest.param({"items": ITEMS[:2]}, "items_sha256 differ", id="items"),
        pytest.param({"num_samples": 2}, "num_samples differ", id="samples"),
    ],
)
def test_the_directory_of_another_run_is_refused(tmp_path, change, words):
    run(tmp_path / "run")
    before = contents(tmp_path / "run")
    with pytest.raises(ValueError, match=words):
        run(tmp_path / "run", **change)
    assert contents(tmp_path / "run") == before


def test_a_directory_with_other_files_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"no config\.json"):
        run(tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({"items": []}, "0 items", id="none"),
        pytest.param({"items": [ITEMS[0], ITEMS[0]]}, "only 1 different", id="twice"),
        pytest.param({"answer": lambda items, sample: ["x"]}, "asked 3 questions, got 1", id="answers"),
        pytest.param({"config": {"value": float("nan")}}, "cannot be written", id="nan"),
    ],
)
def test_impossible_runs_are_refused(tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        run(tmp_path / "run", **options)


def test_token_callables_get_the_prompts():
    answer = answer_with_tokens(lambda prompts: [str(sum(prompt)) for prompt in prompts])
    assert answer(ITEMS, 0) == ["3", "7", "11"]
    with pytest.raises(ValueError, match="item x has no token ids"):
        answer([Item("x", "t", "m", ("1",), "math")], 0)


def test_question_file_gives_choices_and_problems(tmp_path):
    path = tmp_path / "quiz.jsonl"
    lines = [
        {"question": "2 + 2?", "choices": ["3", "4"], "answer": "b"},
        {"question": "3 + 3?", "choices": [6, 7], "answer": 0, "id": "six", "task": "sums"},
        {"question": "1/2?", "answer": ["0.5", "1/2"]},
        {"question": "7?", "answer": 7},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    first, second, third, fourth = load_questions(path)
    assert (first.item_id, first.task, first.expected, first.metric) == ("quiz/1", "quiz", ("B",), "choice")
    assert first.message.endswith("2 + 2?\n\nA) 3\nB) 4")
    assert (second.item_id, second.task, second.expected) == ("six", "sums", ("A",))
    assert (third.expected, third.metric) == (("0.5", "1/2"), "math")
    assert fourth.expected == ("7",)
    assert load_questions(path, limit=2) == [first, second]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("", "holds no questions", id="empty"),
        pytest.param('{"question": "x"}', "line 1 of quiz.jsonl is not", id="no-answer"),
        pytest.param(
            '{"question": "x", "choices": ["1"], "answer": "B"}', "none of the 1 choices", id="no-such-choice"
        ),
        pytest.param('{"question": "x", "choices": ["1"], "answer": 1}', "line 1", id="no-such-index"),
        pytest.param(
            '{"question": "x", "answer": 1, "id": 1}\n{"question": "y", "answer": 1, "id": 1}', "alike", id="id"
        ),
        pytest.param("[1]", "line 1", id="no-object"),
    ],
)
def test_bad_question_files_are_refused(tmp_path, text, words):
    path = tmp_path / "quiz.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        load_questions(path)


GPQA_HEAD = "Pre-Revision Question,Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3"


def test_gpqa_rows_are_choices_in_an_order_of_their_own(tmp_path):
    path = tmp_path / "gpqa.csv"
    rows = [f'old,"What is {i}, exactly?",right {i},wrong a,wrong b,"wrong\nc"' for i in range(40)]
    path.write_text("\n".join([GPQA_HEAD, *rows]) + "\n", encoding="utf-8-sig")
    items = load_questions(path)
    assert [item.item_id for item in items[:2]] == ["gpqa/1", "gpqa/2"]
    for i, item in enumerate(items):
        assert item.metric == "choice"
        question, *options = item.message.split("\n\n", 1)[1].replace("wrong\nc", "wrong c").split("\n")
        assert question == f"What is {i}, exactly?"
        assert sorted(option[3:] for option in options[1:]) == [f"right {i}", "wrong a", "wrong b", "wrong c"]
        assert f"{item.expected[0]}) right {i}" in item.message
    # each letter is right sometimes, the same for a seed, whatever the limit
    assert {item.expected[0] for item in items} == set("ABCD")
    assert load_questions(path, limit=3) == items[:3]
    assert load_questions(path, seed=1) != items


def test_gpqa_rows_without_an_option_are_refused(tmp_path):
    path = tmp_path / "gpqa.csv"
    path.write_text(f"{GPQA_HEAD}\nold,new,1,2,3,4\nold,new,1,2,,4\n")
    assert len(load_questions(path, limit=1)) == 1
    with pytest.raises(ValueError, match=r"line 2 of gpqa\.csv is not a question: .*'Incorrect Answer 2' is missing"):
        load_questions(path)


class Server(BaseHTTPRequestHandler):
    """Echoes what it is sent; fails as often as `failures` says."""

    failures = 0
    seen: list = []  # noqa: RUF012  filled by one test at a time

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).seen.append((self.path, body, self.headers.get("Authorization")))
        if type(self).failures:
            type(self).failures -= 1
            self.send_error(503)
            return
        if body["model"] == "missing":
            self.send_error(404)
            return
        if self.path.endswith("/chat/completions"):
            choice = {"message": {"content": body["messages"][0]["content"].upper()}}
        elif body.get("echo"):
            size = len(body["prompt"]) + body["max_tokens"]
            choice = {"text": "", "logprobs": {"token_logprobs": [None, *[-math.log(50)] * (size - 1)]}}
        else:
            choice = {"text": str(sum(body["prompt"]))}
        reply = json.dumps({"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *args):
        pass


@pytest.fixture
def url():
    Server.failures, Server.seen = 0, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_endpoint_answers_in_order(url):
    endpoint = Endpoint(url, "m", api_key="hush", max_tokens=5)
    assert endpoint.answer(ITEMS, 3) == ["SAY 1", "SAY 2", "SAY 3 AND 4"]
    path, body, key = Server.seen[0]
    assert (path, key) == ("/v1/chat/completions", "Bearer hush")
    assert (body["seed"], body["max_tokens"], body["temperature"]) == (3, 5, 0.0)
    assert endpoint.generate([[1, 2], [3]]) == ["3", "3"]
    assert "hush" not in repr(endpoint)


def test_endpoint_of_a_uniform_model_has_its_vocabulary_as_perplexity(url):
    result = measure_perplexity(Endpoint(url, "m").prompt_logprobs, [[1, 2, 3], [4, 5]])
    assert result.perplexity == pytest.approx(50)
    assert result.num_tokens == 3


def test_endpoint_repeats_what_failed_for_a_while(url):
    Server.failures = 2
    assert Endpoint(url, "m", num_parallel=1, retry_wait_s=0.0).generate([[7]]) == ["7"]
    assert len(Server.seen) == 3


def test_endpoint_says_what_is_wrong(url):
    with pytest.raises(ConnectionError, match="failed: 404"):
        Endpoint(url, "missing").generate([[7]])
    assert len(Server.seen) == 1
    with pytest.raises(ConnectionError, match="failed"):
        Endpoint("http://127.0.0.1:1/v1", "m", retry_wait_s=0.0).generate([[7]])
