"""What stands for an image in a prompt, against transformers' processors; placeholders in texts and in ids."""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from llmpy.errors import CheckpointError, InvalidRequestError
from llmpy.vision.items import Grid, ImageItem, Piece
from llmpy.vision.processors import FAMILIES, Vision
from llmpy.vision.prompts import Writer

TOKENS = ["<image>", "<|image_pad|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<image_soft_token>", "<start_of_image>",
          "<end_of_image>", "<IMG_CONTEXT>", "<img>", "</img>", "<fake_token_around_image>", "<global-img>", "<|patch|>",
          "<|image|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"]  # fmt: skip
"""Token 10 + i is TOKENS[i]; a character is its code + 100."""


def encode(text: str) -> list[int]:
    ids = []
    while text:
        name = next((name for name in TOKENS if text.startswith(name)), text[0])
        ids.append(10 + TOKENS.index(name) if name in TOKENS else 100 + ord(name))
        text = text[len(name) :]
    return ids


def writer(config: dict[str, Any], with_tokenizer: bool = True) -> Writer:
    expansion = FAMILIES[config["model_type"]].expansion(Vision(config, "config.json").all)
    token_of = dict(enumerate(TOKENS, 10)).get
    id_of = {name: number for number, name in enumerate(TOKENS, 10)}.get
    return Writer(expansion, token_of, id_of, encode if with_tokenizer else None)


def item(grid: Grid, pieces: int, features: int) -> ImageItem:
    return ImageItem(np.zeros((1, 3), np.uint8), grid, (Piece(1, features),) * pieces, b"", pieces * features)


def ids_of(text: str) -> npt.NDArray[np.int32]:
    return np.array(encode(text), np.int32)


def reference(module: str, name: str, inputs: dict[str, Any], **fields: Any) -> str:
    """What transformers' processor writes for one image; the fields are those of the processor that its method reads."""
    processor = getattr(import_module(f"transformers.models.{module}.processing_{module}"), name)
    text = processor.replace_image_token(SimpleNamespace(**fields), inputs, 0)
    assert isinstance(text, str)
    return text


IDEFICS = {"fake_image_token": "<fake_token_around_image>", "image_token": "<image>", "global_image_tag": "<global-img>",
           "global_image_token": "<global-img>", "image_seq_len": 9}  # fmt: skip
GEMMA = {"full_image_sequence": "\n\n<start_of_image>" + "<image_soft_token>" * 4 + "<end_of_image>\n\n"}


def test_tiles_of_idefics3_and_smolvlm() -> None:
    for rows, cols in ((0, 0), (2, 3), (1, 4)):
        given = {"rows": [[rows]], "cols": [[cols]]}
        one = item(Grid(1, 6, 6, max(rows, 1), max(cols, 1)), rows * cols + 1, 9)
        for name in ("idefics3", "smolvlm"):
            kind = {"idefics3": "Idefics3Processor", "smolvlm": "SmolVLMProcessor"}[name]
            assert writer({"model_type": name}).expand_text("<image>", [one]) == reference(name, kind, given, **IDEFICS)


def test_crops_of_gemma3() -> None:
    config = {"model_type": "gemma3", "image_token_index": 15, "boi_token_index": 16, "eoi_token_index": 17}
    for crops in (0, 2, 3):
        wanted = reference("gemma3", "Gemma3Processor", {"num_crops": [crops]}, **GEMMA)
        assert writer(config).expand_text("a<start_of_image>b", [item(Grid(1, 8, 8), crops + 1, 4)]) == f"a{wanted}b"


def test_tiles_of_llama4() -> None:
    """Its processor in transformers needs torchvision, so the text is written here."""
    made = writer({"model_type": "llama4", "image_token_index": 23})
    one = "<|image_start|><|image|><|patch|><|patch|><|image_end|>"
    line = "<|patch|><|patch|><|tile_x_separator|><|patch|><|patch|><|tile_y_separator|>"
    tiles = item(Grid(1, 2, 2, 2, 2), 5, 2)
    text = made.expand_text("a<|image|>b<|image|>", [item(Grid(1, 2, 2), 1, 2), tiles])
    assert text == f"a{one}b" + one.replace("<|image|>", 2 * line + "<|image|>")
    ids = np.array(encode(text), np.int32)
    assert made.expand_ids(ids, [item(Grid(1, 2, 2), 1, 2), tiles]) is ids  # expanded already, with a placeholder for each


def test_images_of_paligemma_come_first() -> None:
    """Its processor in transformers writes the begin of the text behind the images, and a newline at the end."""
    made = writer({"model_type": "paligemma", "image_token_index": 10})
    text = made.expand_text("<image>ab", [item(Grid(1, 2, 2), 1, 4)])
    ids = encode(text)
    assert text == "<image>" * 4 + "ab\n"
    assert made.arranged([7, *ids], 7) == [10] * 4 + [7, *encode("ab\n")] == made.arranged(ids, 7)
    assert made.arranged(ids, None) == ids and made.arranged([7, 201], 7) == [7, 201]
    assert writer({"model_type": "llava"}).arranged([7, *ids], 7) == [7, *ids]


