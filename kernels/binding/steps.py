"""A step's first and last call: the upload of its batch, and the sampler."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from staging import Array, Stage, address, header, struct

from .opened import Opened


class Steps(Opened):
    """The calls at both ends of a step."""

    def begin(
        self, slot: int, rows: tuple[Array, ...], tables: Array, runs: Array, to: tuple[Array, ...], to_tables: Array,
        n_pad_rows: int = 0, pad_row_seq: int = 0, row_adapters: Array | None = None, has_adapters: bool = False,
    ) -> None:  # fmt: skip
        """Uploads a batch. rows and to: token_ids, positions, row_seq, seq_first_row, logits_rows; runs: first, count, .."""
        self.table.function("begin")
        names = ("token_ids", "positions", "row_seq", "seq_first_row", "logits_rows")
        n_rows = len(rows[0])
        if len(rows[1]) != n_rows or len(rows[2]) != n_rows or not len(rows[3]):
            raise ValueError("rows: wanted as many positions and row_seq as token ids, and a seq_first_row")
        stage, args = Stage(self), struct(
            "begin_args", slot=slot, n_rows=n_rows, n_seqs=len(rows[3]) - 1, n_logits_rows=len(rows[4]), n_pad_rows=n_pad_rows,
            pad_row_seq=pad_row_seq, tables=address(tables), runs=address(runs), n_runs=runs.size // 2,
            has_adapters=has_adapters, row_adapters=0 if row_adapters is None else address(row_adapters),
            **{name: address(values) for name, values in zip(names, rows, strict=True)},
        )  # fmt: skip
        for name, values in zip(names, to, strict=True):
            if stage.array(args.to, name, values, "i", True) <= n_rows + n_pad_rows:
                raise ValueError("to: wanted one item more than there are rows")
        if stage.array(args.to, "tables", to_tables, "i", True) != tables.size:
            raise ValueError("to_tables: wanted as many entries as tables")
        if any(first + count > tables.size for first, count in runs.reshape(-1, 2)):
            raise ValueError("runs: wanted runs of entries")
        self._run(stage, "begin", args)

    def sample(
        self, logits: Array, tasks: Sequence[Mapping[str, Any]], vocab_limit: int = 0, banned: Array | None = None,
        slots: int = 1,
    ) -> list[tuple[Any, ...]]:  # fmt: skip
        """Draws tokens from float32 logits, or scores given tokens.

        Args:
            logits: [rows, vocab].
            tasks: Fields of struct sample_task, its lists as Python lists.
            vocab_limit: Ids >= vocab_limit are never sampled; 0: no limit.
            banned: int32 ids that are never sampled.
            slots: 1, or 2: each slot has half of the tasks, and both are in flight at once.

        Returns:
            (id, status, raw, full, processed, kept_mass, rank, [(id, value, rank), ...]) of each task.
        """
        kept: list[Any] = []
        made = (header().structs["sample_task"] * len(tasks))(*(self._task(task, kept) for task in tasks))
        n_top = 0
        for task in made:
            task.top_offset, n_top = n_top, n_top + task.n_top
        results = (header().structs["sample_result"] * len(tasks))()
        ids, values, ranks = np.zeros(n_top, np.int32), np.zeros(n_top, np.float32), np.zeros(n_top, np.int32)
        stage, view = Stage(self, 4), struct("view")
        stage.view(view, "logits", logits)
        args = struct(
            "sample_args", vocab_size=view.width, vocab_stride=view.stride, n_logits_rows=stage.n_rows,
            vocab_limit=vocab_limit or view.width, top_ids=address(ids), top_values=address(values), top_ranks=address(ranks),
            banned=None if banned is None else address(banned), n_banned=0 if banned is None else banned.size,
        )  # fmt: skip

        def work() -> None:
            args.logits = view.data
            copies = []
            for slot in range(slots):
                first, end = len(tasks) * slot // slots, len(tasks) * (slot + 1) // slots
                one = type(args).from_buffer_copy(args)
                one.slot, one.first_task, one.n_tasks = slot, first, end - first
                one.tasks = ctypes.addressof(made) + first * ctypes.sizeof(made) // max(len(tasks), 1)
                one.results = ctypes.addressof(results) + first * ctypes.sizeof(results) // max(len(tasks), 1)
                copies.append(one)
                self.table.call("sample", self.ctx, ctypes.addressof(one))
            for slot in range(slots if "sample_finish" in self.table else 0):
                self.table.call("sample_finish", self.ctx, slot)

        stage.run(work)
        tops = [range(task.top_offset, task.top_offset + task.n_top) for task in made]
        return [
            (r.id, r.status, r.raw, r.full, r.processed, r.kept_mass, r.rank,
             [(int(ids[i]), float(values[i]), int(ranks[i])) for i in top])
            for r, top in zip(results, tops, strict=True)
        ]  # fmt: skip

    @staticmethod
    def _task(given: Mapping[str, Any], kept: list[Any]) -> Any:
        """A struct sample_task; the arrays that it points to are appended to `kept`."""
        task = struct("sample_task", temperature=1.0, top_p=1.0, repetition_penalty=1.0)
        kinds = {"bias": "token_bias", "seen": "token_seen"}
        for name, value in given.items():
            if name in kinds:
                items = (header().structs[kinds[name]] * len(value))(*value)
            elif name in ("banned", "allowed", "mask"):
                items = (ctypes.c_uint32 * len(value))(*(item & 0xFFFFFFFF for item in value))
            else:
                setattr(task, name, value)
                continue
            kept.append(items)
            setattr(task, name, ctypes.addressof(items) if len(value) else None)
            if name != "mask":
                setattr(task, f"n_{name}", len(value))
        return task
