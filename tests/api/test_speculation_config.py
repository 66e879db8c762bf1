"""The option `speculative_config`: its methods, keys and names of other engines."""

from typing import Any

import pytest

from llmpy import ConfigError, EngineConfig, SamplingParams
from llmpy.engine.speculation import SHARED_BYTES, core_options

SUFFIX = {"method": "suffix", "k": "auto", "shared": SHARED_BYTES}


def config(value: Any) -> Any:
    return EngineConfig(model="m", speculative_config=value).speculative_config


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, None),
        ({"method": "ngram"}, {"method": "ngram", "k": 4, "min": 2, "max": 4}),
        ({"method": "ngram", "k": "auto", "min": 6}, {"method": "ngram", "k": "auto", "min": 6, "max": 6}),
        ({"method": "ngram", "max": 1}, {"method": "ngram", "k": 4, "min": 1, "max": 1}),
        (
            {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 8, "prompt_lookup_min": 3},
            {"method": "ngram", "k": 5, "min": 3, "max": 8},
        ),
        ({"method": "draft", "model": "small"}, {"method": "draft", "k": 4, "model": "small"}),
        (
            {"method": "draft_model", "model": "small", "num_speculative_tokens": 2},
            {"method": "draft", "k": 2, "model": "small"},
        ),
        ({"method": "eagle3", "model": "head"}, {"method": "eagle3", "k": 4, "model": "head"}),
        ({"method": "mtp"}, {"method": "mtp", "k": 1}),
        ({"method": "medusa", "model": "head", "k": 3}, {"method": "medusa", "k": 3, "model": "head"}),
        ({"method": "deepseek_mtp", "num_speculative_tokens": 2}, {"method": "mtp", "k": 2}),
        ({"method": "suffix"}, SUFFIX),
        ({"method": "suffix", "shared": False, "num_speculative_tokens": 16}, {"method": "suffix", "k": 16, "shared": 0}),
        ({"method": "suffix", "shared": "1MiB"}, {"method": "suffix", "k": "auto", "shared": 1 << 20}),
    ],
)
def test_forms(given: Any, wanted: Any) -> None:
    assert config(given) == wanted
    assert config(config(given)) == wanted
    assert EngineConfig.from_dict(EngineConfig(model="m", speculative_config=given).to_dict()).speculative_config == wanted


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "'method' among ngram, suffix, draft, eagle, eagle3, mtp, medusa, got {}"),
        ({"method": "magic"}, "must be a dict with a 'method' among"),
        ({"method": "ngram", "k": 0}, "speculative_config: k must be from 1 to 16"),
        ({"method": "ngram", "k": 17}, "speculative_config: k must be from 1 to 16"),
        ({"method": "ngram", "min": 3, "max": 2}, "speculative_config: max must be from min=3 to 10, got 2"),
        ({"method": "ngram", "min": 1, "max": 9}, "speculative_config: max must be from min=1 to 8, got 9"),
        ({"method": "ngram", "k": 3, "num_speculative_tokens": 3}, "one of 'k' and 'num_speculative_tokens', got both"),
        ({"method": "suffix", "shared": -1}, "shared must be a size"),
        ({"method": "draft"}, "must be a dict with the 'model' of the method 'draft'"),
        ({"method": "eagle3", "k": 2}, "must be a dict with the 'model' of the method 'eagle3'"),
    ],
)
def test_bad_values(given: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(given)
    assert message in str(caught.value)


@pytest.mark.parametrize("given", [3, "ngram", {"method": "ngram", "k": "few"}, {"method": "suffix", "shared": 1.5}])
def test_wrong_types(given: Any) -> None:
    with pytest.raises(TypeError, match="speculative_config"):
        config(given)


@pytest.mark.parametrize("key", ["kk", "model", "shared"])
def test_unknown_keys_are_named(key: str) -> None:
    with pytest.raises(TypeError, match=f"{key}"):
        config({"method": "ngram", key: 1})


def test_options_of_the_core() -> None:
    assert core_options(None) == {}
    assert core_options(SUFFIX)["draft_k"] == 0
    assert core_options(config({"method": "ngram", "k": 3}))["draft_k"] == 3
    methods = {"draft": "draft", "eagle": "head", "eagle3": "head", "medusa": "heads"}
    assert {name: core_options(config({"method": name, "model": "m"}))["draft_method"] for name in methods} == methods
    assert core_options(config({"method": "mtp"}))["draft_method"] == "head"


def test_a_request_can_do_without() -> None:
    assert SamplingParams().speculative and not SamplingParams(speculative=False).speculative
    with pytest.raises(TypeError, match="speculative must be a bool"):
        SamplingParams(speculative=1)  # type: ignore[arg-type]
