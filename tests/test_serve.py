"""`novakv serve` as a user meets it: a process that answers over HTTP and ends when interrupted."""

import json
import sys
import urllib.request
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from quickstart import ask, running_server

EXACT = json.dumps({"novakv": {"history": "exact"}})


@pytest.mark.e2e
def test_served_model_answers_a_chat_request(smollm2_dir, tmp_path):
    log = tmp_path / "server.log"
    # the lossless history needs no fitted artifact
    options = ("--additional-config", EXACT, "--enforce-eager", "--max-num-batched-tokens", "2048")
    with running_server(smollm2_dir, log, *options) as url:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as reply:
            models = [model["id"] for model in json.load(reply)["data"]]
        answer = ask(url, smollm2_dir.name, "What is the capital of France? Answer with one word.")
        # before the end: vLLM may log a traceback of its own when its processes are stopped
        text = log.read_text()
    assert models == [smollm2_dir.name]
    assert "Paris" in answer
    assert "NOVAKV cache:" in text
    assert "Traceback" not in text


@pytest.mark.e2e
def test_server_without_an_artifact_ends_and_says_what_to_run(smollm2_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    with (
        pytest.raises(RuntimeError, match="novakv fit --model"),
        running_server(smollm2_dir, tmp_path / "server.log", "--enforce-eager"),
    ):
        pass
