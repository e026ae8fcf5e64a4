"""The figures that engines leave for metrics and page: one JSON file per engine, replaced in one step."""

import json
import secrets
from pathlib import Path
from typing import Any

PATTERN = "engine-*.json"


def status_file(directory: Path, engine: int) -> Path:
    """Where an engine leaves its figures."""
    return directory / f"engine-{engine}.json"


def write_status(path: Path, status: dict[str, Any]) -> None:
    """Replace an engine's figures.

    Raises:
        OSError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_text(json.dumps(status))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_statuses(directory: Path) -> dict[str, dict[str, Any]]:
    """Figures by engine number; an engine that has not started, or has ended, is missing."""
    statuses: dict[str, dict[str, Any]] = {}
    for path in sorted(directory.glob(PATTERN)):
        try:
            statuses[path.stem.removeprefix("engine-")] = json.loads(path.read_text())
        except FileNotFoundError:
            continue
    return statuses
