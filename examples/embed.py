"""Which sentence is closest to the question? Usage: python examples/embed.py [MODEL]

MODEL is an encoder of sentences (all-MiniLM-L6-v2, say), an embedding model, or any generative model.
"""

import sys

from llmpy import LLM
from llmpy.demo import fetch_model

QUESTION = "What do bees make?"
SENTENCES = ["Bees make honey.", "The train to Rome leaves at noon.", "A square has four sides."]


def main() -> None:
    with LLM(sys.argv[1] if len(sys.argv) > 1 else fetch_model()) as llm:
        generates = llm.program()[-2].startswith("logits")  # for these models the mean of all states is the better vector
        vectors = llm.embed([QUESTION, *SENTENCES], pooling="mean" if generates else None).numpy()
    likeness = vectors[1:] @ vectors[0]
    for value, sentence in zip(likeness.tolist(), SENTENCES, strict=True):
        print(f"{value:.3f}  {sentence}")
    print("closest:", SENTENCES[likeness.argmax()])


if __name__ == "__main__":
    main()
