"""MiMo 7B."""

from . import heads, qwen2
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "MiMo 7B"
REFERENCE = "transformers, as Qwen2"
LIMITS = "layers that predict further tokens only draft (`mtp`)"


@architecture(*heads.names("MiMo"), defaults=qwen2.DEFAULTS, ignore=("model.mtp_layers.*", "mtp_layers.*"))
def mimo(cfg: ModelConfig, m: Model) -> None:
    """MiMo decoder: that of Qwen2."""
    qwen2.qwen2(cfg, m)
