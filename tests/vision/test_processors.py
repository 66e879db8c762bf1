"""Items of images against transformers' processors (those of Pillow), byte for byte, and against its tables of positions."""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import PIL
import pytest
from PIL import Image

from llmpy.errors import CheckpointError, ConfigError, UnsupportedError
from llmpy.vision.items import WEIGHT_ROW, Grid, ImageItem, Piece, PlacedItem, rope_positions
from llmpy.vision.processors import FAMILIES, KINDS, Processor

Array = npt.NDArray[Any]

pytestmark = pytest.mark.skipif(int(PIL.__version__.split(".")[0]) >= 13, reason="Pillow 13 has other bits")
SIZES = [(64, 64), (70, 126), (120, 160), (90, 29), (31, 200), (37, 29), (250, 175)]


def clip(side: int, **more: Any) -> dict[str, Any]:
    return {"vision_config": {"model_type": "clip_vision_model", "image_size": side, "patch_size": 14}, **more}


class Case(NamedTuple):
    """A family, the module and class of its processor, and the fields of both."""

    config: dict[str, Any]
    module: str
    kind: str
    fields: dict[str, Any]
    given: Mapping[str, object] = MappingProxyType({})


CROPPED = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
QWEN = {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 20}}
SIGLIP = {"model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
PINPOINTS = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
TILED = {"size": {"longest_edge": 160}, "max_image_size": {"longest_edge": 56}}
PIXTRAL = {"model_type": "pixtral", "patch_size": 14, "image_size": 112}
CASES = {
    "llava": Case({"model_type": "llava", **clip(56)}, "clip", "CLIP", CROPPED),
    "llava full": Case(
        {"model_type": "llava", **clip(56, vision_feature_select_strategy="full")}, "llava", "Llava", CROPPED
    ),
    "llava padded": Case({"model_type": "llava", **clip(56)}, "llava", "Llava", {**CROPPED, "do_pad": True}),
    "llava siglip": Case(
        {"model_type": "llava", "vision_config": SIGLIP, "vision_feature_select_strategy": "full"},
        "siglip", "Siglip", {"size": {"height": 56, "width": 56}},
    ),
    "llava pixtral": Case(
        {"model_type": "llava", "vision_config": PIXTRAL}, "pixtral", "Pixtral",
        {"size": {"longest_edge": 112}, "patch_size": {"height": 14, "width": 14}},
    ),
    "mistral3": Case(
        {"model_type": "mistral3", "vision_config": PIXTRAL, "spatial_merge_size": 2}, "pixtral", "Pixtral",
        {"size": {"longest_edge": 112}, "patch_size": {"height": 28, "width": 28}},
    ),
    "llava_next": Case(
        {"model_type": "llava_next", **clip(56, image_grid_pinpoints=PINPOINTS)}, "llava_next", "LlavaNext",
        {**CROPPED, "image_grid_pinpoints": PINPOINTS},
    ),
    "qwen2_vl": Case({"model_type": "qwen2_vl", "vision_config": {}}, "qwen2_vl", "Qwen2VL", QWEN),
    "qwen2_5_vl": Case({"model_type": "qwen2_5_vl", "vision_config": {}}, "qwen2_vl", "Qwen2VL", QWEN),
    "qwen3_vl": Case(
        {"model_type": "qwen3_vl", "vision_config": {}}, "qwen2_vl", "Qwen2VL", {**QWEN, **HALF, "patch_size": 16}
    ),
    "qwen3_vl_moe": Case(
        {"model_type": "qwen3_vl_moe", "vision_config": {}}, "qwen2_vl", "Qwen2VL", {**QWEN, **HALF, "patch_size": 16}
    ),
    "gemma3": Case(
        {"model_type": "gemma3", "vision_config": SIGLIP, "mm_tokens_per_image": 4}, "gemma3", "Gemma3",
        {"size": {"height": 56, "width": 56}},
    ),
    "gemma3 crops": Case(
        {"model_type": "gemma3", "vision_config": SIGLIP, "mm_tokens_per_image": 4}, "gemma3", "Gemma3",
        {"size": {"height": 56, "width": 56}, "pan_and_scan_min_crop_size": 28, "pan_and_scan_max_num_crops": 4,
         "pan_and_scan_min_ratio_to_activate": 1.2},
        {"do_pan_and_scan": True},
    ),
    "paligemma": Case({"model_type": "paligemma", "vision_config": SIGLIP}, "siglip", "Siglip",
                      {"size": {"height": 56, "width": 56}}),
    "internvl": Case(
        {"model_type": "internvl", "vision_config": {"image_size": [56, 56], "patch_size": [14, 14]}}, "got_ocr2", "GotOcr2",
        {"size": {"height": 56, "width": 56}, "crop_to_patches": True},
    ),
    "internvl one": Case(
        {"model_type": "internvl", "vision_config": {"image_size": 56, "patch_size": 14}}, "got_ocr2", "GotOcr2",
        {"size": {"height": 56, "width": 56}},
    ),
    "idefics3": Case({"model_type": "idefics3", "vision_config": SIGLIP}, "idefics3", "Idefics3", TILED),
    "smolvlm": Case({"model_type": "smolvlm", "vision_config": SIGLIP}, "smolvlm", "SmolVLM", TILED),
    "smolvlm whole": Case(
        {"model_type": "smolvlm", "vision_config": SIGLIP}, "smolvlm", "SmolVLM", TILED, {"do_image_splitting": False}
    ),
}  # fmt: skip


def noise(height: int, width: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng([seed, height, width]).integers(0, 256, (height, width, 3), dtype=np.uint8)


def ours(case: Case) -> Processor:
    return Processor(case.config, {"image_processor_type": f"{case.kind}ImageProcessorFast", **case.fields}, case.given)


def reference(case: Case, image: Array) -> Mapping[str, Any]:
    module = import_module(f"transformers.models.{case.module}.image_processing_pil_{case.module}")
    processor = getattr(module, f"{case.kind}ImageProcessorPil")(**case.fields)
    more = {"return_row_col_info": True} if case.config["model_type"] in ("idefics3", "smolvlm") else {}
    found: Mapping[str, Any] = processor(Image.fromarray(image), return_tensors="np", **case.given, **more)
    return found


def normalised(item: ImageItem, processor: Processor) -> list[Array]:
    """Rows of each tile as the tower sees them, float32 [patches, 3, P, P], back in merge order, without class rows."""
    tower, tiles = processor.tower, []
    ends = item.tables["segments.1" if tower.window else "segments.0"].values.cumsum().tolist()
    for start, end in zip([0, *ends], ends, strict=False):
        rows = item.rows[start : end - tower.has_class]
        assert not item.rows[end - tower.has_class : end].any()
        if tower.window:
            per = tower.merge**2
            order = item.tables["rows.features"].values
            rows = rows.reshape(-1, per, rows.shape[1])[order].reshape(rows.shape)
        planes = rows.reshape(-1, 3, tower.patch, tower.patch)
        tiles.append(np.stack([processor.table[c][planes[:, c]] for c in range(3)], 1))
    return tiles


def patches(tile: Array, patch: int, merge: int) -> Array:
    """A tile [3, h, w] as patches in merge order."""
    rows, cols = tile.shape[1] // patch, tile.shape[2] // patch
    tile = tile[:, : rows * patch, : cols * patch]
    cells = tile.reshape(3, rows // merge, merge, patch, cols // merge, merge, patch)
    return cells.transpose(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3, patch, patch)


@pytest.mark.parametrize("name", CASES)
def test_rows_equal_the_processor_of_transformers(name: str) -> None:
    case = CASES[name]
    processor = ours(case)
    for size in SIZES:
        image = noise(*size)
        item, wanted = processor.item(image), reference(case, image)["pixel_values"]
        tiles = normalised(item, processor)
        if case.module == "qwen2_vl":  # [patches, channel, time, y, x], both times equal
            planes = np.asarray(wanted).reshape(-1, 3, 2, processor.tower.patch, processor.tower.patch)
            assert planes[:, :, 0].tobytes() == planes[:, :, 1].tobytes()
            assert tiles[0].tobytes() == planes[:, :, 0].tobytes()
        else:
            stacked = np.asarray(wanted).reshape(-1, *np.asarray(wanted).shape[-3:])
            assert len(tiles) == len(stacked)
            for tile, plane in zip(tiles, stacked, strict=True):
                assert tile.tobytes() == patches(plane, processor.tower.patch, processor.tower.merge).tobytes()


@pytest.mark.parametrize("name", CASES)
def test_pieces_and_tables_agree(name: str) -> None:
    processor = ours(CASES[name])
    for size in SIZES:
        item = processor.item(noise(*size))
        n_rows, n_features = (sum(piece[i] for piece in item.pieces) for i in (0, 1))
        assert item.rows.shape == (n_rows, processor.tower.patch_bytes) and not item.rows.flags.writeable
        assert item.n_tokens == n_features
        for label, table in item.tables.items():
            assert len(table.ends) == len(item.pieces) and table.ends[-1] == table.values.shape[-1], label
            assert not table.values.flags.writeable and table.values.dtype in (np.int32, np.float32)
            if label.split(".")[0] in ("positions", "taps") or label == "rows.class":
                assert np.diff([0, *table.ends]).tolist() == [piece.n_rows for piece in item.pieces], label
            if label == "rows.features":
                assert np.diff([0, *table.ends]).tolist() == [piece.n_features for piece in item.pieces]
        for label in ("segments.0", "segments.1"):
            if label in item.tables:
                assert item.tables[label].values.sum() == n_rows


def test_every_family_and_kind_has_a_case() -> None:
    elsewhere = {"deepseek_vl_v2", "llama4"}, {"DeepseekVLV2Processor", "Llama4ImageProcessor"}  # test_pages, test_llama4
    assert {case.config["model_type"] for case in CASES.values()} == set(FAMILIES) - elsewhere[0]
    assert {f"{case.kind}ImageProcessor" for case in CASES.values()} == set(KINDS) - elsewhere[1]


def test_class_rows_stand_last_and_are_left_out() -> None:
    item = ours(CASES["llava"]).item(noise(60, 70))
    assert item.pieces == (Piece(17, 16),)
    assert item.tables["rows.class"].values.tolist() == [*range(16), WEIGHT_ROW]
    assert item.tables["rows.patches"].values.tolist() == list(range(16))
    assert item.tables["taps.index"].values.tolist() == [[*range(1, 17), 0]]
    full = ours(CASES["llava full"]).item(noise(60, 70))
    assert full.pieces == (Piece(17, 17),)
    assert full.tables["rows.patches"].values.tolist() == [16, *range(16)]


def test_features_of_llava_next_lie_as_in_transformers() -> None:
    torch = pytest.importorskip("torch")
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaNextConfig
    from transformers.models.llava_next.modeling_llava_next import LlavaNextModel

    case = CASES["llava_next"]
    vision = CLIPVisionConfig(image_size=56, patch_size=14, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    text = LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=8)
    model = LlavaNextModel(LlavaNextConfig(vision_config=vision, text_config=text, image_grid_pinpoints=PINPOINTS))
    for size in SIZES:
        item = ours(case).item(noise(*size))
        n_tiles = item.grid.tile_rows * item.grid.tile_cols + 1
        numbers = torch.arange(n_tiles * 16, dtype=torch.float32).reshape(n_tiles, 16, 1)
        packed, _ = model.pack_image_features(
            [numbers], torch.tensor([size]), "default", torch.tensor([float(WEIGHT_ROW)])
        )  # fmt: skip
        assert item.tables["rows.features"].values.tolist() == packed[0][:, 0].int().tolist()


@pytest.mark.parametrize("size", [(56, 56), (112, 84), (140, 308)])
def test_tables_of_qwen_equal_those_of_transformers(size: tuple[int, int]) -> None:
    torch = pytest.importorskip("torch")
    from transformers import vision_utils as vu

    item = ours(CASES["qwen2_5_vl"]).item(noise(*size))
    grid = torch.tensor([[1, item.grid.rows, item.grid.cols]])
    order, ends = vu.get_vision_window_index(grid, 2, 112, 14)
    plain = vu.get_vision_position_ids(grid, 2)
    wanted = plain.reshape(-1, 4, 2)[order].reshape(-1, 2)
    assert item.tables["positions"].values.T.tolist() == wanted.tolist()
    assert item.tables["segments.0"].values.cumsum().tolist() == ends[1:].tolist()
    assert item.tables["segments.1"].values.tolist() == [item.grid.rows * item.grid.cols]
    assert item.tables["rows.features"].values.tolist() == torch.argsort(order).tolist()

    item = ours(CASES["qwen3_vl"]).item(noise(*size))
    grid = torch.tensor([[1, item.grid.rows, item.grid.cols]])
    index, weight = vu.get_vision_interpolation_indices_and_weights(grid, 48, "bilinear", True, 2)
    assert item.tables["taps.index"].values.T.tolist() == index.tolist()
    assert np.ascontiguousarray(item.tables["taps.weight"].values.T).tobytes() == weight.numpy().tobytes()
    assert item.tables["positions"].values.T.tolist() == vu.get_vision_position_ids(grid, 2).tolist()


def test_positions_of_a_prompt_equal_those_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    grids = [(4, 6), (2, 8), (6, 2)]
    ids, kinds, placed = [1, 2], [0, 0], []
    for rows, cols in grids:
        n_features = rows * cols // 4
        item = ImageItem(np.zeros((rows * cols, 3), np.uint8), Grid(1, rows, cols), (Piece(1, 1),), b"", n_features)
        placed.append(PlacedItem(item, len(ids), n_features))
        ids += [9] * n_features + [3]
        kinds += [1] * n_features + [0]

    class Named:
        spatial_merge_size, tokens_per_second, temporal_patch_size = 2, 2, 2

    for model in (Qwen2_5_VLModel, Qwen3VLModel):
        this = object.__new__(model)
        torch.nn.Module.__init__(this)
        this.config = type("C", (), {"vision_config": Named})  # type: ignore[assignment]
        wanted, delta = this.get_rope_index(
            torch.tensor([ids]), torch.tensor([kinds]), image_grid_thw=torch.tensor([[1, *grid] for grid in grids])
        )
        positions, found = rope_positions(len(ids), placed, 2)
        assert positions.tolist() == wanted[:, 0].tolist()
        assert found == int(delta[0, 0])


def test_content_depends_on_bytes_grid_and_fields() -> None:
    case, image = CASES["qwen2_vl"], noise(84, 84)
    item = ours(case).item(image)
    assert len(item.content) == 16 and item.content == ours(case).item(image.copy()).content
    other = image.copy()
    other[40, 40, 0] ^= 1
    assert ours(case).item(other).content != item.content
    flat = np.zeros((56, 112, 3), np.uint8)
    assert ours(case).item(flat).content != ours(case).item(flat.transpose(1, 0, 2).copy()).content
    wide = case._replace(given={"max_pixels": 28 * 28 * 21})
    assert ours(wide).item(image).rows.tobytes() == item.rows.tobytes()
    assert ours(wide).item(image).content != item.content


def test_sizes_can_be_overridden() -> None:
    case = CASES["qwen2_vl"]
    assert ours(case._replace(given={"max_pixels": 28 * 28 * 5})).item(noise(300, 300)).n_tokens == 4
    size = {"shortest_edge": 1, "longest_edge": 28 * 28 * 5}
    assert ours(case._replace(given={"size": size})).item(noise(300, 300)).n_tokens == 4
    assert ours(CASES["internvl"]._replace(given={"max_patches": 2})).item(noise(50, 200)).grid.tile_cols == 2
    for given in ({"max_pixel": 3}, {"max_pixels": 0}, {"max_pixels": True}, {"size": 4}, {"do_pan_and_scan": 1}):
        with pytest.raises(ConfigError, match="mm_processor_kwargs"):
            ours(case._replace(given=given))


def test_wrong_fields_are_named() -> None:
    config = CASES["llava"].config
    with pytest.raises(UnsupportedError, match="'NoImageProcessor' is not supported"):
        Processor(config, {"image_processor_type": "NoImageProcessor"}, {})
    with pytest.raises(UnsupportedError, match="models of type 'llama' take no images"):
        Processor({"model_type": "llama"}, {"image_processor_type": "CLIPImageProcessor"}, {})
    for stored, field in (
        ({"size": {"shortest_edge": "big"}}, "size.shortest_edge"),
        ({"size": 0}, "size.shortest_edge"),
        ({"image_mean": [1, 2]}, "image_mean"),
        ({"rescale_factor": 0}, "rescale_factor"),
        ({"resample": 9}, "resample"),
        ({"do_resize": "yes"}, "do_resize"),
    ):
        with pytest.raises(CheckpointError, match=field):
            Processor(config, {"image_processor_type": "CLIPImageProcessor", **stored}, {}).item(noise(9, 9))
    with pytest.raises(UnsupportedError, match="interpolated positions"):
        Processor(config, {"image_processor_type": "CLIPImageProcessor"}, {}).item(noise(9, 9))


def test_a_table_without_rescaling_or_normalising() -> None:
    stored = {"image_processor_type": "CLIPImageProcessor", "do_rescale": False, "do_normalize": False}
    plain = Processor(CASES["llava"].config, stored, {})
    assert plain.table.tolist() == [[float(value) for value in range(256)]] * 3
