"""Request logs: what arrived when, as chains of blocks. Broken lines are counted and reported, never fatal.

Two formats are read, one JSON object per line, recognised line by line:
- trace: {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}, one id per block of the
  prompt, equal ids for equal prompts up to and with that block;
- OpenAI-style: {"messages": [...]} or {"prompt": ...}, alone or under "body" or "request"; the time under "timestamp",
  "created", "created_at" or "time"; token counts under "usage", alone or in a "response".
"""

import datetime
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TRACE_BLOCK_TOKENS = 512
"""Tokens per block of the hash_ids in the trace format."""

MAX_REPORTED_PROBLEMS = 5
MAX_LINE_BYTES = 1 << 26
TEXT_CHARACTERS = 200
MAX_SECONDS = 1e11
"""A time above this (the year 5138) is meant in milliseconds."""


@dataclass(frozen=True)
class LoggedRequest:
    """One request of a log.

    Attributes:
        arrival_s: seconds, on the log's clock.
        keys: of the prompt's blocks, first block first; equal keys stand for equal prompts up to and with that block.
            The last block may be partial.
        num_tokens: tokens of the prompt.
        output_tokens: tokens of the answer, 0 if unknown.
        block_tokens: tokens per block.
        text: the beginning of the prompt, empty if the log has none.
    """

    arrival_s: float
    keys: tuple[int, ...]
    num_tokens: int
    output_tokens: int
    block_tokens: int
    text: str = ""


@dataclass
class Log:
    """The requests of a log in order of arrival, and what could not be read.

    Attributes:
        requests: in order of arrival.
        num_broken: lines that were left out.
        problems: the first of them, with line numbers and reasons.
        num_without_time: requests whose line has no time; they get that of the line before, or 0.
        is_estimated: whether token counts are estimates, because the log holds texts.
        counted_tokens: prompt tokens of the texts whose number the log gives.
        counted_characters: characters of the same texts.
    """

    requests: list[LoggedRequest] = field(default_factory=list)
    num_broken: int = 0
    problems: list[str] = field(default_factory=list)
    num_without_time: int = 0
    is_estimated: bool = False
    counted_tokens: int = 0
    counted_characters: int = 0

    def reject(self, line_number: int, reason: str) -> None:
        """Count a broken line."""
        self.num_broken += 1
        if len(self.problems) < MAX_REPORTED_PROBLEMS:
            self.problems.append(f"line {line_number}: {reason}")


def read_log(path: Path, block_tokens: int = 128, characters_per_token: float = 4.0) -> Log:
    """Read a log file.

    Texts are cut into blocks of block_tokens · characters_per_token characters, after the messages have been joined
    with their roles; so sizes are estimates, while equal beginnings are found as such. Prompts of token ids are exact.

    Args:
        path: the file, UTF-8.
        block_tokens: tokens per block, for texts; traces bring their own blocks.
        characters_per_token: to turn characters into tokens.

    Returns:
        The requests and the broken lines.

    Raises:
        ValueError: a number is not positive.
        OSError: the file cannot be read.
    """
    if block_tokens < 1 or not characters_per_token > 0:
        raise ValueError(f"{block_tokens=} and {characters_per_token=} must be positive")
    with path.open("rb") as file:
        return parse_log(file, block_tokens, characters_per_token)


def parse_log(lines: Iterable[bytes], block_tokens: int = 128, characters_per_token: float = 4.0) -> Log:
    """Requests of a log's lines, see `read_log`.

    Args:
        lines: of the file; empty ones are skipped.
        block_tokens: as for `read_log`.
        characters_per_token: as for `read_log`.
    """
    log = Log()
    last_time = 0.0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"longer than {MAX_LINE_BYTES} bytes")
            entry = json.loads(line)
            if not isinstance(entry, dict):
                raise ValueError("not a JSON object")
            time_s = _find_time(entry)
            if "hash_ids" in entry:
                request = _trace_request(entry, last_time if time_s is None else time_s / 1000.0)
            else:
                arrival_s = last_time if time_s is None else time_s / (1000.0 if time_s > MAX_SECONDS else 1.0)
                request = _text_request(entry, arrival_s, block_tokens, characters_per_token, log)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            log.reject(number, str(error) or type(error).__name__)
            continue
        log.num_without_time += time_s is None
        last_time = request.arrival_s
        log.requests.append(request)
    log.requests.sort(key=lambda request: request.arrival_s)
    return log


