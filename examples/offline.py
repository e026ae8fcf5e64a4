"""Use the 2-bit cache from Python without a server: vLLM's own LLM class, with one more argument.

novakv fit --model MODEL      # once
python examples/offline.py MODEL
"""

import argparse

from vllm import LLM, SamplingParams

QUESTIONS = ("Name three rivers in Europe.", "Write one sentence about winter.", "What is 12 times 12?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="model directory, or a hub name that is already downloaded")
    parser.add_argument("--max-model-len", type=int, default=4096, help="longest sequence (default: %(default)s)")
    options = parser.parse_args()

    llm = LLM(
        model=options.model,
        attention_backend="NOVAKV",
        max_model_len=options.max_model_len,
        # on a CPU, vLLM would otherwise ask for nearly all of the machine's memory
        kv_cache_memory_bytes=2**30,
        # every setting and its default: see README; {} takes the artifact that was fitted for this model
        additional_config={"novakv": {}},
    )
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    for question, output in zip(
        QUESTIONS, llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=64)), strict=True
    ):
        print(f"{question}\n  {output.outputs[0].text.strip()}\n")


if __name__ == "__main__":
    main()
