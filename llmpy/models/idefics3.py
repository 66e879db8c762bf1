"""Idefics3 and SmolVLM: SigLIP on tiles, whose patches are joined and multiplied by one matrix, and Llama."""

from . import towers
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "Idefics3 8B, SmolVLM and SmolVLM2 256M to 2.2B"
LIMITS = "images; clips are refused"


@architecture("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration",
              texts={"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"})  # fmt: skip
def idefics3(cfg: ModelConfig, m: Model) -> None:
    """SigLIP, scale_factor^2 patches joined, and the text model."""
    vision = cfg.sub("vision_config", {}, {"layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh", "num_channels": 3})
    stem = towers.prefix(m, "embeddings.patch_embedding.weight", ("model.vision_model.", "vision_model."))
    v = m.tower(vision, stem, towers.feature_id(cfg))
    x = v.group(towers.siglip(cfg, vision, v), cfg.size("scale_factor", 2) ** 2)
    connector = towers.prefix(m, "modality_projection.proj.weight", ("model.connector.", "connector."))
    v.features(v.at(connector).linear(x, "modality_projection.proj", cfg.hidden_size))
    towers.text(cfg, m)
