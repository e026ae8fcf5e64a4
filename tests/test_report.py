"""Reports over finished runs, and the command that makes both, against a model that reads its prompt."""

import dataclasses
import json
import math
import re
import sys
from pathlib import Path

import pytest

from vllm_novakv import eval_command as command
from vllm_novakv.cli import main as novakv
from vllm_novakv.evaluation.items import Item
from vllm_novakv.evaluation.perplexity_run import run_perplexity
from vllm_novakv.evaluation.plots import histogram_figure, line_figure
from vllm_novakv.evaluation.report import describe_runs, read_run, write_report
from vllm_novakv.evaluation.run_directory import note_engine
from vllm_novakv.evaluation.runner import run_items
from vllm_novakv.evaluation.study_report import Study, describe_study, distortion_by_layer

ITEMS = [Item(f"{task}/{i}", task, f"say {i}", (str(i),), "needle_recall") for task in ("a", "b") for i in range(4)]


def make_run(directory, method, suite="needles-4096", prompt_tokens=4096, right=range(4), items=ITEMS):
    """A run that knows the answers in `right`."""
    config = {"method": method, "suite": suite}
    if prompt_tokens is not None:
        config["prompt_tokens"] = prompt_tokens

    def answer(asked, sample):
        return [item.expected[0] if int(item.expected[0]) in right else "?" for item in asked]

    path = directory / method / suite
    run_items(answer, items, path, config, show_progress=False)
    return read_run(path)


def describe(runs, reference):
    return "\n".join(section.text for section in describe_runs(runs, reference))


def row(text, name, heading):
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    return next(line for line in section.splitlines() if line.startswith(f"| {name} |"))


def test_report_compares_methods_item_by_item(tmp_path):
    runs = [make_run(tmp_path, "bf16"), make_run(tmp_path, "int2", right=[0]), make_run(tmp_path, "ours")]
    text = describe(runs, "bf16")
    assert row(text, "bf16", "Mean of the tasks") == "| bf16 | – | 100.0 [100.0, 100.0] |"
    assert row(text, "int2", "Mean of the tasks").startswith("| int2 | – | 25.0 [")
    # six of eight items are solved by the reference alone: p = 2/64
    assert re.fullmatch(
        r"\| int2 \| -75\.0 \[-100\.0, -\d+\.\d\], p = 0\.031 \|", row(text, "int2", "Difference to bf16")
    )
    assert row(text, "ours", "Difference to bf16") == "| ours | +0.0 [+0.0, +0.0], p = 1 |"
    assert row(text, "task", "Tasks of needles-4096") == "| task | bf16 | int2 | ours |"
    assert row(text, "b", "Tasks of needles-4096").startswith("| b | 100.0 [100.0, 100.0] | 25.0 [")
    assert "- ours, needles-4096, commit " in text


def test_missing_runs_leave_dashes(tmp_path):
    runs = [
        make_run(tmp_path, "bf16"),
        make_run(tmp_path, "ours"),
        make_run(tmp_path, "ours", "needles-512", 512),
        make_run(tmp_path, "ours", "quiz", None),
    ]
    text = describe(runs, "bf16")
    assert row(text, "method", "Mean of the tasks") == "| method | bits/element | quiz | needles-512 | needles-4096 |"
    assert row(text, "bf16", "Mean of the tasks") == "| bf16 | – | – | – | 100.0 [100.0, 100.0] |"
    assert row(text, "ours", "Difference to bf16").startswith("| ours | – | – | +0.0")


def lines(figure):
    """Points of each line of a figure by its name."""
    return {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].lines}


