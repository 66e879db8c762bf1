"""Output objects: arrays, the lazy view of logprobs, tables, JSON, pickling."""

import copy
import json
import pickle
import sys

import numpy as np
import pytest

from llmpy import Logprob, SamplingParams
from llmpy.logprobs import Logprobs
from llmpy.outputs import Chunk, RequestOutputs, ScoreOutputs

ONE = SamplingParams(max_tokens=1)
FULL = SamplingParams(max_tokens=5, logprobs=3, prompt_logprobs=2)


@pytest.fixture
def output(fake_llm):
    return fake_llm().generate([5, 6, 7], FULL)[0]


def test_arrays_are_read_only_and_views_agree(output):
    sample = output.outputs[0]
    assert sample.token_ids == sample.token_ids_array.tolist() and sample.token_ids is sample.token_ids
    arrays = [
        sample.token_ids_array, sample.token_logprobs, *sample.sampled, sample.logprobs.ids, sample.logprobs.values,
        sample.logprobs.ranks, output.prompt_token_ids_array, output.prompt_token_logprobs, output.prompt_logprobs.ids,
    ]  # fmt: skip
    for array in arrays:
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    assert sample.token_ids_array.dtype == np.int32 and sample.token_logprobs.dtype == np.float32
    assert len(sample.token_ids) == len(sample.logprobs) == len(sample.token_logprobs) == 5
    total = 0.0
    for value in sample.token_logprobs.tolist():
        total += value
    assert sample.cumulative_logprob == total


@pytest.mark.parametrize("mode", ["raw", "full", "processed"])
def test_the_mode_picks_what_is_shown(fake_llm, mode):
    params = FULL.replace(logprobs_mode=f"{mode}_logprobs")
    for llm, given in ((fake_llm(), params), (fake_llm(logprobs_mode=f"{mode}_logprobs"), FULL)):
        sample = llm.generate([5, 6, 7], given)[0].outputs[0]
        assert sample.token_logprobs.tolist() == getattr(sample.sampled, mode).tolist()
        assert sample.logprobs.values[:, 0].tolist() == sample.token_logprobs.tolist()
        assert llm.fake.submitted[-1][1]["logprobs_mode"] == f"{mode}_logprobs"


def test_no_logprobs(fake_llm):
    output = fake_llm().generate([5, 6], max_tokens=2)[0]
    sample = output.outputs[0]
    assert sample.logprobs is sample.token_logprobs is sample.cumulative_logprob is sample.sampled is None
    assert output.prompt_logprobs is output.prompt_token_logprobs is None


def view():
    ids = np.array([[4, 7, 4], [9, 2, 3], [5, 1, 10]], np.int32)
    values = np.array([[-1, -0.5, -1], [-2, -0.1, -0.2], [-3, -0.3, -np.inf]], np.float32)
    return Logprobs(ids, values, np.array([[2, 1, 2], [9, 1, 2], [4, 1, 0]], np.int32), 10, lambda token: f"<{token}>")


def test_logprobs_act_as_a_list_of_dicts():
    logprobs = view()
    assert list(logprobs[0]) == [4, 7] and list(logprobs[1]) == [9, 2, 3] and list(logprobs[2]) == [5, 1]
    assert logprobs[1][9] == Logprob(-2.0, 9, "<9>") and logprobs[1][9].rank == 9
    as_list = [dict(row) for row in logprobs]
    assert logprobs == as_list and as_list == logprobs and logprobs == view() and logprobs != as_list[:2]
    assert len(logprobs) == 3 and logprobs[-1] == as_list[-1] and logprobs[1:] == as_list[1:]
    assert isinstance(logprobs[1:], Logprobs) and logprobs[1:].ids.shape == (2, 3)
    with pytest.raises(IndexError):
        logprobs[3]
    with pytest.raises(TypeError):
        hash(logprobs)
    assert repr(logprobs) == "Logprobs(3 tokens, 2 alternatives)"


