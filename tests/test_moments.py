"""Streaming moments against direct sums in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from vllm_novakv.calibration.moments import LayerMoments, chunk_moments, empty_moments


def random_chunk(
    num_tokens: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    query = torch.randn(num_tokens, num_heads, 8, generator=generator)
    # a mean that dwarfs the spread, as keys have
    key = torch.randn(num_tokens, num_kv_heads, 8, generator=generator) + 50
    output = torch.randn(num_tokens, num_heads, 8, generator=generator)
    return query.to(dtype), key.to(dtype), output.to(dtype)


def assert_same(left: LayerMoments, right: LayerMoments) -> None:
    assert left.num_tokens == right.num_tokens
    for name in ("query_moment", "key_mean", "key_scatter", "output_moment"):
        torch.testing.assert_close(getattr(left, name), getattr(right, name), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads"),
    [(1, 4, 4), (17, 4, 1), (64, 8, 2), (33, 7, 7)],
    ids=["tok1-h4-kv4", "tok17-h4-kv1", "tok64-h8-kv2", "tok33-h7-kv7"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_chunk_moments_equal_sums_over_tokens_and_shared_query_heads(
    num_tokens: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype
) -> None:
    query, key, output = random_chunk(num_tokens, num_heads, num_kv_heads, dtype)
    moments = chunk_moments(query, key, output)
    for head in range(num_kv_heads):
        sharing = [h for h in range(num_heads) if h // (num_heads // num_kv_heads) == head]
        query_sum = sum(torch.outer(q, q) for t in range(num_tokens) for q in query[t, sharing].double())
        output_sum = sum(torch.outer(o, o) for t in range(num_tokens) for o in output[t, sharing].double())
        rows = key[:, head].double()
        centred = rows - rows.mean(dim=0)
        torch.testing.assert_close(moments.query_moment[head], query_sum, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(moments.output_moment[head], output_sum, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(moments.key_mean[head], rows.mean(dim=0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(moments.key_scatter[head], centred.T @ centred, rtol=1e-9, atol=1e-9)
    assert moments.query_moment.dtype == torch.float64


@pytest.mark.parametrize("cuts", [(1, 60), (20, 21), (30,), (7, 14, 21, 28)], ids=str)
def test_merge_gives_the_moments_of_all_tokens_for_any_chunking(cuts: tuple[int, ...]) -> None:
    query, key, output = random_chunk(61, 6, 2, torch.float32)
    bounds = [0, *cuts, 61]
    merged = empty_moments(2, 8, torch.device("cpu"))
    for start, stop in pairwise(bounds):
        merged = merged.merge(chunk_moments(query[start:stop], key[start:stop], output[start:stop]))
    assert_same(merged, chunk_moments(query, key, output))


def test_merge_with_no_tokens_changes_nothing() -> None:
    moments = chunk_moments(*random_chunk(9, 4, 2, torch.float32))
    empty = empty_moments(2, 8, torch.device("cpu"))
    assert_same(empty.merge(moments), moments)
    assert_same(moments.merge(empty), moments)
    assert empty.merge(empty).num_tokens == 0


def test_key_scatter_survives_a_large_mean() -> None:
    key = torch.randn(4096, 1, 8, generator=torch.Generator().manual_seed(0)).double() + 1e6
    rest = torch.zeros(4096, 1, 8)
    merged = empty_moments(1, 8, torch.device("cpu"))
    for start in range(0, 4096, 100):
        chunk = slice(start, start + 100)
        merged = merged.merge(chunk_moments(rest[chunk], key[chunk], rest[chunk]))
    centred = key[:, 0] - key[:, 0].mean(dim=0)
    torch.testing.assert_close(merged.key_scatter[0], centred.T @ centred, rtol=1e-7, atol=1e-5)


def test_chunk_moments_refuses_heads_that_do_not_divide() -> None:
    query, key, output = random_chunk(3, 4, 4, torch.float32)
    with pytest.raises(ValueError, match="4 query heads cannot share 3 KV heads"):
        chunk_moments(query, key[:, :3], output)


def test_chunk_moments_refuses_no_tokens() -> None:
    query, key, output = random_chunk(3, 4, 4, torch.float32)
    with pytest.raises(ValueError, match="0 tokens"):
        chunk_moments(query[:0], key[:0], output[:0])
