"""Offline engines, one process per cache: what each is started with, what it says of itself, and its runs."""

import json
import multiprocessing
from collections import Counter

import pytest
from tiny_model import random_text, save_tiny_llama

from vllm_novakv.cli import main as novakv
from vllm_novakv.evaluation.items import Item
from vllm_novakv.offline import OfflineEngine, cache_names, engine_arguments

BAND = {"sink_tokens": 16, "recent_tokens": 16, "prompt_recent_tokens": 16}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    from transformers import AutoTokenizer

    model = save_tiny_llama(tmp_path_factory.mktemp("tiny"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(model)
    return model


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(random_text(600, seed=3))
    return path


def test_arguments_of_each_kind_of_cache():
    shared = {"enable_prefix_caching": False, "seed": 0, "dtype": "float32"}
    engine = {"dtype": "float32"}
    assert engine_arguments("stock", BAND, engine) == shared
    assert engine_arguments("bf16", BAND, engine) == shared
    assert engine_arguments("fp8", BAND, engine) == shared | {"kv_cache_dtype": "fp8"}

    def ours(settings):
        return shared | {"attention_backend": "NOVAKV", "additional_config": {"novakv": settings}}

    assert engine_arguments("novakv", BAND, engine) == ours(BAND)
    assert engine_arguments("exact", BAND, engine) == ours(BAND | {"history": "exact"})
    expected = ours(BAND | {"history": "exact", "baseline": "kivi-int2"})
    assert engine_arguments("kivi-int2", BAND, engine) == expected
    with pytest.raises(ValueError, match="cache 'int2' is unknown; choose from stock, bf16, fp8, novakv, exact, naive"):
        engine_arguments("int2", {}, {})
    assert max(Counter(cache_names()).values()) == 1


@pytest.mark.e2e
def test_an_engine_says_what_it_is_and_answers_until_it_is_closed(tiny):
    engine = {"dtype": "float32", "max_model_len": 256}
    with OfflineEngine(str(tiny), "quarot-int2", BAND, engine, max_tokens=4) as model:
        assert model._process is None, "nothing starts before the first question"
        prompts = [Item(str(i), "t", "water stone", ("x",), "math", (5 + i, 6, 7)) for i in range(2)]
        answers = model.answer(prompts, 0)
        assert model.facts == {
            "backends": {"NOVAKV": 2},
            "bits_per_element": 2.5,
            "cache_dtypes": [],
            "dtype": "float32",
            "fit_sha256": None,
        }
        assert model.answer(prompts[1:], 0) == answers[1:]
        # a message without token ids goes through the model's chat template
        (said,) = model.answer([Item("m", "t", "water stone", ("x",), "math")], 0)
        assert isinstance(said, str)
        (logprobs,) = model.prompt_logprobs([[5, 6, 7]])
        assert len(logprobs) == 2
        assert all(value < 0 for value in logprobs)
        process = model._process
    assert process.exitcode == 0


@pytest.mark.e2e
def test_an_engine_that_refuses_its_arguments_says_why(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = {"dtype": "float32", "max_model_len": 256}
    with (
        OfflineEngine(str(tiny), "oscar-int2", engine=engine) as model,
        pytest.raises(ValueError, match=r"(?s)engine of --cache oscar-int2 failed: .*novakv fit --model MODEL --save"),
    ):
        model.answer([], 0)


@pytest.mark.parametrize(
    ("cache", "backends", "cache_dtypes", "words"),
    [
        ("bf16", {"CPU_ATTN": 2}, ["float32"], r"--cache bf16 .* holds \['float32'\]; use --cache stock"),
        ("stock", {"NOVAKV": 2}, [], r"--cache stock ran on \{'NOVAKV': 2\}"),
        ("novakv", {"CPU_ATTN": 2}, ["bfloat16"], "--cache novakv ran on"),
    ],
)
def test_an_engine_that_runs_another_cache_is_refused(cache, backends, cache_dtypes, words, monkeypatch):
    model = OfflineEngine("m", cache)

    class Process:
        """Stands in for an engine's process."""

        def __init__(self, target, args, name):
            args[0].send((True, {"backends": backends, "cache_dtypes": cache_dtypes}))

        def start(self):
            pass

        def join(self, timeout):
            pass

        def is_alive(self):
            return False

    monkeypatch.setattr(multiprocessing.get_context("spawn"), "Process", Process, raising=False)
    with pytest.raises(ValueError, match=words):
        model.prompt_logprobs([[5, 6]])
    assert model._process is None


@pytest.mark.e2e
def test_command_measures_caches_offline_and_continues(tiny, text, tmp_path, capsys, monkeypatch):
    out = tmp_path / "runs"
    common = ["--model", str(tiny), "--text", str(text), "--out", str(out), "--dtype", "float32"]
    common += ["--novakv", json.dumps(BAND), "--cache"]
    needles = ["needles", "--lengths", "384", "--tasks", "niah_single_1", "--num-items", "2"]
    perplexity = ["perplexity", "--window-tokens", "200", "--num-windows", "2", "--bucket-tokens", "100"]
    caches = ("stock", "exact")
    assert novakv(["eval", *perplexity, *common, *caches]) == 0
    scores = {cache: json.loads((out / cache / "perplexity-200" / "scores.json").read_text()) for cache in caches}
    # nothing is quantized: the same but for the order of sums
    assert scores["exact"]["perplexity"] == pytest.approx(scores["stock"]["perplexity"], rel=1e-5)
    assert [(b["first"], b["last"]) for b in scores["stock"]["by_position"]] == [(1, 99), (100, 199)]
    facts = json.loads((out / "stock" / "perplexity-200" / "engine.json").read_text())
    assert (facts["bits_per_element"], facts["cache_dtypes"]) == (32.0, ["float32"])

    assert novakv(["eval", *needles, *common, "exact"]) == 0
    first = capsys.readouterr().out
    folder = out / "exact" / "needles-384"
    config = json.loads((folder / "config.json").read_text())["identity"]["config"]
    assert config["cache"] == "exact"
    assert config["engine"] == {"dtype": "float32", "max_model_len": 512}
    assert str(tmp_path) not in (folder / "config.json").read_text()

    # finished runs are read back without an engine
    def refuse(self):
        raise AssertionError("an engine was started")

    monkeypatch.setattr(OfflineEngine, "_start", refuse)
    assert novakv(["eval", *needles, *common, "exact"]) == 0
    assert novakv(["eval", *perplexity, *common, "stock"]) == 0
    assert capsys.readouterr().out.startswith(first[first.index("exact  needles") :])
    # an unfinished one is not continued with another engine
    (folder / "predictions.jsonl").write_text("")
    monkeypatch.setattr(OfflineEngine, "facts", property(lambda self: facts))
    assert novakv(["eval", *needles, *common, "exact"]) == 1
    assert "holds another run: backends, cache_dtypes differ" in capsys.readouterr().err


def test_command_lines_that_fit_no_model_are_refused(tmp_path, text, capsys):
    common = ["--model", "m", "--text", str(text), "--out", str(tmp_path)]
    for arguments, words in (
        (["--cache", "stock", "fp8", "--method", "x"], "--method x names one row"),
        (["--method", "x"], "--tokenizer is missing"),
    ):
        assert novakv(["eval", "needles", *common, *arguments]) == 1
        assert capsys.readouterr().err.startswith(f"novakv: {words}")
    path = tmp_path / "quiz.jsonl"
    path.write_text(json.dumps({"question": "2 + 2?", "answer": 4}))
    assert novakv(["eval", "questions", str(path), "--model", "m", "--out", str(tmp_path)]) == 1
    assert "--method is missing" in capsys.readouterr().err
    for value in ("{", "[1]"):
        with pytest.raises(SystemExit):
            novakv(["eval", "questions", str(path), "--model", "m", "--out", "o", "--engine", value])
