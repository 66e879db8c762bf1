"""Intermediate values of a prompt: those of the oracle, and to the last bit those of a step."""

from pathlib import Path

import numpy as np
import pytest
from modules import load

from binding import Backend
from llmpy import LLM, InvalidRequestError, _core
from llmpy.models import names

vision = load(Path(__file__).with_name("vision_models.py"))
CASES = ["llama-bias", "qwen3-window", "gemma2", "cohere2", "stablelm-parallel", "bamba", "mixtral"]
MORE = ["deepseek2-groups", "deepseek3", "gpt2", "gptj", "mamba", "nemotron_h", "olmo", "apertus", "phi-norms"]
CASES += [pytest.param(case, marks=pytest.mark.slow) for case in MORE]


def tapped(model: _core.Model, spec, ids, values) -> list[np.ndarray]:
    (rows,) = model.tap(np.asarray(ids, np.int32).tobytes(), values, None, {"seed": 0})
    return [
        np.frombuffer(one, np.float32).reshape(len(ids), names.width(spec, value))
        for one, value in zip(rows, values, strict=True)
    ]


@pytest.mark.parametrize("case", CASES)
def test_every_value_is_the_oracles(case, tiny, oracle, engine, prompts, error_of) -> None:
    path = tiny(case).directory
    reference = oracle(path)
    spec = reference.compiled.spec
    named = names.of_program(spec)
    assert len({one.name for one in named}) == len(named)
    values = [one.value for one in named]
    with engine(path, max_num_batched_tokens=24) as small, engine(path) as large:
        for ids in prompts:
            mine = tapped(large.model, spec, ids, values)
            logits = reference.logits(ids)
            for one, rows in zip(named, mine, strict=True):
                want = logits if one.value == names.LOGITS else reference.interpreter.values[one.value]
                assert error_of(rows, want) <= 1e-4, one.name
            for rows, chunked in zip(mine, tapped(small.model, spec, ids, values), strict=True):
                assert rows.tobytes() == chunked.tobytes()


@pytest.mark.parametrize("case", [*CASES, "bamba bfloat16", "gemma2 bfloat16"])
def test_the_logits_are_those_of_a_step(case, tiny, device, core_options, oracle, engine, prompts) -> None:
    """The sampler gives their logprobs, of every id, the bits that it gives those of steps, which fuse operations."""
    case, dtype = (*case.split(), "float32")[:2]
    path = tiny(case, dtype).directory
    spec = oracle(path).compiled.spec
    sampler = Backend(**core_options(device), vocab_size=99)
    with engine(path, dtype=dtype, kv_dtype=dtype) as model:
        for ids in prompts[1:]:
            answer = model.run([ids], top=99)[0]
            logits = tapped(model.model, spec, ids, [names.LOGITS])[0].copy()
            tasks = [
                {"logits_row": i, "is_score": 1, "target": token, "wants_logprobs": 1, "n_top": 99}
                for i, token in enumerate(ids[1:])
            ]
            results = sampler.sample(logits, tasks)
            scores = np.array([result[2] for result in results], np.float32)
            assert scores.tobytes() == answer.prompt.tobytes()
            assert model.run([ids], top=99)[0].prompt_top.tobytes() == answer.prompt_top.tobytes()  # nothing is disturbed


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_values_are_rounded_as_the_engines_are(dtype, tiny, oracle, engine, prompts, error_of) -> None:
    path = tiny("qwen3", dtype).directory
    spec = oracle(path).compiled.spec
    with engine(path, dtype=dtype, kv_dtype=dtype) as model:
        rows = tapped(model.model, spec, prompts[2], [named.value for named in names.of_program(spec)])
        for one in rows[:-1]:
            bits = one.view(np.uint32) & (0x1FFF if dtype == "float16" else 0xFFFF)
            assert model.model.describe()["device"].startswith("cpu") or not bits.any()


