"""The format's numeric definition against brute force, hand-computed bytes and its invariants."""

import pytest
import torch
from codec_samples import generator, sample_codec, sample_keys, sample_values

from vllm_novakv.codec import quantizer
from vllm_novakv.codec.codebook import CODEBOOK_DTYPES
from vllm_novakv.codec.layout import BLOCK_TOKENS, RecordLayout, record_byte_offsets, value_code_position
from vllm_novakv.codec.quantizer import (
    VALUE_STEP,
    LayerCodec,
    decode_keys,
    decode_values,
    encode_keys,
    encode_values,
    gather_centroids,
    pack_records,
    unpack_records,
)

SHAPES = [
    pytest.param(size, group, id=f"hs{size}-g{group}")
    for size, group in [(64, 2), (64, 4), (64, 8), (128, 2), (128, 4), (128, 8), (256, 4), (256, 8)]
]
BF16_MAX = torch.finfo(torch.bfloat16).max


def transformed(keys, codec):
    """f64 [num_tokens, num_kv_heads, head_size]: r = (k − k̄) R_K, in plain words."""
    return torch.einsum("thi,hij->thj", keys.double() - codec.key_mean.double(), codec.key_transform.double())


def identity_codec(num_heads=1, head_size=64, centroids=((0.0,) * 4, (1.0,) * 4)):
    """No mean, no rotation, and the same few centroids for every group of 4."""
    eye = torch.eye(head_size).repeat(num_heads, 1, 1)
    codebook = torch.tensor(centroids).repeat(num_heads, head_size // 4, 1, 1)
    return LayerCodec(torch.zeros(num_heads, head_size), eye, eye, eye, codebook)


def encode(keys, values, codec):
    """uint8 [num_tokens, num_kv_heads, record_bytes]."""
    return pack_records(*encode_keys(keys, codec), *encode_values(values, codec.value_transform), codec.layout)


@pytest.mark.parametrize("book", CODEBOOK_DTYPES)
@pytest.mark.parametrize(("head_size", "group_size"), SHAPES)
def test_indices_are_exact_nearest_centroids(head_size, group_size, book):
    codec = sample_codec(2, head_size, group_size, book=book)
    keys = sample_keys(codec, 50)
    indices, _ = encode_keys(keys, codec)
    r = transformed(keys, codec)
    x = r / r.square().mean(dim=-1, keepdim=True).sqrt()
    # [tokens, heads, groups, centroids]
    offsets = x.view(50, 2, -1, 1, group_size) - codec.codebook.double()
    distances = offsets.square().sum(dim=-1)
    best, runner_up = distances.topk(2, dim=-1, largest=False).values.unbind(dim=-1)
    is_unique = runner_up - best > 1e-12 * distances.amax(dim=-1)
    assert float(is_unique.double().mean()) > 0.9
    assert torch.equal(indices[is_unique].long(), distances.argmin(dim=-1)[is_unique])
    chosen = distances.gather(-1, indices.long().unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(chosen, best, rtol=1e-9, atol=1e-12)


def test_search_reaches_all_256_centroids():
    codec = sample_codec(1, 64, 4, num_centroids=256)
    own = codec.codebook[0]
    # Token j is centroid j in every group, so its nearest centroid is itself or a duplicate of it.
    r = own.transpose(0, 1).reshape(256, 1, 64).double()
    r = r / r.square().mean(dim=-1, keepdim=True).sqrt()
    codec = LayerCodec(torch.zeros(1, 64), *([torch.eye(64)[None]] * 3), codec.codebook)
    indices, _ = encode_keys(r * r.new_tensor(3.0), codec)
    assert indices.dtype == torch.uint8
    assert len(set(indices[:, 0, 0].tolist())) > 128
    assert int(indices.max()) == 255


def test_nearest_of_equal_centroids_is_the_first():
    codec = identity_codec(centroids=((0.0,) * 4, (1.0,) * 4, (1.0,) * 4, (-1.0,) * 4))
    keys = torch.ones(3, 1, 64)
    keys[1] = -1.0
    indices, key_scale = encode_keys(keys, codec)
    assert indices[:, 0].unique(dim=1).flatten().tolist() == [1, 3, 1]
    assert key_scale.flatten().tolist() == [1.0, 1.0, 1.0]


def test_key_encoding_matches_hand_computation():
    codec = identity_codec(centroids=((0.0,) * 4, (1.0,) * 4, (-1.5,) * 4))
    key = torch.zeros(1, 1, 64)
    key[..., :32] = 2.0
    key[..., 32:36] = -4.0
    # |r|² = 32·4 + 4·16 = 192, ρ = √3; r/ρ = 1.15, −2.31 and 0; nearest 1, −1.5 and 0
    indices, key_scale = encode_keys(key, codec)
    assert indices.flatten().tolist() == [1] * 8 + [2] + [0] * 7
    # ⟨r, ĉ⟩ = 32·2 + 4·6 = 88, ⟨ĉ, ĉ⟩ = 32 + 4·2.25 = 41; 88/41 = 2.146 is 2.140625 in bf16
    assert float(key_scale) == 2.140625
    decoded = decode_keys(indices, key_scale, codec.codebook)
    assert decoded.flatten().tolist() == [2.140625] * 32 + [-1.5 * 2.140625] * 4 + [0.0] * 28


@pytest.mark.parametrize(("head_size", "group_size"), SHAPES)
def test_key_scale_is_least_squares_in_bf16(head_size, group_size):
    codec = sample_codec(2, head_size, group_size)
    keys = sample_keys(codec, 40)
    indices, key_scale = encode_keys(keys, codec)
    assert key_scale.dtype == torch.bfloat16
    r, centroids = transformed(keys, codec), gather_centroids(indices, codec.codebook).double()
    optimum = (r * centroids).sum(dim=-1) / centroids.square().sum(dim=-1)
    assert torch.equal(key_scale, optimum.to(torch.bfloat16))

    def loss(scale):
        return (r - scale.double().unsqueeze(-1) * centroids).square().sum(dim=-1)

    as_bits = key_scale.view(torch.int16)
    for step in (-1, 1):
        neighbour = (as_bits + step).view(torch.bfloat16)
        assert bool((loss(key_scale) <= loss(neighbour) * (1 + 1e-12)).all())
    plain = r.square().mean(dim=-1).sqrt()
    assert bool((loss(optimum) <= loss(plain) * (1 + 1e-12)).all())


def test_decoded_logits_equal_the_definition():
    codec = sample_codec(2, 64, 4)
    keys, queries = sample_keys(codec, 30), sample_keys(codec, 30, seed=7).double()
    indices, key_scale = encode_keys(keys, codec)
    decoded = decode_keys(indices, key_scale, codec.codebook)
    assert decoded.dtype == torch.float32
    plain = torch.empty(30, 2, 64, dtype=torch.float64)
    for token in range(30):
        for head in range(2):
            chosen = [codec.codebook[head, group, int(indices[token, head, group])] for group in range(16)]
            plain[token, head] = float(key_scale[token, head]) * torch.cat(chosen).double()
    torch.testing.assert_close(decoded.double(), plain, rtol=1e-6, atol=0)
    # k̂ = r̂ R_K^{-1} + k̄ gives the same logits as (q R_K^{-T})·r̂ + q·k̄
    reconstructed = torch.einsum("thj,hij->thi", plain, codec.key_transform_inv_t.double()) + codec.key_mean
    folded = torch.einsum("thi,hij->thj", queries, codec.key_transform_inv_t.double())
    logits = (
        torch.einsum("qhj,khj->hqk", folded, plain)
        + torch.einsum("qhj,hj->hq", queries, codec.key_mean.double())[..., None]
    )
    torch.testing.assert_close(logits, torch.einsum("qhj,khj->hqk", queries, reconstructed))


def test_more_centroids_lower_the_distortion():
    losses = []
    for num_centroids in (1, 16, 256):
        codec = sample_codec(2, 64, 4, num_centroids=num_centroids)
        keys = sample_keys(codec, 200, seed=2)
        r = transformed(keys, codec)
        losses.append(float((r - decode_keys(*encode_keys(keys, codec), codec.codebook)).square().sum()))
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_value_codes_match_the_definition(head_size):
    codec = sample_codec(2, head_size, 4)
    values = sample_values(codec, 20)
    codes, value_scale = encode_values(values, codec.value_transform)
    assert codes.dtype == torch.uint8
    assert value_scale.dtype == torch.bfloat16
    w = torch.einsum("thi,hij->thj", values.double(), codec.value_transform.double())
    expected_scale = (VALUE_STEP * w.square().mean(dim=-1).sqrt()).to(torch.bfloat16)
    assert torch.equal(value_scale, expected_scale)
    for token in range(20):
        for head in range(2):
            scale = float(value_scale[token, head])
            for dim in range(head_size):
                ratio = float(w[token, head, dim]) / scale
                code = 0 if ratio < -1 else 1 if ratio < 0 else 2 if ratio < 1 else 3
                assert int(codes[token, head, dim]) == code
    levels = torch.tensor([-1.5, -0.5, 0.5, 1.5])
    expected = levels[codes.long()] * value_scale.float().unsqueeze(-1)
    assert torch.equal(decode_values(codes, value_scale), expected)


def test_value_encoding_matches_hand_computation():
    eye = torch.eye(64)[None]
    # RMS 1 gives s = 0.9957, which is 0.99609375 in bf16: 1.0 is above one step, 0.995 below
    value = torch.tensor([1.0, -1.0]).repeat(32).view(1, 1, 64)
    codes, value_scale = encode_values(value, eye)
    assert float(value_scale) == 0.99609375
    assert codes.flatten().tolist() == [3, 0] * 32
    value[..., :4] = torch.tensor([0.25, -0.25, 0.0, 0.9375])
    codes, value_scale = encode_values(value, eye)
    assert codes.flatten().tolist()[:4] == [2, 1, 2, 2]
    decoded = decode_values(codes, value_scale).flatten().tolist()
    scale = float(value_scale)
    assert decoded[:6] == [0.5 * scale, -0.5 * scale, 0.5 * scale, 0.5 * scale, 1.5 * scale, -1.5 * scale]


def test_value_step_is_optimal_for_a_gaussian():
    x = torch.linspace(-8, 8, 200_001, dtype=torch.float64)
    weight = torch.exp(-x.square() / 2)

    def loss(step):
        levels = ((x / step).floor() + 2).clamp(0, 3) - 1.5
        return float((weight * (x - step * levels).square()).sum())

    assert loss(VALUE_STEP) <= min(loss(VALUE_STEP + delta) for delta in (-0.002, -0.001, 0.001, 0.002))


@pytest.mark.parametrize(("head_size", "group_size"), [(64, 4), (128, 4), (256, 8)], ids=["hs64", "hs128", "hs256-g8"])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 16, 33])
def test_bytes_do_not_depend_on_the_batch(head_size, group_size, num_tokens):
    codec = sample_codec(3, head_size, group_size, num_centroids=64)
    keys, values = sample_keys(codec, 100), sample_values(codec, 100)
    together = encode(keys, values, codec)
    for start in range(0, 100 - num_tokens, 23):
        chunk = slice(start, start + num_tokens)
        assert torch.equal(encode(keys[chunk], values[chunk], codec), together[chunk])


