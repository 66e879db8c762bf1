"""Tiny random checkpoints of transformers' classes, and their converted programs."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from llmpy import LLM, SamplingParams, export, models  # noqa: E402
from llmpy.export.conversion import convert  # noqa: E402
from llmpy.export.trace import build, randomise  # noqa: E402

SIZES = {
    "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "max_position_embeddings": 128,
    "n_shared_experts": 1, "num_shared_experts": 1, "shared_expert_intermediate_size": 32, "first_k_dense_replace": 0,
    "moe_shared_expert_intermediate_size": 32, "shared_intermediate_size": 40, "sliding_window": 8, "moe_topk": 2,
    "moe_num_experts": 4, "n_positions": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OPTIONS = {"skip_tokenizer_init": True, "device": "cpu", "kv_cache_memory_bytes": "16MiB", "dtype": "float32"}
IDS = [3, 5, 9, 17, 44, 2, 8, 61, 33, 20, 7, 7, 90, 12, 55, 1]


def config_of(kind: str, **changes: object) -> object:
    """A tiny configuration of a model type: the sizes that it has, under its own names."""
    found = transformers.CONFIG_MAPPING[kind]
    fields = set(found.__dataclass_fields__) | set(found.attribute_map)
    return found(**{**{name: size for name, size in SIZES.items() if name in fields}, **changes})


@cache
def checkpoint(folder: Path, kind: str, changes: str = "{}") -> SimpleNamespace:
    """A checkpoint of a model type with every parameter random: its folder, the model, and the fields of config.json."""
    config = config_of(kind, **json.loads(changes))
    cls = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = build(cls, config)
    randomise(model, 1.0)
    path = folder / f"{kind}-{abs(hash(changes))}"
    model.save_pretrained(path)
    return SimpleNamespace(path=path, model=model, raw=json.loads((path / "config.json").read_text()))


@pytest.fixture(scope="session")
def cache_of_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of converted programs of this run."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cache_dir(cache_of_run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That of this test; tests of other files look for their models elsewhere."""
    monkeypatch.setenv("LLMPY_CACHE_DIR", str(cache_of_run))
    return cache_of_run


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., SimpleNamespace]:
    """`checkpoint` in a folder of this run."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return lambda kind, **changes: checkpoint(folder, kind, json.dumps(changes, sort_keys=True))


@pytest.fixture
def converted(cache_dir: Path, made) -> Callable[..., SimpleNamespace]:
    """A checkpoint whose converted program is in the cache; it is converted in this process, which has imported torch."""

    def give(kind: str, **changes: object) -> SimpleNamespace:
        found = made(kind, **changes)
        path = export.place(found.raw, found.raw["architectures"][0])
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(convert(found.raw)))
        return SimpleNamespace(**vars(found), program=path)

    return give


def expected(model, ids: list[int]) -> np.ndarray:
    """Log-probabilities of transformers, [tokens, vocabulary]."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].double()
    return torch.log_softmax(logits, -1).numpy()


def generated(llm: LLM, prompts: list[list[int]], n: int = 8) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens and their log-probabilities."""
    params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=0)
    found = []
    for one in llm.generate(prompts, params):
        out = one.outputs[0]
        tokens = list(out.token_ids)
        found.append((tokens, [out.logprobs[i][token].logprob for i, token in enumerate(tokens)]))
    return found


def program_of(path: Path, raw: dict[str, object]) -> models.Spec:
    """The program of a file, without a checkpoint."""
    found = export.stored.read(path)
    config = models.ModelConfig(found.fields(raw), "config.json")
    m = models.Model(config, None, models.Source(), "checkpoint")
    found.build(config, m)
    return m.spec
