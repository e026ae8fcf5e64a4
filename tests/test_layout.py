"""The byte map: sizes, hand-computed addresses, and that the permutation loses and shares nothing."""

import dataclasses

import pytest
import torch

from vllm_novakv import support
from vllm_novakv.codec.layout import (
    BLOCK_TOKENS,
    SUPPORTED_HEAD_SIZES,
    RecordLayout,
    index_byte_offset,
    record_byte_offsets,
    scale_byte_offset,
    value_cell_offset,
    value_code_position,
)

LAYOUTS = [
    pytest.param(RecordLayout(size, group), id=f"hs{size}-g{group}") for size in (64, 128, 256) for group in (2, 4, 8)
]


@pytest.mark.parametrize(
    ("head_size", "group_size", "record_bytes", "bits"),
    [
        pytest.param(64, 4, 36, 2.25, id="hs64-g4"),
        pytest.param(128, 4, 68, 2.125, id="hs128-g4"),
        pytest.param(256, 4, 132, 2.0625, id="hs256-g4"),
        pytest.param(64, 2, 52, 3.25, id="hs64-g2"),
        pytest.param(128, 8, 52, 1.625, id="hs128-g8"),
    ],
)
def test_layout_sizes_match_hand_computation(head_size, group_size, record_bytes, bits):
    layout = RecordLayout(head_size, group_size)
    assert layout.record_bytes == record_bytes
    assert layout.block_bytes == 128 * record_bytes
    assert layout.bits_per_element == bits
    assert layout.num_groups == layout.index_bytes == head_size // group_size
    assert layout.value_bytes == head_size // 4
    assert layout.value_cell_bytes == head_size // 32


def test_layout_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RecordLayout(64).head_size = 128


@pytest.mark.parametrize("head_size", [0, 16, 32, 80, 96, 192, 512, -64])
def test_layout_refuses_head_size(head_size):
    with pytest.raises(ValueError, match=rf"head_size={head_size} is not supported.*64, 128, 256.*without the NOVAKV"):
        RecordLayout(head_size)


@pytest.mark.parametrize("group_size", [0, -4, 3, 5, 128])
def test_layout_refuses_group_size(group_size):
    with pytest.raises(ValueError, match=rf"head_size=64 is not divisible by group_size={group_size}; refit the model"):
        RecordLayout(64, group_size)


def test_layout_and_support_rules_name_the_same_head_sizes():
    assert support.SUPPORTED_HEAD_SIZES == SUPPORTED_HEAD_SIZES


@pytest.mark.parametrize("layout", LAYOUTS)
def test_table_is_bijection(layout):
    table = record_byte_offsets(layout)
    assert table.dtype == torch.int64
    assert table.shape == (BLOCK_TOKENS, layout.record_bytes)
    assert torch.equal(table.flatten().sort().values, torch.arange(layout.block_bytes))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_table_equals_address_functions(layout):
    table = record_byte_offsets(layout).tolist()
    unit = layout.value_cell_bytes
    for token, row in enumerate(table):
        for group in range(layout.num_groups):
            assert row[group] == index_byte_offset(layout, token, group)
        for cell in range(8):
            for byte in range(unit):
                assert (
                    row[layout.record_value_start + cell * unit + byte] == value_cell_offset(layout, token, cell) + byte
                )
        for byte in (0, 1):
            key, value = layout.record_key_scale_start + byte, layout.record_value_scale_start + byte
            assert row[key] == scale_byte_offset(layout.block_key_scale_start, token) + byte
            assert row[value] == scale_byte_offset(layout.block_value_scale_start, token) + byte


@pytest.mark.parametrize(
    ("head_size", "token", "group", "expected"),
    [
        pytest.param(64, 3, 5, 53, id="hs64"),
        pytest.param(128, 127, 31, 4095, id="hs128-last"),
        pytest.param(256, 2, 0, 128, id="hs256"),
    ],
)
def test_index_address_matches_hand_computation(head_size, token, group, expected):
    assert index_byte_offset(RecordLayout(head_size), token, group) == expected


