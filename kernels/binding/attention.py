"""The paged cache, rope and attention."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from staging import Array, Batch, Pool, Stage, address, dtype_number, header, struct

from .opened import Opened


class Attention(Opened):
    """The cache and the operations on it."""

    def kv_pool(
        self, n_pages: int, n_kv_heads: int, head_dim: int, dtype: str = "float32", block_tokens: int = 16, n_layers: int = 1,
        fill: int = 0xFF,
    ) -> Pool:  # fmt: skip
        """A pool with all bytes set to one value; 0xFF makes every element NaN."""
        number = dtype_number(dtype)
        layer_bytes = self.table.function("kv_layer_bytes")(self.ctx, n_kv_heads, head_dim, number, block_tokens)
        view = struct("kv_view", n_kv_heads=n_kv_heads, head_dim=head_dim, dtype=number, page_bytes=layer_bytes * n_layers)
        if not view.page_bytes:
            raise ValueError(f"kv_pool: no pages of {dtype}")
        made = ctypes.c_void_p()
        if "pool_create" in self.table:
            use = header().enums["MEMORY_KV"]
            self.table.call("pool_create", self.ctx, use, n_pages * view.page_bytes, ctypes.addressof(made))
        else:
            made.value = self.new_buffer(n_pages * view.page_bytes)
        view.pool = made.value
        pool = Pool(self, view, n_pages, n_layers, block_tokens)
        page = np.full(view.page_bytes, fill, np.uint8)
        for i in range(n_pages):
            self.table.call("upload", self.ctx, view.pool + i * view.page_bytes, address(page), page.nbytes)
        return pool

    def kv_read(self, pool: Pool) -> bytes:
        """The bytes of all pages."""
        data = np.empty(pool.size_bytes, np.uint8)
        self.table.call("download", self.ctx, address(data), pool.view.pool, data.nbytes)
        return data.tobytes()

    def kv_write(self, pool: Pool, batch: Batch, table: Array, k: Array, v: Array, layer: int = 0) -> None:
        """Stores the keys and values of all rows."""
        stage, args = Stage(self), struct("kv_write_args")
        self._stage_write(stage, args, pool, batch, table, k, v, layer)
        self._run(stage, "kv_write", args)

    @staticmethod
    def _stage_write(
        stage: Stage, args: Any, pool: Pool, batch: Batch, table: Array, k: Array, v: Array, layer: int, writes_k: bool = False
    ) -> None:
        view = stage.batch(batch)
        args.batch = ctypes.addressof(view)
        stage.kv(args.kv, pool, table, layer, view)
        stage.view(args.k, "k", k, writes_k)
        stage.view(args.v, "v", v)

    def copy_pages(self, pool: Pool, copies: Array) -> None:
        """Copies pages; `copies` holds int32 pairs of a source and a target page."""
        listed = np.ascontiguousarray(copies, np.int32)
        args = struct("copy_pages_args", pool=pool.view.pool, page_bytes=pool.view.page_bytes, copies=address(listed),
                      n_copies=listed.size // 2)  # fmt: skip
        self._run(Stage(self), "copy_pages", args)

    def rope_table(self, positions: Array, inv_freq: Array, out: Array, magnitude: float = 1.0) -> None:
        """Writes cosines and sines, [rows, frequencies, 2]."""
        stage, args = Stage(self), struct("rope_table_args", magnitude=magnitude)
        args.n_rows = stage.array(args, "positions", positions, "i")
        args.n_freqs = stage.array(args, "inv_freq", inv_freq)
        if stage.array(args, "table", out, is_written=True) != 2 * args.n_rows * args.n_freqs:
            raise ValueError("out: wanted positions x inv_freq x 2 items")
        self._run(stage, "rope_table", args)

    def rope(self, table: Array, q: Array, k: Array, head_dim: int, interleaved: bool = False) -> None:
        """Rotates q and k in place."""
        stage, args = Stage(self), struct("rope_args", head_dim=head_dim, interleaved=interleaved)
        self._stage_rope(stage, args, table, q, k)
        self._run(stage, "rope", args)

    @staticmethod
    def _stage_rope(stage: Stage, args: Any, table: Array | None, q: Array, k: Array) -> None:
        stage.view(args.q, "q", q, True)
        stage.view(args.k, "k", k, True)
        args.n_rows = stage.n_rows
        n = stage.array(args, "table", table)
        args.n_freqs = n // 2 // args.n_rows if args.n_rows else 0
        if n != 2 * args.n_rows * args.n_freqs:
            raise ValueError("table: wanted rows x frequencies x 2 items")

    def _stage_heads(
        self, stage: Stage, args: Any, q: Array, k: Array, q_norm: Array | None, k_norm: Array | None, rope: Array | None,
        interleaved: bool,
    ) -> None:  # fmt: skip
        head_dim = args.write.kv.head_dim
        self._stage_rope(stage, args.rope, rope, q, k)
        args.norm_stride = head_dim if stage.array(args, "q_norm", q_norm) > head_dim else 0
        stage.array(args, "k_norm", k_norm)
        args.rope.head_dim, args.rope.interleaved = head_dim, interleaved

    def qkv(
        self, pool: Pool, batch: Batch, table: Array, q: Array, k: Array, v: Array, q_norm: Array | None = None,
        k_norm: Array | None = None, eps: float = 0.0, rope: Array | None = None, interleaved: bool = False, layer: int = 0,
    ) -> None:  # fmt: skip
        """Norms of q and k, rope and kv_write in one."""
        self.table.function("qkv")
        stage, args = Stage(self), struct("qkv_args", eps=eps)
        self._stage_write(stage, args.write, pool, batch, table, k, v, layer, writes_k=True)
        self._stage_heads(stage, args, q, k, q_norm, k_norm, rope, interleaved)
        self._run(stage, "qkv", args)

    def attention(
        self, pool: Pool, batch: Batch, table: Array, q: Array, out: Array, scale: float, window: int = 0, softcap: float = 0.0,
        layer: int = 0, slopes: Array | None = None, sinks: Array | None = None, chunk: int = 0, ends: Array | None = None,
        heads: tuple[Array, Array, Array | None, Array | None, Array | None, float, bool] | None = None,
    ) -> None:  # fmt: skip
        """Attention over the cache; `heads` (k, v, q_norm, k_norm, rope, eps, interleaved) makes it run qkv first.

        ends: visible_end of `struct attention_args`.
        """
        stage = Stage(self)
        args = struct("attention_args", scale=scale, window=window, softcap=softcap, chunk=chunk)
        joint = struct("qkv_args")
        if heads:
            self._need_fusion("FUSION_QKV_ATTENTION", "attention that does qkv")
            k, v, q_norm, k_norm, rope, joint.eps, interleaved = heads
            self._stage_write(stage, joint.write, pool, batch, table, k, v, layer, writes_k=True)
            self._stage_heads(stage, joint, q, k, q_norm, k_norm, rope, interleaved)
            args.heads = ctypes.addressof(joint)
        view = stage.batch(batch)
        args.batch = ctypes.addressof(view)
        stage.kv(args.kv, pool, table, layer, view)
        stage.view(args.q, "q", q)
        stage.view(args.out, "out", out, True)
        args.n_heads = args.q.width // args.kv.head_dim
        for name, value in (("slopes", slopes), ("sinks", sinks)):
            if stage.array(args, name, value) not in (0, args.n_heads):
                raise ValueError(f"{name}: wanted one number a head")
        if ends is not None:
            self._need_fusion("FUSION_VISIBLE_END", "attention whose rows see later ones")
            stage.array(args, "visible_end", ends, "i")
        self._run(stage, "attention", args)

    def latent_attention(
        self, pool: Pool, batch: Batch, table: Array, q: Array, q_rope: Array, latent: Array, rope_key: Array, out: Array,
        n_heads: int, scale: float, layer: int = 0,
    ) -> None:  # fmt: skip
        """Latent attention in the absorbed form; stores latents and rope keys first."""
        self.table.function("latent_attention")
        stage, args = Stage(self), struct("latent_attention_args", n_heads=n_heads, scale=scale)
        view = stage.batch(batch)
        args.batch = ctypes.addressof(view)
        stage.kv(args.kv, pool, table, layer, view)
        for name, value in (("q", q), ("q_rope", q_rope), ("latent", latent), ("rope_key", rope_key), ("out", out)):
            stage.view(getattr(args, name), name, value, name == "out")
        self._run(stage, "latent_attention", args)

    def row_attention(
        self, seq_first_row: Array, q: Array, k: Array, v: Array, out: Array, n_heads: int, n_kv_heads: int, scale: float
    ) -> None:
        """Attention over whole sequences, without a cache."""
        stage, batch = Stage(self), struct("batch_view", host_seq_first_row=address(seq_first_row))
        args = struct("row_attention_args", batch=ctypes.addressof(batch), n_heads=n_heads, n_kv_heads=n_kv_heads, scale=scale)
        for name, value in (("q", q), ("k", k), ("v", v), ("out", out)):
            stage.view(getattr(args, name), name, value, name == "out")
        batch.n_seqs = stage.array(batch, "seq_first_row", seq_first_row, "i") - 1
        batch.n_rows, args.head_dim = stage.n_rows, args.q.width // n_heads
        self._run(stage, "row_attention", args)

    def grid_attention(
        self,
        seq_first_row: Array,
        tables: Sequence[Array],
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        n_heads: int,
        scale: float,
    ) -> None:
        """Attention over squares; tables: lines, columns, rows and shares of `struct grid_attention_args`."""
        stage, batch = Stage(self), struct("batch_view", host_seq_first_row=address(seq_first_row))
        args = struct("grid_attention_args", batch=ctypes.addressof(batch), n_heads=n_heads, scale=scale)
        for name, value in (("q", q), ("k", k), ("v", v), ("out", out)):
            stage.view(getattr(args, name), name, value, name == "out")
        for name, value in zip(("lines", "columns", "rows", "shares"), tables, strict=True):
            n = stage.array(args, name, value, "i" if name == "rows" else "f")
        batch.n_seqs = stage.array(batch, "seq_first_row", seq_first_row, "i") - 1
        batch.n_rows, args.head_dim, args.side = stage.n_rows, args.q.width // n_heads, (n // 2 + 1) // 2
        self._run(stage, "grid_attention", args)
