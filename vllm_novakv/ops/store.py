"""Encode tokens and write them to both caches.

    key    r = (k − k̄) R_K;  x = r/ρ, ρ = ‖r‖/√d;  index = argmax x·c − ‖c‖²/2;  ρ ← ⟨r, ĉ⟩/⟨ĉ, ĉ⟩ in bf16
    value  w = v R_V;  s = 0.9957 · RMS(w) in bf16;  code = clamp(⌊w/s⌋ + 2, 0, 3)
    band   k and v, rounded to the band's type

Grid: (tile of tokens, KV head, 2); the first program of a pair encodes keys, the second values and copies the band.
Transforms are tensor-core products of three tf32 terms, which keep f32's precision. R_K is read as four planes, plane i
holding element i of every group, so that r is four [tokens, groups] matrices and the search over centroids is a loop
of broadcasts without reductions. Bytes go where codec/layout.py puts them.

Where it runs, the CUDA kernel of ops/store_cuda.py takes this launch's place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_novakv.codec.quantizer import VALUE_STEP
from vllm_novakv.ops import store_cuda
from vllm_novakv.ops.checks import check_caches, require
from vllm_novakv.ops.launch import launch_for
from vllm_novakv.ops.tables import KernelTables
from vllm_novakv.ops.tiles import BLOCK

BF16_MAX = tl.constexpr(3.3895313892515355e38)


@triton.jit
def _scale_element(tokens):
    """Element of a token in its block's scale planes."""
    return (tokens // 64) * 64 + (tokens % 8) * 8 + (tokens % 64) // 8


@triton.jit
def _scale_bits(x):
    """Bits of x clamped and rounded to bf16, to nearest even: int16."""
    bits = tl.minimum(tl.maximum(x, -BF16_MAX), BF16_MAX).to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)


