"""The folder of a run: what it is, what has been measured so far, what came out. No file is ever overwritten.

config.json      what was asked of whom, and where it ran; written first
engine.json      what an offline engine said of itself; written with its first answer
*.jsonl          one measured thing per line, appended as they come
scores.json      written once, when everything is there
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vllm_novakv.evaluation.record import describe_environment

CONFIG_NAME = "config.json"
ENGINE_NAME = "engine.json"
SCORES_NAME = "scores.json"


def claim(directory: Path, identity: Mapping[str, Any]) -> None:
    """Make a directory that of a run, or find that it is.

    Args:
        directory: created if missing.
        identity: everything that a run with the same results has in common (JSON values).

    Raises:
        ValueError: it is another run's, or holds other files; or the identity cannot be written as JSON.
    """
    try:
        # through JSON, so that tuples compare as the lists that they become
        wanted = json.loads(json.dumps(identity, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"the configuration cannot be written as JSON: {error}") from error
    path = directory / CONFIG_NAME
    directory.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        if any(entry.name != _partial(path).name for entry in directory.iterdir()):
            raise ValueError(f"{directory} holds files but no {CONFIG_NAME}; choose a new directory for the run")
        write_new(path, {"identity": wanted, "environment": describe_environment()})
        return
    _refuse_difference(directory, json.loads(path.read_text())["identity"], wanted)


def note_engine(directory: Path, facts: Mapping[str, Any]) -> None:
    """Write down which engine answers, once.

    Args:
        directory: of a run, claimed already.
        facts: what the engine says of itself (JSON values).

    Raises:
        ValueError: answers of another engine are there already.
    """
    path = directory / ENGINE_NAME
    if path.exists():
        _refuse_difference(directory, json.loads(path.read_text()), json.loads(json.dumps(facts)))
    else:
        write_new(path, facts)


def read_engine(directory: Path) -> dict[str, Any]:
    """What the engine of a run said of itself; empty for a run over an endpoint."""
    path = directory / ENGINE_NAME
    facts: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return facts


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a .jsonl file; a last line that an interruption cut off is removed from the file.

    Args:
        path: the file; it may be missing.

    Returns:
        One object per line.
    """
    if not path.exists():
        return []
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        # what was cut off is measured again
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return [json.loads(line) for line in whole.decode().splitlines()]


def append_lines(path: Path, values: Iterable[Mapping[str, Any]]) -> None:
    """Add objects to a .jsonl file."""
    with path.open("a") as file:
        file.writelines(json.dumps(value) + "\n" for value in values)


def write_new(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file that appears whole or not at all, and only where there is none.

    Raises:
        FileExistsError: there is one.
    """
    partial = _partial(path)
    partial.write_text(json.dumps(value, indent=2) + "\n")
    os.link(partial, path)
    partial.unlink()


def _refuse_difference(directory: Path, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    changed = sorted(key for key in {*stored, *wanted} if stored.get(key) != wanted.get(key))
    if changed:
        raise ValueError(f"{directory} holds another run: {', '.join(changed)} differ; choose a new directory")


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")
