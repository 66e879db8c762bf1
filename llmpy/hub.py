"""Finds a model's files: a local directory, a `.gguf` file, or a repository of the Hugging Face hub and its cache.

A local path never touches the network and never imports the hub client.
"""

from __future__ import annotations

import logging
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import CheckpointError, ModelNotFoundError, UnsupportedError
from .json_files import read_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

logger = logging.getLogger("llmpy")

INDEX = "model.safetensors.index.json"
SCHEME_FILES = ("quantize_config.json", "quant_config.json")
"""Of older files of GPTQ, and of AWQ and SqueezeLLM, whose config.json has no quantization_config."""
TEXT_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "tokenizer.model"),
    *("tokenizer.jsonl", "llmpy_program.json", "preprocessor_config.json", "processor_config.json"),
    *("modules.json", INDEX, *SCHEME_FILES),
)
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx")
DEMO = "demo"
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
ADDRESS = re.compile(r"https?://[^/]+/([\w.-]+/[\w.-]+)")
PART = re.compile(r"(.*-)\d{5}(-of-)(\d{5})(\.gguf)", re.IGNORECASE)
ADAPTER = "adapter_config.json"
REPOSITORY_FILE = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)/(.+\.gguf)")


class ModelFiles:
    """The files of one model.

    Args:
        kind: "hf" (config.json and safetensors) or "gguf".
        directory: Directory of config and tokenizer files; None for a GGUF file, which contains them.
        weights: Safetensors shards in order, or the GGUF file or its parts in order; empty if only text files were requested.
        config: Contents of config.json; {} for GGUF.
        generation_config: Contents of generation_config.json; {} without one. The demo model, a GGUF file, has `demo.SAMPLING`.
        name: Short name for display.
    """

    __slots__ = ("config", "directory", "generation_config", "kind", "name", "weights")

    def __init__(
        self,
        kind: str,
        directory: Path | None,
        weights: list[Path],
        config: dict[str, Any],
        generation_config: dict[str, Any],
        name: str,
    ) -> None:
        self.kind = kind
        self.directory = directory
        self.weights = weights
        self.config = config
        self.generation_config = generation_config
        self.name = name

    def __repr__(self) -> str:
        where = self.directory or self.weights[0]
        return f"ModelFiles({self.kind}, {self.name}, {where}, {len(self.weights)} weight files)"


def is_demo(model: str | Path) -> bool:
    """Whether `model` means the demo model: the word "demo", unless a local file or model folder has that name."""
    path = Path(DEMO)
    return model == DEMO and not (path.is_file() or (path / "config.json").is_file() or any(path.glob("*.gguf")))


def resolve(model: str | Path, revision: str | None = None, token: str | None = None, *, weights: bool = True) -> ModelFiles:
    """Finds the files of a model; downloads missing files of a hub repository to the cache.

    Args:
        model: A local directory, a local `.gguf` file, a hub id ("org/name"), a file in one ("org/name/file.gguf"), or
            "demo", the demo model, which is fetched once.
        revision: Branch, tag or commit of a hub repository; None = its main branch.
        token: Hub token; None = the hub client's token.
        weights: False: only config and tokenizer files are needed; weights are neither required nor downloaded.

    Returns:
        The files, all of them on disk.

    Raises:
        ModelNotFoundError: There is no such path, repository, revision or file, or no network and no cached copy.
        CheckpointError: A JSON file does not parse, or an index names missing files.
        UnsupportedError: The weights have another format only.
    """
    if is_demo(model):
        from .demo import fetch_model

        return _from_gguf(fetch_model())
    path = Path(model).expanduser()
    if path.is_dir():
        return _from_directory(path, weights)
    if path.is_file():
        return _from_gguf(path)
    text = str(model)
    if found := ADDRESS.match(text):
        raise ModelNotFoundError(f"model: {text} is an address; give the hub id {found[1]!r}, a branch or commit as revision")
    if isinstance(model, str) and (found := REPOSITORY_FILE.fullmatch(text)):
        return _from_hub(found[1], found[2], revision, token, weights)
    if isinstance(model, str) and REPOSITORY.fullmatch(text) and not text.endswith(".gguf"):
        return _from_hub(text, None, revision, token, weights)
    raise ModelNotFoundError(
        f"model: {text} is neither a file nor a directory; give a directory with config.json, a .gguf file, "
        'a hub id ("org/name"), or "demo"'
    )


def _from_gguf(path: Path) -> ModelFiles:
    """One local file, or all parts of the model of which it is a part."""
    if path.suffix.lower() != ".gguf":
        raise UnsupportedError(f"model: {path} is a file that is not .gguf; give its directory, or a .gguf file")
    from . import demo

    parts = [path.with_name(name) for name in _parts(path.name)]
    for part in parts:
        if not part.is_file():
            raise ModelNotFoundError(f"{part}: wanted all {len(parts)} parts of {path.name}; is the download complete?")
    sampling = dict(demo.SAMPLING) if path.name == demo.NAME else {}
    return ModelFiles("gguf", None, parts, {}, sampling, re.sub(r"-00001-of-\d{5}$", "", parts[0].stem))


