"""`llmpy eval`: scores of a model on built-in tasks and on those of lm-evaluation-harness."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

from .common import open_model


def run(chosen: Namespace) -> int:
    """Evaluates and prints one line per task."""
    from ..evaluation import TASKS, evaluate

    names = [name for name in chosen.tasks.split(",") if name]
    others = [name for name in names if name not in TASKS]
    if others:
        from ..integrations.lm_eval import HarnessModel  # tells what is missing before a model is loaded
    with open_model(chosen) as llm:
        for one in evaluate(llm, [name for name in names if name in TASKS], chosen.limit):
            _show(chosen, one.task, "accuracy", one.score, one.error, len(one.is_right))
        if others:
            _run_harness(chosen, HarnessModel(llm), others)
    return 0


def _run_harness(chosen: Namespace, model: object, names: list[str]) -> None:
    """Runs tasks of lm-evaluation-harness and prints their metrics."""
    from lm_eval import simple_evaluate

    found = simple_evaluate(model=model, tasks=names, num_fewshot=chosen.num_fewshot, limit=chosen.limit)
    counts = found.get("n-samples", {})
    for task, metrics in found["results"].items():
        for metric, value in metrics.items():
            name, _, by = metric.partition(",")
            if isinstance(value, float) and not name.endswith("_stderr"):
                error = metrics.get(f"{name}_stderr,{by}")
                count = counts.get(task, {}).get("effective", 0)
                _show(chosen, task, name, value, error if isinstance(error, float) else None, count)


def _show(chosen: Namespace, task: str, metric: str, value: float, error: float | None, count: int) -> None:
    row: dict[str, Any] = {"task": task, "metric": metric, "value": value, "error": error, "items": count}
    if chosen.json:
        print(json.dumps(row))
    else:
        print(f"{task:24} {metric:12} {value:.4f}" + ("" if error is None else f" ± {error:.4f}") + f"  ({count} items)")
