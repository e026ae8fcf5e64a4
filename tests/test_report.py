"""Reports over finished runs, and the command that makes both, against a model that reads its prompt."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from vllm_novakv import eval_command as command
from vllm_novakv.cli import main as novakv
from vllm_novakv.evaluation.chart import BOTTOM, LEFT, RIGHT, TOP, line_chart_svg
from vllm_novakv.evaluation.items import Item
from vllm_novakv.evaluation.report import describe_runs, read_run, write_report
from vllm_novakv.evaluation.runner import run_items

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


def row(text, name, heading):
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    return next(line for line in section.splitlines() if line.startswith(f"| {name} |"))


def test_report_compares_methods_item_by_item(tmp_path):
    runs = [make_run(tmp_path, "bf16"), make_run(tmp_path, "int2", right=[0]), make_run(tmp_path, "ours")]
    text = describe_runs(runs, "bf16")
    assert row(text, "bf16", "Mean of the tasks") == "| bf16 | 100.0 [100.0, 100.0] |"
    assert row(text, "int2", "Mean of the tasks").startswith("| int2 | 25.0 [")
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
    text = describe_runs(runs, "bf16")
    assert row(text, "method", "Mean of the tasks") == "| method | quiz | needles-512 | needles-4096 |"
    assert row(text, "bf16", "Mean of the tasks") == "| bf16 | – | – | 100.0 [100.0, 100.0] |"
    assert row(text, "ours", "Difference to bf16").startswith("| ours | – | – | +0.0")


def test_report_files_are_written_once(tmp_path):
    runs = [make_run(tmp_path, "bf16"), make_run(tmp_path, "bf16", "needles-512", 512, right=[0, 1])]
    path = write_report(runs, "bf16", tmp_path / "report")
    assert "![Mean" in path.read_text()
    chart = ElementTree.fromstring((tmp_path / "report" / "accuracy.svg").read_text())
    # 512 tokens at 50 %, 4096 at 100 %
    points = next(element.get("points") for element in chart.iter() if element.tag.endswith("polyline"))
    assert points == f"{LEFT}.0,{(TOP + BOTTOM) / 2:.1f} {RIGHT}.0,{TOP}.0"
    with pytest.raises(ValueError, match="holds a report already"):
        write_report(runs, "bf16", tmp_path / "report")


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


@pytest.mark.parametrize(
    "series",
    [{}, {"a": []}, {"a": [(1.0, float("nan"))]}, {"a": [(0.0, 1.0)]}],
    ids=["none", "empty", "nan", "log-of-zero"],
)
def test_impossible_charts_are_refused(series):
    with pytest.raises(ValueError, match="chart 'y'"):
        line_chart_svg("y", "x", series, is_log_x=True)


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
        return {"input_ids": [len(word) for word in messages[0]["content"].split()]}


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
