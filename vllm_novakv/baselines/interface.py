"""What every compared method is: a codec of keys and values that says what it stores."""

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from vllm_novakv.codec.quantizer import LayerCodec


@dataclass(frozen=True)
class Storage:
    """What one element costs: code_bits + metadata_bits / elements_per_metadata.

    Example: two-bit codes with a 16-bit scale and a 16-bit zero point per 128 elements cost 2 + 32/128 = 2.25 bits.

    Attributes:
        code_bits: bits of an element's code; a byte shared by four elements is 2.
        metadata_bits: bits of scales and zero points per unit.
        elements_per_metadata: elements of such a unit.
    """

    code_bits: float
    metadata_bits: int = 0
    elements_per_metadata: int = 1

    @property
    def bits_per_element(self) -> float:
        """Stored bits per element."""
        return self.code_bits + self.metadata_bits / self.elements_per_metadata


class CacheCodec(ABC):
    """A method that compresses the cache of one attention layer.

    Attributes:
        name: short name, as in tables.
        paper: where the method was published.
        key_group_tokens: consecutive tokens whose keys are quantized together; 1 if each token stands alone.
    """

    name: str
    paper: ClassVar[str]
    key_group_tokens: int = 1

    @property
    @abstractmethod
    def key_storage(self) -> Storage:
        """What a key element costs."""

    @property
    @abstractmethod
    def value_storage(self) -> Storage:
        """What a value element costs."""

    @abstractmethod
    def quantize_keys(self, key: torch.Tensor) -> torch.Tensor:
        """Keys as attention would read them: decode(encode(key)).

        Args:
            key: float [num_tokens, num_kv_heads, head_size], after RoPE; whole groups of `key_group_tokens`.

        Returns:
            The same shape and dtype.
        """

    @abstractmethod
    def quantize_values(self, value: torch.Tensor) -> torch.Tensor:
        """Values as attention would read them: decode(encode(value)).

        Args:
            value: float [num_tokens, num_kv_heads, head_size].

        Returns:
            The same shape and dtype.
        """

    def to(self, device: torch.device) -> Self:
        """The same method with its tensors on a device.

        Args:
            device: where keys and values will be.
        """
        moved = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor | LayerCodec):
                setattr(moved, name, value.to(device))
        return moved


def bits_per_element(
    codec: CacheCodec, context_tokens: int | None = None, band_tokens: int = 64 + 256, band_bits: float = 16.0
) -> float:
    """Mean stored bits per cached element over keys and values: b, or b + (n/T)(16 − b) with n of T tokens exact.

    Example: keys 2.125, values 2.25 and 320 exact tokens of 131,072 give 2.1875 + 0.0337 = 2.2212 bits.

    Args:
        codec: the method.
        context_tokens: length T of the sequence; None leaves the exact band out.
        band_tokens: exact tokens n at the start and the end; all T of a shorter sequence are exact.
        band_bits: bits per exact element.

    Returns:
        Bits per element.

    Raises:
        ValueError: the context has no token.

    Source: arXiv 2608.04074, sections 5 ("Bit rate") and 8.1.
    """
    quantized = (codec.key_storage.bits_per_element + codec.value_storage.bits_per_element) / 2
    if context_tokens is None:
        return quantized
    if context_tokens < 1:
        raise ValueError(f"context_tokens={context_tokens} must be at least 1")
    exact_share = min(1.0, band_tokens / context_tokens)
    return quantized + exact_share * (band_bits - quantized)
