"""Needles in a few long texts, all needles of a text asked about one after the other: affordable on a CPU.

Every text hides several needles at spread depths; its prompts differ in the question at the end only, so each cache
computes a text once and serves the other questions from prefix hits. Stock and NOVAKV run in this process, one after
the other, on the same prompts.

    python benchmarks/shared_needles.py --model DIR --text FILE --artifact DIR
"""

import argparse
import gc
import os
import random
import sys
from pathlib import Path
from typing import Any

from vllm_novakv.evaluation.needle import CITIES, INSTRUCTION, NEEDLE, QUESTION, SENTENCE_END
from vllm_novakv.evaluation.record import write_record

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; without it vLLM wants most of the machine


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="model directory")
    parser.add_argument("--text", type=Path, required=True, help="plain text for the haystacks (UTF-8)")
    parser.add_argument("--artifact", type=Path, required=True, help="artifact directory")
    parser.add_argument("--length", type=int, default=4096, help="prompt length in tokens (default: 4096)")
    parser.add_argument("--num-texts", type=int, default=4, help="texts (default: 4)")
    parser.add_argument("--needles-per-text", type=int, default=5, help="needles in each text (default: 5)")
    parser.add_argument("--dtype", default="auto", help="model type, as for vllm serve (default: auto)")
    parser.add_argument("--seed", type=int, default=0, help="of texts, cities and numbers (default: 0)")
    parser.add_argument("--records", type=Path, default=Path(__file__).parent / "records", help="folder for the record")
    return parser.parse_args()


def build_prompts(tokenizer: Any, text: str, options: argparse.Namespace) -> tuple[list[list[int]], list[str]]:
    """Prompts and their answers, text by text."""
    source = random.Random(options.seed)
    sentences = SENTENCE_END.split(text)
    prompts, answers = [], []
    for _ in range(options.num_texts):
        cities = source.sample(CITIES, options.needles_per_text)
        numbers = [str(source.randrange(10_000, 100_000)) for _ in cities]
        needles = [NEEDLE.format(city=city, number=number) for city, number in zip(cities, numbers, strict=True)]
        first = source.randrange(len(sentences) // 2)

        def render(num_sentences: int, city: str, first: int = first, needles: list[str] = needles) -> list[int]:
            parts = sentences[first : first + num_sentences]
            for i, needle in reversed(list(enumerate(needles))):
                parts.insert(round((i + 0.5) / len(needles) * len(parts)), needle.strip())
            message = f"{INSTRUCTION}\n\n{' '.join(parts)}\n\n{QUESTION.format(city=city)}"
            chat = [{"role": "user", "content": message}]
            rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            return list(tokenizer.encode(rendered, add_special_tokens=False))

        # the most sentences that fit, by bisection
        low, high = 1, options.length
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if len(render(middle, cities[0])) <= options.length - 8 else (low, middle - 1)
        prompts += [render(low, city) for city in cities]
        answers += numbers
    return prompts, answers


def ask(options: argparse.Namespace, prompts: list[list[int]], novakv: dict[str, Any] | None) -> dict[str, Any]:
    """Greedy answers of one engine, with the tokens that each request found in the prefix cache."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    settings: dict[str, Any] = {
        "model": options.model,
        "dtype": options.dtype,
        "max_model_len": options.length + 32,
        "max_num_batched_tokens": 2048,
        "enforce_eager": True,
    }
    if novakv is not None:
        settings |= {"attention_backend": "NOVAKV", "additional_config": {"novakv": novakv}}
    llm = LLM(**settings)
    params = SamplingParams(max_tokens=16, temperature=0.0)
    outputs = [llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0] for prompt in prompts]
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return {
        "answers": [output.outputs[0].text for output in outputs],
        "cached_tokens": [output.num_cached_tokens for output in outputs],
    }


def main() -> int:
    """Ask both engines and write the record."""
    from transformers import AutoTokenizer

    options = parse_arguments()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    prompts, answers = build_prompts(tokenizer, options.text.read_text(encoding="utf-8"), options)
    results = {}
    for name, novakv in (("stock", None), ("novakv", {"artifact": str(options.artifact)})):
        result = ask(options, prompts, novakv)
        found = [answer in reply for answer, reply in zip(answers, result["answers"], strict=True)]
        results[name] = result | {"found": sum(found), "asked": len(found)}
        print(
            f"{name:>7}: {sum(found)} of {len(found)} needles, prompts of {max(map(len, prompts))} tokens", flush=True
        )
    settings = {
        key: str(value) for key, value in vars(options).items() if key not in ("model", "text", "artifact", "records")
    }
    settings |= {"model": Path(options.model).name, "text": options.text.name, "expected": answers}
    path = write_record(options.records, f"shared-needles-{Path(options.model).name}", settings, results)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
