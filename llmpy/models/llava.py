"""LLaVA 1.5: a tower of CLIP, a projector of two linears, and a text model of Llama, Mistral or Qwen2."""

from . import towers
from .blocks import Model, Value
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "LLaVA 1.5 7B and 13B (llava-hf)"

TEXTS = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_TOWERS = ("vision_tower.", "vision_tower.vision_model.", "model.vision_tower.", "model.vision_tower.vision_model.")
_VISION = {"layer_norm_eps": 1e-5, "hidden_act": "quick_gelu", "num_channels": 3}


def clip(cfg: ModelConfig, vision: ModelConfig, v: Model) -> Value:
    """The rows of CLIP behind the layer that the configuration names, without class rows unless it wants them."""
    vision.only("model_type", "clip_vision_model")
    vision.only("num_channels", 3)
    dim, patch, eps = vision.hidden_size, vision.size("patch_size", 14), vision.get("layer_norm_eps", 1e-5)
    n_rows = (vision.size("image_size", 336) // patch) ** 2 + 1
    n_layers = towers.layer_number(cfg, vision.num_layers)
    v.ignore(f"{v.prefix}post_layernorm.*", *(f"{v.prefix}encoder.layers.{i}.*" for i in range(n_layers, vision.num_layers)))
    x = v.linear(v.pixels(towers.byte_table(cfg, towers.CLIP), 3 * patch**2), "embeddings.patch_embedding", dim)
    x = v.rows(x, "class", weight="embeddings.class_embedding")
    x = x + v.embed_taps("embeddings.position_embedding", (n_rows, dim))
    x = v.layer_norm(x, "pre_layrnorm", eps)
    for block in v.layers("encoder.layers", n_layers):
        x = towers.layer(block, vision, x, ("layer_norm1", "layer_norm2"), eps)
    return v.rows(x, "patches") if cfg.get("vision_feature_select_strategy", "default") == "default" else x


@architecture("LlavaForConditionalGeneration", defaults={"vision_feature_layer": -2}, texts=TEXTS,
              ignore=["*.embeddings.position_ids"])  # fmt: skip
def llava(cfg: ModelConfig, m: Model) -> None:
    """CLIP, two linears with a GELU between them, and the text model."""
    stem = towers.prefix(m, "embeddings.patch_embedding.weight", _TOWERS)
    vision = cfg.sub("vision_config", **_VISION)
    v = m.tower(vision, stem, towers.feature_id(cfg))
    x = clip(cfg, vision, v)
    bias, act = cfg.get("multimodal_projector_bias", True), cfg.get("projector_hidden_act", "gelu")
    p = v.at(towers.prefix(m, "linear_1.weight", ("multi_modal_projector.", "model.multi_modal_projector.")))
    x = p.act(p.linear(x, "linear_1", cfg.hidden_size, bias=bias), act)
    v.features(p.linear(x, "linear_2", cfg.hidden_size, bias=bias))
    towers.text(cfg, m)
