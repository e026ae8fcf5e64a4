"""The band's block arithmetic: numbers worked out by hand, then the rule itself for every length."""

import doctest

import pytest

from vllm_novakv.backend import band_geometry
from vllm_novakv.backend.band_geometry import BandGeometry

DEFAULT = BandGeometry(sink_tokens=64, recent_tokens=256)
GEOMETRIES = [
    pytest.param(DEFAULT, id="sink64-recent256"),
    pytest.param(BandGeometry(0, 16), id="sink0-recent16"),
    pytest.param(BandGeometry(16, 48), id="sink16-recent48"),
    pytest.param(BandGeometry(128, 128), id="sink128-recent128"),
    pytest.param(BandGeometry(512, 272), id="sink512-recent272"),
]
LENGTHS = range(1, 800)


def test_geometry_docstring_example():
    assert doctest.testmod(band_geometry).attempted == 3
    assert doctest.testmod(band_geometry).failed == 0


def test_sizes():
    assert DEFAULT.num_sink_blocks == 4
    # 256 tokens before a boundary and 128 after it are 24 blocks of 16.
    assert DEFAULT.max_window_blocks == 24
    assert BandGeometry(0, 16).max_window_blocks == 9


@pytest.mark.parametrize(
    ("num_tokens", "start"),
    [(0, 0), (1, 0), (256, 0), (384, 0), (385, 8), (512, 8), (513, 16), (1000, 40), (1024, 40), (1025, 48)],
    ids=lambda value: str(value),
)
def test_window_start_block(num_tokens, start):
    assert DEFAULT.window_start_block(num_tokens) == start


@pytest.mark.parametrize(
    ("num_tokens", "tail"),
    [
        (0, range(0)),
        (127, range(0)),
        (128, range(8)),
        (300, range(16)),
        (383, range(16)),
        (384, range(8, 24)),
        (896, range(40, 56)),
        (1000, range(40, 56)),
    ],
    ids=lambda value: str(value),
)
def test_tail(num_tokens, tail):
    assert DEFAULT.tail(num_tokens) == tail


def test_is_held():
    held = [number for number in range(63) if DEFAULT.is_held(number, 1000)]
    assert held == [0, 1, 2, 3, *range(40, 63)]


@pytest.mark.parametrize(
    ("geometry", "num_tokens", "sink", "tail"),
    [
        pytest.param(DEFAULT, 128, range(0), range(8), id="all-in-tail"),
        pytest.param(DEFAULT, 256, range(0), range(16), id="tail-from-0"),
        pytest.param(DEFAULT, 384, range(4), range(8, 24), id="hole-of-64-tokens"),
        pytest.param(DEFAULT, 896, range(4), range(40, 56), id="hole"),
        pytest.param(BandGeometry(512, 16), 256, range(15), range(15, 16), id="shorter-than-sink"),
    ],
)
def test_blocks_for_hit(geometry, num_tokens, sink, tail):
    assert geometry.blocks_for_hit(num_tokens) == (sink, tail)


def test_steady_and_peak_blocks():
    assert DEFAULT.steady_blocks(100) == 7
    assert DEFAULT.steady_blocks(447) == 28
    assert DEFAULT.steady_blocks(100_000) == 4 + 24
    assert DEFAULT.peak_blocks(500, max_steps_in_flight=1) == 32
    assert DEFAULT.peak_blocks(100_000, max_steps_in_flight=1) == 4 + 2 * 24
    assert DEFAULT.peak_blocks(100_000, max_steps_in_flight=2) == 4 + 3 * 24


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_next_query_reads_held_blocks(geometry):
    for num_tokens in LENGTHS:
        exact = {*range(min(geometry.sink_tokens, num_tokens))}
        exact |= {*range(max(0, num_tokens - geometry.recent_tokens + 1), num_tokens)}
        assert all(geometry.is_held(key // 16, num_tokens) for key in exact), num_tokens


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_resend_finds_held_blocks(geometry):
    for num_tokens in LENGTHS:
        boundary = (num_tokens - 1) // 128 * 128
        sink, tail = geometry.blocks_for_hit(boundary)
        assert all(geometry.is_held(number, num_tokens) for number in (*sink, *tail)), num_tokens
        # The hit serves its first query, at position `boundary`.
        first_exact = {*range(min(geometry.sink_tokens, boundary))}
        first_exact |= {*range(max(0, boundary - geometry.recent_tokens + 1), boundary)}
        assert {key // 16 for key in first_exact} <= {*sink, *tail}, num_tokens


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_window_bounds(geometry):
    starts = [geometry.window_start_block(num_tokens) for num_tokens in LENGTHS]
    assert starts == sorted(starts)
    for num_tokens, start in zip(LENGTHS, starts, strict=True):
        num_blocks = -(-num_tokens // 16)
        assert num_blocks - start <= geometry.max_window_blocks
        held = sum(geometry.is_held(number, num_tokens) for number in range(num_blocks))
        assert held <= geometry.steady_blocks(num_tokens)
