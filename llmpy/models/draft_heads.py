"""Heads that draft from the hidden states of a model: EAGLE, EAGLE-3, MTP. A head's program borrows matrices of the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..errors import CheckpointError, UnsupportedError
from . import deepseek, glm4_moe, mixture, names, qwen2, qwen3_next, registry, usual
from .blocks import Block, Model
from .config import ModelConfig
from .source import Source

if TYPE_CHECKING:
    from .. import _core
    from ..hub import ModelFiles
    from .program import Operands, Spec, Tensors, Value

_ACROSS = ("attention", "latent_attention", "conv", "ssm", "selective_scan", "delta")
_LAYER = re.compile(r"\D*\.(\d+)")
DEFAULTS = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 2048}


class Head(Model):
    """The program of a head. Row t has the token at t + 1 and the model's state at t.

    Args:
        config, tensors, file: As in `Writer`.
        target: The program of the model that the head drafts for.
        n_ranks: Of the model. Several have parts of its matrices, which a head cannot borrow.
        is_own: Whether the checkpoint is the model's, so that the head can have matrices of its own instead.
    """

    def __init__(
        self, config: ModelConfig, tensors: Tensors | None, file: str, target: Spec, n_ranks: int = 1, *, is_own: bool = False
    ) -> None:
        super().__init__(config, tensors, Source(), file)
        self.target, self._n_ranks, self._is_own = target, n_ranks, is_own

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor."""
        return self._tensors is not None and name in self._tensors

    def borrow(self, number: int) -> int:
        """A matrix of the model, without a copy if the model has one rank."""
        lent = self.target["weights"][number]
        if self._n_ranks > 1 and not self._is_own:
            raise UnsupportedError(
                f"{self._file}: a head that uses the model's {lent['parts'][0].source} is not supported yet with "
                f"tensor_parallel_size={self._n_ranks}; use tensor_parallel_size=1"
            )
        if self._n_ranks > 1:
            self.spec["weights"].append(lent)
            return len(self.spec["weights"]) - 1
        borrowed = {**lent, "parts": [], "lent": number, "unit_rows": False}
        borrowed.pop("quantised", None)
        self.spec["weights"].append(borrowed)  # type: ignore[arg-type]
        return len(self.spec["weights"]) - 1

    def borrow_embedding(self) -> Value:
        """The tokens' rows of the model's embedding."""
        width, wanted = _hidden_size(self.target), self.config.hidden_size
        if width != wanted:
            raise CheckpointError(
                f"{self._file}: tensor embed_tokens.weight: wanted [{self.config.vocab_size}, {wanted}], have nothing; the "
                f"model's embedding has rows of {width}",
                file=self._file,
                tensor="embed_tokens.weight",
            )
        weight = self.borrow(_op_of(self.target, "embed")[1]["weights"][0])
        return self.emit("embed", [], width, weights=[weight], source="tokens", scale=1.0)

    def borrow_logits(self, x: Value) -> None:
        """Ends the program with the model's own head."""
        _, op = _op_of(self.target, "logits")
        if len(op["weights"]) > 1 or self.target["ops"][_writer(self.target, op["in"][0])][0] == "take":
            raise UnsupportedError(
                f"{self.config.file}: a head that borrows lm_head is not supported yet for a model whose lm_head has a bias or "
                "sorted columns (act-order)"
            )
        weight = self.borrow(op["weights"][0])
        self._end(x, [weight], {key: value for key, value in op["attributes"].items() if key != "first_id"})

    def own_logits(self, x: Value, name: str, rows: int, ids: np.ndarray | None) -> None:
        """Ends the program with a head of its own, NAME.weight [rows, n].

        Args:
            x: Input, [rows, n].
            name: Module name.
            rows: Ids that the head may draft.
            ids: The model's id of each row; None: they are equal.
        """
        if ids is None and rows != self.config.vocab_size:
            raise CheckpointError(f"{self._file}: tensor d2t: wanted [{rows}], have nothing", file=self._file, tensor="d2t")
        weights = [self.matrix("logits", [(name, rows)], x.width)]
        if ids is not None:
            if ids.size != rows or np.unique(ids).size != rows or ids.min() < 0 or ids.max() >= self.config.vocab_size:
                raise CheckpointError(
                    f"{self._file}: d2t: wanted {rows} different token ids below {self.config.vocab_size}", file=self._file
                )
            row_of = np.full(self.config.vocab_size, -1, np.float32)
            row_of[ids] = np.arange(rows)
            weights += [-1, self.constant(row_of)]
        self._end(x, weights, {"scale": 1.0, "softcap": 0.0})

    def _end(self, x: Value, weights: list[int], attributes: Mapping[str, float | str]) -> None:
        op: Operands = {"in": [x.index], "out": [], "weights": weights, "attributes": dict(attributes)}
        self.spec["ops"].append(("logits", op))
        self.states(x)

    def kept(self, width: int) -> Value:
        """The states of the model, [rows, width]."""
        return self.emit("kept", [], width)

    def carry(self, x: Value) -> Value:
        """The states to go on from: x, or what `keep` has kept behind a draft."""
        return self.emit("carry", [x], x.width)

    def keep(self, x: Value) -> None:
        """Keeps the states from which the next draft goes on."""
        keep(self.spec, len(self.spec["ops"]), x.index, 0, of_all=False)

    def concat(self, first: Value, second: Value) -> Value:
        """The columns of both."""
        return self.emit("concat", [first, second], first.width + second.width)


