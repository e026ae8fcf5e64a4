"""The byte map of the quantized cache: the only definition of where each byte of a token lives.

A token of one KV head is a *record*; 128 records of one head are a *block*.

    record   [ index bytes: one per group | value bytes: 8 cells | key scale, bf16 | value scale, bf16 ]
    block    [ 128 x index bytes | 8 value tiles of 16 tokens | 128 key scales | 128 value scales ]

The record is the unit of thought (a codec writes and reads records), the block is what memory holds. A block
keeps the fields apart so that a warp reads whole sectors of one field, and permutes the value cells and the scales
so that one 16-byte load gives a lane its tensor-core fragment. A token shares no byte with another token, so a
store never reads what it writes. `record_byte_offsets` is the permutation as data; everything else that needs
addresses derives them from it, or, in a kernel, is tested against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

BLOCK_TOKENS = 128
"""Tokens in one history block."""

SUPPORTED_HEAD_SIZES = (64, 128, 256)
"""Head sizes for which the value cell is a whole 2-, 4- or 8-byte word."""

VALUE_CELLS = 8
"""Words of value codes per token: cell c holds the dims c, c + 8, c + 16, ..."""

VALUE_TILE_TOKENS = 16
"""Tokens whose value cells are interleaved."""

SCALE_CHUNK_TOKENS = 64
"""Tokens whose scales are interleaved."""

SCALE_BYTES = 2
"""Bytes of one bf16 scale."""

_LANE_TOKENS = 8
_CODES_PER_BYTE = 4


@dataclass(frozen=True)
class RecordLayout:
    """Sizes of a record and of a block: record_bytes = d/g + 2 + d/4 + 2, block_bytes = 128 * record_bytes.

    Example: `RecordLayout(head_size=128)` has 32 groups and 68-byte records, 2.125 bits per element.

    Args:
        head_size: elements d of one key or value vector; 64, 128 or 256.
        group_size: key elements g that share one index byte; divides head_size.

    Raises:
        ValueError: head_size is not supported, or group_size does not divide it.

    Source: engineering choice: see the module docstring; the fields are those of arXiv:2608.04074, section 8.1.
    """

    head_size: int
    group_size: int = 4

    def __post_init__(self) -> None:
        if self.head_size not in SUPPORTED_HEAD_SIZES:
            supported = ", ".join(map(str, SUPPORTED_HEAD_SIZES))
            raise ValueError(
                f"head_size={self.head_size} is not supported: the cache format has head sizes {supported}; "
                "serve this model without the NOVAKV backend"
            )
        if self.group_size < 1 or self.head_size % self.group_size:
            raise ValueError(
                f"head_size={self.head_size} is not divisible by group_size={self.group_size}; "
                "refit the model with `novakv fit`, which makes groups of 4"
            )

    @property
    def num_groups(self) -> int:
        """Groups per key, L = head_size / group_size."""
        return self.head_size // self.group_size

    @property
    def index_bytes(self) -> int:
        """Bytes of centroid indices per record, one per group."""
        return self.num_groups

    @property
    def value_bytes(self) -> int:
        """Bytes of 2-bit value codes per record."""
        return self.head_size // _CODES_PER_BYTE

    @property
    def value_cell_bytes(self) -> int:
        """Bytes of one value cell, the word that holds the codes of dims c, c + 8, c + 16, ..."""
        return self.value_bytes // VALUE_CELLS

    @property
    def record_bytes(self) -> int:
        """Bytes of one token of one KV head."""
        return self.index_bytes + self.value_bytes + 2 * SCALE_BYTES

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one KV head."""
        return BLOCK_TOKENS * self.record_bytes

    @property
    def bits_per_element(self) -> float:
        """Stored bits per key or value element."""
        return 8 * self.record_bytes / (2 * self.head_size)

    @property
    def record_value_start(self) -> int:
        """First value byte of a record."""
        return self.index_bytes

    @property
    def record_key_scale_start(self) -> int:
        """First byte of the key scale of a record."""
        return self.index_bytes + self.value_bytes

    @property
    def record_value_scale_start(self) -> int:
        """First byte of the value scale of a record."""
        return self.record_key_scale_start + SCALE_BYTES

    @property
    def block_value_start(self) -> int:
        """First byte of the value tiles of a block."""
        return BLOCK_TOKENS * self.index_bytes

    @property
    def block_key_scale_start(self) -> int:
        """First byte of the key-scale plane of a block."""
        return BLOCK_TOKENS * self.record_key_scale_start

    @property
    def block_value_scale_start(self) -> int:
        """First byte of the value-scale plane of a block."""
        return BLOCK_TOKENS * self.record_value_scale_start


