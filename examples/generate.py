"""Offline batched generation. Usage: python examples/generate.py [MODEL]"""

import sys

from llmpy import LLM, SamplingParams
from llmpy.demo import fetch_model

PROMPTS = ["The capital of France is", "Water boils at", "def fibonacci(n):", "Once upon a time"]


def main() -> None:
    with LLM(sys.argv[1] if len(sys.argv) > 1 else fetch_model()) as llm:
        for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24)):
            print(f"{output.prompt!r} -> {output.text!r} ({output.finish_reason})")
        samples = llm.generate("My favourite animal is", n=3, temperature=0.8, top_p=0.95, max_tokens=12, seed=1)[0]
        for sample in samples.outputs:
            print(f"sample {sample.index}: {sample.text!r}")


if __name__ == "__main__":
    main()