def _find_time(entry: Mapping[str, Any]) -> float | None:
    for name in ("timestamp", "created", "created_at", "time"):
        value = entry.get(name)
        if value is None:
            continue
        if isinstance(value, str):
            parsed = datetime.datetime.fromisoformat(value)
            return (parsed if parsed.tzinfo else parsed.replace(tzinfo=datetime.UTC)).timestamp()
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name} is {value!r}, not a time")
        return float(value)
    return None


def _count(entry: Mapping[str, Any], name: str) -> int:
    value = entry[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} is {value!r}, not a number of tokens")
    return value


def _trace_request(entry: Mapping[str, Any], time_s: float) -> LoggedRequest:
    keys = entry["hash_ids"]
    if not isinstance(keys, list) or not keys or not all(type(key) is int for key in keys):
        raise ValueError("hash_ids is not a list of integers")
    if len(set(keys)) != len(keys):
        raise ValueError("hash_ids names a block twice")
    num_tokens = _count(entry, "input_length") if "input_length" in entry else len(keys) * TRACE_BLOCK_TOKENS
    if -(-num_tokens // TRACE_BLOCK_TOKENS) != len(keys):
        raise ValueError(f"{len(keys)} hash_ids do not hold {num_tokens} tokens in blocks of {TRACE_BLOCK_TOKENS}")
    output_tokens = _count(entry, "output_length") if "output_length" in entry else 0
    return LoggedRequest(time_s, tuple(keys), num_tokens, output_tokens, TRACE_BLOCK_TOKENS)


def _text_request(
    entry: Mapping[str, Any], time_s: float, block_tokens: int, characters_per_token: float, log: Log
) -> LoggedRequest:
    body = next((entry[name] for name in ("body", "request") if isinstance(entry.get(name), dict)), entry)
    usage = _find_usage(entry, body)
    output_tokens = _count(usage, "completion_tokens") if "completion_tokens" in usage else 0
    # the model begins the first key: caches of different models share nothing
    start = str(body.get("model", "")).encode()
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        keys = _chain(start, [str(prompt[i : i + block_tokens]) for i in range(0, len(prompt), block_tokens)])
        return LoggedRequest(time_s, keys, len(prompt), output_tokens, block_tokens)
    text = _prompt_text(body)
    log.is_estimated = True
    if "prompt_tokens" in usage:
        log.counted_tokens += _count(usage, "prompt_tokens")
        log.counted_characters += len(text)
    # one size for all requests, or equal prefixes would get unequal blocks
    size = max(1, round(block_tokens * characters_per_token))
    keys = _chain(start, [text[i : i + size] for i in range(0, len(text), size)])
    num_tokens = max(1, math.ceil(len(text) / characters_per_token))
    return LoggedRequest(time_s, keys, num_tokens, output_tokens, block_tokens, text[:TEXT_CHARACTERS])


def _chain(start: bytes, blocks: Iterable[str]) -> tuple[int, ...]:
    """Keys of blocks, each the hash of its text and of the key before it."""
    digest = hashlib.blake2b(start, digest_size=8).digest()
    keys = []
    for block in blocks:
        digest = hashlib.blake2b(digest + block.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        keys.append(int.from_bytes(digest, "little"))
    return tuple(keys)


def _prompt_text(body: Mapping[str, Any]) -> str:
    """Tools, then the messages with their roles, or the prompt, as one text."""
    messages = body.get("messages")
    if messages is None:
        prompt = body.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise ValueError("neither hash_ids nor messages nor one prompt")
        return prompt
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise ValueError("messages is not a list of messages")
    parts = [json.dumps(body["tools"], sort_keys=True)] if body.get("tools") else []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(
                part["text"] if isinstance(part, dict) and isinstance(part.get("text"), str) else json.dumps(part)
                for part in content
            )
        elif content is not None and not isinstance(content, str):
            raise ValueError("the content of a message is neither a text nor a list of parts")
        calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
        parts.append(f"{message.get('role')}\n{content or ''}{calls}\n")
    return "".join(parts)


def _find_usage(entry: Mapping[str, Any], body: Mapping[str, Any]) -> Mapping[str, Any]:
    for holder in (entry, body, entry.get("response")):
        for place in (holder, holder.get("body")) if isinstance(holder, dict) else ():
            if isinstance(place, dict) and isinstance(place.get("usage"), dict):
                usage: dict[str, Any] = place["usage"]
                return usage
    return {}
