"""The prefix index in a server: settings and refusals at start-up, metrics, routes, and equal answers in an engine."""

import asyncio
import re
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import pytest
from engine import build_tiny_llama, engine, num_preemptions, random_prompt, request_outputs
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry, generate_latest
from pydantic import ValidationError
from test_prefix_served import observed
from test_startup_refusals import engine_config, refusal
from vllm.plugins.endpoint_plugins.interface import EndpointPlugin

from vllm_novakv.backend.prefix_endpoint import PrefixEndpoint
from vllm_novakv.backend.prefix_metrics import PrefixCollector
from vllm_novakv.backend.prefix_scheduler import AsyncScheduler, PrefixAsyncScheduler, PrefixScheduler, Scheduler
from vllm_novakv.backend.prefix_settings import SCHEDULER, resolve_prefix_index, status_directory
from vllm_novakv.config import NovaKVConfig, PrefixIndexConfig
from vllm_novakv.prefix.status import read_statuses, status_file, write_status


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("tiny"))


def settings(**prefix_index):
    return {"history": "exact", "prefix_index": prefix_index}


# Settings.


@pytest.mark.parametrize(
    ("prefix_index", "message"),
    [
        ({"policy": "mru"}, "policy 'mru' is unknown; choose one of lru, lfu, gdsf, expected-reuse"),
        ({"polcy": "lru"}, "polcy"),
        ({"max_pinned_ratio": 0.95}, "max_pinned_ratio"),
        ({"reuse_within_blocks": 16}, "reuse_within_blocks"),
        ({"pins": [{"name": "a"}]}, "pin 'a' needs either tokens or a file"),
        ({"pins": [{"name": "a", "tokens": [1], "file": "x"}]}, "pin 'a' needs either tokens or a file"),
        ({"pins": [{"name": "a", "tokens": [-1]}]}, "token ids start at 0"),
        ({"pins": [{"name": "a", "tokens": [1]}, {"name": "a", "tokens": [2]}]}, "pins need different names"),
    ],
)
def test_wrong_settings_are_refused(prefix_index, message):
    with pytest.raises(ValidationError, match=message):
        PrefixIndexConfig(**prefix_index)
    with pytest.raises(ValueError, match=message):
        NovaKVConfig.from_additional_config({"novakv": {"prefix_index": prefix_index}})


def test_index_is_off_by_default(tiny):
    assert engine_config(tiny, {"history": "exact"}).scheduler_config.scheduler_cls is None


def test_index_chooses_the_scheduler_and_keeps_the_compilation_key(tiny):
    configs = [engine_config(tiny, settings()) for _ in range(2)]
    assert [config.scheduler_config.async_scheduling for config in configs] == [False, False]
    assert [config.scheduler_config.scheduler_cls for config in configs] == [SCHEDULER] * 2
    assert configs[0].compute_hash() == configs[1].compute_hash()
    directories = [status_directory(config, PrefixIndexConfig()) for config in configs]
    assert directories[0] != directories[1]
    # vLLM checks its configuration once more in the engine's process
    configs[0].__post_init__()
    assert status_directory(configs[0], PrefixIndexConfig()) == directories[0]
    configs[0].scheduler_config.async_scheduling = True
    resolve_prefix_index(configs[0], PrefixIndexConfig())
    order = configs[0].scheduler_config.get_scheduler_cls().__mro__
    assert order[:4] == (PrefixAsyncScheduler, PrefixScheduler, AsyncScheduler, Scheduler)


def test_features_that_exclude_the_index_are_refused(tiny, tmp_path):
    assert "prefix caching is off" in refusal(tiny, settings(), enable_prefix_caching=False)
    assert "--scheduler-cls my.Scheduler cannot be combined" in refusal(tiny, settings(), scheduler_cls="my.Scheduler")
    assert "--prefix-match-unit is 8; drop one" in refusal(
        tiny, settings(reuse_within_blocks=True), prefix_match_unit=8
    )
    missing = settings(pins=[{"name": "a", "file": str(tmp_path / "missing.txt")}])
    assert "the file of pin 'a' cannot be read" in refusal(tiny, missing)
    (tmp_path / "system.txt").write_text("You are helpful.")
    pin = settings(pins=[{"name": "a", "file": str(tmp_path / "system.txt")}])
    assert "the tokenizer is off; give its token ids" in refusal(tiny, pin)
    (tmp_path / "prompts.trie").write_bytes(b"damaged")
    snapshot = settings(snapshot=str(tmp_path / "prompts.trie"))
    assert "is not a usable prefix snapshot" in refusal(tiny, snapshot)


# Metrics and routes.

FIGURES = {
    "policy": "gdsf",
    "requests": 3,
    "prompt_tokens": 600,
    "hit_tokens": 256,
    "lru_hit_tokens": 128,
    "evicted_chunks": 5,
    "refused_pins": 0,
    "pinned_blocks": 9,
    "pinned_blocks_limit": 20,
    "cached_chunks": 7,
    "clusters": {"count": 2},
    "index": {"sequences": 3, "tokens": 400, "bytes": 5000},
}


