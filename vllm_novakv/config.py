"""The plugin's settings: read once from vLLM's ``--additional-config``, then passed on as a frozen object.

vllm serve MODEL --attention-backend NOVAKV --additional-config '{"novakv": {"skip_layers": [0]}}'
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    ValidationError,
    field_validator,
    model_validator,
)

from vllm_novakv.prefix.policy import policy_names

ADDITIONAL_CONFIG_KEY = "novakv"
BAND_BLOCK_TOKENS = 16


class HistoryFormat(str, Enum):
    """How the history is stored."""

    QUANTIZED = "quantized"
    """The 2-bit records that the fitted artifact describes."""
    EXACT = "exact"
    """Lossless keys and values in the model's type: for tests of the plumbing, uses more memory than no plugin."""


class PrefixPin(BaseModel):
    """A prefix that stays cached: either its token ids or a text file, which the model's tokenizer turns into them.

    Raises:
        ValueError: neither or both are given, or a token id is negative.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, description="Shown in logs, metrics and pages.")
    tokens: tuple[StrictInt, ...] = Field(default=(), description="Token ids from the start of the prompt.")
    file: Path | None = Field(default=None, description="UTF-8 text; tokenized as the start of a prompt.")

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if bool(self.tokens) == (self.file is not None):
            raise ValueError(f"pin {self.name!r} needs either tokens or a file")
        if any(token < 0 for token in self.tokens):
            raise ValueError(f"pin {self.name!r}: token ids start at 0")
        return self


class PrefixIndexConfig(BaseModel):
    """Settings of the prefix index; the index is off without them.

    Raises:
        ValueError: an unknown key or policy, a value outside its range, or two pins of one name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: str = Field(default="expected-reuse", description="Which cached blocks are evicted first.")
    pins: tuple[PrefixPin, ...] = Field(default=(), description="Prefixes that are evicted last.")
    max_pinned_ratio: float = Field(
        default=0.25, ge=0.0, le=0.9, description="Share of the pool's blocks that all pins together may take."
    )
    allow_request_pins: StrictBool = Field(
        default=False, description="Whether a request may pin its prompt with vllm_xargs."
    )
    reuse_within_blocks: StrictBool = Field(
        default=False,
        description="Whether a prefix hit may end at every 16th token instead of every 128th: the block in which a "
        "prompt parts from a cached one is copied.",
    )
    snapshot: Path | None = Field(
        default=None,
        description="File for the prompts' statistics, read at start and written at shutdown.",
    )
    max_index_bytes: StrictInt = Field(
        default=1 << 25, ge=1 << 16, le=1 << 32, description="Memory bound of the index of prompts."
    )
    status_directory: Path | None = Field(
        default=None, description="Where the engine leaves its figures for metrics and page; default: a temporary one."
    )

    @field_validator("policy")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value not in policy_names():
            raise ValueError(f"policy {value!r} is unknown; choose one of {', '.join(policy_names())}")
        return value

    @field_validator("pins")
    @classmethod
    def _names_differ(cls, value: tuple[PrefixPin, ...]) -> tuple[PrefixPin, ...]:
        names = [pin.name for pin in value]
        if len(set(names)) < len(names):
            raise ValueError(f"pins need different names, got {names}")
        return value


