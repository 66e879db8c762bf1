"""Embeddings, classes, scores and ranks over HTTP, for models with and without these tasks."""

import asyncio
import contextlib
import json
import threading

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from llmpy import LLM, AsyncEngine, InvalidRequestError, UnsupportedError
from llmpy.server import build_app, service

TEXTS = ["hello", "you there", "hello there you"]


@pytest.fixture(scope="module", params=[1, 3])
def judge(request, tmp_path_factory, write_model):
    """A classifier with a number of labels."""
    labels = request.param
    path = write_model(tmp_path_factory.mktemp("judge"))
    config = json.loads((path / "config.json").read_text())
    names = {str(i): f"class {i}" for i in range(labels)}
    config |= {"architectures": ["LlamaForSequenceClassification"], "id2label": names, "num_labels": labels, "pad_token_id": 0}
    (path / "config.json").write_text(json.dumps(config))
    weights = load_file(path / "model.safetensors")
    head = np.random.default_rng(1).standard_normal((labels, config["hidden_size"])).astype(np.float32)
    save_file({**weights, "score.weight": head * 0.2}, path / "model.safetensors")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    end = ("<|end|>", tokenizer.token_to_id("<|end|>"))
    tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A <|end|> $B:1", special_tokens=[end])
    tokenizer.save(str(path / "tokenizer.json"))
    engine = AsyncEngine(path, device="cpu", kv_cache_memory_bytes="16MiB")
    yield engine
    engine.close()


