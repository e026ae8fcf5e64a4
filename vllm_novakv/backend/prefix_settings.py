"""Start-up of the prefix index: complete its settings, choose the scheduler, offer the metrics."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import Any

from vllm_novakv.backend.compat import VllmConfig, load_tokenizer
from vllm_novakv.backend.prefix_metrics import register_metrics
from vllm_novakv.config import BAND_BLOCK_TOKENS, PrefixIndexConfig, PrefixPin
from vllm_novakv.prefix.observer import open_trie

SCHEDULER = "vllm_novakv.backend.prefix_scheduler.PrefixScheduler"
_DIRECTORY = "_novakv_status_directory"
ASYNC_SCHEDULER = "vllm_novakv.backend.prefix_scheduler.PrefixAsyncScheduler"


def resolve_prefix_index(vllm_config: VllmConfig, settings: PrefixIndexConfig) -> PrefixIndexConfig:
    """Check the settings against the server's, and make vLLM use a scheduler with the index.

    Args:
        vllm_config: the complete configuration; its ``scheduler_cls`` is set.
        settings: as given.

    Returns:
        The same with token ids for every pin.

    Raises:
        ValueError: prefix caching is off, ``reuse_within_blocks`` meets another unit of hits, a pin's file cannot be
            read or tokenized, the snapshot is damaged or another model's.
        NotImplementedError: another scheduler is asked for.
    """
    scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ValueError(
            "prefix_index: prefix caching is off, there is nothing to index; drop --no-enable-prefix-caching or the "
            "setting"
        )
    if scheduler.scheduler_cls not in (None, SCHEDULER, ASYNC_SCHEDULER):
        raise NotImplementedError(
            f"prefix_index: --scheduler-cls {scheduler.scheduler_cls} cannot be combined with it; drop one of them"
        )
    unit = vllm_config.cache_config.prefix_match_unit
    if settings.reuse_within_blocks and unit not in (None, BAND_BLOCK_TOKENS):
        raise ValueError(
            f"prefix_index.reuse_within_blocks: hits end at multiples of {BAND_BLOCK_TOKENS} tokens, "
            f"--prefix-match-unit is {unit}; drop one of them"
        )
    if settings.snapshot is not None:
        open_trie(settings.snapshot, model.get_vocab_size(), settings.max_index_bytes)
    register_metrics(status_directory(vllm_config, settings))
    scheduler.scheduler_cls = ASYNC_SCHEDULER if scheduler.async_scheduling else SCHEDULER
    pins = tuple(_resolve_pin(pin, model) for pin in settings.pins)
    return settings.model_copy(update={"pins": pins})


def status_directory(vllm_config: VllmConfig, settings: PrefixIndexConfig) -> Path:
    """Where the engines of this server leave their figures; exists afterwards.

    A temporary directory is noted beside vLLM's own fields, so that it reaches the engine's process: as a setting it
    would change the key of vLLM's compilation cache at every start.
    """
    directory = settings.status_directory or getattr(vllm_config, _DIRECTORY, None)
    if directory is None:
        directory = Path(tempfile.mkdtemp(prefix="novakv-prefix-"))
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        setattr(vllm_config, _DIRECTORY, directory)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _resolve_pin(pin: PrefixPin, model: Any) -> PrefixPin:
    if pin.file is None:
        return pin
    try:
        text = pin.file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prefix_index: the file of pin {pin.name!r} cannot be read: {error}") from error
    if model.skip_tokenizer_init:
        raise ValueError(f"prefix_index: pin {pin.name!r} has a file, but the tokenizer is off; give its token ids")
    tokens = tuple(load_tokenizer(model).encode(text))
    if not tokens:
        raise ValueError(f"prefix_index: the file of pin {pin.name!r} is empty")
    return PrefixPin(name=pin.name, tokens=tokens)