def _op_of(spec: Spec, kind: str) -> tuple[int, Operands]:
    """The first operation of a kind, and its number."""
    return next((number, op) for number, (name, op) in enumerate(spec["ops"]) if name == kind)


def _hidden_size(spec: Spec) -> int:
    """The width of a model's embedding."""
    return spec["values"][_op_of(spec, "embed")[1]["out"][0]][0]


def _writer(spec: Spec, value: int) -> int:
    """The number of the operation that writes a value, or the value that it is a range of."""
    while spec["values"][value][1] >= 0:
        value = spec["values"][value][1]
    return next(number for number, (_, op) in enumerate(spec["ops"]) if value in op["out"])


def keep(spec: Spec, at: int, value: int, first: int, *, of_all: bool) -> None:
    """Writes an operation that keeps a value in columns from `first` on, as operation `at`."""
    attributes: dict[str, float | str] = {"first": first, "of_all": int(of_all)}
    spec["ops"].insert(at, ("keep", {"in": [value], "out": [], "weights": [], "attributes": attributes}))


def keep_inputs(spec: Spec, layers: Sequence[int], file: str) -> None:
    """Makes a model keep the inputs of some layers, side by side.

    Raises:
        UnsupportedError: The program has no such layer.
    """
    ends = {int(found[1]): one for one in names.of_program(spec) if (found := _LAYER.fullmatch(one.name))}
    number, op = _op_of(spec, "embed")
    inputs = {0: (number, op["out"][0])} | {layer + 1: (one.op, one.value) for layer, one in ends.items()}
    places = []
    for i, layer in enumerate(layers):
        if layer not in inputs:
            raise UnsupportedError(f"{file}: the head reads the input of layer {layer}, the model has {len(ends)} layers")
        written, value = inputs[layer]
        at = next((n for n, (name, _) in enumerate(spec["ops"]) if n > written and name in _ACROSS), _op_of(spec, "logits")[0])
        places.append((at, value, i * spec["values"][value][0]))
    for at, value, first in sorted(places, reverse=True):
        keep(spec, at, value, first, of_all=True)


def keep_output(spec: Spec) -> int:
    """Makes a model keep the states that its lm_head reads, of all rows. Returns their width."""
    number, value = _op_of(spec, "logits")[0], _op_of(spec, "states")[1]["in"][0]
    keep(spec, number, value, 0, of_all=True)
    return spec["values"][value][0]


def _attention_and_mlp(cfg: ModelConfig, layer: Block, x: Value, residual: Value, norm: str) -> Value:
    """The rest of a decoder layer of Llama's kind behind its first norm."""
    q, k, v = usual.qkv(cfg, layer, x, bias=cfg.get("attention_bias", False) or cfg.get("qkv_bias", False))
    q, k = layer.rope(q, k, cfg.rope)
    y = residual + usual.out(cfg, layer, layer.attention(q, k, v), bias=cfg.get("attention_bias", False))
    return y + usual.mlp(cfg, layer, layer.rms_norm(y, norm, cfg.rms_norm_eps))


