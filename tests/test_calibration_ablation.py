"""The calibration ablation: which commands it issues, in which order, and that it repeats no fit."""

import argparse
import json
import runpy
import sys
from pathlib import Path

import pytest

from vllm_novakv import cli

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "calibration_ablation.py"


def test_sets_are_read_with_and_without_a_number_of_tokens():
    parse_set = runpy.run_path(str(SCRIPT))["parse_set"]
    small, whole = parse_set("small=a/b.csv:8900"), parse_set("x=c:d.txt")
    assert (small.name, small.file, small.num_tokens) == ("small", Path("a/b.csv"), 8900)
    assert (whole.name, whole.file, whole.num_tokens) == ("x", Path("c:d.txt"), None)
    for text in ("file.csv", "=file.csv", "name=", "stock=file.csv"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not NAME=FILE"):
            parse_set(text)


def test_every_set_is_fitted_once_and_measured_beside_the_stock_cache(tmp_path, monkeypatch):
    issued = []

    def note(arguments):
        issued.append(arguments)
        return 0

    monkeypatch.setattr(cli, "main", note)
    (tmp_path / "artifacts" / "known").mkdir(parents=True)
    arguments = ["--model", "m", "--text", "t.txt", "--out", str(tmp_path), "--sets", "known=a.csv", "new=b.csv:512"]
    monkeypatch.setattr(sys, "argv", ["x", *arguments, "--lengths", "1024"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    kinds = [command[0] if command[0] == "fit" else command[1] for command in issued]
    assert kinds == [*["perplexity", "needles"] * 2, "fit", "perplexity", "needles", "report"]
    fit = issued[4]
    assert fit[fit.index("--prompts") + 1] == "b.csv"
    assert fit[fit.index("--num-tokens") + 1] == "512"
    measured = issued[5]
    artifact = str(tmp_path / "artifacts" / "new")
    assert fit[-1] == artifact
    assert json.loads(measured[measured.index("--novakv") + 1]) == {"artifact": artifact}
    runs = issued[-1][2:8]
    assert runs[0] == str(tmp_path / "runs" / "stock" / "perplexity-4096")
    assert runs[-1] == str(tmp_path / "runs" / "new" / "needles-1024")


def test_a_command_that_fails_ends_the_ablation(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "main", lambda arguments: 1)
    monkeypatch.setattr(sys, "argv", ["x", "--model", "m", "--text", "t", "--out", str(tmp_path), "--sets", "a=b.csv"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert caught.value.code == 1
