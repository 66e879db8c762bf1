"""Which ids end a sequence: those of generation_config.json, config.json and the tokenizer together, within the vocabulary."""

import json

from llmpy import LLM


def eos_ids(path):
    with LLM(path, device="cpu", kv_cache_memory_bytes="16MiB") as llm:
        return sorted(llm.tokenizer.eos_token_ids)


def test_all_sources_count_and_none_lies_outside(tmp_path, write_model):
    path = write_model(tmp_path, eos_token_id=[7, 304])
    of_tokenizer = json.loads((path / "tokenizer.json").read_text())["added_tokens"][-1]["id"]
    assert of_tokenizer not in (2, 7)
    assert eos_ids(path) == [2, 7, of_tokenizer]
