"""Watches a served index from a thread of its own: stores prompts, writes figures, saves at the end.

The scheduler only appends to a queue; whatever is slow happens here. A look at the whole trie, and a snapshot, take
time during which the scheduler's thread competes for the interpreter, so each is rationed to `MAX_LOOK_SHARE` of the
time. vLLM may kill an engine that has been told to end, so the snapshot is not left to the end alone.
"""

import logging
import threading
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from vllm_novakv.prefix.clusters import information_clusters, saving
from vllm_novakv.prefix.served import ServedIndex
from vllm_novakv.prefix.snapshot import load_trie, save_trie
from vllm_novakv.prefix.status import write_status
from vllm_novakv.prefix.tokens import TOKEN_BYTES
from vllm_novakv.prefix.trie import Trie
from vllm_novakv.prefix.view import TrieView

# below vLLM's own logger, whose handlers a server configures
logger = logging.getLogger(f"vllm.{__name__}")

STATUS_INTERVAL_S = 5.0
HISTORY_SAMPLES = 720
MIN_LOOK_INTERVAL_S = 30.0
MIN_SAVE_INTERVAL_S = 60.0
MAX_LOOK_SHARE = 0.002
MIN_SHARED_BITS = 1.0
"""Information that prompts must share to count as one cluster.

Counted from the prompts alone, a prefix carries little where most prompts have it and much where few do.
"""

NUM_HOTTEST = 20
SHOWN_TOKENS = 48


