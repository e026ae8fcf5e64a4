"""Types of 8 bits that a codebook's centroids are rounded to, and exact in bf16, which holds them outside the kernels.

    float8_e4m3fn, float8_e5m2    8-bit floats
    int8                          integers of −127 to 127 times a power of two of the group's own

Integers are evenly spaced, as centroids of normalised coordinates nearly are, and tensor cores take them as they are.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

CodebookDtype = Literal["float8_e4m3fn", "float8_e5m2", "int8"]

CODEBOOK_DTYPES: tuple[CodebookDtype, ...] = get_args(CodebookDtype)

DEFAULT_DTYPE: CodebookDtype = "float8_e4m3fn"
"""What a fit rounds to unless told otherwise, and what benchmarks measure."""

_FLOATS = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
_MAX_INTEGER = 127
_MIN_EXPONENT = -100
"""Of a group whose centroids are all zero, or nearly."""

STORED_DTYPES: dict[CodebookDtype, torch.dtype] = {**_FLOATS, "int8": torch.bfloat16}  # type: ignore[dict-item]
"""What a file holds the centroids in."""


def snap(centroids: Tensor, dtype: CodebookDtype) -> Tensor:
    """The nearest values that an 8-bit type has.

    Args:
        centroids: f32 ``[..., num_centroids, group_size]``.
        dtype: the type.

    Returns:
        f32 of the same shape; magnitudes beyond a float type's range become its largest.

    Source: arXiv 2608.04074, section 8.3; integers are an engineering choice.
    """
    if dtype == "int8":
        unit = units(centroids)[..., None, None]
        return (centroids / unit).round().clamp(-_MAX_INTEGER, _MAX_INTEGER) * unit
    largest = torch.finfo(_FLOATS[dtype]).max
    return centroids.clamp(-largest, largest).to(_FLOATS[dtype]).float()


def is_exact(codebook: Tensor, dtype: CodebookDtype) -> bool:
    """Whether all centroids, f32 ``[..., num_centroids, group_size]``, are values of an 8-bit type."""
    return torch.equal(snap(codebook, dtype), codebook)


def units(codebook: Tensor) -> Tensor:
    """The power of two whose multiples a group's centroids are as int8: the smallest that keeps them within 127.

    Args:
        codebook: f32 ``[..., num_centroids, group_size]``.

    Returns:
        f32 ``[...]``.
    """
    largest = codebook.abs().amax(dim=(-2, -1))
    # ldexp and frexp, not log2: exact at powers of two
    mantissa, exponent = torch.frexp(largest / _MAX_INTEGER)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(min=_MIN_EXPONENT)
    return torch.ldexp(torch.ones_like(largest), torch.where(largest == 0, _MIN_EXPONENT, exponent))


def bytes_of(codebook: Tensor, dtype: CodebookDtype) -> Tensor:
    """The 8-bit numbers themselves.

    Args:
        codebook: f32 ``[..., num_centroids, group_size]``, exact in the type.
        dtype: the type.

    Returns:
        uint8 of the same shape: bits of the floats, or integers in two's complement.
    """
    if dtype == "int8":
        return (codebook / units(codebook)[..., None, None]).to(torch.int8).view(torch.uint8)
    return codebook.to(_FLOATS[dtype]).view(torch.uint8)
