"""What comes between two parts of a large image's computation: no bit of its request changes, and nothing stays behind."""

import asyncio
import json
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from modules import load
from safetensors.torch import load_file

from llmpy import LLM, AsyncEngine, SamplingParams

ours = load(Path(__file__).with_name("vision_models.py"))
PARAMS = SamplingParams(temperature=0, max_tokens=3, logprobs=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory, random_parameters):
    return ours.VisionModel(ours.FAMILIES["qwen3-vl"], tmp_path_factory.mktemp("qwen3-vl"), random_parameters)


@pytest.fixture(scope="module")
def options(model, device):
    text = json.loads((model.directory / "config.json").read_text())["text_config"]
    return {
        "model": model.directory, "device": device, "skip_tokenizer_init": True, "kv_cache_memory_bytes": "16MiB",
        "max_encoder_rows": 5000, "encoder_cache_tokens": 2304, "max_model_len": 2048, "max_num_batched_tokens": 2048,
        "enable_prefix_caching": False, "mm_processor_kwargs": {"max_pixels": 2000000},
        "hf_overrides": {"text_config": {**text, "max_position_embeddings": 2048}},
    }  # fmt: skip


@pytest.fixture(scope="module")
def prompts():
    """An image of 4,352 patches, one of 4,608 and one of 512, which has no parts, each between texts; and a text."""
    random, made = np.random.default_rng(0), []
    for i, (h, w) in enumerate([(1088, 1024), (1152, 1024), (256, 512)]):
        image = random.integers(0, 256, (h, w, 3), dtype=np.uint8)
        ids = [3 + i, *[ours.FEATURE] * (h * w // 32**2), 5 + i]
        made.append({"prompt_token_ids": ids, "multi_modal_data": {"image": image}})
    return [*made, [5, 9, 77, 4]]


@pytest.fixture(scope="module")
def other(model):
    """The checkpoint's tensors with another tower and another head."""
    tensors = load_file(next(model.directory.glob("*.safetensors")))
    return [(name, tensor * (1.25 if "blocks.0" in name or "lm_head" in name else 1)) for name, tensor in tensors.items()]


def bits(output):
    return list(output.outputs[0].token_ids), output.outputs[0].token_logprobs.tobytes()


@pytest.fixture(scope="module")
def undisturbed(options, prompts, other):
    """Bits of each prompt alone, with the weights and with the other ones."""
    with LLM(**options) as llm:
        found = [[bits(llm.generate([each], PARAMS)[0]) for each in prompts]]
        llm.update_weights(other)
        found.append([bits(llm.generate([each], PARAMS)[0]) for each in prompts])
    assert all(old[1] != new[1] for old, new in zip(*found, strict=True))
    return found


def start(llm, prompts):
    """Queues prompts and computes two parts of the first one's image; the names."""
    names = [llm.add_request(each, PARAMS) for each in prompts]
    assert llm.step() == [] == llm.step()
    assert [step.rows for step in llm.step_log(2)] == [0, 0]  # the token in front of the image waits, too
    return names


def drain(llm):
    outputs = {}
    while llm.has_unfinished_requests():
        outputs |= {output.request_id: output for output in llm.step()}
    return outputs


def is_idle(engine):
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_unfinished) == (0, 0, 0)
    assert stats.kv_blocks_free == stats.kv_blocks_total and stats.allocations_since_warmup == 0
    return True


def pause(llm, _):
    llm.pause("keep")
    assert llm.step() == []
    llm.resume()


def sleep(level, tags=None):
    def call(llm, other):
        llm.sleep(level, "keep", tags)
        llm.wake_up()
        if level == 2:
            llm.update_weights(other)

    return call


def torn_update(llm, other):
    """An update that is given up leaves the weights incomplete; a whole one follows."""
    with pytest.raises(KeyError), llm.begin_update() as begun:
        begun.write(*other[0])
        raise KeyError
    llm.update_weights(other)


BETWEEN = {  # what happens, and whether the other weights compute the answers
    "pause": (pause, 0),
    "sleep 0": (sleep(0), 0),
    "sleep 1": (sleep(1), 0),
    "sleep 1, weights": (sleep(1, ["weights"]), 0),
    "sleep 1, cache": (sleep(1, ["kv_cache"]), 0),
    "sleep 2": (sleep(2), 1),
    "update": (lambda llm, other: llm.update_weights(other), 1),
    "torn update": (torn_update, 1),
    "reset": (lambda llm, _: llm.reset_prefix_cache(), 0),
    "tap": (lambda llm, _: llm.tap([[5, 9, 77, 4]], ["splice"]), 0),
    "score": (lambda llm, _: llm.score([[5, 9, 77, 4]]), 0),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_between_two_parts(name, options, prompts, other, undisturbed):
    between, weights = BETWEEN[name]
    with LLM(**options) as llm:
        names = start(llm, prompts[:-1])
        between(llm, other)
        names.append(llm.add_request(prompts[-1], PARAMS))
        outputs = drain(llm)
        assert [bits(outputs[each]) for each in names] == undisturbed[weights]
        assert is_idle(llm)


def test_an_aborted_image_is_computed_for_those_who_wait(options, prompts, undisturbed):
    """The second request has the same image and waits for the parts of the first one's."""
    with LLM(**options) as llm:
        names = start(llm, [prompts[0], prompts[0], prompts[1]])
        assert [output.outputs[0].finish_reason for output in llm.abort(names[0])] == ["abort"]
        outputs = drain(llm)
        assert [bits(outputs[each]) for each in names[1:]] == undisturbed[0][:2]
        assert is_idle(llm) and llm.stats().images_encoded == 3  # the first one's, and one for each of the others
        llm.reset_prefix_cache()
        start(llm, prompts[:2])
        assert len(llm.abort()) == 2 and is_idle(llm)
        assert bits(llm.generate([prompts[1]], PARAMS)[0]) == undisturbed[0][1]


@pytest.mark.parametrize("mode", ["abort", "wait", "keep", "close"])
def test_an_async_engine_stops_between_two_parts(mode, options, prompts, undisturbed):
    async def main():
        async with AsyncEngine.create(**options) as engine:
            tasks = [asyncio.ensure_future(engine.generate(each, PARAMS)) for each in prompts[:2]]
            while not engine.step_log(1) or not engine.stats().images_encoded:
                await asyncio.sleep(0)
            if mode == "close":
                engine.close()
                return await asyncio.gather(*tasks)
            await engine.pause(mode)
            late = asyncio.ensure_future(engine.generate(prompts[2], PARAMS))
            await engine.resume()
            outputs = [*await asyncio.gather(*tasks), await late]
            assert is_idle(engine)
            return outputs

    outputs = asyncio.run(main())
    ended = [output.outputs[0].finish_reason == "abort" for output in outputs]
    assert ended[1] == (mode in ("abort", "close"))  # the first may have ended where the loop was slow
    for output, is_partial, (ids, logprobs) in zip(outputs, ended, undisturbed[0], strict=False):
        found, found_logprobs = bits(output)
        assert (found, found_logprobs) == (ids[: len(found)], logprobs[: 4 * len(found)]) and (is_partial or found == ids)


def test_texts_do_not_wait_for_all_rows_of_an_image(options, prompts, undisturbed):
    """Beside a text a step computes 256 rows of the image's prompt, with a new text none; without texts all 1,090."""
    with LLM(**options) as llm:
        llm.generate([prompts[0]], PARAMS)  # its features stay
        names = [llm.add_request(prompts[-1], PARAMS.replace(max_tokens=20, ignore_eos=True))]
        llm.step()
        names.append(llm.add_request(prompts[0], PARAMS))
        llm.step()
        names.append(llm.add_request(prompts[-1], PARAMS))
        outputs = drain(llm)
        rows = [step.prompt_rows for step in llm.step_log() if step.prompt_rows]
        assert rows[-8:] == [1090, 4, 256, 4, 256, 256, 256, 66]
        assert [bits(outputs[each]) for each in names[1:]] == [undisturbed[0][0], undisturbed[0][-1]]
        time.sleep(0.2)
        assert bits(llm.generate([prompts[0]], PARAMS)[0]) == undisturbed[0][0]
        assert [step.prompt_rows for step in llm.step_log() if step.prompt_rows][-1] == 1090
        assert is_idle(llm)