def test_bytes_do_not_depend_on_chunking(monkeypatch):
    codec = sample_codec(2, 64, 4)
    keys, values = sample_keys(codec, 70), sample_values(codec, 70)
    whole = encode(keys, values, codec)
    # 2 heads × 16 groups × 32 centroids is 1,024 scores per token: chunks of 3 tokens, the last one partial
    monkeypatch.setattr(quantizer, "_CHUNK_ELEMENTS", 3 * 1024)
    assert torch.equal(encode(keys, values, codec), whole)
    monkeypatch.setattr(quantizer, "_CHUNK_ELEMENTS", 1)
    assert torch.equal(encode(keys, values, codec), whole)


def test_bytes_do_not_depend_on_strides():
    codec = sample_codec(2, 64, 4)
    keys, values = sample_keys(codec, 9), sample_values(codec, 9)
    fused = torch.cat([keys, values], dim=1)
    expected = encode(keys, values, codec)
    assert torch.equal(encode(fused[:, :2], fused[:, 2:], codec), expected)
    by_head = keys.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(encode(by_head, values, codec), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=["fp16", "fp32", "fp64"])
def test_bytes_do_not_depend_on_the_input_type(dtype):
    codec = sample_codec(2, 64, 4)
    # bf16 values that fp16 holds too
    keys, values = ((x.float() * 64).round().div(64) for x in (sample_keys(codec, 9), sample_values(codec, 9)))
    keys, values = keys.to(torch.bfloat16), values.to(torch.bfloat16)
    keys, values = ((x.float() * 64).round().div(64).to(torch.bfloat16) for x in (keys, values))
    assert torch.equal(encode(keys.to(dtype), values.to(dtype), codec), encode(keys, values, codec))