def eagle3(cfg: ModelConfig, m: Head, checkpoint: _core.Checkpoint | None) -> None:
    """EAGLE-3: one layer on the token's embedding and the inputs of three layers of the model."""
    options = cfg.raw.get("eagle_config")
    options = options if isinstance(options, Mapping) else {}
    if options.get("use_aux_hidden_state", True) is False:
        raise UnsupportedError(f"{cfg.file}: eagle_config: use_aux_hidden_state=false is not supported")
    cfg.without("norm_before_fc", "fc_norm")
    n_layers, width = sum(_LAYER.fullmatch(one.name) is not None for one in names.of_program(m.target)), _hidden_size(m.target)
    given = options.get("eagle_aux_hidden_state_layer_ids")
    layers = [int(i) for i in given] if isinstance(given, list) and given else [2, n_layers // 2, n_layers - 3]
    keep_inputs(m.target, layers, cfg.file)
    states = m.linear(m.kept(width * len(layers)), "fc", cfg.hidden_size, bias=m.has("fc.bias"))
    h = m.carry(states)
    e = m.embed("embed_tokens") if m.has("embed_tokens.weight") else m.borrow_embedding()
    layer = Block(m, "midlayer.")
    normed = layer.rms_norm(h, "hidden_norm", cfg.rms_norm_eps)
    both = m.concat(layer.rms_norm(e, "input_layernorm", cfg.rms_norm_eps), normed)
    residual = normed if cfg.get("norm_before_residual", False) else h
    x = _attention_and_mlp(cfg, layer, both, residual, "post_attention_layernorm")
    m.keep(x)
    rows = cfg.size("draft_vocab_size", cfg.vocab_size)
    ids = None
    if m.has("d2t") and checkpoint is not None:
        ids = np.frombuffer(checkpoint.read("d2t"), np.int64) + np.arange(rows)
    elif checkpoint is None:
        ids = np.arange(rows)
    m.ignore("d2t", "t2d")
    x = m.rms_norm(x, "norm", cfg.rms_norm_eps)
    if m.has("lm_head.weight") or (checkpoint is None and "draft_vocab_size" in cfg.raw):
        m.own_logits(x, "lm_head", rows, ids)
    else:
        m.borrow_logits(x)


def eagle(cfg: ModelConfig, m: Head, checkpoint: _core.Checkpoint | None) -> None:
    """EAGLE 1 and 2: one layer on the token's embedding and the state that the model's lm_head reads."""
    if keep_output(m.target) != cfg.hidden_size:
        cfg.only("hidden_size", _hidden_size(m.target))
    h = m.carry(m.kept(cfg.hidden_size))
    e = m.embed("embed_tokens") if m.has("embed_tokens.weight") else m.borrow_embedding()
    x = m.linear(m.concat(e, h), "fc", cfg.hidden_size, bias=m.has("fc.bias"))
    for i, layer in enumerate(m.layers("layers", cfg.num_layers)):
        first = layer.rms_norm(x, "input_layernorm", cfg.rms_norm_eps) if i else x
        x = _attention_and_mlp(cfg, layer, first, x, "post_attention_layernorm")
    m.keep(x)
    m.ignore("lm_head.weight")
    m.borrow_logits(x)


def mtp(cfg: ModelConfig, m: Head, checkpoint: _core.Checkpoint | None) -> None:
    """The layer of a model's own checkpoint that predicts the token after the next one."""
    if cfg.architecture not in _MTP:
        raise UnsupportedError(
            f"{cfg.file}: the method 'mtp' is not supported for {cfg.architecture}; known: {', '.join(_MTP)}"
        )
    keep_output(m.target)
    _MTP[cfg.architecture](cfg, m)


def _mtp_of_layers(cfg: ModelConfig, m: Head, decoder_layer: Callable[[Block, Value], Value]) -> None:
    """A layer behind the last one, as DeepSeek-V3 and GLM-4.5 have it."""
    layer, eps = Block(m, f"model.layers.{cfg.num_layers}."), cfg.rms_norm_eps
    h = m.carry(m.kept(cfg.hidden_size))
    e = m.embed(f"{layer.prefix}embed_tokens") if m.has(f"{layer.prefix}embed_tokens.weight") else m.borrow_embedding()
    both = m.concat(layer.rms_norm(e, "enorm", eps), layer.rms_norm(h, "hnorm", eps))
    x = decoder_layer(layer, layer.linear(both, "eh_proj", cfg.hidden_size))
    m.keep(x)
    x = layer.rms_norm(x, "shared_head.norm", eps)
    if m.has(f"{layer.prefix}shared_head.head.weight"):
        m.own_logits(x, f"{layer.prefix}shared_head.head", cfg.vocab_size, None)
    else:
        m.borrow_logits(x)


def _deepseek_mtp(cfg: ModelConfig, m: Head) -> None:
    rope, routing = deepseek.rope_of_v3(cfg), mixture.deepseek3(cfg, "mlp.gate")
    _mtp_of_layers(cfg, m, lambda layer, x: deepseek.decoder_layer(cfg, layer, x, rope, routing))


def _glm_mtp(cfg: ModelConfig, m: Head) -> None:
    _mtp_of_layers(cfg, m, lambda layer, x: glm4_moe.decoder_layer(cfg, layer, x, is_dense=False))


def _qwen3_next_mtp(cfg: ModelConfig, m: Head) -> None:
    eps = cfg.rms_norm_eps
    h = m.carry(m.kept(cfg.hidden_size))
    e = m.rms_norm(m.borrow_embedding(), "mtp.pre_fc_norm_embedding", eps, offset=1.0)
    both = m.concat(e, m.rms_norm(h, "mtp.pre_fc_norm_hidden", eps, offset=1.0))
    x = m.linear(both, "mtp.fc", cfg.hidden_size)
    x = qwen3_next.decoder_layer(cfg, Block(m, "mtp.layers.0."), x, is_full=True, is_sparse=True)
    x = m.rms_norm(x, "mtp.norm", eps, offset=1.0)
    m.keep(x)
    m.borrow_logits(x)


def _mimo_mtp(cfg: ModelConfig, m: Head) -> None:
    layer, eps = Block(m, "model.mtp_layers.0."), cfg.rms_norm_eps
    h = m.carry(m.kept(cfg.hidden_size))
    e = layer.rms_norm(m.borrow_embedding(), "token_layernorm", eps)
    both = m.concat(layer.rms_norm(h, "hidden_layernorm", eps), e)
    x = qwen2.decoder_layer(cfg, layer, layer.linear(both, "input_proj", cfg.hidden_size))
    x = layer.rms_norm(x, "final_layernorm", eps)
    m.keep(x)
    m.borrow_logits(x)


_MTP: dict[str, Callable[[ModelConfig, Head], None]] = {
    "DeepseekV3ForCausalLM": _deepseek_mtp,
    "Glm4MoeForCausalLM": _glm_mtp,
    "MiMoForCausalLM": _mimo_mtp,
    "Qwen3NextForCausalLM": _qwen3_next_mtp,
}

def medusa(cfg: ModelConfig, m: Head, number: int) -> None:
    """Head `number` of Medusa: residual layers on the state that the model's lm_head reads, and an lm_head."""
    if m.has("token_map"):
        raise UnsupportedError(f"{cfg.file}: a Medusa head for some token ids alone (token_map) is not supported")
    x = m.kept(cfg.hidden_size)
    stem = "medusa_head." if m.has("medusa_head.0.0.linear.weight") else ""
    is_split = m.has("blocks.0.layers.0.weight")
    n_layers = cfg.size("medusa_num_layers" if "medusa_num_layers" in cfg.raw else "num_hidden_layers", 1)
    for i in range(n_layers):
        name = f"blocks.{number}.layers.{i}" if is_split else f"{stem}{number}.{i}.linear"
        x = x + m.act(m.linear(x, name, cfg.hidden_size, bias=not is_split or m.has(f"{name}.bias")), "silu")
    m.own_logits(x, f"lm_heads.{number}" if is_split else f"{stem}{number}.{n_layers}", cfg.vocab_size, None)


WRITERS = {"eagle": eagle, "eagle3": eagle3, "mtp": mtp}


def load(
    method: str, files: ModelFiles, checkpoint: _core.Checkpoint | None, target: Spec, *, k: int = 0, n_ranks: int = 1
) -> tuple[list[Spec], ModelConfig]:
    """Writes the program of a head, and adds what it reads to the program of the model.

    Args:
        method: A key of `WRITERS`, or "medusa".
        files: The head's files and its config.json; of "mtp" the model's.
        checkpoint: The head's tensors, or the model's; None: dummies.
        target: The program of the model; it is changed.
        k: Most heads of Medusa; 0: all.
        n_ranks: Of the model.

    Returns:
        The head's program and its configuration. Medusa has a program for each place of a draft.

    Raises:
        UnsupportedError, CheckpointError: As `models.load`.
    """
    file = str(files.weights[0]) if files.weights else str(files.directory)
    where = f"{files.directory}/config.json"
    raw = dict(files.config)
    raw["architectures"] = raw.get("architectures") or [method]
    if method == "mtp":
        fields = registry.find(ModelConfig(raw, where).architecture).fields(raw)
    else:
        fields = {**DEFAULTS, **{key: value for key, value in raw.items() if value is not None}}
    config = ModelConfig({**fields, "vocab_size": target["vocab_size"]}, where)
    tensors = None if checkpoint is None else checkpoint.tensors()
    if method == "medusa":
        config.raw |= {"hidden_size": keep_output(target), "num_attention_heads": 1}  # no attention
        n_heads = config.size("num_heads" if "num_heads" in raw else "medusa_num_heads", 1)
        heads = [Head(config, tensors, file, target, n_ranks) for _ in range(min(n_heads, k or n_heads))]
        for number, each in enumerate(heads):
            medusa(config, each, number)
        return [each.finish(("*",)) for each in heads], config
    head = Head(config, tensors, file, target, n_ranks, is_own=method == "mtp")
    WRITERS[method](config, head, checkpoint)
    return [head.finish(("*",) if method == "mtp" else ("*.rotary_emb.inv_freq",))], config
