"""Devices of the kind `plain`: this processor, one thread, loops in plain C."""

from pathlib import Path


def library() -> str:
    """The absolute path of the backend's library, which llmpy asks for; a reason that there is none is an exception."""
    folder = Path(__file__).parent.absolute()
    paths = sorted(folder.glob("_plain*.so"))
    if not paths:
        raise FileNotFoundError(f"no _plain*.so in {folder}; install the package instead of running it from its source")
    return str(paths[0])
