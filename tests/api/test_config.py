"""Options of the constructor: checks, forms, names of other libraries, environment."""

import logging
import os
import pickle
import warnings
from pathlib import Path

import pytest

from llmpy import LLM, ConfigError, DeviceError, EngineConfig, UnsupportedError, environment, hardware
from llmpy.cli.engine_options import descriptions
from llmpy.engine.progress import LoadBar
from llmpy.options import ALWAYS_SO, parse_size

BAD = [
    ("dtype", "int3"), ("load_format", "pt"), ("max_model_len", 0), ("max_model_len", "long"), ("max_num_seqs", 0),
    ("max_num_batched_tokens", 0), ("gpu_memory_utilization", 0), ("gpu_memory_utilization", 1.5),
    ("gpu_memory_utilization", float("nan")), ("kv_cache_memory_bytes", "8 parsec"), ("kv_cache_memory_bytes", -1),
    ("kv_cache_dtype", "int4"), ("activation_dtype", "int4"), ("block_size", 17), ("scheduling_policy", "lifo"),
    ("seed", -2), ("seed", 2**64), ("logprobs_mode", "raw"), ("max_logprobs", -2), ("vocab_limit", 0),
    ("banned_token_ids", [-1]), ("override_generation_config", {"tempr": 1}), ("model", ""),
]  # fmt: skip


@pytest.mark.parametrize(("option", "value"), BAD)
def test_bad_value_names_option_and_value(option, value):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{"model": "m", option: value})
    assert str(caught.value).startswith(f"{option} must be ") and "got " in str(caught.value)
    assert caught.value.option == option


WRONG = [
    ("model", 3), ("dtype", 3), ("skip_tokenizer_init", 1), ("max_model_len", 2.5), ("max_num_seqs", "8"),
    ("max_num_seqs", True), ("gpu_memory_utilization", "half"), ("kv_cache_memory_bytes", 1.5), ("block_size", "16"),
    ("enable_prefix_caching", None), ("seed", "x"), ("banned_token_ids", "12"), ("hf_overrides", 3), ("revision", 3),
    ("override_generation_config", [1]), ("device", 1.5), ("chat_template", 3), ("tokenizer", 3),
]  # fmt: skip


@pytest.mark.parametrize(("option", "value"), WRONG)
def test_wrong_type(option, value):
    with pytest.raises(TypeError, match=option.split("_")[0]):
        EngineConfig(**{"model": "m", option: value})


LATER = [
    ("load_format", "borrow"),
    ("kv_cache_dtype", "fp8_e5m2"), ("logprobs_mode", "raw_logits"), ("max_logprobs", -1),
    ("enable_return_routed_experts", True), ("lora_dtype", "float16"),
    ("pipeline_parallel_size", 2),
]  # fmt: skip


@pytest.mark.parametrize(("option", "value"), LATER)
def test_what_comes_later_names_itself(option, value):
    with pytest.raises(UnsupportedError, match=f"^{option}="):
        EngineConfig(**{"model": "m", option: value})


def test_tokenizer_object_comes_later():
    class Words:
        def encode(self): ...
        def decode(self): ...

    with pytest.raises(UnsupportedError, match="tokenizer as an object"):
        EngineConfig(model="m", tokenizer=Words())


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("8GB", 8 * 10**9),
        ("1.5 MiB", 3 << 19),
        ("512", 512),
        (7, 7),
        ("2kb", 2000),
        ("1 TiB", 1 << 40),
    ],
)
def test_sizes(text, size):
    assert parse_size("x", text) == size


def test_round_trip_and_plain_forms():
    config = EngineConfig(model=Path("/m"), dtype="half", max_model_len=-1, banned_token_ids=[3], hf_token="secret")
    assert (config.model, config.dtype, config.max_model_len, config.banned_token_ids) == (
        "/m",
        "float16",
        "auto",
        (3,),
    )
    assert "secret" not in repr(config) and "hf_token" not in config.to_dict()
    assert EngineConfig.from_dict(config.to_dict()) == config.replace(hf_token=None)
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(AttributeError):
        config.dtype = "float32"
    with pytest.raises(TypeError, match="Did you mean 'dtype'"):
        EngineConfig.from_dict({"model": "m", "dtyp": 1})
    seeds = {EngineConfig(model="m", seed=seed).seed for seed in (None, None, -1, -1)}
    assert len(seeds) == 4 and min(seeds) >= 0


def test_budget_must_hold_the_sequences():
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens must be at least max_num_seqs=8, got 4\."):
        EngineConfig(model="m", max_num_seqs=8, max_num_batched_tokens=4)


def test_documentation_names_every_option():
    assert descriptions().keys() == EngineConfig.__dataclass_fields__.keys()


@pytest.mark.parametrize("name", ALWAYS_SO)
def test_keywords_that_are_always_so(fake_llm, name):
    values = ALWAYS_SO[name]
    fake_llm(**{name: True if values is None else values[0]})
    if values is not None:
        with pytest.raises(UnsupportedError, match=f"^{name}="):
            fake_llm(**{name: "something else"})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("swap_space", "leave it out"), ("task", "embed()"), ("device_map", "device"), ("torch_dtype", "dtype"),
        ("max_model_length", "max_model_len"), ("gpu_memory_utilisation", "gpu_memory_utilization"),
    ],
)  # fmt: skip
def test_unknown_keywords(name, hint):
    with pytest.raises(TypeError) as caught:
        LLM("m", **{name: 1})
    assert str(caught.value).startswith(f"LLM() got an unexpected keyword argument '{name}'.")
    assert hint in str(caught.value)