def _parts(name: str) -> list[str]:
    """The names of all parts of a split GGUF file, given that of one; a whole file's name alone."""
    found = PART.fullmatch(name)
    if not found or not int(found[3]):
        return [name]
    return [f"{found[1]}{number:05}{found[2]}{found[3]}{found[4]}" for number in range(1, int(found[3]) + 1)]


def _from_directory(directory: Path, weights: bool) -> ModelFiles:
    """A local directory with config.json and safetensors, or with one GGUF model."""
    names = sorted(entry.name for entry in directory.iterdir() if entry.is_file())
    if _holds_gguf(names, weights):
        return _from_gguf(directory / _only_gguf(names, str(directory), f"{directory}/"))
    shards: list[Path] = []
    if weights:
        shards = [directory / name for name in _shards(names, directory / INDEX)]
        _check_shards(shards, names, directory)
    config, generation = (read_json(directory / name, absent=dict) for name in ("config.json", "generation_config.json"))
    if config.get("architectures") == ["InternVLChatModel"]:
        from .vision.internvl_chat import translated

        config = translated(config, directory)
    if config and config.get("quantization_config") is None and (scheme := _older_scheme(config, directory)):
        config = {**config, "quantization_config": scheme}
    return ModelFiles("hf", directory, shards, config, generation, _short_name(directory))


def _older_scheme(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    """What older files have in place of quantization_config; {}: nothing."""
    by_gptq, by_others = (read_json(directory / name, absent=dict) for name in SCHEME_FILES)
    if isinstance(config.get("compression_config"), dict):
        return {"quant_method": "compressed-tensors", **config["compression_config"]}
    if by_gptq:
        return {"quant_method": "gptq", **by_gptq}
    if "w_bit" in by_others:
        return {"quant_method": "awq", "bits": by_others["w_bit"], "group_size": by_others.get("q_group_size"), **by_others}
    return {"quant_method": "squeezellm", **by_others} if "wbits" in by_others else by_others


def _holds_gguf(names: list[str], weights: bool) -> bool:
    """Whether these files are a GGUF model rather than a Hugging Face model."""
    if "config.json" not in names:
        return True
    with_weights = [name for name in names if name.endswith((".gguf", ".safetensors"))]
    return weights and bool(with_weights) and all(name.endswith(".gguf") for name in with_weights)


def _check_shards(shards: list[Path], names: list[str], directory: Path) -> None:
    """Raises unless there are safetensors files and none is missing."""
    others = ", ".join([name for name in names if name.endswith(OTHER_WEIGHTS)][:3])
    if not shards and others:
        raise UnsupportedError(f"{directory}: wanted safetensors, have {others}; convert the weights to safetensors")
    if not shards:
        raise ModelNotFoundError(f"{directory}: has config.json and no *.safetensors; is the download complete?")
    for shard in shards:
        if not shard.is_file():
            message = f"{shard}: listed in {INDEX} and not there; is the download complete?"
            raise CheckpointError(message, file=str(shard))


def _shards(names: Iterable[str], index: Path) -> list[str]:
    """Names of the safetensors files that make up the model, in order."""
    found = {name for name in names if name.endswith(".safetensors") and "/" not in name}
    if index.is_file():
        table = read_json(index).get("weight_map")
        if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
            raise CheckpointError(f"{index}: wanted a weight_map of file names", file=str(index))
        for name in table.values():
            if Path(name).name != name:
                raise CheckpointError(f"{index}: wanted names of files beside it, have {name!r}", file=str(index))
        return sorted(set(table.values()))
    if "model.safetensors" in found:
        return ["model.safetensors"]
    return sorted(name for name in found if not name.startswith(("consolidated", "adapter")))


def _only_gguf(names: Sequence[str], where: str, prefix: str) -> str:
    """The only GGUF file among the names; of a split one, the first part."""
    found = sorted(name for name in names if name.lower().endswith(".gguf"))
    if not found and ADAPTER in names:
        raise UnsupportedError(
            f"{where}: has {ADAPTER} and no config.json: a LoRA adapter, which is not supported; merge it into its base "
            "model (merge_and_unload() of peft), save that, and give its directory"
        )
    if not found:
        raise ModelNotFoundError(f"{where}: has neither config.json nor a .gguf file")
    if len({_parts(name)[0] for name in found}) > 1:
        listed = ", ".join(found[:8]) + (", ..." if len(found) > 8 else "")
        raise ModelNotFoundError(f"{where}: has {len(found)} GGUF files ({listed}); name one, as {prefix}{found[0]}")
    return found[0]


def _short_name(directory: Path) -> str:
    """A directory's name; for a snapshot in the hub's cache, the repository's name."""
    resolved = directory.resolve()
    parent = resolved.parent.parent.name
    if resolved.parent.name == "snapshots" and parent.startswith("models--"):
        return parent.rsplit("--", 1)[1]
    return resolved.name or str(resolved)


def _from_hub(repository: str, file: str | None, revision: str | None, token: str | None, weights: bool) -> ModelFiles:
    """The files of a hub repository: downloads the listed files, or uses the cache if the hub cannot be reached."""
    if find_spec("huggingface_hub") is None:  # tokenizers usually brings it
        message = f"{repository}: a model of the hub needs a package: pip install huggingface_hub; or give a local directory"
        raise ModelNotFoundError(message)
    names = _list_repository(repository, revision, token)
    if names is None:
        snapshot = _cached_snapshot(repository, revision)
        names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]
        gguf = _gguf_of(repository, file, names, weights)
    elif gguf := _gguf_of(repository, file, names, weights):
        snapshot = _download(repository, _parts(gguf), revision, token)
    else:
        chosen = [name for name in names if _is_text(name)]
        snapshot = _download(repository, chosen, revision, token)
        if weights:
            snapshot = _download(repository, [*chosen, *_shards(names, snapshot / INDEX)], revision, token)
    return _from_gguf(snapshot / gguf) if gguf else _from_directory(snapshot, weights)


