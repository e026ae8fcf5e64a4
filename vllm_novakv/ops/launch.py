"""Tile sizes, warps and pipeline stages of the Triton kernels: a table of measured settings, launch.json.

A row holds for one operation, GPU architecture, head size and number of query rows (the query heads of a KV head,
padded to 8 or 16; 0 where an operation has none), up to a batch: requests of a decode step, tokens of a store. An
architecture that nobody has measured takes the rows of the newest measured one below it, or of the oldest.

`python benchmarks/tune_launch.py` measures a GPU's rows and writes them into the table.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

TABLE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Launch:
    """Settings of one kernel.

    Args:
        tokens: tokens or rows of a tile: keys of a history tile (decode, gather), query rows (prefill), new tokens
            (store), rows (merges).
        keys: keys of a tile next to those rows (prefill); unused otherwise.
        warps: warps of a program.
        stages: pipeline stages.
    """

    tokens: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Args:
        operation: "fold", "history", "merge" (decode), "prefill", "store", "gather", "merge_pass" (FlashAttention).
        architecture: compute capability as one number, 90 for 9.0.
        head_size: of the model.
        query_rows: query heads of a KV head, padded to 8 or 16; 0 where they do not matter.
        max_batch: largest batch for which the row holds.
        launch: the settings.
    """

    operation: str
    architecture: int
    head_size: int
    query_rows: int
    max_batch: int
    launch: Launch


def launch_for(operation: str, device: torch.device, head_size: int, query_rows: int = 0, batch: int = 1) -> Launch:
    """Settings of a kernel for a call.

    Args:
        operation: see `Row`.
        device: where it runs; a CPU, where Triton interprets, counts as the oldest measured architecture.
        head_size, query_rows, batch: of the call.

    Raises:
        LookupError: the table has no row for the operation with this head size and these query rows.
    """
    rows = _rows_for(operation, architecture_of(device), head_size, query_rows)
    return next((row.launch for row in rows if batch <= row.max_batch), rows[-1].launch)


@cache
def architecture_of(device: torch.device) -> int:
    """Compute capability as one number, 90 for 9.0; 0 without a GPU."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def _rows_for(operation: str, architecture: int, head_size: int, query_rows: int) -> tuple[Row, ...]:
    """Rows of one kernel by batch, for the architecture that comes closest."""
    rows = [
        row
        for row in read_table()
        if (row.operation, row.head_size, row.query_rows) == (operation, head_size, query_rows)
    ]
    if not rows:
        raise LookupError(
            f"{TABLE.name} has no launch settings for {operation}, head size {head_size}, {query_rows} query rows; "
            "add them with benchmarks/tune_launch.py"
        )
    measured = sorted({row.architecture for row in rows})
    closest = max((known for known in measured if known <= architecture), default=measured[0])
    return tuple(sorted((row for row in rows if row.architecture == closest), key=lambda row: row.max_batch))


def read_table() -> list[Row]:
    """All rows of the committed table."""
    return [Row(**{**row, "launch": Launch(**row["launch"])}) for row in json.loads(TABLE.read_text())]
