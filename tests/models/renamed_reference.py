"""Families that transformers lacks, but with the arithmetic of one of its models: that model, saved with their names and
their row order. It uses no code of llmpy."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

Tensors = dict[str, np.ndarray]


class Renamed:
    """A model of transformers under other names.

    Args:
        config: Fields of the family that it is made from.
        seed: Of the weights.
    """

    family = "Llama"
    names: tuple[tuple[str, str], ...] = ()  # patterns of names, and what becomes of them

    def __init__(self, config: Mapping[str, object], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        made = getattr(transformers, self.family + "Config")(**self.base(dict(config)), attn_implementation="eager")
        self.model = getattr(transformers, self.family + "ForCausalLM")(made).float().eval()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(1 + 0.2 * noise if "norm" in name else noise if "embed" in name else 0.15 * noise)
        self.cfg = self.model.config

    def save(self, directory: Path) -> None:
        tensors = {name: tensor.numpy() for name, tensor in self.model.state_dict().items()}
        renamed: Tensors = {}
        for name, tensor in self.packed(tensors).items():
            for pattern, new in self.names:
                name = re.sub(pattern, new, name)
            renamed[name] = np.ascontiguousarray(tensor)
        save_file(renamed, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps({**self.config(), "torch_dtype": "float32"}))

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        with torch.no_grad():
            return self.model(torch.tensor([list(ids)]), use_cache=False).logits[0].double().numpy()

    def base(self, config: dict[str, object]) -> dict[str, object]:
        """Fields for transformers' model."""
        return config

    def packed(self, tensors: Tensors) -> Tensors:
        """The tensors, several of which may become one."""
        return tensors

    def config(self) -> dict[str, object]:
        """config.json as the family writes it."""
        raise NotImplementedError


