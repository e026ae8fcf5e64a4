"""Fetch a small model, calibrate it, serve it with the 2-bit cache, ask one question, stop the server.

python examples/quickstart.py ["Your question"]
"""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fetch_smollm2 import fetch

QUESTION = "What is the capital of France, and what is it known for?"
START_TIMEOUT_S = 900
STOP_TIMEOUT_S = 60
# without a size, vLLM on a CPU asks for nearly all of the machine's memory
CACHE_BYTES = 2**30
NOVAKV = [sys.executable, "-m", "vllm_novakv.cli"]


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Wait for the server to answer.

    Raises:
        RuntimeError: it ended or did not answer in time; the text holds the end of its log.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    end_of_log = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
    raise RuntimeError(f"the server did not start; the end of {log}:\n{end_of_log}")


@contextmanager
def running_server(model: Path, log: Path, *options: str) -> Iterator[str]:
    """A server for a model on a free port of this machine: its URL; stopped when the block ends."""
    port = find_free_port()
    command = [*NOVAKV, "serve", str(model), "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "4096"]
    command += ["--served-model-name", model.name, "--kv-cache-memory-bytes", str(CACHE_BYTES), *options]
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(server, url, log)
        yield url
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def ask(url: str, model: str, question: str) -> str:
    """The answer of the server's chat endpoint to one question."""
    body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 80, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


def main() -> None:
    question = sys.argv[1] if len(sys.argv) > 1 else QUESTION
    print("1/4 fetching SmolLM2-135M-Instruct", flush=True)
    model = fetch()
    print("2/4 calibrating (once per model)", flush=True)
    if subprocess.run([*NOVAKV, "doctor", str(model)], capture_output=True).returncode:
        subprocess.run([*NOVAKV, "fit", "--model", str(model)], check=True)
        subprocess.run([*NOVAKV, "doctor", str(model)], check=True)
    log = model.parent / "quickstart-server.log"
    print(f"3/4 starting the server (log: {log})", flush=True)
    with running_server(model, log) as url:
        print(f"4/4 asking: {question}\n", flush=True)
        print(ask(url, model.name, question), flush=True)
    print("\nthe server has stopped; to keep one running: novakv serve", model)


if __name__ == "__main__":
    main()
