"""Options that never change a result, in random combinations, beside options that do: a batch has the bits of lone requests."""

from contextlib import ExitStack
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from modules import load

from llmpy import LLM, CheckpointError, ConfigError, InvalidRequestError, SamplingParams, UnsupportedError
from llmpy.inputs import Prompt

vision = load(Path(__file__).with_name("vision_models.py"))
adapter_files = load(Path(__file__).parents[1] / "helpers/adapter_files.py")
CASES = (
    "llama", "gemma2", "qwen3_moe", "qwen3_next", "deepseek3", "gpt_oss", "falcon_h1", "jamba", "phi3", "llama4", "nemotron_h",
)  # fmt: skip
IMAGES = ("llava", "qwen2.5-vl", "qwen3-vl", "gemma3", "paligemma2", "deepseek-ocr", "qwen3-vl-moe", "mistral3")
N_CASES, N_SLOW = 57, 760
N_PROMPTS, N_WORDS = 10, 60
ALWAYS = {"skip_tokenizer_init": True, "generation_config": "none", "max_model_len": 64}
ALONE = {"kv_cache_memory_bytes": "16MiB"}
MEANING: dict[str, tuple[object, ...]] = {
    "quantization": ("fp8", "int8", "int4", "int4_g32", "nf4", "q8_0", "q4_0"),
    "kv_cache_dtype": ("fp8", "int8", "bfloat16"),
    "activation_dtype": ("int8", "float"),
    "dtype": ("bfloat16", "float16"),
    "lora_dtype": ("bfloat16",),
    "lora_embeddings": (True,),
    "lora_experts": (True,),
}
"""Options that change results, with their values."""
FREE: dict[str, tuple[object, ...]] = {
    "max_num_seqs": (2, 4),
    "max_encoder_rows": (150, 400),
    "encoder_cache_tokens": (64,),
    "max_num_batched_tokens": (28, 60),
    "block_size": (32,),
    "kv_cache_memory_bytes": ("1MiB", "2MiB"),
    "host_cache_bytes": ("1MiB", "4MiB"),
    "disk_cache": ("16MiB",),
    "tensor_parallel_size": (2, 3, 4),
    "data_parallel_size": (2,),
    "enable_dp_attention": (True,),
    "speculative_config": tuple({"method": name, "num_speculative_tokens": k} for name in ("ngram", "suffix") for k in (1, 3)),
    "max_loras": (1, 2),
    "enable_prefix_caching": (False,),
    "preemption": ("swap", "recompute"),
}
"""Options that change none. The bytes of `disk_cache` stand for its value."""


def chosen(random: Random, table: dict[str, tuple[object, ...]], chance: float) -> dict[str, Any]:
    """Some of the options of a table."""
    return {name: random.choice(values) for name, values in table.items() if random.random() < chance}


def params_of(random: Random, seed: int) -> SamplingParams:
    temperature, most = random.choice([0, 0.7, 1.0]), random.choice([1, 5, 12])
    more = chosen(random, {
        "prompt_logprobs": (1,), "top_p": (0.9,), "repetition_penalty": (1.2,), "logit_bias": ({5: 3.0},), "min_tokens": (1,),
        "logprobs": (0, 3), "n": (2 if temperature else 1,),
    }, 0.25)  # fmt: skip
    return SamplingParams(temperature=temperature, max_tokens=most, seed=seed, ignore_eos=random.random() < 0.7, **more)


def prompts_of(random: Random) -> list[list[int]]:
    """Prompts with common starts, and with repeated ends, which n-grams draft."""
    heads = [[], *([random.randrange(N_WORDS) for _ in range(20)] for _ in range(2))]
    found = []
    for _ in range(N_PROMPTS):
        tail = [random.randrange(N_WORDS) for _ in range(random.choice([1, 5, 17, 30]))]
        found.append((random.choice(heads) + tail + tail[-8:] * random.choice([0, 2]))[:45])
    return found


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory, random_parameters: Any) -> Any:
    """vision_model(family); each is made once."""
    return cache(lambda name: vision.VisionModel(vision.FAMILIES[name], tmp_path_factory.mktemp(name), random_parameters))


