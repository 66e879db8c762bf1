"""Embeddings, classes and rewards of tiny random models against transformers; bits that depend on nothing but the prompt."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from llmpy import LLM, UnsupportedError  # noqa: E402

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


class Saved:
    """A saved tiny model with every parameter random, and its reference."""

    def __init__(self, directory, kind, dtype="float32", **fields):
        family = next(name for name in FAMILIES if kind.startswith(name))
        config = getattr(transformers, family + "Config")(**{**SIZES, **fields})
        model = getattr(transformers, kind)(config)
        generator = torch.Generator().manual_seed(len(kind))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(1 + 0.2 * noise if "norm" in name else noise if "embed" in name else 0.15 * noise)
        model.to(getattr(torch, dtype)).save_pretrained(directory)
        self.directory = directory
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.model = getattr(transformers, kind).from_pretrained(directory, **options).eval()

    def run(self, ids):
        with torch.no_grad():
            return self.model(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long))

    def states(self, ids):
        body = getattr(self.model, "model", self.model)
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


def near(values, exact, bound=1e-5):
    assert values.dtype == np.float32 and values.shape == exact.shape
    return np.abs(values - exact).max() <= bound * max(1, np.abs(exact).max())


def unit(rows):
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("kind", [family + end for family in FAMILIES for end in ("ForCausalLM", "Model")])
def test_decoders_embed(kind, device, saved):
    model = saved(kind)
    with LLM(model.directory, skip_tokenizer_init=True, device=device) as llm:
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
    with LLM(model.directory, skip_tokenizer_init=True, device=device) as llm:
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
    with LLM(model.directory, skip_tokenizer_init=True, device=device) as llm:
        outputs = llm.encode(PROMPTS, pooling_task="token_classify")
        for output, ids in zip(outputs, PROMPTS, strict=True):
            assert near(output.outputs.data, softmax(model.run(ids).logits[0].double().numpy()))


@pytest.mark.parametrize("kind", ["multi_label_classification", "regression"])
def test_the_problem_type_decides_the_activation(kind, saved):
    model = saved("Qwen2ForSequenceClassification", num_labels=3, problem_type=kind)
    with LLM(model.directory, skip_tokenizer_init=True, device="cpu") as llm:
        exact = model.run(PROMPTS[0]).logits[0].double().numpy()
        wanted = 1 / (1 + np.exp(-exact)) if kind.startswith("multi") else exact
        assert near(llm.classify(PROMPTS[0])[0].outputs.probs, wanted)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype, device, saved):
    """Within the type's own error of the same weights in float32."""
    model = saved("Qwen3ForCausalLM", dtype=dtype)
    with LLM(model.directory, skip_tokenizer_init=True, device=device) as llm:
        bound = {"float16": 0.01, "bfloat16": 0.08}[dtype]
        for ids, row in zip(PROMPTS, llm.embed(PROMPTS, pooling="mean").numpy(), strict=True):
            assert near(row, unit(model.states(ids).mean(0)), bound)


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

    options = {"skip_tokenizer_init": True, "device": device, "kv_cache_memory_bytes": "4MiB"}
    with LLM(model.directory, **options, enable_prefix_caching=False) as llm:
        alone = everything(llm, [[prompt] for prompt in prompts])
        assert everything(llm, [prompts]) == alone
    with LLM(model.directory, **options, max_num_batched_tokens=13, max_num_seqs=3) as llm:
        assert everything(llm, [prompts]) == alone
        assert everything(llm, [prompts]) == alone
        cached = llm.encode(prompts, pooling_task=tasks[1])
        assert [output.num_cached_tokens for output in cached] == [0, 0, 32, 64, 31, 48, 32]
        assert llm.stats().allocations_since_warmup == 0
    small = {**options, "kv_cache_memory_bytes": 10 * 8192, "max_model_len": 128}  # the longest alone
    with LLM(model.directory, **small) as llm:
        assert everything(llm, [prompts]) == alone