def test_report_files_are_written_once(tmp_path):
    runs = [make_run(tmp_path, "bf16"), make_run(tmp_path, "bf16", "needles-512", 512, right=[0, 1])]
    (section,) = describe_runs(runs, "bf16")
    assert lines(section.plots["accuracy.png"]) == {"bf16": [[512, 50], [4096, 100]]}
    path = write_report(runs, "bf16", tmp_path / "report")
    assert "(accuracy.png)" in path.read_text()
    assert (tmp_path / "report" / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    path.unlink()
    with pytest.raises(ValueError, match="holds a report already"):
        write_report(runs, "bf16", tmp_path / "report")


def make_perplexity(directory, method, losses, windows=((1, 2, 3, 4), (5, 6, 7, 8)), bits=None):
    """A run whose windows lose the same at every token."""
    given = dict(zip(map(tuple, windows), losses, strict=True))
    path = directory / method / "perplexity-4"
    run_perplexity(
        lambda asked: [[-given[tuple(window)]] * 3 for window in asked],
        windows,
        2,
        path,
        {"method": method, "suite": "perplexity-4"},
        show_progress=False,
    )
    if bits is not None:
        note_engine(path, {"bits_per_element": bits})
    return read_run(path)


def test_perplexities_are_compared_window_by_window(tmp_path):
    # losses ln 2 and ln 8 have the mean ln 4; one percent more of perplexity in each window
    bf16 = make_perplexity(tmp_path, "bf16", [math.log(2), math.log(8)], bits=16.0)
    ours = make_perplexity(tmp_path, "ours", [math.log(2.02), math.log(8.08)], bits=2.25)
    (section,) = describe_runs([ours, bf16], "bf16")
    assert "| bf16 | 16 | 4.000 |\n| ours | 2.25 | 4.040 |" in section.text
    assert "| ours | +1.00 % [+1.00, +1.00] |" in section.text
    drawn = lines(section.plots["perplexity-4.png"])
    # position 1 alone, then 2 and 3
    assert drawn["bf16"] == [[2, pytest.approx(4)], [4, pytest.approx(4)]]
    other = make_perplexity(tmp_path / "other", "ours", [1.0], windows=((1, 2, 3, 4),))
    with pytest.raises(ValueError, match="did not predict the same windows"):
        describe_runs([bf16, other], "bf16")
    with pytest.raises(ValueError, match="no perplexity run of the reference 'fp8'"):
        describe_runs([bf16], "fp8")
    with pytest.raises(ValueError, match="same method and suite"):
        describe_runs([bf16, bf16], "bf16")


def test_interrupted_perplexity_measures_only_the_missing_windows(tmp_path):
    asked = []

    def fail_later(windows):
        if asked:
            raise ConnectionError("gone")
        asked.extend(windows)
        return [[-1.0] * 3]

    arguments = ([[1, 2, 3, 4], [5, 6, 7, 8]], 2, tmp_path, {"method": "m", "suite": "s"}, False)
    with pytest.raises(ConnectionError):
        run_perplexity(fail_later, *arguments)
    with pytest.raises(ValueError, match="no finished run"):
        read_run(tmp_path)
    with (tmp_path / "windows.jsonl").open("a") as file:
        file.write('{"window": 1, "buck')
    result = run_perplexity(lambda windows: [[-2.0] * len(w[1:]) for w in windows], *arguments)
    assert [(losses.window, losses.nll, losses.num_tokens) for losses in result] == [(0, 3.0, 3), (1, 6.0, 3)]
    assert json.loads((tmp_path / "scores.json").read_text())["perplexity"] == pytest.approx(math.exp(1.5))
    with pytest.raises(ValueError, match="bucket_tokens differ"):
        run_perplexity(fail_later, arguments[0], 3, *arguments[2:])


def study():
    """Two layers with one and two heads; every figure can be computed by hand."""

    def head(layer, number, factor):
        bases = [
            {
                "basis": basis,
                "quantizer": quantizer,
                "bits_per_element": 2.0,
                "query_weighted": factor * loss,
                "mse": 1.0,
            }
            | {"top1_agreement": 0.5}
            for basis, quantizer, loss in (
                ("oscar", "fixed-sq", 8.0),
                ("ours", "fixed-sq", 6.0),
                ("oscar", "vq", 4.0),
                ("ours", "vq", 2.0),
            )
        ]
        sorted_part = {"name": "sorted", "log10_volumes": [-1.0, 1.0], "test_distortion": 0.3, "mean_volume_root": 4.0}
        return {
            "layer": layer,
            "head": number,
            "energy": 20.0,
            "bases": bases,
            "partitions": [sorted_part | {"total_correlation_bits": 0.25 * factor}],
        }

    heads = [head(0, 0, 1.0), head(3, 0, 1.0), head(3, 1, 3.0)]
    law = {"constant": 1.5, "exponent": 1.8, "local_exponents": [1.7, 1.9], "measured": [[1.0, 0.4], [2.0, 0.1]]}
    return Study({"model": "m", "bits": 2.0}, {"commit": "abc"}, heads, law)


def test_study_shows_distortion_volumes_and_rate_law():
    by_layer = distortion_by_layer(study())
    # layer 3: mean of 2/20 and 6/20
    assert by_layer["ours, vq"] == [(0.0, 0.1), (3.0, pytest.approx(0.2))]
    section = describe_study(study(), "study1")
    # over heads: mean of 0.1, 0.1 and 0.3
    assert "| ours | vq | 2.000 | 0.1667 | 0.500 |" in section.text
    # predicted: 1.5 / 16 · 4; dependence: mean of 0.25, 0.25 and 0.75
    assert "| sorted | 0.3 | 0.375 | 0.417 |" in section.text
    assert "Ĉ = 1.500, α = 1.800" in section.text
    assert set(section.plots) == {"study1-distortion.png", "study1-volumes.png", "study1-rates.png"}
    assert lines(section.plots["study1-rates.png"])["1.500 · 2^(-2b)"] == [[1.0, 0.375], [2.0, 0.09375]]
    panel = section.plots["study1-volumes.png"].axes[0]
    assert [patch.get_height() for patch in (panel.patches[0], panel.patches[-1])] == [3, 3]
    assert all(f"({name})" in section.text for name in section.plots)


def test_plots_without_matplotlib_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for draw in (lambda: line_figure("y", "x", {}), lambda: histogram_figure("y", "x", {"a": [1.0]})):
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'vllm-novakv\[report\]'"):
            draw()


def test_report_without_lengths_has_no_chart(tmp_path):
    path = write_report([make_run(tmp_path, "bf16", "quiz", None)], "bf16", tmp_path / "report")
    assert "![" not in path.read_text()
    assert [entry.name for entry in path.parent.iterdir()] == ["report.md"]


def test_impossible_reports_are_refused(tmp_path):
    run = make_run(tmp_path, "bf16")
    with pytest.raises(ValueError, match="no runs"):
        describe_runs([], "bf16")
    with pytest.raises(ValueError, match="same method and suite"):
        describe_runs([run, run], "bf16")
    with pytest.raises(ValueError, match="--reference is missing"):
        describe_runs([run], None)
    with pytest.raises(ValueError, match="no run of the reference 'other'"):
        describe_runs([run], "other")
    with pytest.raises(ValueError, match="not asked the same items"):
        describe_runs([run, make_run(tmp_path, "ours", items=ITEMS[:5])], "bf16")
    (tmp_path / "bf16" / "needles-4096" / "scores.json").unlink()
    with pytest.raises(ValueError, match="no finished run"):
        read_run(tmp_path / "bf16" / "needles-4096")
    run_items(lambda asked, sample: ["1"] * len(asked), ITEMS, tmp_path / "bare", {}, show_progress=False)
    with pytest.raises(ValueError, match="needs 'method' and 'suite'"):
        read_run(tmp_path / "bare")


class Reader:
    """Stands in for an endpoint: knows a fixed share of what the prompt says."""

    asked = 0

    def __init__(self, base_url, model, **options):
        self.is_good = model == "good"

    def answer(self, items, sample):
        Reader.asked += len(items)
        return [" ".join(item.expected) if self.is_good else "no idea" for item in items]


class Tokenizer:
    """Words as tokens."""

    @classmethod
    def from_pretrained(cls, name):
        return cls()

    def apply_chat_template(self, messages, **options):
        return {"input_ids": self.encode(messages[0]["content"])}

    def encode(self, text, **options):
        return [len(word) for word in text.split()]


def test_command_runs_continues_and_reports(tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(command, "Endpoint", Reader)
    monkeypatch.setattr(transformers, "AutoTokenizer", Tokenizer)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"Sentence {i} says little about anything at all." for i in range(200)))
    out = tmp_path / "runs"
    common = ["--text", str(text), "--tokenizer", "t", "--lengths", "300", "600", "--num-items", "2", "--out", str(out)]
    for method, model in (("bf16", "good"), ("int2", "bad"), ("bf16", "good")):
        assert novakv(["eval", "needles", "--model", model, "--method", method, *common]) == 0
    assert Reader.asked == 2 * 2 * 8 * 2
    assert "needles-600  mean                 100.0" in capsys.readouterr().out
    runs = [str(out / method / f"needles-{length}") for method in ("bf16", "int2") for length in (300, 600)]
    assert novakv(["eval", "report", *runs, "--reference", "bf16", "--out", str(tmp_path / "report")]) == 0
    report = (tmp_path / "report" / "report.md").read_text()
    assert row(report, "int2", "Difference to bf16").count("-100.0 [-100.0, -100.0]") == 2
    assert str(tmp_path) not in report


