"""Operations for architecture functions: each call writes one or a few operations (csrc/program/operations.def).

Nothing is computed here. A `Value` stands for rows of activations, one row per token. Every call checks the widths, and the
shapes of the weights against the checkpoint; an error names the operation, the tensor and the sizes.
"""

from collections.abc import Iterator, Sequence
from math import inf
from typing import TYPE_CHECKING, Literal, NoReturn, overload

from ..errors import UnsupportedError
from .block_latent import LatentBlock
from .block_mixture import MixtureBlock
from .block_norm import NormBlock
from .block_tower import TowerBlock
from .cache_scales import CacheScales
from .config import ModelConfig
from .pieces import Piece, pieces_of
from .program import Tensors, Writer, kinds_of
from .program import Value as Value
from .rope import Rope
from .source import Order, Source

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "quick_gelu": "quick_gelu",
}
"""Activation names in configurations -> activation names in csrc/program/operations.def."""


Spans = Literal["none", "image", "prompt"]
SPANS: tuple[Spans, ...] = ("none", "image", "prompt")
"""Tokens that see each other, in the order of enum spans in csrc/step/items.h."""


def _activation(op: str, where: str, act: str) -> str:
    if act not in ACTIVATIONS:
        raise UnsupportedError(f"{op} {where}: activation {act!r}; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[act]


class Block(MixtureBlock, NormBlock, LatentBlock, TowerBlock):
    """Operations whose tensor names start with `prefix`: the model itself, or one of its layers."""

    def __init__(self, model: "Model", prefix: str) -> None:
        self._model, self.prefix = model, prefix

    if not TYPE_CHECKING:  # a type checker must report missing attributes itself

        def __getattr__(self, name: str) -> NoReturn:
            """Raises an error that names the missing operation and the known ones."""
            if name.startswith("_"):
                raise AttributeError(name)
            known = sorted(each for kind in type(self).__mro__ for each in vars(kind) if not each.startswith("_"))
            raise UnsupportedError(
                f"operation {name!r} is not in the vocabulary; known: {', '.join(dict.fromkeys(known))}. "
                "docs/develop/adding-an-architecture.md says what a new one takes"
            )

    @overload
    def linear(
        self, x: Value, name: str, width: int, *, bias: bool = False, groups: int = 1, transposed: bool = False
    ) -> Value: ...
    @overload
    def linear(
        self,
        x: Value,
        name: str | Sequence[str],
        width: Sequence[int],
        *,
        bias: bool = False,
        groups: int = 1,
        transposed: bool = False,
    ) -> list[Value]: ...
    def linear(
        self,
        x: Value,
        name: str | Sequence[str],
        width: int | Sequence[int],
        *,
        bias: bool = False,
        groups: int = 1,
        transposed: bool = False,
    ) -> Value | list[Value]:
        """x W^T, plus a bias. Several widths give one value each; their rows form one matrix with one multiplication.

        Args:
            x: Input, [rows, n].
            name: Module name or names; the tensors are NAME.weight [width, n] and, with bias, NAME.bias [width].
            width: Output width, one for each name. One name with several widths is one tensor with the rows of all widths.
            bias: Whether all of the names have a bias.
            groups: Number of groups in the rows of one tensor with several widths; each group has an equal part of every width
                in order. If each head has its own q, k and v, this is the number of heads. 1: all rows of a width are
                contiguous. Converters to GGUF make them contiguous, except for modules in `grouped` of a family's table.
            transposed: Whether the tensors of floats are [n, width]; in GGUF, GPTQ, AWQ and bitsandbytes files they never are.
        """
        m = self._model
        if not isinstance(x, Value) or isinstance(name, Value):
            m.refuse("linear", self.prefix, f"wanted linear(x, name, width), have {kinds_of(x, name, width)}")
        names, widths = ([name] if isinstance(name, str) else name), ([width] if isinstance(width, int) else width)
        where = self.prefix + "|".join(names)
        m.expect("linear", where, x)
        is_one = isinstance(name, str)
        if not names or not widths or (len(names) != len(widths) if not is_one else groups < 1):
            m.refuse("linear", where, f"wanted one width for each name, have {width!r}")
        if isinstance(width, int) != is_one and not is_one:
            m.refuse("linear", where, f"wanted one width for each name, have {width!r}")
        if groups > 1 and (not is_one or any(each % groups for each in widths)):
            m.refuse("linear", where, f"wanted widths of one tensor in {groups} equal groups, have {list(widths)}")
        if m.source.is_gguf and (groups > 1 or transposed):
            if groups > 1 and not (is_one and m.source.keeps_groups(where)):
                groups = 1
                m.move(m.named(f"{self.prefix}{names[0]}.weight"), Order(is_other=True))
            m.spec["reordered"], transposed = True, False
        if transposed and m.is_packed(f"{self.prefix}{names[0]}.weight"):
            m.spec["reordered"], transposed = True, False
        orders = [m.orders.get(f"{self.prefix}{each}.weight") for each in names]
        if len({b"" if each is None else each.tobytes() for each in orders}) > 1:
            each_alone = zip(names, widths, strict=True)
            return [self.linear(x, each, n, bias=bias, transposed=transposed) for each, n in each_alone]
        pieces = self._pieces(names, ".weight", widths, groups, transposed, x.width)
        x = m.take(x, orders[0])
        weights = [m.matrix("linear", pieces, x.width, order=orders[0])]
        if bias:
            weights.append(m.vector("linear", self._pieces(names, ".bias", widths, groups, False, 0)))
        out = m.emit("linear", [x], sum(widths), weights=weights)
        if isinstance(width, int):
            return out
        return [out] if len(widths) == 1 else m.split(out, widths)

    def _pieces(
        self, names: Sequence[str], kind: str, widths: Sequence[int], groups: int, transposed: bool, cols: int
    ) -> list[Piece]:
        """The pieces of tensors for the widths; `cols` is the number of columns, 0 for vectors."""
        pieces: list[Piece] = []
        for name, own in [(names[0], widths)] if len(names) == 1 else [(n, [w]) for n, w in zip(names, widths, strict=True)]:
            rows = sum(own)
            shape = (rows,) if not cols else (cols, rows) if transposed else (rows, cols)
            pieces += pieces_of(f"{self.prefix}{name}{kind}", shape, own, groups, transposed)
        return pieces

    def split(self, x: Value, widths: Sequence[int]) -> list[Value]:
        """Splits a value into adjacent columns without a copy, for checkpoints that store several parts as one matrix.

        Args:
            x: [rows, n].
            widths: Columns of each part; their sum is n.
        """
        m = self._model
        m.expect("split", self.prefix, x)
        if sum(widths) != x.width:
            m.refuse("split", self.prefix, f"wanted widths of {x.width} in all, have {list(widths)}")
        return [m.value(width, x.index, sum(widths[:i])) for i, width in enumerate(widths)]

    def join(self, first: Value, *others: Value) -> Value:
        """Joins adjacent columns of one value (results of `split` or `linear`) into one value without a copy."""
        m, parts = self._model, (first, *others)
        m.expect("join", self.prefix, *parts)
        places = [m.spec["values"][part.index] for part in parts]
        ends = [offset + width for width, _, offset in places]
        wanted = [(places[0][1], end) for end in ends[:-1]]
        if places[0][1] < 0 or [place[1:] for place in places[1:]] != wanted:
            m.refuse("join", self.prefix, f"wanted neighbouring columns of one value, have {places}")
        return m.value(sum(part.width for part in parts), places[0][1], places[0][2])

    def rope(self, q: Value, k: Value, rope: Rope) -> tuple[Value, Value]:
        """Rotates the heads of q and k by their positions."""
        m = self._model
        m.expect("rope", self.prefix, q, k)
        for x in (q, k):
            m.heads("rope", self.prefix, x)
        if 2 * rope.inv_freq.size > m.head_dim:
            m.refuse("rope", self.prefix, f"{rope.inv_freq.size} frequencies turn more than head_dim {m.head_dim}")
        return m.emit_pair("rope", q, k, rope=m.rope_index(rope), head_dim=m.head_dim)

    def attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        *,
        window: int = 0,
        scale: float | None = None,
        softcap: float = 0.0,
        slopes: int | None = None,
        sinks: str | None = None,
        chunk: int = 0,
        spans: Spans = "none",
    ) -> Value:
        """Causal attention; each call adds a layer of the cache. Groups of query heads share one head of k and v.

        Args:
            q: Queries, [rows, n_heads * head_dim].
            k: Keys, [rows, n_kv_heads * head_dim].
            v: Values, [rows, n_kv_heads * head_dim].
            window: Number of keys that a query sees, its own position included; 0: all keys up to its position.
            scale: Factor on q k^T; None: head_dim^-0.5.
            softcap: c * tanh(scores / c) after scaling; 0: none.
            slopes: A vector with one number per head (`m.constant`). ALiBi adds this number times the distance j - i of key j
                from query i to the score. None: no ALiBi.
            sinks: Name of a tensor [n_heads]: a score that is part of each softmax but has no value; None: no sinks.
            chunk: Chunk length in positions: a query sees only keys of its own chunk. 0: `window` applies.
            spans: Which tokens also see those behind them: "image", all of an image (Gemma 3); "prompt", all of a prompt
                (PaliGemma).
        """
        m = self._model
        m.expect("attention", self.prefix, q, k, v)
        n_heads, n_kv_heads = m.heads("attention", self.prefix, q), m.heads("attention", self.prefix, k)
        if k.width != v.width or n_heads % n_kv_heads:
            m.refuse(
                "attention",
                self.prefix,
                f"wanted k and v of equal width and a multiple of it in q, have {q.width}, {k.width}, {v.width}",
            )
        if window < 0 or chunk < 0:
            m.refuse("attention", self.prefix, f"wanted a window of at least 0, have {min(window, chunk)}")
        weights = [] if slopes is None and sinks is None else [-1 if slopes is None else slopes]
        if sinks is not None:
            weights.append(m.vector("attention", [(self.prefix + sinks, n_heads)]))
        m.spec["layers"].append((n_heads, n_kv_heads, m.head_dim, chunk or window))
        k_scale, v_scale = m.cache_scales.of(self.prefix)
        scale = (m.head_dim**-0.5 if scale is None else scale) * k_scale
        layer = len(m.spec["layers"]) - 1
        inputs = [q, self.scale(k, [1 / k_scale]), self.scale(v, [1 / v_scale])]
        given: dict[str, float | str] = {"layer": layer, "chunk": chunk, "scale": scale, "softcap": softcap}
        if spans != "none":
            given["spans"] = SPANS.index(spans)
        out = m.emit_rows("attention", inputs, q.width, q.rows, weights, 0, given)
        return self.scale(out, [v_scale])

    def row_attention(self, q: Value, k: Value, v: Value, *, scale: float | None = None, segments: int = 0) -> Value:
        """Bidirectional attention: every row attends to all rows of its prompt. There is no cache, so a prompt is computed in
        one step. A program has either `row_attention` or `attention`.

        Args:
            q, k, v, scale: As in `attention`.
            segments: Of a tower: the table, 0 or 1, of the segments whose rows attend to each other.
        """
        m = self._model
        m.expect("row_attention", self.prefix, q, k, v)
        n_heads, n_kv_heads = (m.heads("row_attention", self.prefix, x) for x in (q, k))
        if k.width != v.width or n_heads % n_kv_heads or m.spec["layers"]:
            m.refuse(
                "row_attention",
                self.prefix,
                f"wanted k and v of equal width, a multiple of it in q, and no layer with a cache, have {q.width}, {k.width}, "
                f"{v.width} and {len(m.spec['layers'])} layers",
            )
        scale = m.head_dim**-0.5 if scale is None else scale
        given: dict[str, float | str] = {"n_heads": n_heads, "n_kv_heads": n_kv_heads, "scale": scale}
        if segments:
            given["segments"] = segments
        return m.emit_rows("row_attention", [q, k, v], q.width, q.rows, [], 0, given)

    def conv(self, x: Value, name: str, taps: int, *, act: str | None = None, bias: bool = True) -> Value:
        """Causal depthwise convolution: act(bias + sum over k of weight[:, k] * x[row - (taps - 1 - k)]).

        Args:
            x: Input, [rows, n].
            name: Module name; the tensors are NAME.weight [n, 1, taps] and, with bias, NAME.bias [n].
            taps: Number of rows that an output row reads, its own included; at least 2.
            act: Name of the activation; None: none.
            bias: Whether the convolution has a bias.
        """
        m, where = self._model, self.prefix + name
        m.expect("conv", where, x)
        if taps < 2:
            m.refuse("conv", where, f"wanted at least 2 taps, have {taps}")
        weights = [m.flat("conv", f"{where}.weight", (x.width, 1, taps))]
        if bias:
            weights.append(m.flat("conv", f"{where}.bias", (x.width,)))
        named = "none" if act is None else _activation("conv", where, act)
        state = m.state_layer(x.width, taps - 1)
        return m.emit("conv", [x], x.width, weights=weights, state=state, n_taps=taps, act=named)

    def ssm(
        self, x: Value, dt: Value, b: Value, c: Value, name: str, *, groups: int = 1, limits: tuple[float, float] = (0.0, inf)
    ) -> Value:
        """The recurrence of Mamba-2 with a state per head: S = e^(-e^A_log d) S + d x B^T, y = S C + D x, with steps
        d = softplus(dt + dt_bias).

        Args:
            x: Input, [rows, heads * head size].
            dt: Steps before their bias, [rows, heads].
            b, c: Input and output vectors B and C of the state, [rows, groups * state size].
            name: Module name; the tensors are NAME.A_log, NAME.dt_bias and NAME.D, [heads].
            groups: Number of groups of adjacent heads; the heads of a group share b and c.
            limits: Lower and upper limit of the step d.
        """
        m, where = self._model, self.prefix + name
        m.expect("ssm", where, x, dt, b, c)
        heads = dt.width
        if groups < 1 or x.width % heads or heads % groups or b.width % groups or b.width != c.width:
            sizes = f"x {x.width}, dt {dt.width}, b {b.width}, c {c.width}, {groups} groups"
            m.refuse("ssm", where, f"wanted heads of equal width in equal groups, have {sizes}")
        weights = [m.flat("ssm", f"{where}.{tensor}", (heads,)) for tensor in ("A_log", "dt_bias", "D")]
        state = m.state_layer(heads, x.width // heads * (b.width // groups))
        low, high = limits[0], min(limits[1], 3e38)
        inputs = [x, dt, b, c]
        return m.emit("ssm", inputs, x.width, weights=weights, state=state, n_groups=groups, dt_min=low, dt_max=high)

    def selective_scan(self, x: Value, dt: Value, b: Value, c: Value, name: str, *, dt_bias: str | None) -> Value:
        """The recurrence of Mamba with a state per column: S = e^(-e^A_log d) S + d x B, y = S . C + D x, with steps
        d = softplus(dt + bias).

        Args:
            x: Input, [rows, n].
            dt: Steps before their bias, [rows, n].
            b, c: Input and output vectors B and C of the state, [rows, state size].
            name: Module name; the tensors are NAME.A_log [n, state size] and NAME.D [n].
            dt_bias: Name of the bias [n] within the module, such as "dt_proj.bias"; None: no bias.
        """
        m, where = self._model, self.prefix + name
        m.expect("selective_scan", where, x, dt, b, c)
        if dt.width != x.width or b.width != c.width:
            sizes = f"x {x.width}, dt {dt.width}, b {b.width}, c {c.width}"
            m.refuse("selective_scan", where, f"wanted x and dt of one width, b and c of one, have {sizes}")
        weights = [m.flat("selective_scan", f"{where}.A_log", (x.width, b.width))]
        for tensor in ("D", dt_bias) if dt_bias else ("D",):
            weights.append(m.flat("selective_scan", f"{where}.{tensor}", (x.width,)))
        return m.emit("selective_scan", [x, dt, b, c], x.width, weights=weights, state=m.state_layer(x.width, b.width))

    def delta(self, q: Value, k: Value, v: Value, a: Value, b: Value, name: str, *, key_heads: int) -> Value:
        """The gated delta rule: S = g S, S += k (sigmoid(b) (v - k^T S))^T, y = S^T q; k is normalised to length 1, q to
        key size^-0.5.

        Args:
            q, k: [rows, key_heads * key size]; adjacent heads of v share a key head.
            v: [rows, heads * value size].
            a, b: [rows, heads]; the decay is g = e^(-e^A_log softplus(a + dt_bias)).
            name: Module name; the tensors are NAME.A_log and NAME.dt_bias, [heads].
            key_heads: Heads of q and k.
        """
        m, where = self._model, self.prefix + name
        m.expect("delta", where, q, k, v, a, b)
        heads = a.width
        if heads % key_heads or q.width % key_heads or v.width % heads or q.width != k.width or b.width != heads:
            sizes = f"q {q.width}, k {k.width}, v {v.width}, a {a.width}, b {b.width}, {key_heads} key heads"
            m.refuse("delta", where, f"wanted heads of equal width, a multiple of the key heads, have {sizes}")
        weights = [m.flat("delta", f"{where}.{tensor}", (heads,)) for tensor in ("A_log", "dt_bias")]
        state = m.state_layer(heads, q.width // key_heads * (v.width // heads))
        return m.emit("delta", [q, k, v, a, b], v.width, weights=weights, state=state, n_key_heads=key_heads)

    def act(self, x: Value, act: str) -> Value:
        """act(x), by the activation's name in Hugging Face configurations."""
        m = self._model
        m.expect("act", self.prefix, x)
        return m.emit("act", [x], x.width, act=_activation("act", self.prefix, act))

    def mlp(self, x: Value, up: str, down: str, width: int, *, act: str, bias: bool = True, transposed: bool = False) -> Value:
        """down(act(up(x))).

        Args:
            x: Input, [rows, n]; the output has the same width.
            up: Module name, [width, n].
            down: Module name, [n, width].
            width: The width in between.
            act: Name of the activation as in Hugging Face configurations.
            bias: Whether both have a bias.
            transposed: As in `linear`.
        """
        h = self.act(self.linear(x, up, width, bias=bias, transposed=transposed), act)
        return self.linear(h, down, x.width, bias=bias, transposed=transposed)

    def gated(self, gate: Value, up: Value, act: str) -> Value:
        """act(gate) * up; a gate with one column applies to all columns."""
        m = self._model
        m.expect("gated", self.prefix, gate, up)
        if gate.width not in (1, up.width):
            m.refuse("gated", self.prefix, f"wanted equal widths, have {gate.width} and {up.width}")
        return m.emit("gated", [gate, up], up.width, act=_activation("gated", self.prefix, act))

    def gated_mlp(self, x: Value, gate: str, up: str, down: str, width: int, *, act: str, bias: bool = False) -> Value:
        """down(act(gate(x)) * up(x)); gate and up form one matrix.

        Args:
            x: Input, [rows, n]; the output has the same width.
            gate: Module name of the gate, [width, n].
            up: Module name, [width, n].
            down: Module name, [n, width].
            width: The width in between.
            act: Name of the activation as in Hugging Face configurations.
            bias: Whether all three have a bias.
        """
        g, u = self.linear(x, [gate, up], [width, width], bias=bias)
        return self.linear(self.gated(g, u, act), down, x.width, bias=bias)


class Model(Writer, Block):
    """The program being written. It has all operations of `Block`, and those that begin or end a program."""

    def __init__(self, config: ModelConfig, tensors: Tensors | None, source: Source, file: str) -> None:
        Writer.__init__(self, config, tensors, source, file)
        Block.__init__(self, self, "")
        self.tasks: tuple[str, ...] = ()
        self.generates = False
        self.pooling = "last"
        self.cache_scales = CacheScales()
        self.injections: list[int] = []
        self.spans: Spans = "none"

    def embed(self, name: str, *, scale: float = 1.0, width: int | None = None) -> Value:
        """Row NAME.weight[token id] times scale, [rows, width]; width None means hidden_size."""
        width = width or self.config.hidden_size
        weight = self.matrix("embed", [(name, self.config.vocab_size)], width)
        self._embeddings[name] = weight
        x = self.emit("embed", [], width, weights=[weight], source="tokens", scale=scale)
        return self.splice(x) if self.spec.get("towers") else x

    def embed_positions(self, name: str, rows: int, *, first: int = 0) -> Value:
        """Row NAME.weight[first + position], [rows, hidden_size]; the matrix has `rows` rows."""
        width = self.config.hidden_size
        weight = self.matrix("embed", [(name, rows)], width)
        return self.emit("embed", [], width, weights=[weight], source="positions", first_row=first, scale=1.0)

    def embed_types(self, name: str, rows: int) -> Value:
        """Row NAME.weight[token type], [rows, hidden_size]; the matrix has `rows` rows. Types default to 0 in requests."""
        width = self.config.hidden_size
        weight = self.matrix("embed", [(name, rows)], width)
        return self.emit("embed", [], width, weights=[weight], source="types", scale=1.0)

    def layers(self, prefix: str, n: int) -> Iterator[Block]:
        """One block for each i < n; its tensor names start with PREFIX.i."""
        return (Block(self, f"{self.prefix}{prefix}.{i}.") for i in range(n))

    def logits(
        self,
        x: Value,
        name: str,
        *,
        tied_to: str,
        scale: float = 1.0,
        softcap: float = 0.0,
        bias: bool = False,
        padded: int = 1,
        unit_rows: bool = False,
    ) -> None:
        """Ends the program with logits: scale * (x W^T + b) over the vocabulary, in float32, for the requested rows.

        Args:
            x: Input, [rows, n].
            name: Module name of the head, [vocab_size, n].
            tied_to: Name of the embedding that serves as the head if the configuration sets tie_word_embeddings. A separate
            head in the file is then ignored.
            scale: Factor on the logits.
            softcap: c * tanh(logits / c) after scaling; 0: none.
            bias: Whether the head has a bias, NAME.bias.
            padded: An untied head has vocab_size rows, padded to a multiple of this; padding rows are not read.
            unit_rows: Divide the rows of W by their lengths, at load and in updates; W must not be tied.
        """
        self.expect("logits", name, x)
        order = None
        if self.config.tie_word_embeddings and unit_rows:
            self.refuse("logits", name, "wanted an untied head, because its rows are divided by their lengths, have a tied one")
        if self.config.tie_word_embeddings:
            if tied_to not in self._embeddings:
                self.refuse("logits", name, f"there is no embedding {tied_to} to tie it to")
            weight = self._embeddings[tied_to]
            self.leave_out(name)
            self.spec["ignored"].append(self.named(f"{name}.weight"))
        else:
            rows = -(-self.config.vocab_size // padded) * padded
            piece = Piece(f"{name}.weight", (rows, x.width), self.config.vocab_size)
            order = self.orders.get(piece.name)
            weight = self.matrix("logits", [piece], x.width, order=order)
            self.spec["weights"][weight]["unit_rows"] = unit_rows
        if self.spec["weights"][weight]["cols"] != x.width:
            self.refuse("logits", name, f"wanted a row of {self.spec['weights'][weight]['cols']}, have {x.width}")
        weights = [weight, self.vector("logits", [(f"{name}.bias", self.config.vocab_size)])] if bias else [weight]
        given: dict[str, int | float] = {"scale": scale, "softcap": softcap}
        ordered = self.take(x, order)
        self.spec["ops"].append(("logits", {"in": [ordered.index], "out": [], "weights": weights, "attributes": given}))
        self.generates = True
        self.states(x)

    def states(self, x: Value, *tasks: str, pooling: str = "last") -> None:
        """Ends the program with rows to pool. `logits` calls this for its input.

        Args:
            x: [rows, n]; a program ends with its logits or its states.
            tasks: Uses of the rows, from "embed", "token_embed", "classify", "token_classify"; none given: the first two.
            pooling: Default pooling of a request: "last", "cls" or "mean".
        """
        self.expect("states", "", x)
        self.tasks, self.pooling = tasks or ("embed", "token_embed"), pooling
        self.spec["ops"].append(("states", {"in": [x.index], "out": [], "weights": [], "attributes": {}}))

    def tower(self, config: ModelConfig, prefix: str, feature_id: int) -> "Model":
        """Begins the program that turns images into features, with the operations of `TowerBlock`; `features` ends it.

        Args:
            config: The tower's configuration (`ModelConfig.sub`).
            prefix: Prefix of the tower's tensor names.
            feature_id: The token that stands for a feature.
        """
        tower = Model(config, self._tensors, self.source, self._file)
        tower.prefix, tower.function, tower.scheme, tower.orders = prefix, self.function, self.scheme, self.orders
        tower._used, tower._matrices, tower._ignored = self._used, self._matrices, self._ignored
        tower.spec["weights"] = self.spec["weights"]
        tower.spec["rows"], tower.spec["feature_id"] = [], feature_id
        self.spec["towers"] = {"image": tower.spec}
        return tower

    def inject(self, x: Value) -> Value:
        """Adds the next columns of the features behind a layer of the text, if the tower makes some for it (DeepStack)."""
        return self.splice(x, self.injections.pop(0), is_sum=True) if self.injections else x

    def at(self, prefix: str) -> Block:
        """Operations of this program with another prefix of tensor names."""
        return Block(self, prefix)

    def features(self, *columns: Value) -> None:
        """Ends a tower: the columns of its features, first those that take the place of an embedding."""
        self.expect("features", "", *columns)
        numbers = [x.index for x in columns]
        self.spec["ops"].append(("features", {"in": numbers, "out": [], "weights": [], "attributes": {}}))

    def stem(self, prefix: str, name: str) -> str:
        """`prefix`, or "" if the checkpoint has NAME.weight without the prefix, as models saved without a head do."""
        if self._tensors is None:
            end = self.config.architecture
            return "" if end.endswith("Model") and not end.endswith("LMHeadModel") else prefix
        if self.source.is_gguf or self.named(f"{prefix}{name}.weight") in self._tensors:
            return prefix
        return "" if self.named(f"{name}.weight") in self._tensors else prefix

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor; False for dummy weights."""
        return self._tensors is not None and name in self._tensors

    def activation(self, op: str, name: str, act: str) -> str:
        """Maps an activation's name in configurations to its name in operations."""
        return _activation(op, name, act)
