"""Chat with a running server through the openai client, token by token.

novakv serve MODEL            # in another terminal
python examples/chat.py "Why is the sky blue?"
"""

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question", help="what to ask")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="the server (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer in tokens (default: %(default)s)")
    options = parser.parse_args()

    client = OpenAI(base_url=options.url, api_key="not-needed")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": options.question}],
        max_tokens=options.max_tokens,
        stream=True,
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
