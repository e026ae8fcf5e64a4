"""Small synthetic codecs with the heavy spectrum of real keys, shared by the codec tests."""

from functools import cache

import torch

from vllm_novakv.codec.codebook import snap
from vllm_novakv.codec.quantizer import LayerCodec
from vllm_novakv.codec.transform import key_transforms, value_transform


def generator(seed):
    return torch.Generator().manual_seed(seed)


def heavy_vectors(num_tokens, num_heads, head_size, seed, decades=3.0):
    """f64 [num_tokens, num_heads, head_size]: Gaussian with a geometric spectrum of `decades` in a random basis."""
    source = generator(seed)
    scales = torch.logspace(0, -decades, head_size, dtype=torch.float64)
    bases = torch.linalg.qr(torch.randn(num_heads, head_size, head_size, generator=source, dtype=torch.float64)).Q
    noise = torch.randn(num_heads, num_tokens, head_size, generator=source, dtype=torch.float64)
    return ((noise * scales) @ bases).transpose(0, 1)


def moment(vectors):
    """f64 [num_heads, head_size, head_size]: sum of outer products over tokens."""
    by_head = vectors.transpose(0, 1)
    return by_head.mT @ by_head


@cache
def sample_codec(num_heads=2, head_size=64, group_size=4, num_centroids=32, book="float8_e4m3fn", seed=0):
    """A fitted-looking codec, shared and so read-only: bases from moments, centroids drawn from transformed keys."""
    queries = heavy_vectors(512, num_heads, head_size, seed + 1, decades=2.0)
    keys = heavy_vectors(512, num_heads, head_size, seed + 2)
    values = heavy_vectors(512, num_heads, head_size, seed + 3, decades=1.0)
    mean = torch.randn(num_heads, head_size, generator=generator(seed + 4), dtype=torch.float64) / 8
    bases = key_transforms(moment(queries) / 512, moment(keys), group_size)
    r = torch.bmm(keys.transpose(0, 1), bases.key_transform)
    x = r / r.square().mean(dim=-1, keepdim=True).sqrt()
    # [heads, groups, centroids, group_size]
    drawn = x[:, :num_centroids].reshape(num_heads, num_centroids, -1, group_size).transpose(1, 2)
    return LayerCodec(
        key_mean=mean.float(),
        key_transform=bases.key_transform.float(),
        key_transform_inv_t=bases.key_transform_inv_t.float(),
        value_transform=value_transform(moment(values)).float(),
        codebook=snap(drawn.float(), book).contiguous(),
    )


def sample_keys(codec, num_tokens, seed=100):
    """bf16 [num_tokens, num_kv_heads, head_size]: keys around the codec's mean."""
    drawn = heavy_vectors(num_tokens, codec.num_kv_heads, codec.head_size, seed)
    return (drawn + codec.key_mean.double()).to(torch.bfloat16)


def sample_values(codec, num_tokens, seed=200):
    """bf16 [num_tokens, num_kv_heads, head_size]."""
    return heavy_vectors(num_tokens, codec.num_kv_heads, codec.head_size, seed, decades=1.0).to(torch.bfloat16)