def test_metrics_have_a_sample_per_engine(tmp_path):
    registry = CollectorRegistry()
    registry.register(PrefixCollector(tmp_path))
    assert 'engine="' not in generate_latest(registry).decode()
    for number in (0, 1):
        write_status(status_file(tmp_path, number), FIGURES | {"hit_tokens": 256 + number})
    lines = generate_latest(registry).decode().splitlines()
    assert 'novakv_prefix_hit_tokens_total{engine="0"} 256.0' in lines
    assert 'novakv_prefix_hit_tokens_total{engine="1"} 257.0' in lines
    assert 'novakv_prefix_clusters{engine="0"} 2.0' in lines
    assert 'novakv_prefix_index_bytes{engine="1"} 5000.0' in lines


@pytest.mark.parametrize("has_index", [True, False])
def test_endpoint_shows_figures_of_a_server_with_an_index(tiny, has_index, tmp_path):
    plugin = PrefixEndpoint()
    assert isinstance(plugin, EndpointPlugin)
    app = FastAPI()
    plugin.attach_router(app)
    novakv = settings(status_directory=str(tmp_path)) if has_index else {"history": "exact"}
    client = SimpleNamespace(vllm_config=engine_config(tiny, novakv))
    asyncio.run(plugin.init_state(client, app.state, None))
    write_status(status_file(tmp_path, 0), FIGURES)
    client = TestClient(app)
    reply = client.get("/v1/novakv/prefix")
    assert reply.status_code == (200 if has_index else 404)
    assert reply.json() == ({"0": FIGURES} if has_index else {"error": reply.json()["error"]})
    page = client.get("/novakv/prefix")
    assert page.status_code == 200
    assert "<title>Prefix index</title>" in page.text


# The engine.


SHORT_BAND = {"history": "exact", "sink_tokens": 16, "recent_tokens": 64, "prompt_recent_tokens": 128}


def answers(llm) -> tuple[list[list[int]], int]:
    """Tokens and hit tokens of a hot prefix between scans, and of a crowd for which the pool is too small."""
    tokens, hits = [], 0
    batches = [[random_prompt(500, 100 + 10 * step + i) for i in range(3)] for step in range(6)]
    for step in range(0, 6, 2):
        batches[step].append(random_prompt(400, 1) + random_prompt(40, 50 + step))
    batches.append([random_prompt(150, 300 + i) for i in range(10)])
    for batch in batches:
        for output in request_outputs(llm, batch, max_tokens=4 if len(batch) < 10 else 40):
            tokens.append(list(output.outputs[0].token_ids))
            hits += output.num_cached_tokens or 0
    return tokens, hits


def test_answers_are_equal_with_the_index_and_more_is_hit(tiny, tmp_path):
    small = {"num_gpu_blocks_override": 100, "max_model_len": 640, "max_num_batched_tokens": 512}
    with engine(tiny, SHORT_BAND, **small) as llm:
        expected, stock_hits = answers(llm)
    snapshot = tmp_path / "prompts.trie"
    index = {"policy": "lfu", "snapshot": str(snapshot), "status_directory": str(tmp_path)}
    index["pins"] = [{"name": "system", "tokens": random_prompt(400, 1)}]
    novakv = SHORT_BAND | {"prefix_index": index}
    with engine(tiny, novakv, **small) as llm:
        tokens, hits = answers(llm)
        preempted = num_preemptions(llm)
        assert llm.reset_prefix_cache()
        again, _ = answers(llm)
        for _ in range(600):
            if (figures := read_statuses(tmp_path)["0"])["requests"] == 62:
                break
            llm.llm_engine.engine_core.engine_core.scheduler._novakv_observer._stop.wait(0.02)
    print(f"hit tokens {stock_hits} without the index, {hits} with it; {preempted} preemptions")
    assert tokens == again == expected
    assert hits > stock_hits
    assert preempted > 0
    assert figures["hit_tokens"] >= hits
    assert figures["pins"] == [{"name": "system", "tokens": 384, "is_bound": True}]
    # shut down cleanly: the figures are gone, the prompts are kept
    assert not read_statuses(tmp_path)
    with engine(tiny, novakv, **small) as llm:
        assert llm.llm_engine.engine_core.engine_core.scheduler._novakv_observer.trie.num_sequences == 31


def test_pin_larger_than_its_share_of_the_pool_ends_the_start(tiny):
    index = {"pins": [{"name": "big", "tokens": random_prompt(1200, 1)}], "max_pinned_ratio": 0.1}
    with (
        pytest.raises(ValueError, match=r"need \d+ blocks \('big' \d+\), max_pinned_ratio allows 27"),
        engine(tiny, settings(**index), num_gpu_blocks_override=280, max_model_len=1400),
    ):
        pass


def test_pool_without_a_block_for_a_copy_ends_the_start(tiny):
    with (
        pytest.raises(ValueError, match=r"takes 99 of 99 blocks, and a copy of its last one 1 more"),
        engine(tiny, settings(reuse_within_blocks=True), num_gpu_blocks_override=100, max_model_len=1400),
    ):
        pass


def test_page_names_only_figures_that_exist(tmp_path):
    page = files("vllm_novakv.prefix").joinpath("page.html").read_text()
    status = observed(tmp_path)[1].status()
    for name in set(re.findall(r"figures\.([a-z_]+)", page)):
        assert name in status