def joined(tensors: Tensors, old: Sequence[str], new: str, groups: int = 1) -> Tensors:
    """Joins the tensors of every layer with these name endings; each group has an equal part of each tensor."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        kind = name.rsplit(".", 1)[1]
        stem = next((name.removesuffix(f"{each}.{kind}") for each in old if name.endswith(f"{each}.{kind}")), None)
        if stem is None:
            found[name] = tensor
        elif f"{stem}{new}.{kind}" not in found:
            parts = [tensors[f"{stem}{each}.{kind}"] for each in old]
            shares = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
            found[f"{stem}{new}.{kind}"] = np.concatenate(shares, 1).reshape(-1, *tensor.shape[1:])
    return found


QKV = ("q_proj", "k_proj", "v_proj")


class InternLM2(Renamed):
    names = (
        ("embed_tokens", "tok_embeddings"), ("lm_head", "output"), ("self_attn", "attention"), ("o_proj", "wo"),
        ("input_layernorm", "attention_norm"), ("post_attention_layernorm", "ffn_norm"),
        ("mlp.gate_proj", "feed_forward.w1"), ("mlp.up_proj", "feed_forward.w3"), ("mlp.down_proj", "feed_forward.w2"),
    )  # fmt: skip

    def packed(self, tensors: Tensors) -> Tensors:
        return joined(tensors, QKV, "wqkv", self.cfg.num_key_value_heads)

    def config(self) -> dict[str, object]:
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        names += ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "hidden_act")
        return {
            "architectures": ["InternLM2ForCausalLM"], "rope_theta": 10000, "bias": self.cfg.attention_bias,
            **{name: getattr(self.cfg, name) for name in names},
        }  # fmt: skip


class Baichuan7B(Renamed):
    def base(self, config: dict[str, object]) -> dict[str, object]:
        return {**config, "num_key_value_heads": config["num_attention_heads"]}

    def packed(self, tensors: Tensors) -> Tensors:
        return joined(tensors, QKV, "W_pack")

    def config(self) -> dict[str, object]:
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        names += ("rms_norm_eps", "max_position_embeddings", "hidden_act")
        return {"architectures": ["BaiChuanForCausalLM"], **{name: getattr(self.cfg, name) for name in names}}


class Baichuan2(Baichuan7B):
    """The rows of the head have length 1, whatever the checkpoint has."""

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        with torch.no_grad():
            states = self.model.model(torch.tensor([list(ids)]), use_cache=False).last_hidden_state[0]
            return (states @ torch.nn.functional.normalize(self.model.lm_head.weight).T).double().numpy()

    def config(self) -> dict[str, object]:
        return {**super().config(), "architectures": ["BaichuanForCausalLM"], "z_loss_weight": 0}


class Qwen1(Renamed):
    family = "Qwen2"
    names = (
        (r"model\.", "transformer."), ("embed_tokens", "wte"), (r"\.layers\.", ".h."), ("input_layernorm", "ln_1"),
        ("post_attention_layernorm", "ln_2"), ("self_attn.o_proj", "attn.c_proj"), ("self_attn", "attn"),
        ("gate_proj", "w2"), ("up_proj", "w1"), ("down_proj", "c_proj"), (r"transformer\.norm", "transformer.ln_f"),
    )  # fmt: skip

    def base(self, config: dict[str, object]) -> dict[str, object]:
        return {**config, "num_key_value_heads": config["num_attention_heads"]}

    def packed(self, tensors: Tensors) -> Tensors:
        return joined(tensors, QKV, "c_attn")

    def config(self) -> dict[str, object]:
        cfg = self.cfg
        return {
            "architectures": ["QWenLMHeadModel"], "vocab_size": cfg.vocab_size, "hidden_size": cfg.hidden_size,
            "intermediate_size": 2 * cfg.intermediate_size, "num_hidden_layers": cfg.num_hidden_layers,
            "num_attention_heads": cfg.num_attention_heads, "kv_channels": cfg.hidden_size // cfg.num_attention_heads,
            "layer_norm_epsilon": cfg.rms_norm_eps, "rotary_emb_base": 10000, "rotary_pct": 1.0, "no_bias": True,
            "seq_length": cfg.max_position_embeddings, "tie_word_embeddings": False, "use_logn_attn": True,
            "use_dynamic_ntk": True,
        }  # fmt: skip


class ChatGlm3(Renamed):
    family = "Glm"
    names = (
        (r"model\.embed_tokens", "transformer.embedding.word_embeddings"),
        (r"model\.norm", "transformer.encoder.final_layernorm"),
        (r"model\.layers", "transformer.encoder.layers"), ("lm_head", "transformer.output_layer"),
        ("self_attn.o_proj", "self_attention.dense"), ("self_attn", "self_attention"),
        ("mlp.gate_up_proj", "mlp.dense_h_to_4h"), ("mlp.down_proj", "mlp.dense_4h_to_h"),
    )  # fmt: skip

    def packed(self, tensors: Tensors) -> Tensors:
        found = joined(tensors, QKV, "query_key_value")
        return {**found, "transformer.rotary_pos_emb.inv_freq": np.ones(4, np.float32)}

    def config(self) -> dict[str, object]:
        cfg = self.cfg
        return {
            "architectures": ["ChatGLMModel"], "padded_vocab_size": cfg.vocab_size, "hidden_size": cfg.hidden_size,
            "ffn_hidden_size": cfg.intermediate_size, "num_layers": cfg.num_hidden_layers, "kv_channels": cfg.head_dim,
            "num_attention_heads": cfg.num_attention_heads, "multi_query_attention": True,
            "multi_query_group_num": cfg.num_key_value_heads, "layernorm_epsilon": cfg.rms_norm_eps, "rmsnorm": True,
            "add_qkv_bias": cfg.attention_bias, "add_bias_linear": False, "post_layer_norm": True,
            "apply_residual_connection_post_layernorm": False, "seq_length": cfg.max_position_embeddings,
            "tie_word_embeddings": False,
        }  # fmt: skip


class Baichuan13B(Baichuan7B):
    """The same without rope, with slopes: transformers has no such model, so its layers are walked here."""

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        w = {name: tensor.double().numpy() for name, tensor in self.model.state_dict().items()}
        n_heads, x = self.cfg.num_attention_heads, w["model.embed_tokens.weight"][list(ids)]
        n, width = x.shape

        def norm(x: np.ndarray, name: str) -> np.ndarray:
            return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.cfg.rms_norm_eps) * w[name]

        distance = np.arange(n) - np.arange(n)[:, None]
        for i in range(self.cfg.num_hidden_layers):
            stem = f"model.layers.{i}."
            h = norm(x, f"{stem}input_layernorm.weight")
            q, k, v = (
                (h @ w[f"{stem}self_attn.{name}.weight"].T).reshape(n, n_heads, -1).swapaxes(0, 1) for name in QKV
            )
            scores = q @ k.swapaxes(1, 2) / math.sqrt(width // n_heads) + slopes(n_heads)[:, None, None] * distance
            scores = np.where(distance > 0, -np.inf, scores)
            p = np.exp(scores - scores.max(-1, keepdims=True))
            h = (p / p.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(n, width)
            x = x + h @ w[f"{stem}self_attn.o_proj.weight"].T
            h = norm(x, f"{stem}post_attention_layernorm.weight")
            gate, up = (h @ w[f"{stem}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{stem}mlp.down_proj.weight"].T
        return norm(x, "model.norm.weight") @ w["lm_head.weight"].T

    def config(self) -> dict[str, object]:
        found = {**super().config(), "architectures": ["BaichuanForCausalLM"]}
        return {**found, "model_max_length": found.pop("max_position_embeddings")}


def slopes(n: int) -> np.ndarray:
    """As in the paper's code: powers of two for 2^k heads, every other one of twice as many for the rest."""
    if math.log2(n).is_integer():
        return np.array([2 ** (-8 * (i + 1) / n) for i in range(n)])
    closest = 2 ** math.floor(math.log2(n))
    return np.concatenate([slopes(closest), slopes(2 * closest)[0::2][: n - closest]])
