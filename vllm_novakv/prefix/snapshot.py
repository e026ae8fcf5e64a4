"""A trie in a file: header, columns, checksum. A damaged file is refused as a whole, never read in part."""

import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_novakv.prefix.tokens import TOKEN_BYTES, TOKEN_DTYPE
from vllm_novakv.prefix.trie import Trie
from vllm_novakv.prefix.view import TrieColumns, TrieView

MAGIC = b"novakv-trie\n"
FORMAT_VERSION = 1
_DIGEST_BYTES = 32
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 1 << 20
_COLUMNS = ("parent", "num_tokens", "own_weight", "order", "has_logprobs", "tokens", "logprobs", "payload")


def save_trie(trie: Trie, path: Path) -> None:
    """Write a trie to a file: magic, header length (int64), JSON header, columns, SHA-256 of all before it.

    The lock is held while the columns are copied, not while they are written. The file appears under its name in one
    step and replaces an earlier one.

    Args:
        trie: payloads must be values that JSON can hold.
        path: the file; its directory exists.

    Raises:
        ValueError: a payload cannot be written as JSON.
        OSError: the file cannot be written.

    Source: engineering choice.
    """
    view = trie.view()
    columns = _columns(view)
    header = {
        "version": FORMAT_VERSION,
        "vocab_size": trie.vocab_size,
        "max_bytes": trie.max_bytes,
        "column_bytes": {name: len(columns[name]) for name in _COLUMNS},
    }
    text = json.dumps(header).encode()
    content = b"".join(
        [MAGIC, len(text).to_bytes(_LENGTH_BYTES, "little"), text, *(columns[name] for name in _COLUMNS)]
    )
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.write(hashlib.sha256(content).digest())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_trie(path: Path) -> Trie:
    """Read a trie that `save_trie` wrote.

    Args:
        path: the file.

    Returns:
        A trie equal to the saved one: sequences, weights, log-probabilities, payloads, order of insertion.

    Raises:
        ValueError: the file is not such a snapshot, is damaged, or comes from another format version.
        OSError: the file cannot be read.

    Source: engineering choice.
    """
    content = path.read_bytes()
    try:
        return _parse(content)
    except (ValueError, KeyError, TypeError, OverflowError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a usable prefix snapshot ({error}); delete it, the index starts empty"
        ) from error


def _columns(view: TrieView) -> dict[str, bytes]:
    try:
        payload = json.dumps(view.payload, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"a payload cannot be saved as JSON: {error}") from error
    return {
        "parent": view.parent.astype("<i8").tobytes(),
        "num_tokens": np.array([len(edge) // TOKEN_BYTES for edge in view.tokens], dtype="<i8").tobytes(),
        "own_weight": view.own_weight.astype("<i8").tobytes(),
        "order": view.order.astype("<i8").tobytes(),
        "has_logprobs": np.array([values is not None for values in view.logprobs], dtype=np.uint8).tobytes(),
        "tokens": b"".join(view.tokens),
        "logprobs": b"".join(values.astype("<f4").tobytes() for values in view.logprobs if values is not None),
        "payload": payload,
    }


def _parse(content: bytes) -> Trie:
    if not content.startswith(MAGIC):
        raise ValueError("it does not begin like one")
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        raise ValueError("its checksum is wrong, so it is damaged or incomplete")
    start = len(MAGIC) + _LENGTH_BYTES
    header_bytes = int.from_bytes(body[len(MAGIC) : start], "little")
    if header_bytes > _MAX_HEADER_BYTES:
        raise ValueError("its header is too long")
    header = json.loads(body[start : start + header_bytes])
    if header["version"] != FORMAT_VERSION:
        raise ValueError(f"its format version is {header['version']}, this program reads {FORMAT_VERSION}")
    position = start + header_bytes
    columns: dict[str, bytes] = {}
    for name in _COLUMNS:
        size = int(header["column_bytes"][name])
        if size < 0:
            raise ValueError(f"column {name} has a negative size")
        columns[name] = body[position : position + size]
        position += size
    if position != len(body):
        raise ValueError("its columns do not fill it")
    return Trie.from_columns(_rebuild(columns), int(header["vocab_size"]), int(header["max_bytes"]))


def _rebuild(columns: dict[str, bytes]) -> TrieColumns:
    num_tokens = np.frombuffer(columns["num_tokens"], dtype="<i8")
    has_logprobs = np.frombuffer(columns["has_logprobs"], dtype=np.uint8).astype(bool)
    if len(has_logprobs) != len(num_tokens) or not len(num_tokens) or np.any(num_tokens < 0):
        raise ValueError("its columns differ in length")
    logprobs = _edges(columns["logprobs"], np.dtype("<f4"), num_tokens * has_logprobs)
    return TrieColumns(
        parent=np.frombuffer(columns["parent"], dtype="<i8").astype(np.int64),
        tokens=tuple(edge.tobytes() for edge in _edges(columns["tokens"], TOKEN_DTYPE, num_tokens)),
        logprobs=tuple(
            values.astype(np.float32) if known else None for values, known in zip(logprobs, has_logprobs, strict=True)
        ),
        own_weight=np.frombuffer(columns["own_weight"], dtype="<i8").astype(np.int64),
        order=np.frombuffer(columns["order"], dtype="<i8").astype(np.int64),
        payload=tuple(json.loads(columns["payload"])),
    )


def _edges(data: bytes, dtype: np.dtype[Any], lengths: NDArray[np.int64]) -> list[NDArray[Any]]:
    ends = np.cumsum(lengths)
    if len(data) != int(ends[-1]) * dtype.itemsize:
        raise ValueError("its edges do not fill their column")
    values = np.frombuffer(data, dtype=dtype)
    return [values[end - length : end] for end, length in zip(ends, lengths, strict=True)]