def test_rows_of_pixtral() -> None:
    """Its processor in transformers needs torchvision, so the text is written here."""
    vision = {"model_type": "pixtral"}
    for config, rows, cols in (
        ({"model_type": "llava", "image_token_index": 12, "vision_config": vision}, 6, 4),
        ({"model_type": "mistral3", "image_token_index": 12, "vision_config": vision}, 3, 2),
    ):
        row = "[IMG]" * cols
        wanted = (row + "[IMG_BREAK]") * (rows - 1) + row + "[IMG_END]"
        assert writer(config).expand_text("[IMG]", [item(Grid(1, 6, 4), 1, rows * cols)]) == wanted


def test_tiles_of_internvl() -> None:
    names = {"start_image_token": "<img>", "end_image_token": "</img>", "image_token": "<IMG_CONTEXT>", "image_seq_length": 4}
    wanted = reference("internvl", "InternVLProcessor", {"num_patches": [3]}, **names)
    assert writer({"model_type": "internvl"}).expand_text("<IMG_CONTEXT>", [item(Grid(1, 4, 4, 1, 2), 3, 4)]) == wanted


@pytest.mark.parametrize(("name", "token"), [("llava", "<image>"), ("qwen3_vl", "<|image_pad|>"), ("llava_next", "<image>")])
def test_features_of_other_families_are_repeated(name: str, token: str) -> None:
    items = [item(Grid(1, 2, 2), 1, 3), item(Grid(1, 2, 2), 1, 2)]
    assert writer({"model_type": name}).expand_text(f"a{token}b{token}", items) == f"a{token * 3}b{token * 2}"


def test_texts_and_ids_give_the_same_places() -> None:
    write = writer({"model_type": "internvl"})
    items = [item(Grid(1, 4, 4), 1, 3), item(Grid(1, 4, 4, 1, 2), 3, 2)]
    text = "see <IMG_CONTEXT> and<IMG_CONTEXT>"
    ids = ids_of(write.expand_text(text, items))
    assert write.expand_ids(ids_of(text), items).tolist() == ids.tolist()
    assert write.expand_ids(ids, items) is ids  # already expanded
    placed = write.place(ids, items)
    assert [(one.first, one.n_tokens) for one in placed] == [(5, 3), (14, 6)]
    assert [set(ids[one.first : one.first + one.n_tokens].tolist()) for one in placed] == [{18}, {18}]


def test_a_range_spans_its_separators() -> None:
    write = writer({"model_type": "mistral3"})
    one = item(Grid(1, 4, 6), 1, 6)
    ids = write.expand_ids(ids_of("x[IMG]y"), [one])
    assert ids.tolist() == ids_of("x[IMG][IMG][IMG][IMG_BREAK][IMG][IMG][IMG][IMG_END]y").tolist()
    assert [(found.first, found.n_tokens) for found in write.place(ids, [one])] == [(1, 7)]


def test_an_image_of_one_feature_is_expanded_unless_it_has_its_marks() -> None:
    write = writer({"model_type": "qwen2_vl"})
    ids = ids_of("a<|image_pad|>")
    assert write.expand_ids(ids, [item(Grid(1, 2, 2), 1, 1)]) is ids
    gemma = writer({"model_type": "gemma3"})
    assert gemma.expand_ids(ids_of("<start_of_image>"), [item(Grid(1, 2, 2), 1, 1)]).size == 7


def test_other_numbers_of_placeholders_are_refused() -> None:
    write = writer({"model_type": "qwen2_vl"})
    items = [item(Grid(1, 2, 2), 1, 3)] * 2
    for count in (0, 1, 3):
        text = "a" + "<|image_pad|>" * count
        with pytest.raises(InvalidRequestError, match=rf"2 images but {count} placeholders '<\|image_pad\|>'"):
            write.expand_text(text, items)
        with pytest.raises(InvalidRequestError, match=rf"2 images but {count} placeholders"):
            write.expand_ids(ids_of(text), items)
    for count in (5, 7):
        with pytest.raises(InvalidRequestError, match=rf"2 images with 6 features, but {count} tokens"):
            write.place(ids_of("<|image_pad|>" * count), items)
    gemma = writer({"model_type": "gemma3"})
    with pytest.raises(InvalidRequestError, match="1 images but 2 placeholders"):  # feature tokens beside a placeholder
        gemma.expand_ids(ids_of("<start_of_image><image_soft_token><image_soft_token>"), [items[0]])


def test_ids_without_a_tokenizer_must_be_expanded() -> None:
    write = writer({"model_type": "qwen2_vl"}, with_tokenizer=False)
    one = item(Grid(1, 2, 2), 1, 3)
    expanded = ids_of("<|image_pad|>" * 3)
    assert write.expand_ids(expanded, [one]) is expanded
    with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
        write.expand_ids(ids_of("<|image_pad|>"), [one])


def test_a_vocabulary_without_the_token_is_named() -> None:
    expansion = FAMILIES["qwen2_vl"].expansion(Vision({"model_type": "qwen2_vl"}, "config.json").all)
    with pytest.raises(CheckpointError, match=r"no token '<\|image_pad\|>'"):
        Writer(expansion, lambda number: None, lambda text: None, encode)
    with pytest.raises(CheckpointError, match="image_token_id: wanted a token id, have -1"):
        writer({"model_type": "qwen2_vl", "image_token_id": -1})
