"""Models behind an OpenAI-compatible HTTP endpoint, as the callables that the evaluation takes."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from vllm_novakv.evaluation.items import Item

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")
_RETRIED_STATUS = {429, 500, 502, 503, 504}
_TRIES = 4


@dataclass(frozen=True)
class Endpoint:
    """A model served over HTTP.

    Attributes:
        base_url: up to and with the version, e.g. "http://localhost:8000/v1".
        model: name under which it is served.
        max_tokens: answer limit in tokens.
        temperature: 0 for greedy answers.
        api_key: sent as bearer token; None sends none. It appears in no message and no repr.
        num_parallel: requests in flight.
        timeout_s: for one request, in seconds.
        retry_wait_s: before the first repetition of a request that failed; doubled each time.
    """

    base_url: str
    model: str
    max_tokens: int = 128
    temperature: float = 0.0
    api_key: str | None = None
    num_parallel: int = 8
    timeout_s: float = 600.0
    retry_wait_s: float = 1.0

    def __repr__(self) -> str:
        return f"Endpoint(base_url={self.base_url!r}, model={self.model!r})"

    def answer(self, items: Sequence[Item], sample: int) -> list[str]:
        """Answers from `/chat/completions` to the items' messages; the server applies its chat template.

        Args:
            items: what to ask.
            sample: sent as seed.

        Returns:
            One text per item; empty where the model said nothing.

        Raises:
            ConnectionError: the endpoint cannot be reached or keeps failing.
            ValueError: its reply is not a completion.
        """

        def ask(item: Item) -> str:
            messages = [{"role": "user", "content": item.message}]
            reply = self._post("/chat/completions", {"messages": messages, "seed": sample, **self._sampling()})
            return str(_first_choice(reply)["message"]["content"] or "")

        return self._in_parallel(ask, items)

    def generate(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        """Continuations from `/completions` of prompts given as token ids: a `needle.Generate`.

        Args:
            prompts: token ids of whole prompts.

        Returns:
            One text per prompt.

        Raises:
            ConnectionError: the endpoint cannot be reached or keeps failing.
            ValueError: its reply is not a completion.
        """

        def ask(prompt: Sequence[int]) -> str:
            reply = self._post("/completions", {"prompt": list(prompt), **self._sampling()})
            return str(_first_choice(reply)["text"])

        return self._in_parallel(ask, prompts)

    def prompt_logprobs(self, windows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities of the tokens of windows, from `/completions` with "echo": a `perplexity.PromptLogprobs`.

        Args:
            windows: token ids.

        Returns:
            For a window of n tokens, the natural log-probabilities of tokens 1 .. n − 1.

        Raises:
            ConnectionError: the endpoint cannot be reached or keeps failing.
            ValueError: its reply has no log-probabilities of the prompt.
        """

        def ask(window: Sequence[int]) -> list[float]:
            # one token must be generated, because some servers refuse none; it is left out below
            request = {"prompt": list(window), "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0.0}
            logprobs = (_first_choice(self._post("/completions", request)).get("logprobs") or {}).get("token_logprobs")
            if not logprobs or len(logprobs) < len(window):
                raise ValueError(f"{self!r} gives no log-probabilities for the {len(window)} tokens of a prompt")
            return [float(value) for value in logprobs[1 : len(window)]]

        return self._in_parallel(ask, windows)

    def _sampling(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "temperature": self.temperature}

    def _in_parallel(self, ask: Callable[[_Request], _Reply], requests: Sequence[_Request]) -> list[_Reply]:
        with ThreadPoolExecutor(max_workers=self.num_parallel) as pool:
            return list(pool.map(ask, requests))

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = json.dumps({"model": self.model, **body}).encode()
        url = self.base_url.rstrip("/") + path
        for attempt in range(_TRIES):
            request = urllib.request.Request(url, data=data, headers=headers, method="POST")
            try:
                with urllib.request.urlopen(request, timeout=self.timeout_s) as reply:
                    return json.load(reply)
            except urllib.error.HTTPError as error:
                reason = f"{error.code} {error.read()[:300].decode(errors='replace')}"
                if error.code not in _RETRIED_STATUS:
                    break
            except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
                reason = str(error)
            if attempt + 1 < _TRIES:
                time.sleep(self.retry_wait_s * 2**attempt)
        raise ConnectionError(f"{url} failed: {reason}")


def _first_choice(reply: Any) -> dict[str, Any]:
    try:
        choice = reply["choices"][0]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"the reply is not a completion: {str(reply)[:300]}") from error
    if not isinstance(choice, dict):
        raise ValueError(f"the reply is not a completion: {str(reply)[:300]}")
    return choice
