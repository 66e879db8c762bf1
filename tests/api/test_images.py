"""Images of prompts and of chats, up to the ids and places that the engine gets."""

import base64
import io
import json
import warnings

import numpy as np
import pytest
from PIL import Image

from llmpy import ConfigError, EngineConfig, InvalidRequestError, SamplingParams, UnsupportedError
from llmpy.inputs import parse
from llmpy.text import chat
from llmpy.vision.images import Images

ONE = SamplingParams(max_tokens=1)
PIXELS = np.random.default_rng(0).integers(0, 256, (56, 84, 3), dtype=np.uint8)
MARK = "<|end|>"
PARTS = (
    "{% for message in messages %}<|im_start|>{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>{% endfor %}"
)


def png(pixels=PIXELS):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


URL = "data:image/png;base64," + base64.b64encode(png()).decode()


@pytest.fixture
def seeing(fake_llm, tmp_path):
    """An LLM over the stand-in for the core whose model takes images: 6 features for PIXELS, MARK stands for one."""

    def make(tokenizer=True, template=None, **options):
        llm = fake_llm(tokenizer=tokenizer, **({} if template is None else {"template": template}), **options)
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Qwen2VLImageProcessorFast"}))
        config = {"model_type": "qwen2_vl", "vision_config": {}, "image_token_id": 299}
        llm._frontend.images = Images(llm.config, config, tmp_path, llm._frontend.tokenizer)
        return llm

    return make


def prompt(text, *images, **more):
    return {"prompt": text, "multi_modal_data": {"image": list(images)}, **more}


def test_a_text_is_expanded(seeing):
    llm = seeing()
    out = llm.generate(prompt(f"see {MARK} now", PIXELS), ONE)[0]
    encode = llm.tokenizer.encode
    assert out.prompt == f"see {MARK} now" and out.num_image_tokens == 6
    assert out.prompt_token_ids == [*encode("see "), *[299] * 6, *encode(" now")]
    assert np.frombuffer(llm.fake.submitted[-1][0], np.int32).tolist() == out.prompt_token_ids
    made = llm._frontend.prompts([prompt(f"{MARK}x{MARK}", PIXELS, PIXELS[:, :56])])[0]
    assert [(one.first, one.n_tokens) for one in made.images] == [(0, 6), (7, 4)]


def test_forms_of_an_image_and_of_ids_agree(seeing, tmp_path):
    llm = seeing()
    (tmp_path / "a.png").write_bytes(png())
    forms = [PIXELS, Image.fromarray(PIXELS), png(), tmp_path / "a.png", URL]
    one = {"prompt_token_ids": [5, 299, 6], "multi_modal_data": {"image": PIXELS}}
    whole = {"prompt_token_ids": [5, *[299] * 6, 6], "multi_modal_data": {"image": [PIXELS]}}
    made = llm._frontend.prompts([*(prompt(f"a{MARK}", form) for form in forms), one, whole])
    assert len({found.items[0].content for found in made}) == 1
    assert made[-1].ids.tolist() == made[-2].ids.tolist() == [5, *[299] * 6, 6]


def test_a_bad_image_fails_its_prompt_alone(seeing):
    llm = seeing()
    bad = [prompt(MARK, b"torn"), prompt(f"{MARK}{MARK}", PIXELS, PIXELS.astype(float)), prompt("none", PIXELS),
           prompt(MARK * 2, PIXELS)]  # fmt: skip
    outputs = llm.generate([*bad, prompt(MARK, PIXELS)], ONE, on_error="return")
    words = ["no image of JPEG", "image 2 of 2: an array must be of uint8", "1 images but 0 placeholders",
             "1 images but 2 placeholders"]  # fmt: skip
    for index, word in enumerate(words):
        error = outputs[index].error
        assert isinstance(error, InvalidRequestError) and word in str(error) and error.index == index
    assert outputs[4].error is None
    with pytest.raises(InvalidRequestError, match="1 images but 0 placeholders"):
        llm.generate(bad[2])