@pytest.fixture
def opened(tiny, device):
    made = []

    def make(case: str, **options: object) -> LLM:
        fixed = {"device": device, "skip_tokenizer_init": True, "kv_cache_memory_bytes": "16MiB"}
        made.append(LLM(tiny(case).directory, **fixed, **options))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def test_names(opened, prompts) -> None:
    llm = opened("llama")
    layer = llm.tap_names("model.layers.1.*")
    assert layer[:5] == [
        "model.layers.1.input_layernorm",
        "model.layers.1.self_attn.q_proj|model.layers.1.self_attn.k_proj|model.layers.1.self_attn.v_proj",
        *(f"model.layers.1.self_attn.{part}_proj" for part in "qkv"),
    ]
    assert {"model.layers.1.rope.q", "model.layers.1.attention", "model.layers.1.gated", "model.layers.1.add.2"} <= set(layer)
    assert llm.tap_names()[-3:] == ["model.layers.1", "model.norm", "logits"]
    one, two = llm.tap(prompts[:2], ["model.layers.0", "logits", 0])
    assert one["logits"].shape == (1, 99) and two["model.layers.0"].shape == (7, 64)
    assert two[0].tobytes() == llm.tap([prompts[1]], "model.embed_tokens")[0]["model.embed_tokens"].tobytes()
    wanted = "names must be a name, the number of an operation, or a list of these, got"
    for wrong, text in {
        "model.layers.0.attn": "nearest: model.layers.0.attention",
        "model.layers.0.*": r"is a pattern, wanted names: LLM\.tap_names\('model\.layers\.0\.\*'\)",
        99: "operation 99 makes no value; they are numbered from 0 to ",
        1.5: f"{wanted} 1.5",
        None: f"{wanted} None",
        True: f"{wanted} True",
        ("logits", None): f"{wanted} None",
    }.items():
        with pytest.raises(InvalidRequestError, match=text):
            llm.tap(prompts[:1], wrong)
    with pytest.raises(InvalidRequestError, match="cannot be empty"):
        llm.tap([[]], "logits")


def test_requests_in_flight_do_not_notice(opened, prompts) -> None:
    llm = opened("qwen3", max_num_batched_tokens=32, max_num_seqs=4)
    ids = prompts[3]
    want = llm.generate([ids], temperature=0.0, max_tokens=8, ignore_eos=True)[0].token_ids
    llm.reset_prefix_cache()
    number, seen = llm.add_request(ids, temperature=0.0, max_tokens=8, ignore_eos=True), None
    while llm.has_unfinished_requests():
        llm.tap([list(reversed(ids))], ["model.layers.0", "logits"])
        for output in llm.step():
            seen = output if output.request_id == number else seen
    assert seen is not None and seen.token_ids == want
    llm.check()