def prompts_with_images(random: Random, model: Any) -> list[Prompt]:
    """The same three images at places of their own in prompts, some of which have none."""
    images, found = model.images(3), []
    for _ in range(N_PROMPTS):
        parts = [random.randrange(N_WORDS) for _ in range(random.choice([2, 9]))]
        for image in random.sample(images, random.choice([0, 1, 2])):
            parts.insert(random.randrange(1, len(parts)), image)
        found.append(model.request(parts))
    return found


def bits(output: Any) -> object:
    raw = [None if one.sampled is None else one.sampled.raw.tobytes() for one in output.outputs]
    prompt = output.prompt_token_logprobs
    samples = [(list(one.token_ids), one.finish_reason) for one in output.outputs]
    return samples, raw, None if prompt is None else prompt.tobytes()


def load_adapters(llm: LLM, seed: int) -> None:
    """Adapters a and b of random matrices, of those that can have one."""
    shapes = {}
    for info in llm.weight_info():
        name = info["name"].removesuffix(".weight")
        if name == info["name"] or len(info["shape"]) != 2:
            continue
        try:
            llm.load_adapter("a", adapter_files.factors({name: info["shape"]}, 1), {"r": 1, "lora_alpha": 1})
        except (UnsupportedError, InvalidRequestError, CheckpointError):
            continue
        shapes[name] = info["shape"]
    random = Random(seed)
    for name, rank in (("a", 4), ("b", 7)):
        some = dict(random.sample(sorted(shapes.items()), max(1, len(shapes) // 2)))
        llm.load_adapter(name, adapter_files.factors(some, rank, seed, 0.2), {"r": rank, "lora_alpha": 2 * rank})


def options_of(random: Random, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options that change results, and those that do not; combinations that are refused by design are left out."""
    meaning, free = chosen(random, MEANING, 0.3), chosen(random, FREE, 0.3)
    meaning |= {"enable_lora": True, "max_loras": 3} if random.random() < 0.6 else {}
    needs = {"disk_cache": "host_cache_bytes", "preemption": "host_cache_bytes", "enable_dp_attention": "tensor_parallel_size"}
    needs |= dict.fromkeys(("max_loras", "lora_dtype", "lora_embeddings", "lora_experts"), "enable_lora")
    for name, needed in needs.items():
        if needed not in meaning | free:
            meaning.pop(name, None)
            free.pop(name, None)
    if "disk_cache" in free:
        free["disk_cache"] = {"path": str(folder), "bytes": free["disk_cache"]}
        free.pop("enable_prefix_caching", None)
    return meaning, free


@pytest.mark.parametrize("seed", [
    seed if seed < N_CASES else pytest.param(seed, marks=pytest.mark.slow) for seed in range(N_SLOW)
])  # fmt: skip
def test_a_batch_has_the_bits_of_lone_requests(seed: int, tiny: Any, vision_model: Any, device: str, tmp_path: Path) -> None:
    random, case = Random(seed), (*CASES, *IMAGES)[seed % len((*CASES, *IMAGES))]
    meaning, free = options_of(random, tmp_path)
    model = vision_model(case) if case in IMAGES else tiny(case)
    prompts = prompts_with_images(random, model) if case in IMAGES else prompts_of(random)
    params = [params_of(random, i) for i in range(N_PROMPTS)]
    adapters = [random.choice([None, "a", "b"]) if "enable_lora" in meaning else None for _ in prompts]
    with ExitStack() as engines:
        try:
            alone = engines.enter_context(LLM(model.directory, device=device, **ALWAYS, **ALONE, **meaning))
            batched = engines.enter_context(LLM(model.directory, device=device, **{**ALWAYS, **ALONE, **meaning, **free}))
        except (UnsupportedError, ConfigError) as error:
            pytest.skip(str(error))
        if "enable_lora" in meaning:
            load_adapters(alone, seed)
            load_adapters(batched, seed)
        wanted = [
            bits(alone.generate([ids], each, lora_request=name)[0])
            for ids, each, name in zip(prompts, params, adapters, strict=True)
        ]
        for _ in range(2):
            assert [bits(out) for out in batched.generate(prompts, params, lora_request=adapters)] == wanted, (meaning, free)
            batched.sleep(1)
            batched.wake_up()
