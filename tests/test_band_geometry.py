"""The band's block arithmetic: numbers worked out by hand, then the rule itself for every length."""

import doctest

import pytest

from vllm_novakv.backend import band_geometry
from vllm_novakv.backend.band_geometry import BandGeometry

DEFAULT = BandGeometry(sink_tokens=64, recent_tokens=256, prompt_recent_tokens=1024)
GEOMETRIES = [
    pytest.param(DEFAULT, id="sink64-recent256-prompt1024"),
    pytest.param(BandGeometry(0, 16, 16), id="sink0-recent16-prompt16"),
    pytest.param(BandGeometry(16, 48, 80), id="sink16-recent48-prompt80"),
    pytest.param(BandGeometry(128, 128, 256), id="sink128-recent128-prompt256"),
    pytest.param(BandGeometry(512, 272, 400), id="sink512-recent272-prompt400"),
]
LENGTHS = range(1, 1600)


def test_geometry_docstring_example():
    assert doctest.testmod(band_geometry).attempted == 4
    assert doctest.testmod(band_geometry).failed == 0


@pytest.mark.parametrize(
    ("num_tokens", "start"),
    [(0, 0), (1, 0), (1024, 0), (1152, 0), (1153, 8), (1280, 8), (1281, 16), (2000, 56), (2048, 56), (2049, 64)],
    ids=lambda value: str(value),
)
def test_window_start_block_while_the_prompt_goes_on(num_tokens, start):
    assert DEFAULT.window_start_block(num_tokens) == start
    assert DEFAULT.window_start_block(num_tokens, num_tokens + 1) == start


@pytest.mark.parametrize(
    ("num_tokens", "start"),
    [(1, 0), (256, 0), (384, 0), (385, 8), (512, 8), (513, 16), (1000, 40), (1024, 40), (1025, 48), (2000, 104)],
    ids=lambda value: str(value),
)
def test_window_start_block_after_the_prompt(num_tokens, start):
    assert DEFAULT.window_start_block(num_tokens, num_tokens) == start
    assert DEFAULT.window_start_block(num_tokens, 1) == start


@pytest.mark.parametrize(
    ("num_tokens", "tail"),
    [
        (0, range(0)),
        (127, range(0)),
        (128, range(8)),
        (300, range(16)),
        (1151, range(64)),
        (1152, range(8, 72)),
        (1920, range(56, 120)),
        (2000, range(56, 120)),
    ],
    ids=lambda value: str(value),
)
def test_tail(num_tokens, tail):
    assert DEFAULT.tail(num_tokens) == tail


def test_is_required():
    required = [number for number in range(125) if DEFAULT.is_required(number, 2000)]
    assert required == [0, 1, 2, 3, *range(56, 125)]


@pytest.mark.parametrize(
    ("geometry", "num_tokens", "sink", "tail"),
    [
        pytest.param(DEFAULT, 128, range(0), range(8), id="all-in-tail"),
        pytest.param(DEFAULT, 1024, range(0), range(64), id="tail-from-0"),
        pytest.param(DEFAULT, 1152, range(4), range(8, 72), id="hole-of-64-tokens"),
        pytest.param(DEFAULT, 1920, range(4), range(56, 120), id="hole"),
        pytest.param(DEFAULT, 1936, range(4), range(57, 121), id="inside-128-tokens"),
        pytest.param(BandGeometry(512, 16, 16), 256, range(15), range(15, 16), id="shorter-than-sink"),
    ],
)
def test_blocks_for_hit(geometry, num_tokens, sink, tail):
    assert geometry.blocks_for_hit(num_tokens) == (sink, tail)


def test_steady_and_peak_blocks():
    assert DEFAULT.steady_blocks(100) == 7
    assert DEFAULT.steady_blocks(447) == 28
    # 256 tokens before a boundary and 128 after it are 24 blocks of 16; 1,024 and 128 are 72.
    assert DEFAULT.steady_blocks(100_000) == 4 + 24
    assert DEFAULT.peak_blocks(500, num_windows=2) == 32
    assert DEFAULT.peak_blocks(100_000, num_windows=2) == 4 + 2 * 72
    assert DEFAULT.peak_blocks(100_000, num_windows=3) == 4 + 3 * 72


def exact_keys(geometry: BandGeometry, position: int, num_prompt_tokens: int) -> set[int]:
    """Earlier keys that a query attends exactly."""
    is_prompt = position < num_prompt_tokens
    window_tokens = geometry.prompt_recent_tokens if is_prompt else geometry.recent_tokens
    return {key for key in range(position) if key < geometry.sink_tokens or key > position - window_tokens}


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_next_query_reads_held_blocks(geometry):
    for num_tokens in LENGTHS:
        for num_prompt_tokens in (num_tokens + 1, num_tokens):
            start = geometry.window_start_block(num_tokens, num_prompt_tokens)
            exact = {key // 16 for key in exact_keys(geometry, num_tokens, num_prompt_tokens)}
            assert all(number < geometry.num_sink_blocks or number >= start for number in exact), num_tokens
            assert all(geometry.is_required(number, num_tokens) for number in exact), num_tokens


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_resend_finds_required_blocks(geometry):
    for num_tokens in LENGTHS:
        boundary = (num_tokens - 1) // 128 * 128
        sink, tail = geometry.blocks_for_hit(boundary)
        assert all(geometry.is_required(number, num_tokens) for number in (*sink, *tail)), num_tokens
        # The hit serves its first query, at position `boundary`.
        exact = exact_keys(geometry, boundary, num_prompt_tokens=num_tokens)
        assert {key // 16 for key in exact} <= {*sink, *tail}, num_tokens


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_window_bounds(geometry):
    prompt_starts = [geometry.window_start_block(num_tokens) for num_tokens in LENGTHS]
    decode_starts = [geometry.window_start_block(num_tokens, 1) for num_tokens in LENGTHS]
    assert prompt_starts == sorted(prompt_starts)
    assert decode_starts == sorted(decode_starts)
    for num_tokens, prompt_start, decode_start in zip(LENGTHS, prompt_starts, decode_starts, strict=True):
        assert prompt_start <= decode_start
        num_blocks = -(-num_tokens // 16)
        held = min(geometry.num_sink_blocks, decode_start) + num_blocks - decode_start
        assert held <= geometry.steady_blocks(num_tokens)
