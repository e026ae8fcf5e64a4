"""Orthogonal bases of the compared methods, one per KV head; row vectors, x R acts on the right."""

import torch

from vllm_novakv.codec.transform import hadamard


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """x R per KV head.

    Args:
        x: f32 [num_tokens, num_kv_heads, head_size].
        rotation: f32 [num_kv_heads or 1, head_size, head_size].

    Returns:
        f32 [num_tokens, num_kv_heads, head_size].
    """
    return torch.matmul(x.transpose(0, 1), rotation).transpose(0, 1)


def hadamard_rotation(head_size: int) -> torch.Tensor:
    """The normalised Hadamard matrix, the same for every head.

    Args:
        head_size: a power of two.

    Returns:
        f32 [1, head_size, head_size], orthogonal and symmetric.

    Source: arXiv 2404.00456 (QuaRot).
    """
    return hadamard(head_size).float().unsqueeze(0)


def random_rotation(head_size: int, seed: int) -> torch.Tensor:
    """A rotation drawn uniformly: Q of the QR decomposition of a Gaussian matrix, signs fixed by R.

    Args:
        head_size: rows.
        seed: of the draw; encoder and decoder use the same.

    Returns:
        f32 [1, head_size, head_size], orthogonal.

    Source: arXiv 2504.19874 (TurboQuant), algorithm 1.
    """
    generator = torch.Generator().manual_seed(seed)
    q, r = torch.linalg.qr(torch.randn(head_size, head_size, generator=generator, dtype=torch.float64))
    return torch.mul(q, r.diagonal().sign()).float().unsqueeze(0)


def bit_reversal(size: int) -> torch.Tensor:
    """Indices 0 .. size − 1 with their bits in reverse order.

    Example: size 8 gives 0 4 2 6 1 5 3 7.

    Args:
        size: a power of two.

    Returns:
        int64 [size], its own inverse.

    Source: Walsh ordering; arXiv 2605.17757 (OSCAR).
    """
    num_bits = size.bit_length() - 1
    indices = torch.arange(size)
    reversed_indices = torch.zeros_like(indices)
    for bit in range(num_bits):
        reversed_indices |= ((indices >> bit) & 1) << (num_bits - 1 - bit)
    return reversed_indices


def oscar_rotation(moment: torch.Tensor) -> torch.Tensor:
    """R = U H P: eigenvectors of a second moment by descending eigenvalue, Hadamard mixing, bit-reversed columns.

    In this basis the moment has the same diagonal everywhere, trace/d.

    Args:
        moment: f64 [num_kv_heads, head_size, head_size]; queries' (Σ q^T q) for keys, attention outputs' (Σ o^T o) for
            values.

    Returns:
        f32 [num_kv_heads, head_size, head_size], orthogonal.

    Source: arXiv 2605.17757 (OSCAR).
    """
    vectors = torch.linalg.eigh((moment + moment.mT) / 2).eigenvectors.flip(-1)
    mixed = torch.matmul(vectors, hadamard(moment.shape[-1]).to(moment.device))
    return mixed[..., bit_reversal(moment.shape[-1]).to(moment.device)].float()