@triton.jit
def _search(
    r0,
    r1,
    r2,
    r3,
    is_stored,
    block_ptr,
    places,
    centroids_ptr,
    NUM: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
):
    L: tl.constexpr = D // 4
    group = tl.arange(0, L)
    # 2. x = r/ρ
    norm = tl.sqrt_rn(tl.sum(r0 * r0 + r1 * r1 + r2 * r2 + r3 * r3, 1) / D)
    norm = tl.where(norm == 0.0, 1.0, norm)[:, None]
    x0 = tl.div_rn(r0, norm)
    x1 = tl.div_rn(r1, norm)
    x2 = tl.div_rn(r2, norm)
    x3 = tl.div_rn(r3, norm)
    # 3. nearest centroid, the first of equals
    best = tl.full([M, L], -float("inf"), tl.float32)
    nearest = tl.zeros([M, L], tl.int32)
    for c in tl.range(0, NUM, loop_unroll_factor=4):
        centroid_ptr = centroids_ptr + c * 5 * L + group
        score = x0 * tl.load(centroid_ptr)[None, :] - tl.load(centroid_ptr + 4 * L)[None, :]
        score += x1 * tl.load(centroid_ptr + L)[None, :]
        score += x2 * tl.load(centroid_ptr + 2 * L)[None, :]
        score += x3 * tl.load(centroid_ptr + 3 * L)[None, :]
        nearest = tl.where(score > best, c, nearest)
        best = tl.maximum(best, score)
    # 4. least-squares scale
    chosen_ptr = centroids_ptr + nearest * 5 * L + group[None, :]
    c0 = tl.load(chosen_ptr)
    c1 = tl.load(chosen_ptr + L)
    c2 = tl.load(chosen_ptr + 2 * L)
    c3 = tl.load(chosen_ptr + 3 * L)
    energy = tl.sum(c0 * c0 + c1 * c1 + c2 * c2 + c3 * c3, 1)
    product = tl.sum(r0 * c0 + r1 * c1 + r2 * c2 + r3 * c3, 1)
    rho = _scale_bits(tl.div_rn(product, tl.where(energy == 0.0, 1.0, energy)))

    index_ptr = block_ptr[:, None] + places[:, None] * L + group[None, :]
    tl.store(index_ptr, nearest.to(tl.uint8), mask=is_stored[:, None])
    plane = (block_ptr + BLOCK * (L + D // 4)).to(tl.pointer_type(tl.int16))
    tl.store(plane + _scale_element(places), rho, mask=is_stored)


@triton.jit
def _encode_keys(
    row_ptr,
    is_stored,
    block_ptr,
    places,
    mean_ptr,
    planes_ptr,
    centroids_ptr,
    NUM: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
):
    L: tl.constexpr = D // 4
    K: tl.constexpr = 32
    k = tl.arange(0, K)
    group = tl.arange(0, L)
    # 1. r = (k − k̄) R_K: element i of every group in r_i [M, L]
    r0 = tl.zeros([M, L], tl.float32)
    r1 = tl.zeros([M, L], tl.float32)
    r2 = tl.zeros([M, L], tl.float32)
    r3 = tl.zeros([M, L], tl.float32)
    for first in tl.static_range(0, D, K):
        x = tl.load(row_ptr[:, None] + (first + k)[None, :], mask=is_stored[:, None], other=0.0).to(tl.float32)
        x -= tl.load(mean_ptr + first + k)[None, :]
        plane_ptr = planes_ptr + (first + k)[:, None] * L + group[None, :]
        r0 = tl.dot(x, tl.load(plane_ptr), r0, input_precision="tf32x3")
        r1 = tl.dot(x, tl.load(plane_ptr + D * L), r1, input_precision="tf32x3")
        r2 = tl.dot(x, tl.load(plane_ptr + 2 * D * L), r2, input_precision="tf32x3")
        r3 = tl.dot(x, tl.load(plane_ptr + 3 * D * L), r3, input_precision="tf32x3")
    _search(r0, r1, r2, r3, is_stored, block_ptr, places, centroids_ptr, NUM, M, D)


@triton.jit
def _encode_values(
    row_ptr, is_stored, block_ptr, places, rotation_ptr, STEP: tl.constexpr, M: tl.constexpr, D: tl.constexpr
):
    L: tl.constexpr = D // 4
    K: tl.constexpr = 32
    k = tl.arange(0, K)
    d = tl.arange(0, D)
    # w = v R_V: [M, D]
    w = tl.zeros([M, D], tl.float32)
    for first in tl.static_range(0, D, K):
        x = tl.load(row_ptr[:, None] + (first + k)[None, :], mask=is_stored[:, None], other=0.0).to(tl.float32)
        rotation = tl.load(rotation_ptr + (first + k)[:, None] * D + d[None, :])
        w = tl.dot(x, rotation, w, input_precision="tf32x3")
    s = _scale_bits(tl.sqrt_rn(tl.sum(w * w, 1) / D) * STEP)
    divisor = (s.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    divisor = tl.where(divisor == 0.0, 1.0, divisor)
    level = tl.floor(tl.div_rn(w, divisor[:, None])) + 2.0
    codes = tl.minimum(tl.maximum(level, 0.0), 3.0).to(tl.int32)
    # dim = 8 j + c: code j of cell c, 16 codes (8 at head size 64) to a word
    WORDS: tl.constexpr = (D + 127) // 128
    CODES: tl.constexpr = D // 8 // WORDS
    codes = tl.reshape(codes, [M, WORDS, CODES, 8])
    words = tl.sum(codes << (2 * tl.arange(0, CODES))[None, None, :, None], 2)
    p = places % 16
    unit = (places // 16) * 128 + ((p % 8) // 2) * 4 + p % 2 + 2 * (p // 8)
    # [M, WORDS, 8]
    place = (unit[:, None, None] + tl.arange(0, 8)[None, None, :] * 16) * WORDS + tl.arange(0, WORDS)[None, :, None]
    values_ptr = block_ptr + BLOCK * L
    if D == 64:
        cell_ptr = values_ptr.to(tl.pointer_type(tl.int16))[:, None, None] + place
        tl.store(cell_ptr, words.to(tl.int16), mask=is_stored[:, None, None])
    else:
        word_ptr = values_ptr.to(tl.pointer_type(tl.int32))[:, None, None] + place
        tl.store(word_ptr, words, mask=is_stored[:, None, None])
    plane = (block_ptr + BLOCK * (L + D // 4)).to(tl.pointer_type(tl.int16)) + BLOCK
    tl.store(plane + _scale_element(places), s, mask=is_stored)


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["slots_ptr", "band_slots_ptr"])
def _store_kernel(
    key_ptr,
    value_ptr,
    cache_ptr,
    band_ptr,
    slots_ptr,
    band_slots_ptr,
    mean_ptr,
    transform_ptr,
    centroids_ptr,
    rotation_ptr,
    num_slots,
    key_stride_t,
    key_stride_h,
    value_stride_t,
    value_stride_h,
    cache_stride_b,
    cache_stride_h,
    band_stride_b,
    band_stride_h,
    band_stride_t,
    NUM: tl.constexpr,
    STEP: tl.constexpr,
    BAND_BLOCK: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
):
    h = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    slot = tl.load(slots_ptr + token, mask=token < num_slots, other=-1)
    # block 0 is vLLM's null block
    is_stored = slot >= BLOCK
    block_ptr = cache_ptr + (slot // BLOCK) * cache_stride_b + h * cache_stride_h
    places = (slot % BLOCK).to(tl.int32)
    key_row_ptr = key_ptr + token * key_stride_t + h * key_stride_h
    value_row_ptr = value_ptr + token * value_stride_t + h * value_stride_h
    has_any = tl.max(is_stored.to(tl.int32), 0) > 0
    if tl.program_id(2) == 0:
        if has_any:
            _encode_keys(
                key_row_ptr,
                is_stored,
                block_ptr,
                places,
                mean_ptr + h * D,
                transform_ptr + h * D * D,
                centroids_ptr + h * 256 * 5 * (D // 4),
                NUM,
                M,
                D,
            )
    else:
        if has_any:
            _encode_values(value_row_ptr, is_stored, block_ptr, places, rotation_ptr + h * D * D, STEP, M, D)
        d = tl.arange(0, D)
        band_slot = tl.load(band_slots_ptr + token, mask=token < num_slots, other=-1)
        is_held = (band_slot >= BAND_BLOCK)[:, None]
        place_ptr = band_ptr + (band_slot // BAND_BLOCK) * band_stride_b + h * band_stride_h
        place_ptr += (band_slot % BAND_BLOCK) * band_stride_t
        key = tl.load(key_row_ptr[:, None] + d[None, :], mask=is_held, other=0.0)
        value = tl.load(value_row_ptr[:, None] + d[None, :], mask=is_held, other=0.0)
        element = band_ptr.dtype.element_ty
        tl.store(place_ptr[:, None] + d[None, :], key.to(tl.float32).to(element), mask=is_held)
        tl.store(place_ptr[:, None] + D + d[None, :], value.to(tl.float32).to(element), mask=is_held)


def store(
    key: torch.Tensor,
    value: torch.Tensor,
    history_cache: torch.Tensor,
    band_cache: torch.Tensor,
    history_slot_mapping: torch.Tensor,
    band_slot_mapping: torch.Tensor,
    tables: KernelTables,
    use_cuda: bool | None = None,
) -> None:
    """Write tokens to both caches: history record = Q((k − k̄) R_K), Q(v R_V); band = (k, v).

    Args:
        key, value: ``[num_tokens, num_kv_heads, head_size]``, fp16, bf16 or f32, last dimension contiguous; rows past
            the slots are padding.
        history_cache: ``[num_blocks, num_kv_heads, 128, record_bytes]`` uint8.
        band_cache: ``[num_blocks, num_kv_heads, 16, 2 * head_size]`` bf16.
        history_slot_mapping, band_slot_mapping: ``[num_slots]`` int64, block * block size + offset; -1 is padding, and
            a slot in block 0 (vLLM's null block) means that this cache does not hold the token.
        tables: the layer's kernel tables.
        use_cuda: whether the CUDA kernel takes over; where it runs, if None.

    Raises:
        ValueError: a shape, type, device or stride is not as above.
    """
    codec = tables.codec
    heads, size = codec.num_kv_heads, codec.head_size
    check_caches(history_cache, band_cache, codec.layout.record_bytes, heads, size)
    num_slots = history_slot_mapping.shape[0]
    for name, tensor in (("key", key), ("value", value)):
        require(
            tensor.dim() == 3
            and tuple(tensor.shape[1:]) == (heads, size)
            and tensor.shape[0] >= num_slots
            and tensor.stride(2) == 1
            and tensor.device == history_cache.device,
            name,
            tensor,
            f"[at least {num_slots}, {heads}, {size}] on {history_cache.device}, last dimension contiguous",
        )
    for name, slots in (("history slots", history_slot_mapping), ("band slots", band_slot_mapping)):
        require(
            slots.dtype == torch.int64 and slots.shape[0] >= num_slots and slots.is_contiguous(),
            name,
            slots,
            f"int64 [{num_slots}], contiguous",
        )
    if num_slots == 0:
        return
    if store_cuda.takes(band_cache) if use_cuda is None else use_cuda:
        store_cuda.launch_store(key, value, history_cache, band_cache, history_slot_mapping, band_slot_mapping, tables)
        return
    launch = launch_for("store", key.device, size, batch=num_slots)
    _store_kernel[(triton.cdiv(num_slots, launch.tokens), heads, 2)](
        key,
        value,
        history_cache,
        band_cache,
        history_slot_mapping,
        band_slot_mapping,
        codec.key_mean,
        tables.key_transform_planes,
        tables.centroids,
        codec.value_transform,
        num_slots,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        history_cache.stride(0),
        history_cache.stride(1),
        *band_cache.stride()[:3],
        NUM=codec.num_centroids,
        STEP=VALUE_STEP,
        BAND_BLOCK=band_cache.shape[2],
        M=launch.tokens,
        D=size,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
