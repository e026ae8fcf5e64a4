"""The plumbing, bit for bit apart from the codec: exact mode must answer as vLLM's own CPU backend does (fp32)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from engine import build_tiny_llama, engine, generate, num_preemptions, random_prompt, request_outputs

pytestmark = pytest.mark.e2e
EXACT = {"history": "exact"}
LENGTHS = (1, 20, 63, 64, 65, 300, 320, 321, 1500)
MAX_TOKENS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model, or the one that NOVAKV_TEST_MODEL names."""
    if path := os.environ.get("NOVAKV_TEST_MODEL"):
        return Path(path)
    return build_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[int]]:
    base = random_prompt(1500, seed=100)
    singles = {f"tok{length}": random_prompt(length, seed=length) for length in LENGTHS}
    shared = {
        "shared1000-a": base[:1000] + random_prompt(200, seed=101),
        "shared1000-b": base[:1000] + random_prompt(60, seed=102),
        "base": base,
    }
    mixed = {
        f"mixed{i}": random_prompt(length, seed=200 + i) for i, length in enumerate((900, 700, 33, 1200, 257, 128))
    }
    return singles | shared | mixed


@pytest.fixture(scope="module")
def expected(model: Path, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    """Answers of the stock backend, each request alone, without prefix caching."""
    with engine(model, enable_prefix_caching=False) as llm:
        return {name: generate(llm, [prompt], MAX_TOKENS)[0] for name, prompt in prompts.items()}


def test_exact_mode_gives_the_stock_backends_tokens(
    model: Path, prompts: dict[str, list[int]], expected: dict[str, list[int]]
) -> None:
    singles = [f"tok{length}" for length in LENGTHS]
    mixed = [name for name in prompts if name.startswith("mixed")]
    with engine(model, EXACT) as llm:
        for name in singles:
            assert generate(llm, [prompts[name]], MAX_TOKENS) == [expected[name]], name
        assert generate(llm, [prompts[name] for name in mixed], MAX_TOKENS) == [expected[name] for name in mixed]


def test_exact_mode_prefix_hits_give_the_same_tokens(
    model: Path, prompts: dict[str, list[int]], expected: dict[str, list[int]]
) -> None:
    with engine(model, EXACT) as llm:

        def answer(prompt: list[int]) -> tuple[list[int], int]:
            output = request_outputs(llm, [prompt], MAX_TOKENS)[0]
            return list(output.outputs[0].token_ids), output.num_cached_tokens

        assert answer(prompts["base"]) == (expected["base"], 0)
        assert answer(prompts["shared1000-a"]) == (expected["shared1000-a"], 896)
        assert answer(prompts["shared1000-b"]) == (expected["shared1000-b"], 896)
        # The whole prompt again: its last token, and with it its last block, is computed anew.
        assert answer(prompts["base"]) == (expected["base"], 1408)
        turn = prompts["base"] + expected["base"] + prompts["tok20"]
        tokens, num_cached = answer(turn)
        assert num_cached == 1408
        assert tokens == answer(turn)[0]


def test_exact_mode_chunked_prefill_gives_the_same_tokens(
    model: Path, prompts: dict[str, list[int]], expected: dict[str, list[int]]
) -> None:
    names = [name for name in prompts if name.startswith("mixed")] + ["base", "shared1000-a", "shared1000-b"]
    with engine(model, EXACT, max_num_batched_tokens=256, num_gpu_blocks_override=190) as llm:
        for _ in range(2):
            assert generate(llm, [prompts[name] for name in names], MAX_TOKENS) == [expected[name] for name in names]


def test_exact_mode_preempted_requests_give_the_same_tokens(model: Path) -> None:
    growing = [random_prompt(100 + i, seed=300 + i) for i in range(8)]
    with engine(model, enable_prefix_caching=False) as llm:
        alone = [generate(llm, [prompt], 160)[0] for prompt in growing]
    with engine(model, EXACT, max_model_len=512, num_gpu_blocks_override=70) as llm:
        assert generate(llm, growing, 160) == alone
        assert num_preemptions(llm) > 0
