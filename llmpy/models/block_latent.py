"""Operations of a block for latent attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .pieces import Piece
from .source import Order

if TYPE_CHECKING:
    from .blocks import Model, Value
    from .rope import Rope


class HeadRows(NamedTuple):
    """A weight of heads and the attributes of `head_linear` that select the rows of each head."""

    weight: int
    rows: dict[str, int]


def _head_rows(weight: int, head_rows: int, first_row: int, used_rows: int, is_transposed: bool = False) -> HeadRows:
    rows = {"head_rows": head_rows, "first_row": first_row, "used_rows": used_rows, "is_transposed": int(is_transposed)}
    return HeadRows(weight, rows)


class LatentBlock:
    """Base class of `Block` with the operations of latent attention."""

    _model: Model
    prefix: str

    def latent_attention(
        self, q: Value, latent: Value, rope_key: Value, name: str, n_heads: int, value_dim: int, *, rope: Rope, scale: float
    ) -> Value:
        """Multi-head latent attention, absorbed. Each call adds a cache layer with one latent and one rope key per token.

        Args:
            q: Queries, [rows, n_heads * (key_dim + rope_dim)]; a head ends with its rope part.
            latent: Normalised latent from which keys and values are computed, [rows, latent_dim].
            rope_key: The part of the key that rope rotates; all heads share it, [rows, rope_dim].
            name: Module name; NAME.weight is [n_heads * (key_dim + value_dim), latent_dim], per head key rows, then value rows.
            n_heads: Query heads.
            value_dim: Elements of a head's output; the output is [rows, n_heads * value_dim].
            rope: Rotates the ends of q's heads, and rope_key.
            scale: Factor on the scores.
        """
        m, where = self._model, self.prefix + name
        m.expect("latent_attention", where, q, latent, rope_key)
        key_dim = q.width // n_heads - rope_key.width
        if q.width % n_heads or key_dim < 1 or 2 * rope.inv_freq.size != rope_key.width:
            m.refuse(
                "latent_attention",
                where,
                f"wanted {n_heads} heads that end with {2 * rope.inv_freq.size} turned elements, have {q.width} and a key of "
                f"{rope_key.width}",
            )
        sizes = {"head_dim": q.width // n_heads, "k_head_dim": rope_key.width}
        q, rope_key = m.emit_pair("rope", q, rope_key, rope=m.rope_index(rope), **sizes, is_tail=True)
        keys, values = self._key_and_value_rows(where, n_heads, key_dim, value_dim, latent.width)
        absorbed = m.emit("head_linear", [q], n_heads * latent.width, weights=[keys.weight], n_heads=n_heads, **keys.rows)
        m.spec["layers"].append((n_heads, 0, latent.width + rope_key.width, 0))
        inputs, layer = [absorbed, q, latent, rope_key], len(m.spec["layers"]) - 1
        out = m.emit("latent_attention", inputs, n_heads * latent.width, layer=layer, scale=scale)
        return m.emit("head_linear", [out], n_heads * value_dim, weights=[values.weight], n_heads=n_heads, **values.rows)

    def _key_and_value_rows(
        self, where: str, heads: int, key_dim: int, value_dim: int, latent: int
    ) -> tuple[HeadRows, HeadRows]:
        """Rows of keys and of values. GGUF files may have two tensors; the keys' tensor is then transposed in each head."""
        m = self._model
        turned, plain = (where.removesuffix("kv_b_proj") + name for name in ("k_b_proj.weight", "v_b_proj.weight"))
        if m.source.is_gguf and m.shape_of(turned) is not None:
            m.move(m.named(f"{where}.weight"), Order(is_other=True))
            keys = m.matrix("latent_attention", [Piece(turned, (heads, latent, key_dim), heads * latent)], key_dim)
            values = m.matrix("latent_attention", [Piece(plain, (heads, value_dim, latent), heads * value_dim)], latent)
            return _head_rows(keys, latent, 0, latent), _head_rows(values, value_dim, 0, value_dim)
        rows = key_dim + value_dim
        weight = m.matrix("latent_attention", [(where, heads * rows)], latent)
        return _head_rows(weight, rows, 0, key_dim, True), _head_rows(weight, rows, key_dim, value_dim)