def test_what_a_prompt_would_run(seeing):
    """`render` and `render_chat`: ids, places and keys of images; nothing is submitted."""
    llm = seeing(template=PARTS)
    one, other = llm.render([prompt(f"a {MARK}{MARK}", PIXELS, PIXELS[:, :56]), "plain"])
    assert one.prompt_token_ids == [*llm.tokenizer.encode("a "), *[299] * 10] and one.prompt == f"a {MARK}{MARK}"
    first = len(one.prompt_token_ids) - 10
    assert [image[:2] for image in one.images] == [(first, 6), (first + 6, 4)]
    assert other.images == () and other.prompt_token_ids == llm.tokenizer.encode("plain")
    talk = [{"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image", "image": png()}]}]
    (chat_one,) = llm.render_chat(talk)
    assert chat_one.images[0].content == one.images[0].content != one.images[1].content and len(one.images[0].content) == 32
    assert not llm.fake.submitted
    assert llm.chat(talk, ONE)[0].prompt_token_ids == chat_one.prompt_token_ids
    with pytest.raises(InvalidRequestError, match="1 images but 0 placeholders") as caught:
        llm.render(["fine", prompt("none", PIXELS)])
    assert caught.value.index == 1
    with pytest.raises(InvalidRequestError, match="longer than the maximum model length"):
        seeing(max_model_len=8).render(prompt(f"abcdef{MARK}", PIXELS))


def test_an_expanded_prompt_may_be_too_long(seeing):
    with pytest.raises(InvalidRequestError, match="longer than the maximum model length"):
        seeing(max_model_len=8).generate(prompt(f"abcdef{MARK}", PIXELS))


def test_names_of_images_are_their_content(seeing):
    llm = seeing()
    frontend = llm._frontend

    def content(**more):
        return frontend.prompts([prompt(MARK, PIXELS, **more)])[0].items[0].content

    named = content(multi_modal_uuids={"image": ["a"]})
    assert named == content(multi_modal_uuids={"image": "a"}) != content()
    assert named != content(multi_modal_uuids={"image": ["b"]})
    assert named != content(multi_modal_uuids={"image": ["a"]}, mm_processor_kwargs={"max_pixels": 2000000})
    assert content(multi_modal_uuids={"image": [None]}) == content()
    with pytest.raises(InvalidRequestError, match="2 names for 1 images"):
        parse(prompt(MARK, PIXELS, multi_modal_uuids={"image": ["a", "b"]}))
    with pytest.raises(UnsupportedError, match="send it"):
        llm.generate({"prompt": MARK, "multi_modal_uuids": {"image": ["a"]}})


def test_sizes_of_the_engine_and_of_a_prompt(seeing):
    llm = seeing(mm_processor_kwargs={"max_pixels": 3200})
    count = len(llm.generate(prompt(MARK, PIXELS), ONE)[0].prompt_token_ids)
    more = len(llm.generate(prompt(MARK, PIXELS, mm_processor_kwargs={"max_pixels": 999999}), ONE)[0].prompt_token_ids)
    assert (count, more) == (2, 6)
    with pytest.raises(InvalidRequestError, match="unknown key 'pixels'"):
        llm.generate(prompt(MARK, PIXELS, mm_processor_kwargs={"pixels": 1}))


def test_limits_are_options(seeing, tmp_path):
    with pytest.raises(InvalidRequestError, match="2 in one prompt, but limit_mm_per_prompt allows 1"):
        seeing(limit_mm_per_prompt={"image": 1}).generate(prompt(MARK * 2, PIXELS, PIXELS))
    with pytest.raises(InvalidRequestError, match="raise max_image_pixels"):
        seeing(max_image_pixels=1000).generate(prompt(MARK, PIXELS))
    with pytest.raises(InvalidRequestError, match="raise max_image_side"):
        seeing(max_image_side=80).generate(prompt(MARK, png()))
    (tmp_path / "inside").mkdir()
    (tmp_path / "a.png").write_bytes(png())
    with pytest.raises(InvalidRequestError, match="allowed_image_folder"):
        seeing(allowed_image_folder=tmp_path / "inside").generate(prompt(MARK, tmp_path / "a.png"))
    assert EngineConfig(limit_mm_per_prompt={"video": 0}).limit_mm_per_prompt == {"image": 16}
    with pytest.raises(UnsupportedError, match="audio is not supported yet"):
        EngineConfig(limit_mm_per_prompt={"audio": 1})
    for wrong in ({"image": -1}, {"images": 1}):
        with pytest.raises(ConfigError, match="limit_mm_per_prompt"):
            EngineConfig(limit_mm_per_prompt=wrong)


