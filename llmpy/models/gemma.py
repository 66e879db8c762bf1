"""Gemma 1, 2 and 3; Gemma 3 also with its tower for images, and PaliGemma."""

from collections.abc import Iterable
from math import sqrt

from . import heads, towers, usual
from .blocks import Model
from .config import ModelConfig
from .pieces import Piece
from .registry import architecture
from .rope import Rope

CHECKPOINTS = (
    "Gemma 2B and 7B; Gemma 2 2B, 9B and 27B; Gemma 3 270M to 27B; PaliGemma 3B; "
    "PaliGemma 2 3B, 10B and 28B"
)
KINDS = ("full_attention", "sliding_attention")
DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "head_dim": 256,
    "tie_word_embeddings": True,
}
SANDWICH = {"hidden_activation": "gelu_pytorch_tanh", "num_key_value_heads": 4, "sliding_window": 4096}


@architecture(*heads.names("Gemma"), defaults={**DEFAULTS, "num_key_value_heads": 16})
def gemma(cfg: ModelConfig, m: Model) -> None:
    """Gemma decoder: Llama with an embedding times sqrt(hidden_size), and norm weights stored minus 1."""
    if m.spans == "none":
        cfg.without("use_bidirectional_attention")
    bias, eps = cfg.get("attention_bias", False), cfg.rms_norm_eps
    act = cfg.get("hidden_activation", "") or cfg.get("hidden_act", "gelu_pytorch_tanh")
    act = "gelu_pytorch_tanh" if act == "gelu" else act  # the family's first files say "gelu" for it
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens", scale=sqrt(cfg.hidden_size))
    for layer in m.layers(f"{stem}layers", cfg.num_layers):
        q, k, v = usual.qkv(cfg, layer, layer.rms_norm(x, "input_layernorm", eps, offset=1.0), bias=bias)
        q, k = layer.rope(q, k, cfg.rope)
        x = x + usual.out(cfg, layer, layer.attention(q, k, v, spans=m.spans), bias=bias)
        x = x + usual.mlp(cfg, layer, layer.rms_norm(x, "post_attention_layernorm", eps, offset=1.0), act=act)
    heads.head(cfg, m, m.rms_norm(x, f"{stem}norm", eps, offset=1.0), stem)