def test_no_tokens_give_no_records():
    codec = sample_codec(2, 64, 4)
    records = encode(torch.empty(0, 2, 64), torch.empty(0, 2, 64), codec)
    assert records.shape == (0, 2, 36)
    indices, key_scale, codes, value_scale = unpack_records(records, codec.layout)
    assert decode_keys(indices, key_scale, codec.codebook).shape == (0, 2, 64)
    assert decode_values(codes, value_scale).shape == (0, 2, 64)


def test_zero_vectors_decode_to_zero():
    codec = sample_codec(2, 64, 4)
    keys = codec.key_mean.repeat(3, 1, 1)
    indices, key_scale = encode_keys(keys, codec)
    assert torch.equal(key_scale, torch.zeros_like(key_scale))
    assert torch.equal(decode_keys(indices, key_scale, codec.codebook), torch.zeros(3, 2, 64))
    nearest_to_origin = codec.codebook.square().sum(dim=-1).argmin(dim=-1)
    assert torch.equal(indices.long(), nearest_to_origin.expand(3, 2, 16))
    codes, value_scale = encode_values(torch.zeros(3, 2, 64), codec.value_transform)
    assert torch.equal(codes, torch.full_like(codes, 2))
    assert torch.equal(decode_values(codes, value_scale), torch.zeros(3, 2, 64))


