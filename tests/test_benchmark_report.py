"""README's numbers are those of the records."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import report

ROOT = Path(__file__).resolve().parent.parent


def test_readme_says_what_the_records_say():
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "report.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_changed_number_is_noticed():
    text = (ROOT / "README.md").read_text()
    match = report.MARKED.search(text)
    changed = text[: match.start()] + match[0].replace("0", "1", 1) + text[match.end() :]
    assert changed != text
    assert report.rewritten(changed) == text


def test_unknown_part_is_refused():
    with pytest.raises(SystemExit, match="part 'nothing'; the tables are"):
        report.rewritten("<!-- records: nothing -->\n<!-- end -->")


def test_newest_goes_by_date(tmp_path):
    for name, date in (("b-engine", "2026-01-02"), ("a-engine", "2026-01-03"), ("z-other", "2026-01-09")):
        (tmp_path / f"{name}.json").write_text(json.dumps({"date": date, "results": {}, "settings": {}}))
    assert report.newest(".*engine", tmp_path).path.name == "a-engine.json"
    with pytest.raises(SystemExit, match="no record soak"):
        report.newest("soak", tmp_path)


def test_engine_table(monkeypatch):
    step = {"decode_step_ms": 12.35, "prefill_tokens_per_s": 26_000.4}
    fill = {"requests": 100, "preemptions": 0, "tokens_per_s": 2500.0}
    kinds = {"attention": 5.0, "gemm": 4.0, "store": 0.375, "other": 0.5, "kernel x": 0.5}
    results = {
        "novakv": {"2x30": step, "4x8": step | {"gpu_ms_by_kind": kinds}, "pool_tokens": 7000, "fill 30": fill},
        "bf16": {"2x30": {"skipped": "the pool does not hold it"}, "pool_tokens": 1000},
    }
    settings = {"shapes": ["2x30"], "profile": ["4x8"], "fill": 30, "chunk": 16_384, "memory": 0.7}
    record = report.Record(report.RECORDS / "x.json", "2026-01-01", results, settings)
    monkeypatch.setattr(report, "newest", lambda pattern: record)
    lines = report.engine_table().splitlines()
    assert lines[2] == "|  | 2-bit | BF16, FlashAttention 3 |"
    assert "| decode step, 2 x 30 tokens, ms | 12.35 | - |" in lines
    assert "| prefill of 2 x 30 tokens, tokens/s | 26,000 | - |" in lines
    assert "| pool, tokens | 7,000 | 1,000 |" in lines
    assert "| requests of 30 tokens in the pool at once | 100 | - |" in lines
    assert "| of which preempted | 0 | - |" in lines
    assert "| of which attention, ms | 5.00 | - |" in lines
    assert "| of which writing the cache, ms | 0.38 | - |" in lines
    assert "| of which other kernels, ms | 0.50 | - |" in lines
