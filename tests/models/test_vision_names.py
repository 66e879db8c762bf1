"""The names that released files of models with images have: each spelling gives the same program with the same weights."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from modules import load

from llmpy import LLM, UnsupportedError, hub, models
from llmpy.models.interpret import _weight
from llmpy.vision import processors

pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.numpy")

ours = load(Path(__file__).with_name("vision_models.py"))
renamed = load(Path(__file__).with_name("renamed_reference.py"))

OPTIONS = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "kv_cache_memory_bytes": "16MiB"}
INNER = [("^vision_tower\\.", "vision_tower.vision_model.")]
MEMORY = [
    (r"^language_model\.model\.", "model.language_model."), (r"^language_model\.lm_head", "lm_head"),
    ("^(vision_tower|vision_model|multi_modal_projector|image_newline)", r"model.\1"),
]  # fmt: skip
QWEN = [(r"^model\.(embed_tokens|layers|norm)", r"model.language_model.\1"), (r"^visual\.", "model.visual.")]
SPELLINGS = {
    "llava": {"hub": INNER, "memory": MEMORY}, "llava-next": {"hub": INNER, "memory": MEMORY},
    "qwen2-vl": {"memory": QWEN}, "qwen2.5-vl": {"memory": QWEN}, "gemma3": {"hub": INNER, "memory": MEMORY},
    "paligemma": {"hub": INNER, "memory": MEMORY}, "internvl": {"memory": MEMORY}, "pixtral": {"memory": MEMORY},
    "mistral3": {"memory": MEMORY},
}  # fmt: skip
"""What saving gives -> other spellings. Qwen3-VL, Idefics3, SmolVLM, Llama 4 and DeepSeek-OCR have only what saving gives."""
CHAT = [
    (r"^vision_tower\.embeddings\.cls_token", "vision_model.embeddings.class_embedding"),
    (r"^vision_tower\.embeddings\.patch_embeddings\.projection", "vision_model.embeddings.patch_embedding"),
    (r"^vision_tower\.embeddings\.position_embeddings", "vision_model.embeddings.position_embedding"),
    (r"^vision_tower\.encoder\.layer\.", "vision_model.encoder.layers."), (r"layernorm_before", "norm1"),
    (r"layernorm_after", "norm2"), (r"attention\.projection_layer", "attn.proj"), (r"attention\.([qk])_norm", r"attn.\1_norm"),
    (r"lambda_1", "ls1"), (r"lambda_2", "ls2"), (r"^multi_modal_projector\.layer_norm", "mlp1.0"),
    (r"^multi_modal_projector\.linear_1", "mlp1.1"), (r"^multi_modal_projector\.linear_2", "mlp1.3"),
]  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory, random_parameters):
    """saved(family) -> the folder of a tiny model, and its tensors."""
    made = {}

    def make(name):
        if name not in made:
            folder = ours.VisionModel(ours.FAMILIES[name], tmp_path_factory.mktemp(name), random_parameters).directory
            made[name] = folder, safetensors.load_file(folder / "model.safetensors")
        return made[name]

    return make


def respelled(folder, tensors, rules, target):
    """A copy of a folder whose tensors have other names."""
    for file in folder.glob("*.json"):
        shutil.copy(file, target)
    found = {}
    for name, tensor in tensors.items():
        for pattern, new in rules:
            name = re.sub(pattern, new, name)
        found[name] = tensor
    safetensors.save_file(found, target / "model.safetensors")
    return target


def program(folder):
    """A program without its weights, and the weights' values."""
    files = hub.resolve(str(folder))
    checkpoint = models.open_checkpoint(files)
    spec = models.load(files, checkpoint).spec

    def read(name, shape):
        return np.frombuffer(checkpoint.read_float32(name), np.float32).reshape(shape)

    weights = [_weight(weight, read) for weight in spec["weights"]]
    return [spec[field] for field in ("values", "ops", "ropes", "layers")], spec["towers"]["image"]["ops"], weights


def check_equal(folder, other):
    (text, tower, weights), (text2, tower2, weights2) = program(folder), program(other)
    assert text == text2 and tower == tower2
    assert all(np.array_equal(a, b) for a, b in zip(weights, weights2, strict=True))


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in SPELLINGS.items() for kind in kinds])
def test_spellings(name, kind, saved, tmp_path):
    folder, tensors = saved(name)
    other = respelled(folder, tensors, SPELLINGS[name][kind], tmp_path)
    assert {*safetensors.load_file(other / "model.safetensors")} != {*tensors}
    check_equal(folder, other)