class NovaKVConfig(BaseModel):
    """Validated settings of one server.

    Raises:
        ValueError: an unknown key or a value outside its range; the text lists the known keys.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    artifact: Path | None = Field(
        default=None,
        description="Folder that `novakv fit` wrote; default: found by the model's fingerprint in the user's cache.",
    )
    sink_tokens: StrictInt = Field(
        default=64, ge=0, le=4096, description="First tokens of a sequence kept in BF16; a multiple of 16."
    )
    recent_tokens: StrictInt = Field(
        default=256, ge=16, le=8192, description="Latest tokens of a sequence kept in BF16; a multiple of 16."
    )
    prompt_recent_tokens: StrictInt = Field(
        default=1024,
        ge=16,
        le=1 << 20,
        description="Latest tokens that a token of the prompt reads in BF16 while the prompt is computed; a multiple "
        "of 16, at least recent_tokens.",
    )
    skip_layers: tuple[StrictInt, ...] = Field(
        default=(), description="Indices of attention layers that stay on vLLM's own backend, in the model's type."
    )
    history: HistoryFormat = Field(default=HistoryFormat.QUANTIZED, description="'exact' is for tests only.")
    baseline: str | None = Field(
        default=None,
        description="Compared method through which keys and values pass on their way into an exact history; for "
        "measurements only.",
    )
    prefix_index: PrefixIndexConfig | None = Field(
        default=None, description="Retention policy, pins and statistics of the prefix cache; off by default."
    )

    @field_validator("sink_tokens", "recent_tokens", "prompt_recent_tokens")
    @classmethod
    def _is_whole_band_blocks(cls, value: int) -> int:
        if value % BAND_BLOCK_TOKENS:
            raise ValueError(f"got {value}; must be a multiple of {BAND_BLOCK_TOKENS} (the band's block size)")
        return value

    @model_validator(mode="after")
    def _prompt_window_is_the_wider(self) -> Self:
        if self.prompt_recent_tokens < self.recent_tokens:
            raise ValueError(
                f"prompt_recent_tokens={self.prompt_recent_tokens} is less than recent_tokens={self.recent_tokens}; "
                "raise the first or lower the second"
            )
        return self

    @field_validator("baseline")
    @classmethod
    def _is_a_known_baseline(cls, value: str | None) -> str | None:
        if value is not None:
            # only measurements need the methods, and torch with them
            from vllm_novakv.baselines import BASELINES

            if value not in BASELINES:
                raise ValueError(f"got {value!r}; choose from {', '.join(BASELINES)}")
        return value

    @model_validator(mode="after")
    def _baseline_needs_an_exact_history(self) -> Self:
        if self.baseline is not None and self.history is not HistoryFormat.EXACT:
            raise ValueError(
                f"baseline={self.baseline!r} writes the keys and values of another method, which the quantized history "
                'cannot hold; add "history": "exact" or drop the baseline'
            )
        return self

    @field_validator("skip_layers")
    @classmethod
    def _is_sorted_and_unique(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(index < 0 for index in value):
            raise ValueError(f"got {list(value)}; layer indices start at 0")
        return tuple(sorted(set(value)))

    @classmethod
    def from_additional_config(cls, additional_config: Mapping[str, Any] | object) -> NovaKVConfig:
        """Read the settings under the key ``novakv``.

        Args:
            additional_config: ``VllmConfig.additional_config``; anything that is not a mapping means "none given".

        Returns:
            The validated settings; all defaults where none were given.

        Raises:
            ValueError: a setting is wrong, or one that looks meant for this plugin stands elsewhere.
        """
        if isinstance(additional_config, Mapping):
            _refuse_misplaced(additional_config, cls.model_fields)
        raw = additional_config.get(ADDITIONAL_CONFIG_KEY, {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(raw, Mapping):
            raise ValueError(
                f'--additional-config: "{ADDITIONAL_CONFIG_KEY}" is {raw!r}; it must be an object, '
                f'for example {{"{ADDITIONAL_CONFIG_KEY}": {{"recent_tokens": 256}}}}'
            )
        try:
            return cls(**raw)
        except ValidationError as error:
            known = ", ".join(cls.model_fields)
            lines = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
            raise ValueError(
                f'--additional-config: wrong setting under "{ADDITIONAL_CONFIG_KEY}": {"; ".join(lines)}. '
                f"Known settings: {known}"
            ) from error


def _refuse_misplaced(additional_config: Mapping[str, Any], settings: Container[str]) -> None:
    """Refuse a misspelt key of the plugin, and settings beside it: vLLM hands both on without a word."""
    for key in map(str, additional_config):
        is_misspelt = key != ADDITIONAL_CONFIG_KEY and re.sub(r"[\W_]", "", key).lower() == ADDITIONAL_CONFIG_KEY
        if is_misspelt or key in settings:
            inner = "..." if is_misspelt else f'"{key}": ...'
            raise ValueError(
                f'--additional-config: "{key}" has no effect there; settings of this plugin stand under '
                f'"{ADDITIONAL_CONFIG_KEY}": {{"{ADDITIONAL_CONFIG_KEY}": {{{inner}}}}}'
            )
