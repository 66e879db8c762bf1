"""The tokenizer of a Hugging Face directory: tokenizer.json, or PLaMo's tokenizer.jsonl, and their settings files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..errors import CheckpointError, UnsupportedError
from ..json_files import check_token_ids, damaged, read_json
from .tokenizer import DEFAULT_TEMPLATE, SPECIAL_NAMES, Backend, TemplateText, Tokenizer

if TYPE_CHECKING:
    import tokenizers

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class Settings:
    """Settings in tokenizer_config.json and special_tokens_map.json; the former wins. Every value is checked when read.

    Args:
        directory: Directory of the files.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files = [directory / name for name in ("tokenizer_config.json", "special_tokens_map.json")]
        self._found: list[dict[str, Any]] = [read_json(file, absent=dict) for file in self._files]

    def get(self, key: str) -> Any:
        """The unchecked value of a key; None if it is absent."""
        return next((found[key] for found in self._found if key in found), None)

    def error(self, key: str, wanted: str, have: object) -> CheckpointError:
        """The error for a key; names the file that has the key."""
        file = next((file for file, found in zip(self._files, self._found, strict=True) if key in found), self._files[0])
        return damaged(file, f"{key}: wanted {wanted}, have {repr(have)[:80]}; correct it")

    def text(self, key: str, token: object) -> str:
        """Text of a token, which is a str or an object with `content`."""
        content = token.get("content") if isinstance(token, Mapping) else token
        if not isinstance(content, str):
            raise self.error(key, "a text or an object with its content", token)
        return content

    def named(self) -> dict[str, str]:
        """Special tokens by role."""
        return {name: self.text(name, self.get(name)) for name in SPECIAL_NAMES if self.get(name)}

    def additional(self) -> list[str]:
        """Special tokens without a role."""
        key = "additional_special_tokens"
        given = self.get(key) or []
        if not isinstance(given, list):
            raise self.error(key, "a list of tokens", given)
        return [self.text(key, token) for token in given]

    def added(self) -> dict[int, tuple[str, dict[str, bool]]]:
        """Text and flags of the listed tokens by id, in the order of the ids."""
        key = "added_tokens_decoder"
        given = self.get(key) or {}
        if not isinstance(given, dict):
            raise self.error(key, "an object with a token for each id", given)
        found = {}
        for place, token in given.items():
            if not (place.isdecimal() and len(place) < 10 and isinstance(token, dict)):
                raise self.error(key, "an object with a token for each id", {place: token})
            flags = {flag: bool(token[flag]) for flag in FLAGS if flag in token}
            found[int(place)] = self.text(key, token), flags
        return dict(sorted(found.items()))

    def templates(self) -> dict[str, str]:
        """Chat templates by name; separate template files win over tokenizer_config.json."""
        key, directory = "chat_template", self.directory
        given = self.get(key)
        if isinstance(given, list):
            found = {self.text_of(one, "name"): self.text_of(one, "template") for one in given}
        elif given is None or isinstance(given, str):
            found = {} if given is None else {DEFAULT_TEMPLATE: given}
        else:
            raise self.error(key, "a text, or a list of objects with name and template", given)
        templates = {name: TemplateText(text, self._files[0]) for name, text in found.items()}
        legacy = directory / "chat_template.json"
        text = read_json(legacy, absent=dict).get(key)
        if text is not None:
            if not isinstance(text, str):
                raise damaged(legacy, f"{key}: wanted a text, have {repr(text)[:80]}; correct it")
            templates[DEFAULT_TEMPLATE] = TemplateText(text, legacy)
        if (directory / "chat_template.jinja").is_file():
            templates[DEFAULT_TEMPLATE] = _template(directory / "chat_template.jinja")
        for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
            templates[path.stem] = _template(path)
        return dict(templates)

    def text_of(self, one: object, name: str) -> str:
        """A field of a named template."""
        found = one.get(name) if isinstance(one, Mapping) else None
        if not isinstance(found, str):
            raise self.error("chat_template", "a text, or a list of objects with name and template", one)
        return found


