"""Token ids and log-probabilities as the trie stores them, checked on the way in."""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

TOKEN_DTYPE = np.dtype("<u4")
"""Type of a stored token id."""

TOKEN_BYTES = TOKEN_DTYPE.itemsize
"""Bytes of a stored token id."""

LOGPROB_BYTES = 4
"""Bytes of a stored log-probability (float32)."""

Tokens = Sequence[int] | NDArray[Any]
"""Token ids of one sequence, each in [0, vocab_size)."""


def encode(tokens: Tokens, vocab_size: int) -> bytes:
    """Token ids as little-endian uint32.

    Args:
        tokens: int [n].
        vocab_size: bound of the ids.

    Raises:
        ValueError: not one row of integers, or an id is out of range.
    """
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise ValueError(f"tokens have shape {tokens.shape} and type {tokens.dtype}; need one row of integers")
        values = tokens
    else:
        try:
            values = np.frombuffer(array("I", tokens), dtype=np.uint32) if len(tokens) else np.empty(0, np.uint32)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"tokens must be integers from 0 to {vocab_size - 1}: {error}") from error
    is_negative = values.dtype.kind == "i" and bool(values.size) and values.min() < 0
    if is_negative or (values.size and values.max() >= vocab_size):
        raise ValueError(
            f"tokens run from {values.min()} to {values.max()}; they must be below vocab_size={vocab_size}"
        )
    return values.astype(TOKEN_DTYPE, copy=False).tobytes()


def common_tokens(first: bytes, second: bytes, start: int = 0) -> int:
    """Number of equal tokens at the beginning of `first` and of `second`, the latter read from token `start` on."""
    count = min(len(first) // TOKEN_BYTES, len(second) // TOKEN_BYTES - start)
    left = np.frombuffer(first, dtype=TOKEN_DTYPE, count=count)
    right = np.frombuffer(second, dtype=TOKEN_DTYPE, count=count, offset=start * TOKEN_BYTES)
    different = left != right
    position = int(different.argmax()) if count else 0
    return position if count and different[position] else count


def checked_logprobs(logprobs: Sequence[float | None] | NDArray[Any], num_tokens: int) -> NDArray[np.float32]:
    """Natural log-probabilities as float32 [num_tokens], NaN where they are None.

    Raises:
        ValueError: another number of them, or one that is no logarithm of a probability in (0, 1].
    """
    try:
        values = np.asarray(logprobs, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise ValueError(f"logprobs must be numbers, or None where unknown: {error}") from error
    if values.shape != (num_tokens,):
        raise ValueError(f"got {values.shape} log-probabilities for {num_tokens} tokens; give one per token")
    if np.any(values > 0) or np.any(np.isneginf(values)):
        raise ValueError("log-probabilities must be natural logarithms of probabilities in (0, 1]")
    return values
