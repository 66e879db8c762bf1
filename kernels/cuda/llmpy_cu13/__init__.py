"""llmpy's backend for NVIDIA GPUs. llmpy finds it by its entry point; there is nothing to import."""

from pathlib import Path


def library() -> str:
    """The absolute path of the backend's library."""
    path = Path(__file__).absolute().with_name("libllmpy_cuda13.so")
    if not path.exists():
        raise FileNotFoundError(f"no {path}; install the wheel of llmpy-cu13 instead of running it from its source")
    return str(path)
