"""A streamed chat of two turns; the second turn finds the first in the prefix cache. Usage: python examples/chat.py [MODEL]"""

import sys

from llmpy import LLM
from llmpy.demo import fetch_model


def main() -> None:
    with LLM(sys.argv[1] if len(sys.argv) > 1 else fetch_model()) as llm:
        messages = [{"role": "system", "content": "You are a helpful assistant who answers in one sentence."}]
        for question in ("What is the capital of Italy?", "And what language do they speak there?"):
            messages.append({"role": "user", "content": question})
            print(f"\n> {question}")
            answer = ""
            for chunk in llm.stream_chat(messages, temperature=0, max_tokens=48):
                print(chunk, end="", flush=True)
                answer += chunk
            messages.append({"role": "assistant", "content": answer})
        stats = llm.stats()
        print(f"\n{stats.prefix_cache_hits} of {stats.prefix_cache_queries} prompt tokens came from the cache")


if __name__ == "__main__":
    main()