def test_an_encoder(tmp_path: Path, device) -> None:
    """A program without a cache and with bidirectional attention, in one piece."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    model.save_pretrained(tmp_path)
    ids = np.random.default_rng(0).integers(3, 99, 40)
    with torch.no_grad():
        want = model(torch.tensor(ids[None]), output_hidden_states=True).hidden_states
    with LLM(tmp_path, device=device, skip_tokenizer_init=True, kv_cache_memory_bytes="16MiB", dtype="float32") as llm:
        last = next(name for name in reversed(llm.tap_names()) if name.endswith("output.LayerNorm"))
        have = llm.tap([ids], last)[0][last]
        assert np.abs(have - want[-1][0].numpy()).max() <= 1e-4
        types = np.arange(40) // 20
        with torch.no_grad():
            typed = model(torch.tensor(ids[None]), token_type_ids=torch.tensor(types[None])).last_hidden_state
        prompt = {"prompt_token_ids": ids, "token_type_ids": types}
        assert np.abs(llm.tap([prompt], last)[0][last] - typed[0].numpy()).max() <= 1e-4 < float((typed - want[-1]).abs().max())
        with pytest.raises(InvalidRequestError, match="below 2, the model's number of types, got 2"):
            llm.tap([{**prompt, "token_type_ids": types + 1}], last)


@pytest.mark.parametrize("name", ["llava", "qwen3-vl", "gemma3", "paligemma2"])
def test_prompts_with_images(name, tmp_path, random_parameters, device, error_of) -> None:
    """Their own features, in memory apart from the engine's: with one rank and with two, whole and in chunks."""
    model = vision.VisionModel(vision.FAMILIES[name], tmp_path, random_parameters)
    a, b = model.images(2)
    given = [[3, 8, a, 20, 21, b, 4], [4, 5, 9, 7], [a, 7], [5, b, 6, b]]
    prompts = [model.request(parts) for parts in given]
    options = {"device": device, "skip_tokenizer_init": True, "kv_cache_memory_bytes": "16MiB", "dtype": "float32"}
    ways = [{}] if device.startswith("cuda") else [{}, {"tensor_parallel_size": 2}]
    ways += [{"max_num_batched_tokens": 8}] if name in ("llava", "qwen3-vl") else []  # tokens of others see each other
    found = []
    for way in ways:
        with LLM(tmp_path, **options, **way) as llm:
            before = llm.generate(prompts[:1], temperature=0.0, max_tokens=4)[0].token_ids
            n_encoded = llm.stats().images_encoded
            found.append([each["logits"] for each in llm.tap(prompts, "logits")])
            assert llm.stats().images_encoded == n_encoded
            assert llm.generate(prompts[:1], temperature=0.0, max_tokens=4)[0].token_ids == before
            short = model.request(given[2])
            short.ids = short.ids[1:]
            with pytest.raises(InvalidRequestError, match="image 0: wanted"):
                llm.tap([short], "logits")
    for i, (parts, prompt) in enumerate(zip(given, prompts, strict=True)):
        assert len({each[i].tobytes() for each in found}) == 1
        wanted = model.logits(prompt.ids.tolist(), [part for part in parts if isinstance(part, np.ndarray)])
        assert error_of(found[0][i], wanted) <= 1e-4


def module_rows(model, ids, images) -> dict[str, np.ndarray]:
    """Rows of every output of transformers' modules."""
    found: dict[str, np.ndarray] = {}

    def keep(name: str, out) -> None:
        out = out[0] if isinstance(out, tuple) else out
        if hasattr(out, "detach"):
            found[name] = out.detach().double().numpy().reshape(-1, out.shape[-1])

    hooks = [
        module.register_forward_hook(lambda _, given, out, name=name: keep(name, out))
        for name, module in model.model.named_modules()
    ]
    model.logits(ids, images)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl", "qwen3-vl", "gemma3", "paligemma2", "smolvlm"])
def test_values_of_towers(name, tmp_path, random_parameters, device) -> None:
    """Outputs of transformers' modules, for two images; towers have the rows of an image in orders of their own."""
    model = vision.VisionModel(vision.FAMILIES[name], tmp_path, random_parameters)
    a, b = model.images(2)
    prompt = model.request([3, a, 20, b, 4])
    wanted = module_rows(model, prompt.ids.tolist(), [a, b])
    options = {"device": device, "skip_tokenizer_init": True, "kv_cache_memory_bytes": "16MiB", "dtype": "float32"}
    with LLM(tmp_path, **options) as llm:
        own = [one.name for one in llm._tap.named_of_images()]
        assert llm.tap_names()[: len(own)] == own and len(set(llm.tap_names())) == len(llm.tap_names())
        (found,) = llm.tap([prompt], own)
        assert not any(len(rows) for rows in llm.tap([[3, 4]], own)[0].values())
    n_equal = 0
    for module, rows in found.items():
        for want in (want for other, want in wanted.items() if other.endswith(module) and want.shape == rows.shape):
            distances = np.abs(rows[:, None] - want[None]).max(-1) / np.abs(want).max()
            assert max(distances.min(0).max(), distances.min(1).max()) <= 1e-4, module
            n_equal += 1
    assert n_equal >= 15
