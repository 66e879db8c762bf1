"""A tiny random LLaVA that is complete: weights, tokenizer with a chat template that reads images, and image processor."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from llmpy import models
from llmpy.hub import ModelFiles

SIDE = 42
"""Pixels of a side to which images are cut: 9 patches of 14 pixels, a feature each."""
N_FEATURES = 9
MARK = "<image>"
_TEXT = {
    "model_type": "llama", "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
_VISION = {
    "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 2, "image_size": SIDE, "patch_size": 14, "hidden_act": "quick_gelu",
}  # fmt: skip
CONFIG = {
    "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": 98, "dtype": "float32",
    "text_config": _TEXT, "vision_config": _VISION, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }} {% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image> {% else %}{{ part.text }} {% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)


def write(folder: Path) -> Path:
    """Writes the model to a folder, and returns the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    processor = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": SIDE}}
    crop = {"crop_size": {"height": SIDE, "width": SIDE}}
    (folder / "preprocessor_config.json").write_text(json.dumps({**processor, **crop}))
    spec = models.load(ModelFiles("hf", folder, [], CONFIG, {}, "tiny"), None).spec
    random = np.random.default_rng(3)
    save_file(
        {
            part.source: random.standard_normal(part.shape).astype(np.float32) * 0.2
            for weight in spec["weights"]
            for part in weight["parts"]
        },
        folder / "model.safetensors",
    )
    words = ["<pad>", "<s>", "</s>", "What", "is", "this", "?", "and", *(f"w{i}" for i in range(8, 98)), MARK]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>", MARK])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _TEMPLATE}
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **names}))
    return folder


def photo(path: Path, seed: int = 0) -> Path:
    """Writes a random picture of 90 x 61 pixels, and returns its path."""
    from PIL import Image

    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (61, 90, 3), dtype=np.uint8)).save(path)
    return path