@pytest.mark.parametrize(
    ("head_size", "token", "cell", "expected"),
    [
        # value tiles start at 128 * 16 = 2048; unit of 2 bytes; tile of 256 bytes
        pytest.param(64, 0, 0, 2048, id="hs64-tok0-cell0"),
        pytest.param(64, 1, 0, 2050, id="hs64-tok1-cell0"),
        pytest.param(64, 8, 0, 2052, id="hs64-tok8-cell0"),
        pytest.param(64, 2, 0, 2056, id="hs64-tok2-cell0"),
        # (3*4 + 0)*4 + 1 + 2 = 51
        pytest.param(64, 9, 3, 2048 + 102, id="hs64-tok9-cell3"),
        # last token of the last tile, last cell: unit 127
        pytest.param(64, 127, 7, 2048 + 7 * 256 + 254, id="hs64-tok127-cell7"),
        # value tiles start at 128 * 32 = 4096; unit of 4 bytes; tile of 512 bytes; unit 39
        pytest.param(128, 27, 2, 4096 + 512 + 156, id="hs128-tok27-cell2"),
        # value tiles start at 128 * 64 = 8192; unit of 8 bytes; tile of 1024 bytes; p = 6: (4*5 + 3)*4 = 92
        pytest.param(256, 38, 5, 8192 + 2 * 1024 + 736, id="hs256-tok38-cell5"),
    ],
)
def test_value_address_matches_hand_computation(head_size, token, cell, expected):
    assert value_cell_offset(RecordLayout(head_size), token, cell) == expected


@pytest.mark.parametrize(
    ("head_size", "token", "expected_key", "expected_value"),
    [
        # planes at 128 * 32 = 4096 and 128 * 34 = 4352
        pytest.param(64, 0, 4096, 4352, id="hs64-tok0"),
        pytest.param(64, 8, 4098, 4354, id="hs64-tok8"),
        pytest.param(64, 1, 4112, 4368, id="hs64-tok1"),
        pytest.param(64, 63, 4096 + 126, 4352 + 126, id="hs64-tok63"),
        pytest.param(64, 77, 4306, 4562, id="hs64-tok77"),
        # planes at 128 * 64 = 8192 and 8448
        pytest.param(128, 64, 8192 + 128, 8448 + 128, id="hs128-tok64"),
        pytest.param(256, 127, 16384 + 254, 16640 + 254, id="hs256-tok127"),
    ],
)
def test_scale_address_matches_hand_computation(head_size, token, expected_key, expected_value):
    layout = RecordLayout(head_size)
    assert scale_byte_offset(layout.block_key_scale_start, token) == expected_key
    assert scale_byte_offset(layout.block_value_scale_start, token) == expected_value


@pytest.mark.parametrize(
    ("head_size", "dim", "byte", "shift"),
    [
        pytest.param(64, 0, 16, 0, id="hs64-dim0"),
        pytest.param(64, 8, 16, 2, id="hs64-dim8"),
        pytest.param(64, 43, 23, 2, id="hs64-dim43"),
        pytest.param(64, 63, 31, 6, id="hs64-dim63"),
        pytest.param(128, 127, 32 + 31, 6, id="hs128-dim127"),
        pytest.param(256, 100, 64 + 4 * 8 + 3, 0, id="hs256-dim100"),
    ],
)
def test_value_code_position_matches_hand_computation(head_size, dim, byte, shift):
    assert value_code_position(RecordLayout(head_size), dim) == (byte, shift)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_value_codes_fill_the_value_bytes(layout):
    places = {value_code_position(layout, dim) for dim in range(layout.head_size)}
    first, last = layout.record_value_start, layout.record_key_scale_start
    assert places == {(byte, shift) for byte in range(first, last) for shift in (0, 2, 4, 6)}


@pytest.mark.parametrize("head_size", SUPPORTED_HEAD_SIZES)
def test_four_adjacent_cells_are_one_lanes_tokens(head_size):
    layout = RecordLayout(head_size)
    for pair in range(4):
        start = value_cell_offset(layout, 2 * pair, 6)
        tokens = (2 * pair, 2 * pair + 1, 2 * pair + 8, 2 * pair + 9)
        offsets = [value_cell_offset(layout, token, 6) for token in tokens]
        assert offsets == [start + place * layout.value_cell_bytes for place in range(4)]
        assert (start - layout.block_value_start) % (4 * layout.value_cell_bytes) == 0


def test_scales_of_one_lane_are_sixteen_contiguous_bytes():
    layout = RecordLayout(128)
    for chunk in (0, 64):
        for lane in range(8):
            offsets = [scale_byte_offset(layout.block_key_scale_start, chunk + lane + 8 * step) for step in range(8)]
            assert offsets == [offsets[0] + 2 * step for step in range(8)]
            assert offsets[0] % 16 == 0
