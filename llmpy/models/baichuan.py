"""Baichuan 1 and 2, 7B and 13B."""

from ..errors import UnsupportedError
from . import alibi, heads, usual
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "Baichuan 7B and 13B, Baichuan 2 7B and 13B"
REFERENCE = "Llama of transformers, under Baichuan's names; 13B: plain NumPy; Baichuan 2: a head divided by torch besides"
LIMITS = "Baichuan 2: GGUF files are refused, which do not say whether the rows of the head have length 1"

VOCAB_OF_2 = 125696


@architecture(
    *("BaichuanForCausalLM", "BaiChuanForCausalLM"),
    defaults={"rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 4096},
    renames={"model_max_length": "max_position_embeddings"},
)
def baichuan(cfg: ModelConfig, m: Model) -> None:
    """Baichuan decoder: Llama with q, k and v in one tensor. Models with 40 heads (13B) have ALiBi slopes instead of rope.

    Baichuan 2 divides the rows of its head by their lengths. Its vocabulary size or the field z_loss_weight identifies it.
    """
    is_second, width = cfg.vocab_size == VOCAB_OF_2 or "z_loss_weight" in cfg.raw, cfg.hidden_size
    if is_second and m.source.is_gguf:
        raise UnsupportedError(
            f"{cfg.file}: a GGUF file of Baichuan 2 does not say whether its head's rows have length 1; load the safetensors"
        )
    slopes = m.constant(alibi.slopes(40)) if cfg.num_attention_heads == 40 else None
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens")
    for layer in m.layers(f"{stem}layers", cfg.num_layers):
        h = layer.rms_norm(x, "input_layernorm", cfg.rms_norm_eps)
        q, k, v = layer.linear(h, "self_attn.W_pack", [width] * 3)
        q, k = layer.rope(q, k, cfg.rope) if slopes is None else (q, k)
        x = x + usual.out(cfg, layer, layer.attention(q, k, v, slopes=slopes))
        x = x + usual.mlp(cfg, layer, layer.rms_norm(x, "post_attention_layernorm", cfg.rms_norm_eps))
    heads.head(cfg, m, m.rms_norm(x, f"{stem}norm", cfg.rms_norm_eps), stem, unit_rows=is_second)