def _template(path: Path) -> TemplateText:
    """The template in a file."""
    try:
        return TemplateText(path.read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise damaged(path, f"cannot be read as text: {error}; download it again") from error


def from_directory(directory: Path, config: Mapping[str, object], generation: Mapping[str, object]) -> Tokenizer:
    """Loads the tokenizer of a directory.

    Args:
        directory: Directory with tokenizer.json and its settings files.
        config: Content of config.json.
        generation: Content of generation_config.json.

    Raises:
        CheckpointError: A file is damaged or contradicts itself.
        UnsupportedError: There is no tokenizer.json.
    """
    from . import token_texts

    settings = Settings(directory)
    named, ends = settings.named(), [*_id_list(generation), *_id_list(config)]
    if (directory / "tokenizer.jsonl").is_file() and not (directory / "tokenizer.json").is_file():
        return _from_lines(settings, named, ends)
    backend = _open_backend(directory / "tokenizer.json")
    _add_tokens(backend, settings, named)
    check_token_ids(directory / "tokenizer.json", backend.get_vocab(with_added_tokens=True))
    special = (place for place, token in backend.get_added_tokens_decoder().items() if token.special)
    ends += _ids(backend, [named["eos_token"]] if "eos_token" in named else [])
    return Tokenizer(cast(Backend, backend), token_texts.of_backend(backend), special, named, ends, settings.templates())


def _from_lines(settings: Settings, named: Mapping[str, str], ends: list[int]) -> Tokenizer:
    """Loads PLaMo's tokenizer.jsonl."""
    from .plamo_tokenizer import read

    additional, added = settings.additional(), settings.added()
    path = settings.directory / "tokenizer.jsonl"
    adds = {role for role in ("bos", "eos") if settings.get(f"add_{role}_token")}
    backend = read(path, named, additional, {text: token for token, (text, _) in added.items()}, adds)
    check_token_ids(path, backend.get_vocab())
    marked = [text for text, flags in added.values() if flags.get("special")]
    special = _ids(backend, [*named.values(), *additional, *marked])
    ends += _ids(backend, [named["eos_token"]] if "eos_token" in named else [])
    return Tokenizer(backend, backend.texts(special), set(special), named, ends, settings.templates())


def _ids(backend: Any, texts: Sequence[str]) -> list[int]:
    """Ids of the tokens that the vocabulary has; others are left out."""
    found = (backend.token_to_id(text) for text in texts)
    return [token for token in found if token is not None]


def _id_list(config: Mapping[str, object]) -> list[int]:
    """The end-of-sequence ids of a configuration, which may have one id, several, or none."""
    given = config.get("eos_token_id")
    return [token for token in (given if isinstance(given, list) else [given]) if type(token) is int]


def _open_backend(path: Path) -> tokenizers.Tokenizer:
    """Reads tokenizer.json."""
    directory = path.parent
    if not path.is_file():
        others = [name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (directory / name).is_file()]
        have = ", ".join(others) or "nothing of the kind"
        raise UnsupportedError(
            f"{directory}: wanted tokenizer.json, have {have}; save the tokenizer as tokenizer.json with transformers, "
            "name another one with tokenizer=, or pass ids with skip_tokenizer_init=True (llmpy compare: --ids)"
        )
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
        backend.no_truncation()
        backend.no_padding()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises a bare Exception or a PanicException for a damaged file
        raise damaged(path, f"not a tokenizer: {error}; download it again") from error
    return backend


def _add_tokens(backend: tokenizers.Tokenizer, settings: Settings, named: Mapping[str, str]) -> None:
    """Adds the tokens that are in tokenizer_config.json but not in tokenizer.json, in the order of their ids."""
    from tokenizers import AddedToken

    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    fresh = [AddedToken(text, **flags) for text, flags in settings.added().values() if text not in present]
    present.update(token.content for token in fresh)
    roles = dict.fromkeys([*named.values(), *settings.additional()])
    backend.add_tokens([*fresh, *(AddedToken(name, special=True) for name in roles if name not in present)])