def _gguf_of(repository: str, file: str | None, names: list[str], weights: bool) -> str | None:
    """The chosen GGUF file of a repository; None if it is a Hugging Face model."""
    if file is None:
        return _only_gguf(names, repository, f"{repository}/") if _holds_gguf(names, weights) else None
    if file not in names:
        others = ", ".join(sorted(name for name in names if name.endswith(".gguf"))) or "none"
        raise ModelNotFoundError(f"{repository}: no file {file}; its GGUF files: {others}")
    return file


def _is_text(name: str) -> bool:
    """Whether a repository's file configures the model or its tokenizer."""
    is_template = name.startswith("additional_chat_templates/") and name.endswith(".jinja")
    return name in TEXT_FILES or name.endswith("_Pooling/config.json") or is_template


def _list_repository(repository: str, revision: str | None, token: str | None) -> list[str] | None:
    """Names of a repository's files; None if the hub cannot be reached."""
    from huggingface_hub import HfApi, errors

    knob = "hf_token, HF_TOKEN"
    try:
        siblings = HfApi(token=token).model_info(repository, revision=revision).siblings or []
        return [sibling.rfilename for sibling in siblings]
    except errors.OfflineModeIsEnabled:
        return None
    except errors.GatedRepoError as error:
        message = f"{repository} is gated: accept its terms on the hub and give a token; {knob}"
        raise ModelNotFoundError(message) from error
    except errors.RepositoryNotFoundError as error:
        message = f"{repository}: no such file or directory here, and no such repository on the hub or a private one; {knob}"
        raise ModelNotFoundError(message) from error
    except errors.RevisionNotFoundError as error:
        message = f"{repository} has no revision {revision}; give a branch, a tag or a commit"
        raise ModelNotFoundError(message) from error
    except Exception as error:  # the client's transport has its own classes, which differ between its versions
        if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
            raise ModelNotFoundError(f"{repository}: the hub refused the token; {knob}") from error
        logger.warning("%s: the hub cannot be reached (%s); looking in the cache", repository, _first_line(error))
        return None


def _cached_snapshot(repository: str, revision: str | None) -> Path:
    """The directory of a revision in the hub's cache."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    name = revision or constants.DEFAULT_REVISION
    reference = folder / "refs" / name
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else name
    snapshot = folder / "snapshots" / commit
    if not snapshot.is_dir():
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise ModelNotFoundError(
            f"{repository}: no such file or directory here, {why}, and the cache has no revision {name} at {folder}; "
            "download it where there is a network, or give a local directory"
        )
    return snapshot


def _download(repository: str, names: list[str], revision: str | None, token: str | None) -> Path:
    """Downloads files of a repository to the cache and returns their directory."""
    from huggingface_hub import snapshot_download

    patterns = [re.sub(r"([*?[])", r"[\1]", name) for name in names]
    try:
        return Path(snapshot_download(repository, revision=revision, token=token, allow_patterns=patterns))
    except Exception as error:  # as above
        if type(error) in (OSError, PermissionError):  # a full disk, or a cache without write permission
            raise
        message = f"{repository}: the download failed: {_first_line(error)}; try again, what is there is kept"
        raise ModelNotFoundError(message) from error


def _first_line(error: Exception) -> str:
    """Type and first line of an error's text."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