def test_key_scale_is_zero_when_only_zero_centroids_are_chosen():
    codec = identity_codec(centroids=((0.0,) * 4,))
    indices, key_scale = encode_keys(torch.ones(2, 1, 64), codec)
    assert int(indices.sum()) == 0
    assert torch.equal(key_scale, torch.zeros_like(key_scale))


@pytest.mark.parametrize("exponent", [-100, -60, -20, 20, 60, 100])
def test_powers_of_two_change_only_the_scales(exponent):
    codec = sample_codec(2, 64, 4)
    codec = LayerCodec(torch.zeros(2, 64), *(getattr(codec, name) for name in quantizer_fields()[1:]))
    keys, values = sample_keys(codec, 20), sample_values(codec, 20)
    factor = 2.0**exponent
    indices, key_scale = encode_keys(keys, codec)
    codes, value_scale = encode_values(values, codec.value_transform)
    scaled_indices, scaled_key_scale = encode_keys(keys * factor, codec)
    scaled_codes, scaled_value_scale = encode_values(values * factor, codec.value_transform)
    assert torch.equal(scaled_indices, indices)
    assert torch.equal(scaled_codes, codes)
    assert torch.equal(scaled_key_scale, key_scale * factor)
    assert torch.equal(scaled_value_scale, value_scale * factor)


@pytest.mark.parametrize("magnitude", [BF16_MAX, -BF16_MAX, 1e-38, 1e-45], ids=["max", "min", "tiny", "denormal"])
def test_extreme_vectors_give_finite_records(magnitude):
    codec = sample_codec(2, 64, 4)
    vectors = torch.full((2, 2, 64), magnitude, dtype=torch.float32)
    vectors[1, :, ::2] = -magnitude
    indices, key_scale = encode_keys(vectors, codec)
    codes, value_scale = encode_values(vectors, codec.value_transform)
    for decoded in (key_scale, value_scale):
        assert bool(torch.isfinite(decoded).all())
    assert int(codes.max()) <= 3
    assert int(indices.max()) < codec.num_centroids


