"""The prefix index's figures as Prometheus metrics, on the page where vLLM shows its own.

The engine runs in another process than the API server. It leaves its figures in a file, which is read when Prometheus
asks: no path of our own into the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from vllm_novakv.prefix.status import read_statuses

COUNTERS = {
    "requests": "Requests that the prefix index saw.",
    "prompt_tokens": "Tokens of their prompts.",
    "hit_tokens": "Prompt tokens found in the prefix cache.",
    "lru_hit_tokens": "Prompt tokens that LRU would have found, by a shadow replay (an estimate).",
    "evicted_chunks": "Chunks of a prefix that the retention policy gave up.",
    "refused_pins": "Pins that requests asked for in vain.",
}
GAUGES = {
    "pinned_blocks": "Blocks of pinned prefixes, cached or not.",
    "pinned_blocks_limit": "Blocks that pins may take.",
    "cached_chunks": "Chunks that the retention policy counts as cached.",
    "clusters": "Groups of prompts that share a prefix of at least one bit of information.",
    "index_sequences": "Different prompts in the index.",
    "index_tokens": "Tokens in the index, shared ones once.",
    "index_bytes": "Memory charged to the index.",
}


class PrefixCollector:
    """Reads the engines' figures when the registry asks.

    Args:
        directory: where engines leave them.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def describe(self) -> list[Metric]:
        """Nothing: the registry need not read files when the collector is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One family per figure, with a sample per engine."""
        figures = {engine: _flat(status) for engine, status in read_statuses(self._directory).items()}
        families: list[tuple[type[Any], dict[str, str]]] = [
            (CounterMetricFamily, COUNTERS),
            (GaugeMetricFamily, GAUGES),
        ]
        for family, texts in families:
            for name, text in texts.items():
                metric = family(f"novakv_prefix_{name}", text, labels=["engine"])
                for engine, values in figures.items():
                    metric.add_metric([engine], values[name])
                yield metric


@cache
def register_metrics(directory: Path) -> PrefixCollector:
    """Offer the figures in a directory to Prometheus; once, however often vLLM checks its configuration."""
    collector = PrefixCollector(directory)
    REGISTRY.register(collector)
    return collector


def _flat(status: dict[str, Any]) -> dict[str, float]:
    return {
        **{name: status[name] for name in COUNTERS},
        **{name: status[name] for name in ("pinned_blocks", "pinned_blocks_limit", "cached_chunks")},
        "clusters": status["clusters"]["count"],
        **{f"index_{name}": status["index"][name] for name in ("sequences", "tokens", "bytes")},
    }
