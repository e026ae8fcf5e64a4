"""Tokens per second of the prefix trie: insertions and matches, beside a trie of dictionaries and vLLM's block hashes.

The sequences are those of a chat server: sessions that begin with one of a few shared prompts and grow turn by turn.
All three structures get the same Python lists, and all must find the same prefixes before a number is printed; block
hashes find whole blocks only.

    python benchmarks/prefix_trie.py
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_novakv.evaluation.record import write_record
from vllm_novakv.evaluation.statistics import summarize
from vllm_novakv.prefix.trie import Trie

VOCAB_SIZE = 151_936
BLOCK_TOKENS = 16


class DictTrie:
    """One dictionary per token."""

    def __init__(self) -> None:
        self.root: dict[int, Any] = {}

    def insert(self, tokens: Sequence[int]) -> None:
        node = self.root
        for token in tokens:
            node = node.setdefault(token, {})

    def match(self, tokens: Sequence[int]) -> int:
        node = self.root
        for position, token in enumerate(tokens):
            if token not in node:
                return position
            node = node[token]
        return len(tokens)


class BlockHashes:
    """A set of vLLM's chained block hashes, with the hash function that vLLM uses by default."""

    def __init__(self) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core import kv_cache_utils

        kv_cache_utils.init_none_hash(sha256)
        self.hash_block = lambda parent, block: kv_cache_utils.hash_block_tokens(sha256, parent, block)
        self.stored: set[Any] = set()

    def insert(self, tokens: Sequence[int]) -> None:
        parent = None
        for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            parent = self.hash_block(parent, tokens[start : start + BLOCK_TOKENS])
            self.stored.add(parent)

    def match(self, tokens: Sequence[int]) -> int:
        parent = None
        for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            parent = self.hash_block(parent, tokens[start : start + BLOCK_TOKENS])
            if parent not in self.stored:
                return start
        return len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS


class RadixTrie:
    """The trie under test."""

    def __init__(self) -> None:
        self.trie = Trie(VOCAB_SIZE, max_bytes=1 << 30)

    def insert(self, tokens: Sequence[int]) -> None:
        self.trie.insert(tokens)

    def match(self, tokens: Sequence[int]) -> int:
        return self.trie.match(tokens).num_tokens


def build_sessions(num_sequences: int, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Stored prompts, and queries of which most continue one of them."""
    source = np.random.default_rng(seed)

    def words(count: int) -> list[int]:
        return [int(token) for token in source.integers(0, VOCAB_SIZE, size=count)]

    prompts = [words(600) for _ in range(20)]
    stored: list[list[int]] = []
    queries: list[list[int]] = []
    for number in range(2 * num_sequences):
        pool = stored or prompts
        base = prompts[source.integers(len(prompts))] if source.random() < 0.4 else pool[source.integers(len(pool))]
        sequence = base[: int(source.integers(1, len(base) + 1))] if source.random() < 0.1 else base
        (stored if number % 2 else queries).append(sequence + words(int(source.integers(50, 400))))
    return stored, queries


def rate(action: Callable[[Sequence[int]], object], sequences: Sequence[Sequence[int]]) -> float:
    """Million tokens per second."""
    gc.collect()
    start = time.perf_counter()
    for sequence in sequences:
        action(sequence)
    return sum(map(len, sequences)) / (time.perf_counter() - start) / 1e6


def main() -> int:
    """Check, time, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-sequences", type=int, default=600, help="stored sequences (default: 600)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each structure (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the sequences (default: 0)")
    parser.add_argument("--records", type=Path, default=Path(__file__).parent / "records", help="folder for the record")
    options = parser.parse_args()
    stored, queries = build_sessions(options.num_sequences, options.seed)
    kinds: dict[str, Callable[[], Any]] = {"radix": RadixTrie, "dict-of-dicts": DictTrie, "vllm-hashes": BlockHashes}
    lengths: dict[str, list[int]] = {}
    rates: dict[str, dict[str, list[float]]] = {name: {"insert": [], "match": []} for name in kinds}
    for _ in range(options.repeats):
        for name, kind in kinds.items():
            index = kind()
            rates[name]["insert"].append(rate(index.insert, stored))
            lengths[name] = [index.match(query) for query in queries]
            rates[name]["match"].append(rate(index.match, queries))
            del index
    whole_blocks = [length // BLOCK_TOKENS * BLOCK_TOKENS for length in lengths["radix"]]
    if lengths["radix"] != lengths["dict-of-dicts"] or whole_blocks != lengths["vllm-hashes"]:
        raise SystemExit("the structures found different prefixes; no rate is worth printing")
    results: dict[str, Any] = {}
    for name, measured in rates.items():
        results[name] = {f"{action}_mtokens_per_s": vars(summarize(values)) for action, values in measured.items()}
        medians = {action: f"{summarize(values).median:.2f}" for action, values in measured.items()}
        print(f"{name:>14}: {medians['insert']} M tokens/s inserted, {medians['match']} M matched", flush=True)
    settings = {
        "num_sequences": options.num_sequences,
        "repeats": options.repeats,
        "seed": options.seed,
        "stored_tokens": sum(map(len, stored)),
        "query_tokens": sum(map(len, queries)),
        "matched_tokens": sum(lengths["radix"]),
        "vllm_block_tokens": BLOCK_TOKENS,
        "vllm_hash": "sha256",
    }
    print(write_record(options.records, "prefix-trie", settings, results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