def test_logprobs_pickle_without_the_tokenizer():
    copy = pickle.loads(pickle.dumps(view()))
    assert copy == view() and copy[1][9].decoded_token == "<9>"


def test_logprobs_zero_is_the_token_itself(fake_llm):
    logprobs = fake_llm().generate([5], logprobs=0, max_tokens=3)[0].outputs[0].logprobs
    assert logprobs.ids.shape == (3, 1) and [len(row) for row in logprobs] == [1, 1, 1]


def test_prompt_logprobs_begin_with_none(output):
    logprobs = output.prompt_logprobs
    assert len(logprobs) == 3 and logprobs[0] is None and next(iter(logprobs[1])) == 6 and next(iter(logprobs)) is None
    assert np.isnan(output.prompt_token_logprobs[0])
    np.testing.assert_allclose(output.prompt_token_logprobs[1:], [-0.06, -0.07], rtol=1e-6)
    assert logprobs.ids.shape == (3, 3)


def test_request_output_fields(output):
    assert output.text == output.outputs[0].text and output.finish_reason == "length" and output.finished
    assert output.prompt is None and output.prompt_token_ids == [5, 6, 7] and output.num_cached_tokens == 1
    assert output.weight_version == 0 and output.outputs[0].weight_versions == [(0, 5, 0, 0)]
    assert output.lora_request is None and output.error is None and output.sampling_params == FULL
    metrics = output.metrics
    assert (metrics.first_token_latency, metrics.queue_time, metrics.prefill_time) == (1.0, 0.5, 0.5)
    assert (metrics.decode_time, metrics.time_per_output_token, metrics.e2e_time) == (1.0, 0.25, 2.0)
    assert metrics.arrival_time > 1.6e9


def test_json(output, fake_llm):
    llm = fake_llm()
    text = json.dumps(output.to_dict())
    back = json.loads(text)
    assert back["outputs"][0]["token_ids"] == output.token_ids and back["prompt_token_logprobs"][0] is None
    assert back["outputs"][0]["logprobs"][0][str(output.token_ids[0])]["rank"] == 2
    json.dumps(llm.generate([[5], [400]], on_error="return", max_tokens=1).to_dict())
    json.dumps(llm.score([5, 6], logprobs=1)[0].to_dict())
    json.dumps(llm.stats().to_dict())
    json.dumps(SamplingParams(output_kind="DELTA").to_dict())


def test_pickle(fake_llm):
    llm = fake_llm()
    outs = llm.generate(["a", [5]], FULL)
    copy = pickle.loads(pickle.dumps(outs))
    assert isinstance(copy, RequestOutputs) and copy.elapsed == outs.elapsed and copy.texts == outs.texts
    assert copy[0].outputs[0].logprobs == outs[0].outputs[0].logprobs
    assert pickle.loads(pickle.dumps(llm.score([5, 6])[0])).token_ids == [5, 6]
    chunk = next(llm.stream("a"))
    again = pickle.loads(pickle.dumps(chunk))
    assert isinstance(again, Chunk) and again == chunk and again.token_ids == chunk.token_ids


COLUMNS = [
    "index", "sample", "prompt", "text", "token_ids", "token_logprobs", "cumulative_logprob", "finish_reason",
    "stop_reason", "num_prompt_tokens", "num_tokens", "num_cached_tokens", "weight_version", "first_token_latency",
    "error",
]  # fmt: skip


def test_to_pandas(fake_llm):
    pytest.importorskip("pandas")
    outs = fake_llm().generate(["a", [400], [5]], n=2, logprobs=0, max_tokens=3, on_error="return")
    table = outs.to_pandas()
    assert list(table.columns) == COLUMNS and len(table) == 6
    assert table["sample"].tolist() == [0, 1] * 3 and table["num_tokens"].tolist() == [3, 3, 0, 0, 3, 3]
    assert "out of vocabulary" in table["error"][2] and table["text"][0] == outs[0].text
    assert outs[0].to_pandas()["token_ids"][0].tolist() == outs[0].token_ids
    assert table["cumulative_logprob"].dtype == table["first_token_latency"].dtype == "float64"
    assert table["cumulative_logprob"][0] == outs[0].outputs[0].cumulative_logprob
    bare = fake_llm().generate("a", max_tokens=1).to_pandas()
    assert bare["cumulative_logprob"].dtype == "float64" and bare["cumulative_logprob"].isna().all()


