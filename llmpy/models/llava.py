"""LLaVA 1.5 and LLaVA-NeXT (a tower of CLIP), Pixtral (a tower of its own); a projector of two linears, and a text model."""

from functools import reduce

from . import towers
from .blocks import Model, Value
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "LLaVA 1.5 7B and 13B, LLaVA-NeXT (1.6) with Vicuna or Mistral, Pixtral 12B"

TEXTS = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_TOWERS = ("vision_tower.", "vision_tower.vision_model.", "model.vision_tower.", "model.vision_tower.vision_model.")
_VISION: dict[str, object] = {"layer_norm_eps": 1e-5, "hidden_act": "quick_gelu", "num_channels": 3}


def clip(cfg: ModelConfig, vision: ModelConfig, v: Model) -> Value:
    """The rows of CLIP behind the layers that the configuration names, their columns joined in its order.

    The image's list has class rows or leaves them out.
    """
    vision.only("model_type", "clip_vision_model")
    vision.only("num_channels", 3)
    dim, patch, eps = vision.hidden_size, vision.size("patch_size", 14), vision.get("layer_norm_eps", 1e-5)
    n_rows = (vision.size("image_size", 336) // patch) ** 2 + 1
    numbers = towers.layer_numbers(cfg, vision.num_layers)
    n_layers = max(numbers)
    v.ignore(f"{v.prefix}post_layernorm.*", *(f"{v.prefix}encoder.layers.{i}.*" for i in range(n_layers, vision.num_layers)))
    x = v.linear(v.pixels(towers.byte_table(cfg, towers.CLIP), 3 * patch**2), "embeddings.patch_embedding", dim)
    x = v.rows(x, "class", weight="embeddings.class_embedding")
    x = x + v.embed_taps("embeddings.position_embedding.weight", (n_rows, dim))
    behind = [v.layer_norm(x, "pre_layrnorm", eps)]
    for block in v.layers("encoder.layers", n_layers):
        behind.append(towers.layer(block, vision, behind[-1], ("layer_norm1", "layer_norm2"), eps))
    return v.rows(reduce(v.concat, [behind[number] for number in numbers]), "patches")


def pixtral(cfg: ModelConfig, vision: ModelConfig, v: Model) -> Value:
    """The rows of Pixtral's tower: blocks with RMS norms and a gated MLP, turned by the patches' rows and columns."""
    vision.only("model_type", "pixtral")
    cfg.only("vision_feature_layer", -1)
    dim, patch, eps = vision.hidden_size, vision.size("patch_size", 16), 1e-5
    x = v.linear(v.pixels(towers.byte_table(cfg, towers.CLIP), 3 * patch**2), "patch_conv", dim)
    x, rope = v.rms_norm(x, "ln_pre", eps), v.axial_rope(vision.head_dim, towers.theta(vision), alternating=True)
    for block in v.layers("transformer.layers", vision.num_layers):
        h = block.rms_norm(x, "attention_norm", eps)
        q, k, u = block.linear(h, [f"attention.{name}_proj" for name in "qkv"], [dim] * 3)
        q, k = block.rope(q, k, rope)
        x = x + block.linear(block.row_attention(q, k, u), "attention.o_proj", dim)
        h = block.rms_norm(x, "ffn_norm", eps)
        gate, up, down = (f"feed_forward.{name}_proj" for name in ("gate", "up", "down"))
        x = x + block.gated_mlp(h, gate, up, down, vision.intermediate_size, act=vision.hidden_act)
    return x


def project(cfg: ModelConfig, m: Model, v: Model, x: Value) -> Value:
    """Two linears with an activation between them."""
    bias, act = cfg.get("multimodal_projector_bias", True), cfg.get("projector_hidden_act", "gelu")
    p = v.at(towers.prefix(m, "linear_1.weight", ("multi_modal_projector.", "model.multi_modal_projector.")))
    return p.linear(p.act(p.linear(x, "linear_1", cfg.hidden_size, bias=bias), act), "linear_2", cfg.hidden_size, bias=bias)


@architecture("LlavaForConditionalGeneration", defaults={"vision_feature_layer": -2}, texts=TEXTS,
              ignore=["*.embeddings.position_ids"])  # fmt: skip
def llava(cfg: ModelConfig, m: Model) -> None:
    """A tower, two linears with a GELU between them, and the text model."""
    names = {"clip_vision_model": ("embeddings.patch_embedding.weight", clip), "pixtral": ("patch_conv.weight", pixtral)}
    vision = cfg.sub("vision_config", {}, _VISION)
    tensor, rows = names.get(vision.need("model_type", str), names["clip_vision_model"])
    v = m.tower(vision, towers.prefix(m, tensor, _TOWERS), towers.feature_id(cfg))
    v.features(project(cfg, m, v, rows(cfg, vision, v)))
    towers.text(cfg, m)


@architecture("LlavaNextForConditionalGeneration", defaults={"vision_feature_layer": -2}, texts=TEXTS,
              ignore=["*.embeddings.position_ids"])  # fmt: skip
def llava_next(cfg: ModelConfig, m: Model) -> None:
    """LLaVA 1.5 for an image in tiles: the tiles' features as rows of the whole image, each with a newline behind it."""
    vision = cfg.sub("vision_config", {}, _VISION)
    v = m.tower(vision, towers.prefix(m, "embeddings.patch_embedding.weight", _TOWERS), towers.feature_id(cfg))
    x = project(cfg, m, v, clip(cfg, vision, v))
    v.features(v.at(towers.prefix(m, "image_newline", ("", "model."))).rows(x, "features", weight="image_newline"))
    towers.text(cfg, m)
