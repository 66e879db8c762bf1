"""Which ending does the model find likelier? Usage: python examples/score.py [MODEL]"""

import sys

from llmpy import LLM
from llmpy.demo import fetch_model

PROMPT = "To make tea, first you"
ENDINGS = [" boil the water.", " freeze the water.", " paint the water."]


def main() -> None:
    with LLM(sys.argv[1] if len(sys.argv) > 1 else fetch_model()) as llm:
        scores = llm.score([PROMPT] * len(ENDINGS), ENDINGS)
        for ending, score in sorted(zip(ENDINGS, scores, strict=True), key=lambda pair: -pair[1].sum_logprob):
            print(f"{score.sum_logprob:8.3f}  {PROMPT}{ending}")


if __name__ == "__main__":
    main()