def test_key_scale_beyond_bf16_is_clamped():
    codec = identity_codec(centroids=((0.25,) * 4, (-0.25,) * 4))
    keys = torch.full((2, 1, 64), BF16_MAX)
    keys[1] = -BF16_MAX
    indices, key_scale = encode_keys(keys, codec)
    assert indices.flatten().tolist() == [0] * 16 + [1] * 16
    assert key_scale.flatten().tolist() == [BF16_MAX, BF16_MAX]
    assert bool(torch.isfinite(decode_keys(indices, key_scale, codec.codebook)).all())


def test_non_finite_token_leaves_its_neighbours_alone():
    codec = sample_codec(2, 64, 4)
    keys, values = sample_keys(codec, 5), sample_values(codec, 5)
    clean = encode(keys, values, codec)
    keys[2, 0, 3], values[2, 1, 5] = torch.nan, torch.inf
    spoilt = encode(keys, values, codec)
    others = [0, 1, 3, 4]
    assert torch.equal(spoilt[others], clean[others])
    assert torch.equal(spoilt[2, 1, :16], clean[2, 1, :16])


@pytest.mark.parametrize(("head_size", "group_size"), SHAPES)
def test_records_round_trip(head_size, group_size):
    layout = RecordLayout(head_size, group_size)
    source = generator(0)
    indices = torch.randint(0, 256, (5, 3, layout.num_groups), generator=source, dtype=torch.uint8)
    codes = torch.randint(0, 4, (5, 3, head_size), generator=source, dtype=torch.uint8)
    key_scale, value_scale = torch.randn(2, 5, 3, generator=source).to(torch.bfloat16).unbind()
    records = pack_records(indices, key_scale, codes, value_scale, layout)
    assert records.shape == (5, 3, layout.record_bytes)
    for actual, expected in zip(unpack_records(records, layout), (indices, key_scale, codes, value_scale), strict=True):
        assert torch.equal(actual, expected)
    # any leading dimensions, and records that are not contiguous
    reshaped = records.view(5, 3, 1, -1).expand(5, 3, 2, -1)
    assert torch.equal(unpack_records(reshaped, layout)[2][:, :, 1], codes)


def test_record_bytes_match_hand_computation():
    layout = RecordLayout(64)
    indices = torch.arange(100, 116, dtype=torch.uint8)
    codes = torch.zeros(64, dtype=torch.uint8)
    # dim 0: cell 0 bits 0-1; dim 8: cell 0 bits 2-3; dim 43: cell 3 bits 10-11; dim 63: cell 7 bits 14-15
    codes[[0, 8, 43, 63]] = torch.tensor([3, 1, 2, 3], dtype=torch.uint8)
    one, minus_two = torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(-2.0, dtype=torch.bfloat16)
    record = pack_records(indices, one, codes, minus_two, layout).tolist()
    expected = list(range(100, 116)) + [0] * 16 + [0x80, 0x3F, 0x00, 0xC0]
    expected[16] = 0b0111
    expected[16 + 3 * 2 + 1] = 0b1000
    expected[16 + 7 * 2 + 1] = 0b11000000
    assert record == expected


@pytest.mark.parametrize(("head_size", "group_size"), SHAPES)
def test_records_agree_with_value_code_position(head_size, group_size):
    layout = RecordLayout(head_size, group_size)
    codes = torch.randint(0, 4, (head_size,), generator=generator(1), dtype=torch.uint8)
    zero = torch.tensor(0.0, dtype=torch.bfloat16)
    record = pack_records(torch.zeros(layout.num_groups, dtype=torch.uint8), zero, codes, zero, layout)
    for dim in range(head_size):
        byte, shift = value_code_position(layout, dim)
        assert (int(record[byte]) >> shift) & 3 == int(codes[dim])


@pytest.mark.parametrize(("head_size", "group_size"), SHAPES)
def test_block_round_trip_through_the_table(head_size, group_size):
    layout = RecordLayout(head_size, group_size)
    table = record_byte_offsets(layout)
    records = torch.randint(0, 256, (BLOCK_TOKENS, layout.record_bytes), generator=generator(2), dtype=torch.uint8)
    block = torch.empty(layout.block_bytes, dtype=torch.uint8)
    block[table] = records
    assert torch.equal(block[table], records)
    # a store of one token changes that token only
    block[table[77]] = ~records[77]
    changed = (block[table] != records).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [77]