@architecture(
    *heads.names("Gemma2"),
    defaults={**DEFAULTS, **SANDWICH, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
)
def gemma2(cfg: ModelConfig, m: Model) -> None:
    """Gemma 2 decoder: Gemma with norms around each branch, capped scores and logits, a window in every other layer."""
    ropes, softcap = dict.fromkeys(KINDS, cfg.rope), cfg.get("attn_logit_softcapping", 0.0)
    write_sandwich(cfg, m, cfg.layer_kinds(2), ropes, softcap=softcap, normed_heads=False)


@architecture(
    *heads.names("Gemma3"),
    "Gemma3TextModel",
    defaults={**DEFAULTS, **SANDWICH, "rope_theta": 1000000.0, "max_position_embeddings": 131072},
)
def gemma3(cfg: ModelConfig, m: Model) -> None:
    """Gemma 3 decoder: Gemma 2 without capped scores, with norms on the heads of q and k, a rope for each kind of layer."""
    cfg.without("attn_logit_softcapping")
    cfg.counts_rope_scaling = True
    ropes = cfg.layer_ropes(cfg.get("rope_local_base_freq", 10000.0))
    write_sandwich(cfg, m, cfg.layer_kinds(6), ropes, softcap=0.0, normed_heads=True)


def write_sandwich(
    cfg: ModelConfig, m: Model, kinds: Iterable[str], ropes: dict[str, Rope], *, softcap: float, normed_heads: bool
) -> None:
    """Writes the program of Gemma 2 and 3."""
    if m.spans == "none":
        cfg.without("use_bidirectional_attention")
    bias, eps, act = cfg.get("attention_bias", False), cfg.rms_norm_eps, cfg.need("hidden_activation", str)
    window, scale = cfg.get("sliding_window", 0), cfg.positive("query_pre_attn_scalar", 256.0) ** -0.5
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens", scale=sqrt(cfg.hidden_size))
    for layer, kind in zip(m.layers(f"{stem}layers", cfg.num_layers), kinds, strict=True):
        q, k, v = usual.qkv(cfg, layer, layer.rms_norm(x, "input_layernorm", eps, offset=1.0), bias=bias)
        if normed_heads:
            q = layer.rms_norm(q, "self_attn.q_norm", eps, per_head=True, offset=1.0)
            k = layer.rms_norm(k, "self_attn.k_norm", eps, per_head=True, offset=1.0)
        q, k = layer.rope(q, k, ropes[kind])
        visible = window if kind == "sliding_attention" else 0
        h = layer.attention(q, k, v, window=visible, scale=scale, softcap=softcap, spans=m.spans)
        h = usual.out(cfg, layer, h, bias=bias)
        x = x + layer.rms_norm(h, "post_attention_layernorm", eps, offset=1.0)
        h = usual.mlp(cfg, layer, layer.rms_norm(x, "pre_feedforward_layernorm", eps, offset=1.0), act=act)
        x = x + layer.rms_norm(h, "post_feedforward_layernorm", eps, offset=1.0)
    x = m.rms_norm(x, f"{stem}norm", eps, offset=1.0)
    heads.head(cfg, m, x, stem, softcap=cfg.get("final_logit_softcapping", 0.0))


@architecture("Gemma3ForConditionalGeneration", texts={"gemma3_text": "Gemma3ForCausalLM"})
def gemma3_vision(cfg: ModelConfig, m: Model) -> None:
    """SigLIP, the means of squares of patches, a norm and one matrix; tokens of an image see each other."""
    vision = cfg.sub("vision_config", {}, {"layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh", "num_channels": 3})
    stems = ("vision_tower.", "vision_tower.vision_model.", "model.vision_tower.", "model.vision_tower.vision_model.")
    v = m.tower(vision, towers.prefix(m, "embeddings.patch_embedding.weight", stems), towers.feature_id(cfg))
    n_rows = (vision.size("image_size", 896) // vision.size("patch_size", 14)) ** 2
    x = v.mean_rows(towers.siglip(cfg, vision, v), n_rows // cfg.size("mm_tokens_per_image", 256))
    p = v.at(towers.prefix(m, "mm_soft_emb_norm.weight", ("multi_modal_projector.", "model.multi_modal_projector.")))
    x = p.rms_norm(x, "mm_soft_emb_norm", vision.get("layer_norm_eps", 1e-6), offset=1.0)
    matrix = Piece(f"{p.prefix}mm_input_projection_weight", (x.width, cfg.hidden_size), cfg.hidden_size, transposed=True)
    v.features(v.emit("linear", [x], cfg.hidden_size, weights=[v.matrix("linear", [matrix], x.width)]))
    m.spans = "image"
    towers.text(cfg, m)


@architecture("PaliGemmaForConditionalGeneration", texts={"gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM"},
              defaults={"tie_word_embeddings": True}, ignore=["*.embeddings.position_ids"])  # fmt: skip
def paligemma(cfg: ModelConfig, m: Model) -> None:
    """SigLIP and one matrix, before Gemma or Gemma 2; all tokens of a prompt see each other."""
    vision = cfg.sub("vision_config", {}, {"layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh", "num_channels": 3})
    stems = ("vision_tower.", "vision_tower.vision_model.", "model.vision_tower.", "model.vision_tower.vision_model.")
    v = m.tower(vision, towers.prefix(m, "embeddings.patch_embedding.weight", stems), towers.feature_id(cfg))
    p = v.at(towers.prefix(m, "linear.weight", ("multi_modal_projector.", "model.multi_modal_projector.")))
    v.features(p.linear(towers.siglip(cfg, vision, v), "linear", cfg.hidden_size, bias=True))
    m.spans = "prompt"
    towers.text(cfg, m)
