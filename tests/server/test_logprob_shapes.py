"""Logprobs as answers write them: offsets count characters, and every number is one that JSON has."""

import json

import numpy as np

from llmpy.logprobs import Logprobs
from llmpy.server.logprobs import NEVER, LogprobWriter, finite, prompt_logprobs

TEXTS = ["a", "bcd", "€", "", "hello "]


class Names:
    """The methods of a tokenizer that a writer uses."""

    def token_bytes(self):
        return [text.encode() for text in TEXTS]

    def decode(self, ids):
        return "".join(TEXTS[token] for token in ids)


def entries(ids, values, top=None):
    ranks = np.ones(len(ids), np.int32)
    return Logprobs.of(np.array(ids, np.int32), np.array(values, np.float32), ranks, top, len(TEXTS), TEXTS.__getitem__)


def test_offsets_count_the_characters_before_a_token():
    writer = LogprobWriter(Names(), 0, False)
    first = writer.completion(entries([1, 2], [-1, -2]))
    then = writer.completion(entries([4, 3, 0], [-1, -2, -3]))
    assert first["tokens"] + then["tokens"] == ["bcd", "€", "hello ", "", "a"]
    assert first["text_offset"] + then["text_offset"] == [0, 3, 4, 10, 10]


def test_an_infinite_logprob_is_a_number_that_json_has():
    assert (finite(-np.inf), finite(-1.5), NEVER) == (-9999.0, -1.5, -9999.0)
    top = (
        np.array([[0, 2]], np.int32),
        np.array([[-0.5, -np.inf]], np.float32),
        np.array([[1, 2]], np.int32),
    )
    given = entries([1], [-np.inf], top)
    written = LogprobWriter(Names(), 2, False).completion(given)
    assert written["token_logprobs"] == [-9999.0]
    assert written["top_logprobs"] == [{"a": -0.5, "€": -9999.0}]
    chat = LogprobWriter(Names(), 2, False).chat(given)
    for value in (written, chat, prompt_logprobs(given)):
        assert "-9999.0" in json.dumps(value, allow_nan=False)