def test_unpack_refuses_partial_records():
    with pytest.raises(ValueError, match="records have 35 bytes, but head_size=64 with group_size=4 has 36; gather"):
        unpack_records(torch.zeros(2, 35, dtype=torch.uint8), RecordLayout(64))


@pytest.mark.parametrize(
    "shape", [(5, 64), (5, 3, 64), (5, 2, 32), (1, 5, 2, 64)], ids=["2d", "heads", "head-size", "4d"]
)
def test_encoders_refuse_shapes(shape):
    codec = sample_codec(2, 64, 4)
    with pytest.raises(ValueError, match=r"key has shape .*takes \[num_tokens, 2, 64\].*shard the codec"):
        encode_keys(torch.zeros(shape), codec)
    with pytest.raises(ValueError, match=r"value has shape .*takes \[num_tokens, 2, 64\].*shard the codec"):
        encode_values(torch.zeros(shape), codec.value_transform)


def quantizer_fields():
    return list(LayerCodec.__dataclass_fields__)


def test_codec_properties():
    codec = sample_codec(3, 128, 8, num_centroids=16)
    assert (codec.num_kv_heads, codec.head_size, codec.group_size) == (3, 128, 8)
    assert (codec.num_groups, codec.num_centroids) == (16, 16)
    assert codec.layout == RecordLayout(128, 8)


@pytest.mark.parametrize(("start", "count"), [(0, 1), (1, 2), (3, 1), (0, 4)])
def test_shard_encodes_like_the_whole(start, count):
    codec = sample_codec(4, 64, 4)
    keys, values = sample_keys(codec, 10), sample_values(codec, 10)
    heads = slice(start, start + count)
    shard = codec.shard(start, count)
    assert shard.num_kv_heads == count
    whole = encode(keys, values, codec)
    assert torch.equal(encode(keys[:, heads], values[:, heads], shard), whole[:, heads])


@pytest.mark.parametrize(("start", "count"), [(-1, 1), (0, 0), (0, 3), (2, 1)])
def test_shard_refuses_ranges_outside_the_layer(start, count):
    with pytest.raises(ValueError, match="this layer has heads 0 to 1; the tensor-parallel size must fit"):
        sample_codec(2, 64, 4).shard(start, count)


def test_to_moves_every_tensor():
    moved = sample_codec(2, 64, 4).to("meta")
    assert {getattr(moved, name).device.type for name in quantizer_fields()} == {"meta"}


@pytest.mark.parametrize(
    ("field", "spoil", "text"),
    [
        pytest.param("key_mean", lambda t: t[0], "key_mean has shape .64. and codebook", id="mean-1d"),
        pytest.param("codebook", lambda t: t[0], "codebook .16, 32, 4.; the rule is", id="codebook-3d"),
        pytest.param("key_transform", lambda t: t[:, :32], r"key_transform has shape \[2, 32, 64\]", id="transform"),
        pytest.param("value_transform", lambda t: t[:1], r"value_transform has shape \[1, 64, 64\]", id="heads"),
        pytest.param("codebook", lambda t: t[:, :8], r"codebook has shape \[2, 8, 32, 4\].*imply", id="groups"),
        pytest.param("key_transform_inv_t", lambda t: t.double(), "inv_t is torch.float64", id="dtype"),
        pytest.param("codebook", lambda t: t.repeat(1, 1, 9, 1), "num_centroids=288, but an index is", id="centroids"),
        pytest.param("codebook", lambda t: t[:, :, :0], "num_centroids=0, but an index is", id="no-centroids"),
        pytest.param("value_transform", lambda t: t.to("meta"), "value_transform is on meta", id="device"),
    ],
)
def test_codec_refuses_tensors_that_do_not_fit(field, spoil, text):
    codec = sample_codec(2, 64, 4)
    tensors = {name: getattr(codec, name) for name in quantizer_fields()}
    tensors[field] = spoil(tensors[field])
    with pytest.raises(ValueError, match=text):
        LayerCodec(**tensors)