def post(engine, path, **body):
    """Status and content, without a socket."""

    async def call():
        transport = httpx.ASGITransport(app=build_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            response = await client.post(path, json=body)
            return response.status_code, response.json()

    return asyncio.run(call())


def pooled(engine, prompt, task, **fields):
    async def call():
        return (await engine.encode(prompt, pooling_task=task, **fields)).outputs.data

    return asyncio.run(call())


def test_classes(judge):
    labels = len(judge._frontend.pooler.labels)
    status, made = post(judge, "/classify", input=TEXTS)
    assert status == 200 and [item["index"] for item in made["data"]] == [0, 1, 2]
    for text, item in zip(TEXTS, made["data"], strict=True):
        probs = pooled(judge, text, "classify")
        assert item["probs"] == probs.tolist() and item["num_classes"] == labels
        assert item["label"] == f"class {probs.argmax()}"
    raw = post(judge, "/classify", input=TEXTS[0], use_activation=False)[1]["data"][0]["probs"]
    assert raw == pooled(judge, TEXTS[0], "classify", use_activation=False).tolist() != made["data"][0]["probs"]


def test_a_cross_encoder_reads_pairs(judge):
    status, made = post(judge, "/score", text_1=TEXTS[0], text_2=TEXTS[1:])
    if len(judge._frontend.pooler.labels) != 1:
        assert status == 400 and "one label" in made["error"]["message"]
        return
    ids = judge.tokenizer.encode
    between = [judge.tokenizer.eos_token_id]
    expected = [pooled(judge, ids(TEXTS[0]) + between + ids(text), "classify")[0] for text in TEXTS[1:]]
    assert [item["score"] for item in made["data"]] == [float(value) for value in expected]
    ranked = post(judge, "/v2/rerank", query=TEXTS[0], documents=[TEXTS[1], {"text": TEXTS[2]}], top_n=1)[1]["results"]
    best = int(np.argmax(expected))
    assert ranked == [{"index": best, "relevance_score": float(expected[best]), "document": {"text": TEXTS[1:][best]}}]


def test_similarity_in_python_is_that_of_the_server(judge, engine):
    """Of a cross-encoder and of embeddings."""
    for served in (judge, engine):
        with LLM(served.config.model, device="cpu", kv_cache_memory_bytes="8MiB", max_model_len=256) as llm:
            if len(llm._frontend.pooler.labels) == 3:
                with pytest.raises(UnsupportedError, match=r"^LLM.similarity\(\) wants a classifier with one label"):
                    llm.similarity(*TEXTS[:2])
                continue
            wanted = [item["score"] for item in post(served, "/score", text_1=TEXTS[0], text_2=TEXTS)[1]["data"]]
            found = llm.similarity(TEXTS[0], TEXTS)
            assert [one.outputs.score for one in found] == wanted == llm.similarity([TEXTS[0]] * 3, TEXTS).numpy().tolist()
            assert served is judge or (abs(wanted[0] - 1) < 1e-6 and max(wanted[1:]) < 1)
            assert [one.index for one in found] == [0, 1, 2] and all(one.finished and one.error is None for one in found)
            long = llm.similarity(TEXTS[0], [TEXTS[1], "x " * 300], on_error="return")
            assert np.isfinite(long[0].outputs.score) and np.isnan(long[1].outputs.score) and long[1].error is not None
            with pytest.raises(InvalidRequestError, match=r"^data_1 must be one text or as many as data_2 \(3\), got 2"):
                llm.similarity(TEXTS[:2], TEXTS)
            with pytest.raises(TypeError, match=r"^data_2 must be text or a list of texts, but has int"):
                llm.similarity("a", [1])


@pytest.fixture(scope="module")
def bert(tmp_path_factory, write_model):
    """A cross-encoder with token types for the two texts, and transformers' model of the same files."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    path = write_model(tmp_path_factory.mktemp("bert"))
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    end = ("<|end|>", tokenizer.token_to_id("<|end|>"))
    tokenizer.post_processor = TemplateProcessing(single="$A <|end|>", pair="$A <|end|> $B:1 <|end|>:1", special_tokens=[end])
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.BertConfig(vocab_size=tokenizer.get_vocab_size(), num_labels=1, **sizes)
    torch.manual_seed(3)
    model = transformers.BertForSequenceClassification(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    for file in path.iterdir():
        file.unlink()
    model.save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))

    def reference(first, second):
        encoded = tokenizer.encode(first, second)
        assert 0 < sum(encoded.type_ids) < len(encoded.ids)
        with torch.no_grad():
            return model(torch.tensor([encoded.ids]), token_type_ids=torch.tensor([encoded.type_ids])).logits.sigmoid().item()

    with contextlib.closing(AsyncEngine(path, device="cpu", dtype="float32")) as engine:
        yield engine, reference


def test_a_cross_encoder_with_token_types(bert):
    engine, reference = bert
    status, made = post(engine, "/score", text_1=TEXTS[0], text_2=TEXTS)
    assert status == 200, made
    expected = [reference(TEXTS[0], text) for text in TEXTS]
    assert np.allclose([item["score"] for item in made["data"]], expected, rtol=0, atol=1e-6) and np.ptp(expected) > 1e-3
    results = post(engine, "/v1/rerank", query=TEXTS[1], documents=TEXTS)[1]["results"]
    ranked = {result["index"]: result["relevance_score"] for result in results}
    assert np.allclose([ranked[i] for i in range(3)], [reference(TEXTS[1], text) for text in TEXTS], rtol=0, atol=1e-6)


def test_long_pairs_are_tokenised_beside_the_event_loop(judge, tokenizing, monkeypatch):
    if len(judge._frontend.pooler.labels) == 1:
        monkeypatch.setattr(service, "THREAD_SIZE", 60)
        assert post(judge, "/score", text_1="hello", text_2="hello " * 20)[0] == 200
        assert tokenizing and all(thread is not threading.main_thread() for _, thread in tokenizing)


def test_embeddings_score_by_their_cosine(engine):
    rows = [pooled(engine, text, "embed") for text in TEXTS]
    status, made = post(engine, "/v1/score", queries=TEXTS, documents=TEXTS[::-1])
    assert status == 200 and made["usage"]["prompt_tokens"] == sum(len(engine.tokenizer.encode(text)) for text in TEXTS)
    expected = [float(a @ b) for a, b in zip(rows, rows[::-1], strict=True)]
    assert np.allclose([item["score"] for item in made["data"]], expected, rtol=1e-6)
    results = post(engine, "/rerank", query=TEXTS[0], documents=TEXTS, return_documents=False)[1]["results"]
    assert results[0]["index"] == 0 and results[0].keys() == {"index", "relevance_score"} and len(results) == 3
    wanted = sorted((float(rows[0] @ row) for row in rows), reverse=True)
    assert np.allclose([result["relevance_score"] for result in results], wanted, rtol=1e-6)


def test_states_of_every_token(engine):
    status, made = post(engine, "/pooling", input=TEXTS[1])
    assert status == 200 and made["data"][0]["object"] == "pooling"
    assert np.array_equal(np.array(made["data"][0]["data"], np.float32), pooled(engine, TEXTS[1], "token_embed"))
    whole = post(engine, "/pooling", input=TEXTS[1], task="embed", normalize=False)[1]["data"][0]["data"]
    assert whole == pooled(engine, TEXTS[1], "embed", normalize=False).tolist()


def test_refusals_name_what_the_model_has(engine):
    for path, body, why in (
        ("/classify", {"input": "a"}, "this one has: embed, token_embed, generate"),
        ("/pooling", {"input": "a", "task": "classify"}, "wants a model with the task classify"),
        ("/pooling", {"input": "a", "task": "plugin"}, "task"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
    ):
        status, made = post(engine, path, **body)
        assert status == 400 and why in made["error"]["message"], made
