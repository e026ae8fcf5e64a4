"""The table of launch settings: complete, and found by closest architecture and smallest band that holds the batch."""

import pytest
import torch

from vllm_novakv.codec.layout import SUPPORTED_HEAD_SIZES
from vllm_novakv.ops import launch
from vllm_novakv.ops.launch import Launch, Row, launch_for, read_table

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", SUPPORTED_HEAD_SIZES)
def test_every_kernel_has_settings(size):
    for operation in ("fold", "history", "merge"):
        for rows in (8, 16):
            for batch in (1, 256, 4096):
                assert launch_for(operation, CPU, size, rows, batch).tokens > 0
    for operation in ("prefill", "store", "gather", "merge_pass"):
        for batch in (1, 16_384):
            assert launch_for(operation, CPU, size, batch=batch).warps > 0


def test_tiles_divide_a_block():
    for row in read_table():
        if row.operation in ("history", "gather"):
            assert row.launch.tokens % 16 == 0
            assert 128 % row.launch.tokens == 0
        if row.operation == "prefill":
            assert row.launch.keys % 16 == 0
            assert 128 % row.launch.keys == 0


def test_rows_are_unique():
    keys = [(r.operation, r.architecture, r.head_size, r.query_rows, r.max_batch) for r in read_table()]
    assert len(set(keys)) == len(keys)


@pytest.fixture
def small_table(monkeypatch):
    rows = [
        Row("store", architecture, 64, 0, max_batch, Launch(tokens, 0, 4, 1))
        for architecture, max_batch, tokens in ((80, 512, 1), (80, 9999, 2), (90, 9999, 3))
    ]
    monkeypatch.setattr(launch, "read_table", lambda: rows)
    launch._rows_for.cache_clear()
    yield
    launch._rows_for.cache_clear()


@pytest.mark.parametrize(
    ("architecture", "batch", "tokens"),
    [(80, 1, 1), (80, 512, 1), (80, 513, 2), (80, 100_000, 2), (86, 1, 1), (90, 1, 3), (120, 1, 3), (0, 600, 2)],
)
def test_closest_architecture_and_band(small_table, monkeypatch, architecture, batch, tokens):
    monkeypatch.setattr(launch, "architecture_of", lambda device: architecture)
    assert launch_for("store", CPU, 64, batch=batch).tokens == tokens


def test_missing_row_says_how_to_add_it(small_table):
    with pytest.raises(LookupError, match=r"launch\.json has no launch settings for history.*tune_launch"):
        launch_for("history", CPU, 64, 8)
