"""Token probabilities as a table. Needs pandas: pip install ".[data]" in a clone. Usage: python examples/logprobs.py [MODEL]"""

import sys

import pandas as pd

from llmpy import LLM
from llmpy.demo import fetch_model


def main() -> None:
    with LLM(sys.argv[1] if len(sys.argv) > 1 else fetch_model()) as llm:
        outputs = llm.generate(
            ["The capital of Spain is", "The capital of Japan is"], temperature=0, max_tokens=8, logprobs=3
        )
        print(outputs.to_pandas()[["prompt", "text", "cumulative_logprob", "num_tokens"]].to_string(index=False))
        sample = outputs[0].outputs[0]
        rows = [
            {"step": step, "token": entry.decoded_token, "logprob": entry.logprob, "rank": entry.rank}
            for step, alternatives in enumerate(sample.logprobs)
            for entry in alternatives.values()
        ]
        print(pd.DataFrame(rows).to_string(index=False))


if __name__ == "__main__":
    main()
