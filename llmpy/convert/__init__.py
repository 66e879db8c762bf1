"""Writes quantised copies of a model: compressed-tensors checkpoints and GGUF files (docs/use/quantization.md)."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError
from ..models.quantise import OWN

GGUF = "gguf-"


def convert(model: str, out: str | Path, to: str) -> Path:
    """Writes a quantised copy of a model.

    Args:
        model: Directory, .gguf file or hub id.
        out: The new directory, or the new .gguf file; it must not exist.
        to: "fp8", "int8", "int4" or "int4_g32": a compressed-tensors checkpoint; or "gguf-" and a type, such as "gguf-q8_0".

    Returns:
        The path of the copy.

    Raises:
        ConfigError: `to` is unknown, `out` exists, or the checkpoint is quantised already.
        UnsupportedError: a tensor or a type that the format cannot hold.
        CheckpointError: a file is malformed, or a weight is not finite.
    """
    from ..hub import resolve
    from . import compressed, gguf_file

    path = Path(out)
    if to not in OWN and not to.startswith(GGUF):
        raise ConfigError(f"to={to!r}: wanted {', '.join(OWN)} or {GGUF}TYPE, such as {GGUF}q8_0", option="to", value=to)
    if path.exists():
        raise ConfigError(f"{path} exists; name a new path, or remove it", option="out", value=str(path))
    files = resolve(model)
    if to in OWN:
        compressed.write(files, path, to)
    else:
        gguf_file.write(files, path, to.removeprefix(GGUF))
    return path