class Engine:
    """Stands in for an offline engine: the 2-bit one forgets one task, and loses more at every token."""

    started = 0

    def __init__(self, model, cache, novakv, engine, max_tokens, temperature):
        Engine.started += 1
        self.arguments = (engine["max_model_len"], max_tokens)
        self.is_exact = cache == "stock"
        self.facts = {"bits_per_element": 16.0 if self.is_exact else 2.25}

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def answer(self, items, sample):
        # the longer of 600 + 128 tokens and 50 + 1
        assert self.arguments == (728, 128)
        return [" ".join(item.expected) if self.is_exact or item.task == "niah_single_1" else "?" for item in items]

    def prompt_logprobs(self, windows):
        return [[-math.log(4 if self.is_exact else 5)] * (len(window) - 1) for window in windows]


def test_command_measures_everything_and_reports(tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(command, "OfflineEngine", Engine)
    monkeypatch.setattr(transformers, "AutoTokenizer", Tokenizer)

    def write_study(directory, **settings):
        assert settings == {"model": "m", "seed": 0, "dtype": "auto", "num_tokens": 2048}
        directory.mkdir()
        (directory / "study.json").write_text(json.dumps(dataclasses.asdict(study())))

    monkeypatch.setattr(command, "_write_study", write_study)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"Sentence {i} says little about anything at all." for i in range(200)))
    arguments = ["eval", "all", "--model", "m", "--text", str(text), "--out", str(tmp_path / "out")]
    arguments += ["--lengths", "300", "600", "--num-items", "2", "--tasks", "niah_single_1", "niah_single_2"]
    arguments += ["--window-tokens", "50", "--num-windows", "2", "--study-tokens", "2048"]
    assert novakv(arguments) == 1
    assert "--cache is missing" in capsys.readouterr().err
    assert novakv([*arguments, "--cache", "stock", "novakv"]) == 0
    assert Engine.started == 2
    report = tmp_path / "out" / "report"
    content = (report / "report.md").read_text()
    assert row(content, "novakv", "Mean of the tasks").count("50.0 [50.0, 50.0]") == 2
    assert row(content, "novakv", "Perplexity") == "| novakv | 2.25 | 5.000 |"
    assert "| novakv | +25.00 % [+25.00, +25.00] |" in content
    assert "## Codec study of m" in content
    shown = set(re.findall(r"\]\(([\w.-]+)\)", content))
    assert shown == {path.name for path in report.glob("*.png")}
    assert len(shown) == 5
    # everything is there: a second run writes nothing over it
    assert novakv([*arguments, "--cache", "stock", "novakv"]) == 1
    assert "holds a report already" in capsys.readouterr().err


def test_command_asks_questions(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "Endpoint", Reader)
    path = tmp_path / "quiz.jsonl"
    path.write_text(json.dumps({"question": "2 + 2?", "answer": 4}))
    arguments = ["eval", "questions", str(path), "--model", "good", "--method", "bf16", "--out", str(tmp_path / "runs")]
    assert novakv(arguments) == 0
    assert read_run(tmp_path / "runs" / "bf16" / "quiz").votes == {"quiz/1": True}


def test_command_refuses_in_one_line(tmp_path, capsys):
    arguments = ["eval", "report", str(tmp_path), "--reference", "x", "--out", str(tmp_path / "out")]
    assert novakv(arguments) == 1
    assert capsys.readouterr().err.startswith("novakv: ")
    missing = str(Path(tmp_path) / "missing.jsonl")
    assert novakv(["eval", "questions", missing, "--model", "m", "--method", "x", "--out", str(tmp_path)]) == 1
