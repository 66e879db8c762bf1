"""Speculation on real text: tokens a step with and without drafts. Usage: python examples/speculation.py [MODEL]"""

import sys

from llmpy import LLM
from llmpy.demo import fetch_model

CODE = "def area(width, height):\n    if width < 0 or height < 0:\n        raise ValueError(width)\n    return width * height\n"
TEXTS = {
    "copy": "Repeat this sentence exactly: How vexingly quick daft zebras jump over the lazy dog and the quick brown fox.",
    "edit": "Rename the variable width to length and print the whole function:\n\n" + CODE,
    "story": "Tell me a story about a sailor.",
}


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else fetch_model()
    chats = [[{"role": "user", "content": text}] for text in TEXTS.values()]
    how = {"temperature": 0, "max_tokens": 80, "use_tqdm": False}
    with LLM(model) as plain:
        wanted = [output.outputs[0].token_ids for output in plain.chat(chats, **how)]
    for source in ({"method": "ngram"}, {"method": "suffix"}):
        with LLM(model, speculative_config=source) as llm:
            for time in ("first", "again"):
                for name, chat, ids in zip(TEXTS, chats, wanted, strict=True):
                    output = llm.chat([chat], **how)[0]
                    assert output.outputs[0].token_ids == ids  # drafts never change a token
                    accepted = sum(output.metrics.accepted_drafts)
                    per_step = len(ids) / (len(ids) - accepted)
                    print(f"{source['method']:8} {time:6} {name:6} {per_step:5.2f} tokens a step")


if __name__ == "__main__":
    main()