def chat_folder(saved, target, **changes):
    """InternVL as OpenGVLab's repositories have it: names, one tensor of q, k and v, and configuration."""
    folder, tensors = saved("internvl")
    joined = dict(tensors)
    for name in tensors:
        if "attention.q_proj" in name and "vision" in name:
            parts = [joined.pop(name.replace("q_proj", f"{each}_proj")) for each in "qkv"]
            joined[name.replace("attention.q_proj", "attn.qkv")] = np.concatenate(parts)
    respelled(folder, joined, CHAT, target)
    config = json.loads((folder / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    new = {
        "architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "downsample_ratio": 0.5, "force_image_size": 28,
        "dynamic_image_size": True, "min_dynamic_patch": 1, "max_dynamic_patch": 12, "use_thumbnail": True, "ps_version": "v2",
        "select_layer": -1, "template": "internvl2_5", "torch_dtype": "float32",
        "llm_config": {**text, "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": config["tie_word_embeddings"]},
        "vision_config": {
            **{name: vision[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                                               "layer_norm_eps", "hidden_act", "norm_type")},
            "architectures": ["InternVisionModel"], "model_type": "intern_vit_6b", "image_size": 28, "patch_size": 7,
            "qkv_bias": True, "qk_normalization": True,
        },
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps({**new, **changes}))
    extractor = {"feature_extractor_type": "CLIPFeatureExtractor", "size": 448, "crop_size": 448, "image_mean": [0.5] * 3}
    (target / "preprocessor_config.json").write_text(json.dumps(extractor))
    (target / "added_tokens.json").write_text(json.dumps({"<img>": 96, "<IMG_CONTEXT>": ours.FEATURE, "</img>": 97}))
    return folder, target


def test_internvl_by_the_names_of_its_authors(saved, tmp_path):
    folder, other = chat_folder(saved, tmp_path)
    check_equal(folder, other)
    config = hub.resolve(str(other)).config
    assert config["image_token_id"] == ours.FEATURE and config["vision_config"]["image_size"] == 28
    image = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    fields = {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 28, "width": 28}, "crop_to_patches": True,
              "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}  # fmt: skip
    wanted = processors.Processor(json.loads((folder / "config.json").read_text()), fields)
    have = processors.load(other, config, {})
    one, two = wanted.item(image), have.item(image)
    assert np.array_equal(one.rows, two.rows) and one.grid == two.grid and np.array_equal(wanted.table, have.table)
    prompt = {"prompt_token_ids": [3, 8, *[ours.FEATURE] * two.n_tokens, 20], "multi_modal_data": {"image": image}}
    with LLM(other, **OPTIONS) as llm:
        assert llm.generate(prompt, max_tokens=2, temperature=0)[0].num_image_tokens == two.n_tokens > 4


def test_internvl_over_internlm2(saved, tmp_path):
    """The older ones, whose text model has names of its own, too."""
    folder = tmp_path / "text"
    folder.mkdir()
    _, other = chat_folder(saved, tmp_path)
    config = json.loads((other / "config.json").read_text())
    reference = renamed.InternLM2({**config["llm_config"], "attention_bias": False})
    reference.save(folder)
    text = {f"language_model.{name}": x for name, x in safetensors.load_file(folder / "model.safetensors").items()}
    tensors = safetensors.load_file(other / "model.safetensors")
    tower = {name: x for name, x in tensors.items() if not name.startswith("language_model.")}
    safetensors.save_file({**tower, **text}, other / "model.safetensors")
    config["llm_config"] = {**json.loads((folder / "config.json").read_text()), "model_type": "internlm2"}
    (other / "config.json").write_text(json.dumps(config))
    ids = [5, 9, 77, 4]
    with LLM(other, **OPTIONS) as llm:
        mine, wanted = llm.tap([ids], ["logits"])[0]["logits"], reference.logits(ids)
    assert np.abs(mine - wanted).max() <= 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize(("field", "value"), [("ps_version", "v1"), ("use_thumbnail", False), ("pad2square", True)])
def test_what_other_internvl_have_is_named(field, value, saved, tmp_path):
    _, other = chat_folder(saved, tmp_path, **{field: value})
    with pytest.raises(UnsupportedError, match=f"{field}={value!r} of InternVLChatModel is not supported"):
        hub.resolve(str(other))