def index_byte_offset(layout: RecordLayout, token: int, group: int) -> int:
    """In-block byte of a centroid index: token * L + group.

    Example, head_size 64, group_size 4 (L = 16): token 3, group 5 is at 3 * 16 + 5 = 53.

    Args:
        layout: the record layout.
        token: position in the block, 0 to 127.
        group: group of key elements, 0 to num_groups - 1.

    Returns:
        Byte offset from the start of the block.

    Source: engineering choice: token-major indices, one vector load per token.
    """
    return token * layout.index_bytes + group


def value_code_position(layout: RecordLayout, dim: int) -> tuple[int, int]:
    """Place of a value code in a record: dim = c + 8 j is bits 2j and 2j + 1 of the little-endian cell c.

    Example, head_size 64, group_size 4 (2-byte cells from record byte 16): dim 43 = 3 + 8 * 5 is bits 10 and 11
    of cell 3, that is record byte 16 + 3 * 2 + 1 = 23, shift 2.

    Args:
        layout: the record layout.
        dim: value element, 0 to head_size - 1.

    Returns:
        (byte of the record, right shift in bits that brings the code down to bits 0 and 1).

    Source: engineering choice: the order in which an m16n8k16 fragment wants the codes.
    """
    step, cell = divmod(dim, VALUE_CELLS)
    byte, place = divmod(step, _CODES_PER_BYTE)
    return layout.record_value_start + cell * layout.value_cell_bytes + byte, 2 * place


def value_cell_offset(layout: RecordLayout, token: int, cell: int) -> int:
    """In-block byte where a value cell starts: unit address (4c + (p mod 8) div 2) * 4 + p mod 2 + 2 (p div 8).

    p is the token's place in its tile of 16; a unit is one cell.

    Example, head_size 128, group_size 4 (4-byte cells; tiles of 512 bytes from byte 4096): token 27 is p = 11 of
    tile 1; cell 2 is unit (2 * 4 + 1) * 4 + 1 + 2 = 39, byte 4096 + 512 + 39 * 4 = 4764.

    Args:
        layout: the record layout.
        token: position in the block, 0 to 127.
        cell: value cell, 0 to 7.

    Returns:
        Byte offset from the start of the block.

    Source: engineering choice: one 16-byte load gives a thread its whole fragment.
    """
    tile, place = divmod(token, VALUE_TILE_TOKENS)
    unit = (cell * 4 + (place % _LANE_TOKENS) // 2) * 4 + place % 2 + 2 * (place // _LANE_TOKENS)
    tile_bytes = VALUE_TILE_TOKENS * layout.value_bytes
    return layout.block_value_start + tile * tile_bytes + unit * layout.value_cell_bytes


def scale_byte_offset(plane_start: int, token: int) -> int:
    """In-block byte where a bf16 scale starts: element (t mod 8) * 8 + t div 8 of the token's chunk of 64.

    Example, head_size 64, group_size 4 (key-scale plane from byte 4096): token 77 is t = 13 of chunk 1, element
    5 * 8 + 1 = 41, byte 4096 + (64 + 41) * 2 = 4306.

    Args:
        plane_start: `layout.block_key_scale_start` or `layout.block_value_scale_start`.
        token: position in the block, 0 to 127.

    Returns:
        Byte offset from the start of the block.

    Source: engineering choice: the 8 scales that one lane needs are 16 contiguous bytes.
    """
    chunk, place = divmod(token, SCALE_CHUNK_TOKENS)
    element = (place % _LANE_TOKENS) * 8 + place // _LANE_TOKENS
    return plane_start + (chunk * SCALE_CHUNK_TOKENS + element) * SCALE_BYTES


@cache
def record_byte_offsets(layout: RecordLayout) -> torch.Tensor:
    """In-block byte offset of byte b of token p's record: the permutation between records and a block.

    `block[offsets] = records` writes a block and `records = block[offsets]` reads it. The table is a bijection
    onto range(block_bytes).

    Args:
        layout: the record layout.

    Returns:
        int64 [BLOCK_TOKENS, record_bytes], on the CPU; made once per layout and shared, so do not write to it.

    Source: engineering choice: the one definition that the reference, the kernels and the tests share.
    """
    rows = []
    for token in range(BLOCK_TOKENS):
        row = [index_byte_offset(layout, token, group) for group in range(layout.num_groups)]
        for cell in range(VALUE_CELLS):
            start = value_cell_offset(layout, token, cell)
            row.extend(range(start, start + layout.value_cell_bytes))
        for plane_start in (layout.block_key_scale_start, layout.block_value_scale_start):
            start = scale_byte_offset(plane_start, token)
            row.extend(range(start, start + SCALE_BYTES))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.int64)