def test_to_arrow(fake_llm):
    pytest.importorskip("pyarrow")
    outs = fake_llm().generate(["a", [5]], logprobs=0, max_tokens=3)
    table = outs.to_arrow()
    assert table.column_names == COLUMNS and table["token_ids"].to_pylist() == outs.token_ids
    assert outs[0].to_arrow().num_rows == 1
    plain = outs[:0].to_arrow(), fake_llm().generate("a", max_tokens=1).to_arrow()
    assert plain[0].schema == plain[1].schema == table.schema  # of no rows, and of columns without a value
    assert str(table.schema.field("token_logprobs").type) == "list<item: float>"


@pytest.mark.parametrize(("method", "library"), [("to_pandas", "pandas"), ("to_arrow", "pyarrow")])
def test_missing_libraries_name_the_extra(output, monkeypatch, method, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=r"llmpy\[data\]"):
        getattr(output, method)()


def test_a_position_of_logprobs_is_a_plain_dict(fake_llm):
    out = fake_llm().generate("ab", FULL)[0]
    for view in (out.outputs[0].logprobs, out.prompt_logprobs):
        assert view[0] is None or type(view[0]) is dict
        rows = view.to_list()
        assert type(rows) is list and rows == view
        assert pickle.loads(pickle.dumps(view[-1])) == copy.copy(view[-1]) == copy.deepcopy(view[-1]) == rows[-1]
        assert json.loads(json.dumps(rows))[-1] == {str(token): list(entry) for token, entry in view[-1].items()}
        assert type(view[1:]) is type(view) is type(pickle.loads(pickle.dumps(view)))
        first = view[-1]
        first.clear()
        assert view[-1] == rows[-1], "a dict that is changed changes nothing else"
    assert out.prompt_logprobs[0] is None and out.outputs[0].logprobs[0] is not None


def test_slices_and_sums_keep_the_class(fake_llm):
    llm = fake_llm()
    first, second = llm.generate(["a", "b"], ONE), llm.generate("c", ONE)
    plain = [*first]
    for many in (first + second, sum([first, second]), sum([first, second], RequestOutputs()), plain + second):
        assert type(many) is RequestOutputs and many.texts == first.texts + second.texts
    assert (first + second).elapsed == first.elapsed + second.elapsed
    assert type(first[:1]) is type(first.copy()) is type(first * 2) is RequestOutputs
    assert type(llm.score(["ab", "cd"])[:1]) is ScoreOutputs


def test_the_repr_of_many_outputs_is_short(fake_llm):
    outs = fake_llm().generate("a", ONE)
    assert repr(outs) == f"[{outs[0]!r}]"
    many = RequestOutputs([*outs] * 20000)
    assert len(repr(many)) < 800 and "19,996 more" in repr(many)


def test_scores_and_poolings_are_tables(fake_llm):
    pytest.importorskip("pandas")
    llm = fake_llm()
    scores = llm.score([[5, 6, 7], [400, 401]], on_error="return")
    frame = scores.to_pandas()
    assert frame["sum_logprob"].tolist() == [scores[0].sum_logprob, 0.0] and frame["token_ids"][0].tolist() == [5, 6, 7]
    assert frame["error"].isnull().tolist() == [True, False] and "vocabulary" in frame["error"][1] and len(scores.errors) == 1
    pytest.importorskip("pyarrow")
    assert scores.to_arrow().column_names[:3] == ["index", "num_tokens", "start"]
