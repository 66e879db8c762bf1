"""Scores of a model on small tasks that need no download: `evaluate`, which `llmpy eval` calls."""

from .run import EngineModel, Model, Result, evaluate
from .tasks import TASKS, Item, Task

__all__ = ["TASKS", "EngineModel", "Item", "Model", "Result", "Task", "evaluate"]
