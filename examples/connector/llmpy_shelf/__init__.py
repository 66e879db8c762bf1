"""A store for llmpy's prefix cache in plain C: LLM(kv_connector={"name": "shelf", "folder": PATH})."""

from pathlib import Path


def library() -> str:
    """Path of the library, which the entry point of this package gives to llmpy."""
    return str(next(Path(__file__).absolute().parent.glob("_shelf*.so")))