def test_options_are_checked_before_the_model_is_looked_for():
    with pytest.raises(ConfigError, match="block_size"):
        LLM("/nowhere", block_size=3)


def test_devices(monkeypatch):
    monkeypatch.delenv("LLMPY_DEVICE", raising=False)
    assert hardware.choose(None) == ("cuda:0" if hardware.devices()[1]["available"] else "cpu")
    for wanted in ("cuda:63", 63, "63", "GPU-1234"):
        with pytest.raises(DeviceError):
            hardware.choose(wanted)
    with pytest.raises(ConfigError, match=r"device must be .*, got 'tpu'"):
        hardware.choose("tpu")
    monkeypatch.setenv("LLMPY_DEVICE", "cuda:63")
    with pytest.raises(DeviceError):
        hardware.choose(None)
    assert hardware.choose("cpu") == "cpu"
    assert hardware.choose("cpu:avx2") == "cpu:avx2"
    with pytest.raises(DeviceError, match=r"device 'cpu:mmx': this processor has .*avx2"):
        hardware.choose("cpu:mmx")
    cpu, cuda = hardware.devices()[:2]
    assert cpu["available"] and cpu["memory_bytes"] == hardware.total_memory_bytes() > hardware.free_memory_bytes() > 0
    assert cuda["memory_bytes"] > 0 if cuda["available"] else "CUDA" in cuda["reason"]


def test_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("LLMPY_NUM_THREADS", "3")
    assert environment.num_threads() == 3
    monkeypatch.setenv("LLMPY_NUM_THREADS", "many")
    with pytest.raises(ConfigError, match="LLMPY_NUM_THREADS"):
        environment.num_threads()
    assert environment.sync_level() == 0
    monkeypatch.setenv("LLMPY_SYNC", "1")
    assert environment.sync_level() == 1
    monkeypatch.setenv("LLMPY_SYNC", "yes")
    with pytest.raises(ConfigError, match="LLMPY_SYNC must be 0, 1 or 2, got 'yes'"):
        environment.sync_level()
    monkeypatch.setenv("LLMPY_CACHE_DIR", str(tmp_path))
    assert environment.cache_dir() == tmp_path
    monkeypatch.delenv("LLMPY_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert environment.cache_dir() == tmp_path / "llmpy"


def test_unknown_variable_is_warned_of_with_the_nearest(monkeypatch):
    for name in [name for name in os.environ if name.startswith("LLMPY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LLMPY_DEBUG", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        environment.start()
    monkeypatch.setenv("LLMPY_NUM_THREAD", "1")
    with pytest.warns(UserWarning, match="LLMPY_NUM_THREAD is unknown.*nearest is LLMPY_NUM_THREADS"):
        environment.start()


def test_log_level(monkeypatch):
    logger = logging.getLogger("llmpy")
    before = logger.level
    monkeypatch.setenv("LLMPY_LOG", "debug")
    environment.start()
    assert logger.level == logging.DEBUG and logger.handlers
    monkeypatch.setenv("LLMPY_LOG", "loud")
    with pytest.warns(UserWarning, match="LLMPY_LOG is 'loud'"):
        environment.start()
    logger.setLevel(before)


bars = []


class Bar:
    """A bar that counts."""

    def __init__(self, total, **options):
        self.total, self.done, self.is_open = total, 0, True
        bars.append(self)

    def update(self, n):
        self.done += n

    def close(self):
        self.is_open = False


def test_the_bar_of_a_load_arrives(demo_model):
    """The bar reaches its end although some bytes of the demo model's file are not read."""
    LLM(demo_model, device="cpu", max_model_len=64, kv_cache_memory_bytes="8MiB", use_tqdm_on_load=Bar).close()
    bar = bars[-1]
    assert bar.done == bar.total > 90e6 and not bar.is_open


def test_the_bar_of_a_load_that_fails_does_not_arrive():
    with pytest.raises(RuntimeError), LoadBar(Bar) as update:
        update(3, 10)
        raise RuntimeError
    assert (bars[-1].done, bars[-1].is_open) == (3, False)


@pytest.mark.parametrize(
    ("given", "dtype"), [("fp16", "float16"), ("half", "float16"), ("bf16", "bfloat16"), ("fp32", "float32")]
)
def test_short_names_of_types(given: str, dtype: str) -> None:
    assert EngineConfig(model="m", dtype=given).dtype == dtype


@pytest.mark.parametrize(
    ("given", "length"), [("4k", 4000), ("4K", 4096), ("1.5k", 1500), ("1m", 10**6), ("4096", 4096), ("auto", "auto")]
)
def test_lengths_as_text(given: str, length: int | str) -> None:
    assert EngineConfig(model="m", max_model_len=given).max_model_len == length


@pytest.mark.parametrize("given", ["k", "4kk", "0k", "-4k", "4 k", "", "4g"])
def test_lengths_that_are_none(given: str) -> None:
    with pytest.raises(ConfigError, match="max_model_len must be"):
        EngineConfig(model="m", max_model_len=given)
