"""What becomes a GGUF file: another GGUF file, or a directory with safetensors of a family that is listed here."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UnsupportedError
from ..models import load, open_checkpoint
from ..models.config import ModelConfig
from ..models.gguf.family import USUAL, USUAL_OUTER
from ..models.gguf.names import LAYER, lookup
from ..models.quantise import LINEARS, matrices_of
from ..models.rope import Parameters, base_frequencies
from .gguf_vocabulary import metadata_of

if TYPE_CHECKING:
    from ..hub import ModelFiles
    from ..models import Spec

FAMILIES = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
}  # fmt: skip
"""`general.architecture` of the classes that are written."""
INTERLEAVED = ("llama",)
"""Architectures whose files have the rows of q and k in the order of interleaved rope."""
DIVISORS = "rope_freqs.weight"
EXPERT = re.compile(r"(mlp\.experts)\.\d+\.(.+)")


class FileSource:
    """A GGUF file.

    Args:
        files: Its parts.

    Attributes:
        architecture: general.architecture.
        shapes: Of all tensors, by name.
        matrices: The tensors that are linears, experts, embedding or head.
    """

    def __init__(self, files: ModelFiles) -> None:
        self._checkpoint, self._path = open_checkpoint(files), files.weights[0]
        self.architecture = str(self._checkpoint.metadata["general.architecture"])
        self.shapes = {name: shape for name, (_, shape, _) in self._checkpoint.tensors().items()}
        self.matrices = _matrices(load(files, self._checkpoint).spec)

    def put_keys(self, gguf: Any, writer: Any) -> None:
        """Copies the metadata, except for the keys of the container and of split files."""
        for key, field in gguf.GGUFReader(self._path).fields.items():
            if key.startswith(("GGUF.", "split.")) or key in ("general.architecture", "general.file_type"):
                continue
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if is_array else None)

    def values(self, name: str) -> np.ndarray:
        """A tensor in float32."""
        return np.frombuffer(self._checkpoint.read_float32(name), np.float32).reshape(self.shapes[name])


class DirectorySource:
    """A directory with safetensors, of floats or quantised; attributes as in FileSource.

    Args:
        files: The directory.

    Raises:
        UnsupportedError: another family, or a field that llama.cpp's architecture does not have.
    """

    def __init__(self, files: ModelFiles) -> None:
        self._files, self._checkpoint = files, open_checkpoint(files)
        self._config = cfg = ModelConfig(files.config, f"{files.directory}/config.json")
        if cfg.architecture not in FAMILIES:
            raise UnsupportedError(
                f"convert: {files.name} is a {cfg.architecture}; wanted {', '.join(FAMILIES)} or a GGUF file. llama.cpp's "
                "convert_hf_to_gguf.py knows further classes"
            )
        self.architecture = FAMILIES[cfg.architecture]
        self._rope, self._has_experts = Parameters(files.config, cfg.file), self.architecture.endswith("moe")
        spec = load(files, self._checkpoint).spec
        stored = self._checkpoint.tensors()
        sources = list(dict.fromkeys(part.source for weight in spec["weights"] for part in weight["parts"]))
        self._sources: dict[str, list[str]] = {}
        for source in sources:
            self._sources.setdefault(self._name(source), []).append(source)
        self.shapes = {
            name: (*([len(parts)] if name.endswith("_exps.weight") else []), *stored[parts[0]][1])
            for name, parts in self._sources.items()
        }
        meant = _matrices(spec)
        self.matrices = {name for name, parts in self._sources.items() if parts[0] in meant}
        self._check({layer[3] for layer in spec["layers"]} - {0})
        if self._rope.kind == "llama3":
            self.shapes[DIVISORS] = (cfg.head_dim // 2,)

    def _check(self, windows: set[int]) -> None:
        """Raises for what the file could not say; windows: of the layers that have one."""
        cfg, rope = self._config, self._rope
        narrow = sorted(window for window in windows if window < cfg.max_position_embeddings)
        wanted = {
            "rope_type": (rope.kind, ("default", "linear", "llama3", "yarn")),
            "partial_rotary_factor": (rope.partial, (1.0,)),
            "sliding_window": (narrow[0] if narrow else None, (None,)),
            "hidden_act": (cfg.get("hidden_act", "silu"), ("silu",)),
            "attention_factor": (rope.fields.get("attention_factor"), (None,)),
            "mscale_all_dim": (rope.fields.get("mscale_all_dim"), (None,)),
            "attention_bias": (self.architecture.startswith("qwen3") and cfg.get("attention_bias", False), (False,)),
            "mlp_only_layers": (self._has_experts and any(name.endswith(".ffn_gate.weight") for name in self.shapes), (False,)),
            "norm_topk_prob": (not self._has_experts or cfg.get("norm_topk_prob", False), (True,)),
        }
        for key, (have, known) in wanted.items():
            if have not in known:
                raise UnsupportedError(
                    f"convert: {cfg.file}: {key} {have!r} cannot be written for {self.architecture}; wanted "
                    f"{' or '.join(map(repr, known))}"
                )

    def _name(self, source: str) -> str:
        """The name in the file."""
        inside = LAYER.fullmatch(source)
        found = lookup(USUAL, EXPERT.sub(r"\1.\2", inside[2])) if inside else lookup(USUAL_OUTER, source)
        if len(found) != 1:
            raise UnsupportedError(f"convert: tensor {source} has no place in a GGUF file of {self.architecture}")
        return f"blk.{inside[1]}.{found[0]}" if inside else found[0]

    def put_keys(self, gguf: Any, writer: Any) -> None:
        """Writes the configuration and the vocabulary."""
        cfg, rope, prefix = self._config, self._rope, self.architecture
        values: dict[str, object] = {
            "general.name": self._files.name,
            f"{prefix}.vocab_size": cfg.need("vocab_size", int),
            f"{prefix}.block_count": cfg.num_layers,
            f"{prefix}.context_length": cfg.max_position_embeddings,
            f"{prefix}.embedding_length": cfg.hidden_size,
            f"{prefix}.feed_forward_length": cfg.intermediate_size,
            f"{prefix}.attention.head_count": cfg.num_attention_heads,
            f"{prefix}.attention.head_count_kv": cfg.num_key_value_heads,
            f"{prefix}.attention.key_length": cfg.head_dim,
            f"{prefix}.attention.value_length": cfg.head_dim,
            f"{prefix}.attention.layer_norm_rms_epsilon": cfg.get("rms_norm_eps", 1e-6),
            f"{prefix}.rope.dimension_count": cfg.head_dim,
            f"{prefix}.rope.freq_base": rope.theta,
        }
        if self._has_experts:
            values |= {
                f"{prefix}.expert_count": max(len(parts) for parts in self._sources.values()),
                f"{prefix}.expert_used_count": cfg.need("num_experts_per_tok", int),
                f"{prefix}.expert_feed_forward_length": cfg.need("moe_intermediate_size", int),
            }
        if rope.kind in ("linear", "yarn"):
            values[f"{prefix}.rope.scaling.type"] = rope.kind
            values[f"{prefix}.rope.scaling.factor"] = rope.factor(cfg.max_position_embeddings)
        if rope.kind == "yarn":
            values[f"{prefix}.rope.scaling.original_context_length"] = int(rope.original_length(cfg.max_position_embeddings))
            betas = [name for name in ("beta_fast", "beta_slow") if rope.fields.get(name) is not None]
            values |= {f"{prefix}.rope.scaling.yarn_{name}": rope.number(name) for name in betas}
        values |= metadata_of(self._files, cfg.need("vocab_size", int), prefix)
        for key, value in values.items():
            _put(writer, key, value)

    def values(self, name: str) -> np.ndarray:
        """A tensor in float32, the rows of q and k in the file's order."""
        if name == DIVISORS:
            return self._divisors()
        parts = [np.frombuffer(self._checkpoint.read_float32(source), np.float32) for source in self._sources[name]]
        values = np.concatenate(parts).reshape(self.shapes[name])
        heads = {"attn_q": self._config.num_attention_heads, "attn_k": self._config.num_key_value_heads}
        n_heads = heads.get(name.split(".")[-2]) if self.architecture in INTERLEAVED else None
        if n_heads is None:
            return values
        halves = values.reshape(n_heads, 2, -1, *values.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)

    def _divisors(self) -> np.ndarray:
        """What Llama 3's scaling divides the frequencies by."""
        plain = base_frequencies(self._rope.theta, self._config.head_dim)
        return (plain / self._config.rope.inv_freq).astype(np.float32)


def _matrices(spec: Spec) -> set[str]:
    found = matrices_of(spec, (*LINEARS, "embed", "logits"))
    return {part.source for weight in found for part in weight["parts"]}


def _put(writer: Any, key: str, value: object) -> None:
    """A key-value of the type that it has in Python."""
    if isinstance(value, list):
        writer.add_array(key, value)
        return
    put = {float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool, str: writer.add_string}
    if isinstance(value, float) and not math.isfinite(value):
        raise UnsupportedError(f"convert: {key}: wanted a finite number, have {value}")
    put[type(value)](key, value)