def test_a_model_without_a_tower_refuses_images(fake_llm):
    llm = fake_llm()
    with pytest.raises(UnsupportedError, match="prompts with images: Fake has no tower for images"):
        llm.generate(prompt(MARK, PIXELS))
    assert isinstance(llm.generate([prompt(MARK, PIXELS)], on_error="return")[0].error, UnsupportedError)
    with pytest.raises(UnsupportedError, match="'image': the model has no tower"):
        llm.chat([{"role": "user", "content": [{"type": "image", "image": PIXELS}]}])
    assert llm.generate({"prompt": "a", "multi_modal_data": {}, "mm_processor_kwargs": None}, ONE)[0].error is None


def test_other_kinds_are_named():
    for kind in ("video", "audio"):
        with pytest.raises(UnsupportedError, match=f"prompts with '{kind}' in multi_modal_data"):
            parse({"prompt": "a", "multi_modal_data": {kind: 1}})
    for wrong, words in (
        ({"multi_modal_data": 1}, "multi_modal_data must be a dict"),
        ({"multi_modal_data": {"images": 1}}, "unknown kind 'images'"),
        ({"mm_processor_kwargs": 1}, "mm_processor_kwargs must be a dict"),
        ({"multi_modal_data": {"image": PIXELS}, "multi_modal_uuids": {"image": [1]}}, "multi_modal_uuids must have a str"),
    ):
        with pytest.raises(TypeError, match=words):
            parse({"prompt": "a", **wrong})


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


IMAGES = [
    {"type": "image", "image": PIXELS}, {"type": "image_url", "image_url": {"url": URL}},
    {"type": "image_url", "image_url": URL}, {"type": "input_image", "image_url": URL}, {"type": "image", "url": URL},
]  # fmt: skip
TEXT = {"type": "text", "text": "what?"}


@pytest.mark.parametrize("image", IMAGES, ids=range(len(IMAGES)))
def test_parts_of_a_chat(seeing, image):
    llm = seeing(template=PARTS)
    out = llm.chat(user(TEXT, image), ONE)[0]
    assert out.prompt == f"<|im_start|>what?{MARK}<|im_end|>"
    assert out.prompt_token_ids.count(299) == 6


def test_a_template_without_images_gets_placeholders_in_front(seeing):
    llm = seeing()
    chat._say_in_front.cache_clear()
    with pytest.warns(UserWarning, match=r"does not read images: '<\|end\|>' stands in front"):
        out = llm.chat(user(TEXT, IMAGES[0], IMAGES[1]), ONE, add_generation_prompt=False)[0]
    assert out.prompt == f"<|im_start|>user\n{MARK}\n{MARK}\nwhat?<|im_end|>\n"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.chat(user(IMAGES[0]), ONE)


def test_images_of_several_messages_keep_their_order(seeing):
    llm = seeing(template=PARTS)
    small = {"type": "image", "image": PIXELS[:, :56]}
    messages = [*user(small), {"role": "assistant", "content": "ok"}, *user(TEXT, IMAGES[0])]
    ids = llm.chat(messages, ONE)[0].prompt_token_ids
    assert ids.count(299) == 10 and ids[1:6] == [299] * 4 + [298]


def test_wrong_parts_are_named(seeing):
    llm = seeing(template=PARTS)
    for part in ({"type": "image"}, {"type": "image_url", "image_url": {}}, {"type": "image", "image": PIXELS, "uuid": 3}):
        with pytest.raises(InvalidRequestError, match="messages: "):
            llm.chat(user(part))
    for kind in ("video_url", "input_audio"):
        with pytest.raises(UnsupportedError, match=f"content part of type '{kind}'"):
            llm.chat(user({"type": kind}))
    with pytest.raises(UnsupportedError, match="http URLs"):
        llm.chat(user({"type": "image_url", "image_url": {"url": "http://host/a.png"}}))


def test_a_score_behind_an_image(seeing):
    llm = seeing()
    from llmpy.engine.scoring import pair

    found, starts = pair(llm._frontend, [prompt(f"a{MARK}", PIXELS)], ["bc"])
    assert found[0].ids.tolist() == [*llm.tokenizer.encode("a"), *[299] * 6, *llm.tokenizer.encode("bc")] and starts == [7]
    assert [(one.first, one.n_tokens) for one in found[0].images] == [(1, 6)]
    with pytest.raises(InvalidRequestError, match="a completion has no images"):
        llm.score("a", completions=prompt(MARK, PIXELS))


def test_ids_without_a_tokenizer(seeing):
    llm = seeing(tokenizer=False)
    ids = [5, *[299] * 6]
    assert llm.generate({"prompt_token_ids": ids, "multi_modal_data": {"image": PIXELS}}, ONE)[0].prompt_token_ids == ids