class Observer:
    """One engine's statistics: a trie of its prompts, a history of its hits, two files.

    Args:
        index: what to watch.
        vocab_size: token ids are below it.
        max_bytes: bound of the trie.
        status_file: JSON figures, replaced every few seconds, removed at the end.
        snapshot: read now if it exists, written now and then and by `close`; None: neither.
        policy: name, shown.

    Raises:
        ValueError: the snapshot is damaged or of another model.
    """

    def __init__(
        self,
        index: ServedIndex,
        vocab_size: int,
        max_bytes: int,
        status_file: Path,
        snapshot: Path | None,
        policy: str,
    ) -> None:
        self._index = index
        self._status_file = status_file
        self._snapshot = snapshot
        self._policy = policy
        self._trie = open_trie(snapshot, vocab_size, max_bytes)
        self._num_skipped = 0
        self._history: deque[list[float]] = deque(maxlen=HISTORY_SAMPLES)
        self._look: dict[str, Any] = {"hottest": [], "clusters": {"count": 0}}
        self._next_look_s = 0.0
        self._looked_at = -1
        self._next_save_s = time.monotonic() + MIN_SAVE_INTERVAL_S
        self._has_news = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="novakv-prefix-observer", daemon=True)

    @property
    def trie(self) -> Trie:
        """The prompts."""
        return self._trie

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def close(self) -> None:
        """Stop, store what is left, save the snapshot and remove the figures; calling it again changes nothing."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._store_prompts()
        try:
            self._save()
        except OSError:
            logger.exception("NOVAKV prefix index: the snapshot %s could not be written", self._snapshot)
        self._status_file.unlink(missing_ok=True)

    def update(self) -> None:
        """Store waiting prompts, take a sample, write the figures and, if it is time, the snapshot.

        Raises:
            OSError: a file cannot be written.
        """
        self._store_prompts()
        counts = self._index.counts
        self._history.append(
            [round(time.time(), 1), counts.requests, counts.prompt_tokens, counts.hit_tokens, counts.lru_hit_tokens]
        )
        self._look_at_trie()
        write_status(self._status_file, self.status())
        if (now_s := time.monotonic()) >= self._next_save_s:
            self._save()
            took_s = time.monotonic() - now_s
            self._next_save_s = now_s + max(MIN_SAVE_INTERVAL_S, took_s / MAX_LOOK_SHARE)

    def status(self) -> dict[str, Any]:
        """Figures of now, as JSON can hold them."""
        index, pins = self._index, self._index.pins
        return {
            "time_s": round(time.time(), 1),
            "policy": self._policy,
            "smallest_prefix_tokens": index.pages.chunk_tokens,
            **asdict(index.counts),
            "cached_chunks": index.num_chunks,
            "pinned_blocks": pins.num_pages,
            "pinned_blocks_limit": pins.max_pages,
            "pins": [
                *({"name": name, "tokens": pin.num_tokens, "is_bound": True} for name, pin in list(pins.bound.items())),
                *({"name": pin.name, "tokens": len(pin.tokens), "is_bound": False} for pin in list(pins.unbound)),
            ],
            "index": {
                "sequences": self._trie.num_sequences,
                "tokens": self._trie.num_tokens,
                "nodes": self._trie.num_nodes,
                "bytes": self._trie.memory_bytes,
                "skipped": self._num_skipped,
            },
            **self._look,
            "history": list(self._history),
        }

    def _run(self) -> None:
        has_failed = False
        while True:
            try:
                self.update()
            except OSError:
                if not has_failed:
                    logger.exception("NOVAKV prefix index: figures or snapshot cannot be written")
                has_failed = True
            if self._stop.wait(STATUS_INTERVAL_S):
                return

    def _save(self) -> None:
        if self._snapshot is not None and self._has_news:
            self._snapshot.parent.mkdir(parents=True, exist_ok=True)
            save_trie(self._trie, self._snapshot)
            self._has_news = False

    def _store_prompts(self) -> None:
        prompts = self._index.prompts
        max_tokens = self._trie.max_bytes // (4 * TOKEN_BYTES)
        while prompts:
            try:
                self._trie.insert(prompts.popleft()[:max_tokens])
                self._has_news = True
            except ValueError:
                # placeholders of images and the like are no tokens of the vocabulary
                self._num_skipped += 1

    def _look_at_trie(self) -> None:
        now_s, num_requests = time.monotonic(), self._index.counts.requests
        if now_s < self._next_look_s or num_requests == self._looked_at:
            return
        view = self._trie.view()
        self._look = {"hottest": hottest(view, self._index.pages.chunk_tokens), "clusters": _clusters(view)}
        self._looked_at = num_requests
        took_s = time.monotonic() - now_s
        self._next_look_s = now_s + max(MIN_LOOK_INTERVAL_S, took_s / MAX_LOOK_SHARE)


def open_trie(snapshot: Path | None, vocab_size: int, max_bytes: int) -> Trie:
    """The trie of a snapshot, or an empty one if there is none.

    Raises:
        ValueError: the snapshot is damaged or of another model.
    """
    if snapshot is None or not snapshot.exists():
        return Trie(vocab_size, max_bytes)
    trie = load_trie(snapshot)
    if trie.vocab_size != vocab_size:
        raise ValueError(
            f"{snapshot} knows {trie.vocab_size} tokens, the model {vocab_size}: it is another model's; name another "
            "file in prefix_index.snapshot"
        )
    trie.max_bytes = max_bytes
    return trie


def hottest(view: TrieView, min_tokens: int) -> list[dict[str, Any]]:
    """Shared prefixes by the tokens that sharing them can save, (requests − 1) · tokens, none part of another.

    Args:
        view: of the trie.
        min_tokens: shorter prefixes are left out.

    Returns:
        Up to `NUM_HOTTEST` entries; prompts of a single request are never among them.
    """
    saved = (view.weight - 1) * view.depth_tokens * (view.depth_tokens >= min_tokens)
    # ancestors of chosen nodes, and chosen nodes
    taken: set[int] = set()
    chosen: list[int] = []
    for index in map(int, np.argsort(-saved, kind="stable")):
        if not saved[index] or len(chosen) == NUM_HOTTEST:
            break
        path = view.path(index)
        if index not in taken and not any(step in chosen for step in path):
            chosen.append(index)
            taken.update(path)
    return [
        {
            "tokens": int(view.depth_tokens[index]),
            "requests": int(view.weight[index]),
            "information_bits": round(float(view.information_bits[index]), 1),
            "first_tokens": view.sequence(index)[:SHOWN_TOKENS].tolist(),
        }
        for index in chosen
    ]


def _clusters(view: TrieView) -> dict[str, Any]:
    if not len(view.ends):
        return {"count": 0}
    clusters = information_clusters(view, MIN_SHARED_BITS)
    result = saving(view, clusters)
    return {
        "count": sum(int(view.own_weight[list(cluster.members)].sum()) > 1 for cluster in clusters),
        "min_shared_bits": MIN_SHARED_BITS,
        "covered_ratio": round(result.covered, 4),
        "predicted_saving_ratio": round(result.predicted, 4),
        "measured_saving_ratio": round(result.measured, 4),
    }
