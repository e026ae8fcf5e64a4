"""Kernel steps that decode and prefill share: reading a tile of history tokens, and looking a key's centroids up.

A tile is N tokens of one block and KV head, N a multiple of 16 that divides 128. Attention does not care about the
order of keys, so a tile keeps the order in which memory holds its value cells (codec/layout.py): place s of a tile is
token 16 (s div 16) + s mod 2 + 2 (s mod 16 div 4) + 8 (s div 2 mod 2).

A value of code x is read as the number 1 + x/4, two mantissa bits over the exponent of one, so that unpacking is a
shift and a mask; with w the weights, Σ w (x − 1.5) = 4 Σ w (1 + x/4 − 1.375).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
MASKED = tl.constexpr(-1.0e30)
BLOCK = tl.constexpr(128)


@triton.jit
def tile_tokens(N: tl.constexpr):
    """Token of each place of a tile, int32 [N]."""
    s = tl.arange(0, N)
    p = s % 16
    return s - p + p % 2 + 2 * (p // 4) + 8 * ((p // 2) % 2)


@triton.jit
def split_position(position):
    """Entry of the block table, and place in the block, of a position."""
    return position // 128, position % 128


@triton.jit
def load_indices(block_ptr, tokens, L: tl.constexpr):
    """Centroid indices of tokens of a block: uint8 [L, N]."""
    return tl.load(block_ptr + tokens[None, :] * L + tl.arange(0, L)[:, None])


@triton.jit
def load_scales(block_ptr, tokens, is_valid, D: tl.constexpr):
    """Key and value scales of tokens of a block, f32 [N] each; 0 where not valid."""
    L: tl.constexpr = D // 4
    planes = (block_ptr + BLOCK * (L + D // 4)).to(tl.pointer_type(tl.bfloat16))
    element = (tokens // 64) * 64 + (tokens % 8) * 8 + (tokens % 64) // 8
    rho = tl.load(planes + element, mask=is_valid, other=0.0).to(tl.float32)
    s = tl.load(planes + BLOCK + element, mask=is_valid, other=0.0).to(tl.float32)
    return rho, s


@triton.jit
def load_value_words(block_ptr, first, WORD: tl.constexpr, D: tl.constexpr, N: tl.constexpr):
    """32-bit word WORD of every value cell of the tile that begins at token ``first``: int32 [8, N]."""
    L: tl.constexpr = D // 4
    place = tl.arange(0, N)
    unit = (place // 16)[None, :] * 128 + tl.arange(0, 8)[:, None] * 16 + (place % 16)[None, :] + first * 8
    values = block_ptr + BLOCK * L
    if D == 64:
        # a cell is 16 bits
        return tl.load(values.to(tl.pointer_type(tl.int16)) + unit).to(tl.int32)
    words_per_cell: tl.constexpr = D // 128
    return tl.load(values.to(tl.pointer_type(tl.int32)) + unit * words_per_cell + WORD)


@triton.jit
def unpack_values(words, N: tl.constexpr):
    """1 + code/4 of the 16 codes of each word: fp16 [64, N] of codes 0 to 7 (dims 8 j + c) and of codes 8 to 15."""
    # [2, 4, 8, N]: code 4 half + j of either half-word comes to bits 8 and 9
    half = tl.arange(0, 2)[:, None, None, None]
    j = tl.arange(0, 4)[None, :, None, None]
    x = (words[None, None, :, :] >> (8 * half)) << (8 - 2 * j)
    x = tl.reshape((x & 0x03000300) | 0x3C003C00, [64, N])
    return x.to(tl.int16).to(tl.float16, bitcast=True), (x >> 16).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def load_centroid_words(table_ptr, indices, L: tl.constexpr):
    """Centroids of indices [L, N]: int32 [L, N], four 8-bit numbers each; table_ptr is one head's [L, 256]."""
    return tl.load(table_ptr + tl.arange(0, L)[:, None] * 256 + indices.to(tl.int32))


@triton.jit
def centroid_element(words, I: tl.constexpr, FORMAT: tl.constexpr):
    """Element I of the centroids: fp16, exact; FORMAT as in `KernelTables`."""
    if FORMAT == 1:
        # e5m2 is the upper byte of fp16
        if I == 0:
            bits = words << 8
        else:
            bits = words >> (8 * I - 8)
        return (bits & 0xFF00).to(tl.int16).to(tl.float16, bitcast=True)
    numbers = (words >> (8 * I)).to(tl.int8)
    if FORMAT == 2:
        return numbers.to(tl.float16)
    return numbers.to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def soft_cap(logits, cap):
    """cap · tanh(logits / cap)."""
    # tanh(x) = 1 − 2/(e^{2x} + 1): right at both ends
    return cap * (1.0 - 2.0 / (tl.exp2(logits * (2.0 * LOG2E / cap)) + 1.0))


@triton.jit
def log2_scale(s):
    """log2 of value scales, kept inside the range of f32 exponents; makes the largest weight w·s of a row 1."""
    return tl.where(s > 0.0, tl.minimum(tl.maximum(tl.log2(s), -100.0), 100.0), -100.0)
