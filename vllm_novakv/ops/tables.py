"""Device tensors that the kernels read instead of the codec: the same numbers, laid out once for their access.

centroid_words[h, l, c] = the 4 bytes (see codec/codebook.py) of centroid c of group l, little-endian in one int32
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_novakv.codec.codebook import CODEBOOK_DTYPES, bytes_of, is_exact, units
from vllm_novakv.codec.quantizer import MAX_CENTROIDS, LayerCodec
from vllm_novakv.ops.reference import QuantizedHistory

KERNEL_GROUP_SIZE = 4
"""Elements per group that the kernels support: a centroid is one 32-bit word of four 8-bit floats."""


@dataclass(frozen=True, eq=False)
class KernelTables:
    """What the kernels read of one layer's codec; built once, after loading.

    Args:
        codec: the layer's codec, on the kernels' device.
        centroid_words: int32 [num_kv_heads, num_groups, 256]; centroids that do not exist are zero.
        centroid_format: what the bytes are: 0 float8_e4m3fn, 1 float8_e5m2, 2 int8.
        folding: f32 [num_kv_heads, head_size, head_size], R_K^{-T}, its columns times the units of int8 centroids: with
            it queries meet the bytes' numbers.
        centroids: f32 [num_kv_heads, 256, 5, num_groups]: elements 0 to 3, then ‖c‖²/2 (infinite where there is no
            centroid), so that the search reads one row of groups at a time.
        search_words: int32 [num_kv_heads, num_groups, 8, 32, 4], as `nearest` in ops/store_cuda.cu reads them: two
            bf16 numbers, an element of a centroid and a term of −‖c‖²/2, which is −inf where there is no centroid.
        key_transform_terms, value_transform_terms: int32 [num_kv_heads, head_size / 8, …, 32, 4], the transforms as
            tensor-core operands of bf16: 8 columns at a time, steps of 16 rows, 6 words a lane and step (three terms,
            which hold all bits of an f32, of two words), those words in fours.
        folding_terms, rotation_terms: the same of `folding` and of R_V^T, by which queries and outputs are multiplied.
        key_transform_planes: f32 [num_kv_heads, 4, head_size, num_groups], plane i holds columns i, i + 4, … of R_K.
    """

    codec: LayerCodec
    centroid_words: torch.Tensor
    centroid_format: int
    folding: torch.Tensor
    centroids: torch.Tensor
    search_words: torch.Tensor
    key_transform_terms: torch.Tensor
    value_transform_terms: torch.Tensor
    folding_terms: torch.Tensor
    rotation_terms: torch.Tensor
    key_transform_planes: torch.Tensor

    @classmethod
    def build(cls, codec: LayerCodec) -> KernelTables:
        """Lay the codec's numbers out for the kernels.

        Args:
            codec: the layer's codec, on the kernels' device.

        Returns:
            The tables, on the same device.

        Raises:
            NotImplementedError: the codec's group size is not 4.
            ValueError: a centroid is no value of an 8-bit type.
        """
        if codec.group_size != KERNEL_GROUP_SIZE:
            raise NotImplementedError(
                f"group_size={codec.group_size} is not supported on a GPU: the kernels read groups of "
                f"{KERNEL_GROUP_SIZE}; refit the model with `novakv fit`, which makes such groups"
            )
        codebook = codec.codebook
        dtype = next((t for t in CODEBOOK_DTYPES if is_exact(codebook, t)), None)
        if dtype is None:
            raise ValueError("a centroid is no value of an 8-bit type; refit the artifact with `novakv fit`")
        _, groups, num_centroids, _ = codebook.shape
        missing = MAX_CENTROIDS - num_centroids
        words = bytes_of(codebook, dtype).contiguous().view(torch.int32).squeeze(-1)
        half_norms = codebook.square().sum(dim=-1, keepdim=True) / 2
        rows = torch.nn.functional.pad(torch.cat([codebook, half_norms], dim=-1), (0, 0, 0, missing))
        rows[:, :, num_centroids:, KERNEL_GROUP_SIZE] = torch.inf
        folding = codec.key_transform_inv_t
        if dtype == "int8":
            # [H, L] -> [H, 1, D]
            folding = folding * units(codebook).repeat_interleave(KERNEL_GROUP_SIZE, dim=-1).unsqueeze(1)
        planes = codec.key_transform.unflatten(-1, (groups, KERNEL_GROUP_SIZE)).permute(0, 3, 1, 2)
        return cls(
            codec=codec,
            centroid_words=torch.nn.functional.pad(words, (0, missing)).contiguous(),
            centroid_format=CODEBOOK_DTYPES.index(dtype),
            folding=folding,
            # [H, L, 256, 5] -> [H, 256, 5, L]
            centroids=rows.permute(0, 2, 3, 1).contiguous(),
            search_words=_search_words(rows),
            key_transform_terms=_transform_terms(codec.key_transform),
            value_transform_terms=_transform_terms(codec.value_transform),
            folding_terms=_transform_terms(folding),
            rotation_terms=_transform_terms(codec.value_transform.transpose(-1, -2)),
            key_transform_planes=planes.contiguous(),
        )


@dataclass(frozen=True)
class PackedHistory(QuantizedHistory):
    """The packed history of one layer as the kernels read it; the reference reads it too.

    Args:
        tables: the layer's kernel tables.
    """

    tables: KernelTables


def _bf16_terms(x: torch.Tensor) -> torch.Tensor:
    """Three bf16 numbers whose sum is x: ``[...]`` f32 → ``[..., 3]``."""
    terms = []
    for _ in range(3):
        terms.append(x.to(torch.bfloat16))
        x = torch.where(x.isinf(), 0.0, x - terms[-1].float())
    return torch.stack(terms, dim=-1)


def _words(halves: torch.Tensor) -> torch.Tensor:
    """``[..., 2]`` bf16 → ``[...]`` int32, the first in the lower half."""
    return halves.contiguous().view(torch.int32).squeeze(-1)


def _search_words(rows: torch.Tensor) -> torch.Tensor:
    """[H, L, 256, 5] of elements and ‖c‖²/2 → the words of `KernelTables.search_words`."""
    elements = rows[..., :KERNEL_GROUP_SIZE].to(torch.bfloat16)
    terms = torch.nn.functional.pad(_bf16_terms(-rows[..., KERNEL_GROUP_SIZE]), (0, 1))
    # [H, L, 256, 4]; centroid 8 (4 i + j) + row, quad -> [i, 4 row + quad, j]
    words = _words(torch.stack([elements, terms], dim=-1)).unflatten(2, (8, 4, 8))
    return words.permute(0, 1, 2, 4, 5, 3).flatten(3, 4).contiguous()


def _transform_terms(transform: torch.Tensor) -> torch.Tensor:
    """[H, D, D] → the words of `KernelTables.key_transform_terms`."""
    size = transform.shape[-1]
    terms = _bf16_terms(transform).unflatten(2, (size // 8, 8)).unflatten(1, (size // 16, 2, 4, 2))
    # [H, step, j, quad, half, tile, row, term] -> [H, tile, step, term, j, row, quad]
    words = _words(terms.permute(0, 5, 1, 7, 2, 6, 3, 4)).flatten(5, 6)
    return words.flatten(2, 4).unflatten(2, (-1, 4)).transpose(3, 4).contiguous()
