"""The second model, or the head, that `speculative_config={"method": ..., "model": ...}` names, and that proposes drafts.

Its pages have the numbers of the first model's, so both pools have equally many. Its size must be known before the first model
takes the rest of the device's memory, and it is loaded when the number of pages is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import _core
from ..errors import ConfigError, ModelNotFoundError, UnsupportedError
from .speculation import HEADS, NAME

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..config import EngineConfig
    from ..hub import ModelFiles
    from ..models import Spec
    from ..models.config import Raw
    from ..text.tokenizer import Tokenizer

OTHER_BYTES = 1 << 30
"""Memory of the device for a drafter's context, activations and logits."""


class Drafter:
    """A drafter that is not loaded yet.

    Args:
        config: Options of the first model, with its types.
        options: The core's options of the first model.
        target: The first model's program. A head adds what it reads.
        files, checkpoint: The first model's, in which the layers of "mtp" are.
        tokenizer: The first model's; None = its option left it out.
    """

    def __init__(
        self, config: EngineConfig, options: dict[str, Any], target: Spec, tokenizer: Tokenizer | None, files: ModelFiles,
        checkpoint: _core.Checkpoint | None,
    ) -> None:  # fmt: skip
        from .. import hub, models
        from ..models import quantized

        assert config.speculative_config is not None
        _refuse_ranks(config)
        self.name = config.speculative_config.get("model", config.model)
        self.is_head = config.speculative_config["method"] in HEADS
        self.longest: int | None = None
        """Most positions; None: a head has no limit of its own."""
        self.checkpoint = checkpoint
        dummy, is_own = config.load_format == "dummy", "model" not in config.speculative_config
        if not is_own:
            files = hub.resolve(self.name, None, config.hf_token, weights=not dummy)
            self.checkpoint = None if dummy and files.kind != "gguf" else models.open_checkpoint(files, None)
        raw = self._write_head(config, files, target) if self.is_head else self._write_model(config, files, target, tokenizer)
        if dummy:
            self.checkpoint = None
        self.options = {
            **options,
            "one_group": True,
            "adapters": None,
            "max_draft_rows": 0,
            "hosts": None,
            "dummy_mxfp4": dummy and quantized.dummies_are_mxfp4(raw),
        }
        self.page_bytes = sum(_core.page_bytes(spec, self.options) for spec in self.specs)
        file_bytes = sum(path.stat().st_size for path in files.weights)
        self.num_bytes = OTHER_BYTES + (_part_bytes(self.specs[0]) if is_own else file_bytes)

    def _write_head(self, config: EngineConfig, files: ModelFiles, target: Spec) -> Raw:
        """Writes the program of a head; returns its configuration."""
        from ..models import draft_heads

        assert config.speculative_config is not None
        if files.kind == "gguf":
            raise UnsupportedError(f"{NAME}: {self.name}: a head in a GGUF file is not supported; give its directory")
        method, k = config.speculative_config["method"], config.speculative_config["k"]
        self.specs, found = draft_heads.load(method, files, self.checkpoint, target, k=0 if k == "auto" else k,
                                              n_ranks=config.tensor_parallel_size)  # fmt: skip
        if method == "medusa" and k != "auto" and len(self.specs) < k:
            raise ConfigError(f"{NAME}: k must be at most {len(self.specs)}, the heads of {self.name}, got {k}", option=NAME)
        return found.raw

    def _write_model(
        self, config: EngineConfig, files: ModelFiles, target: Spec, tokenizer: Tokenizer | None
    ) -> Raw:
        """Writes the program of a second model; returns its configuration."""
        from .. import models

        wanted = config.max_model_len if isinstance(config.max_model_len, int) else None
        compiled = models.load(files, self.checkpoint, max_model_len=wanted)
        self.specs, self.longest = [compiled.spec], compiled.config.max_position_embeddings
        if not compiled.generates:
            raise ConfigError(f"{NAME}: {self.name} makes no tokens; choose a model that generates", option=NAME)
        self._check_vocabulary(target["vocab_size"], tokenizer, files)
        return compiled.config.raw

    def _check_vocabulary(self, vocab_size: int, tokenizer: Tokenizer | None, files: Any) -> None:
        """Each id must mean the same text in both models."""
        from ..text.tokenizer import load_tokenizer

        wanted = "choose a drafter with the model's vocabulary"
        if tokenizer is None:
            if self.specs[0]["vocab_size"] != vocab_size:
                have = f"{NAME}: {self.name} has {self.specs[0]['vocab_size']} token ids, the model {vocab_size}"
                raise ConfigError(f"{have}; {wanted}", option=NAME)
            return
        try:
            own = load_tokenizer(files, self.checkpoint, None).get_vocab()
        except ModelNotFoundError as error:
            raise ConfigError(f"{NAME}: {self.name} has no tokenizer to compare: {error}", option=NAME) from error
        for token, number in tokenizer.get_vocab().items():
            if own.get(token) != number:
                have = f"{NAME}: the token {token!r} has the id {number} in the model and {own.get(token)} in {self.name}"
                raise ConfigError(f"{have}; {wanted}", option=NAME)

    @property
    def beside(self) -> tuple[int, int]:
        """The core's option of the first model: bytes of this one, and its bytes for each page."""
        return self.num_bytes, self.page_bytes

    def open(self, model: _core.Model, on_progress: Callable[[int, int], None] | None) -> tuple[_core.Model, ...]:
        """Loads the drafter with as many pages as the model has. Medusa has a core model for each head."""
        chosen = model.describe()
        length = int(chosen["max_model_len"])
        if self.longest is not None and length > self.longest:
            message = (
                f"max_model_len must be at most {self.longest}, the max_position_embeddings of the drafter {self.name}, "
                f"got {length}; lower max_model_len"
            )
            raise ConfigError(message, option="max_model_len", value=length)
        options = {**self.options, "beside": None, "lender": model if self.is_head else None}
        options |= {"max_model_len": length, "fit_model_len": False}
        options["kv_cache_bytes"] = int(chosen["num_pages"]) * (self.page_bytes // len(self.specs))
        return tuple(_core.Model([spec], self.checkpoint, options, on_progress) for spec in self.specs)


def _part_bytes(spec: Spec) -> int:
    """Bytes of the matrices of a program, 2 a value."""
    return sum(2 * part.rows * weight["cols"] for weight in spec["weights"] for part in weight["parts"])


def _refuse_ranks(config: EngineConfig) -> None:
    assert config.speculative_config is not None
    method = config.speculative_config["method"]
    for name in ("data_parallel_size", "nnodes"):
        if getattr(config, name) > 1:
            raise UnsupportedError(
                f"{NAME} with the method {method!r} is not supported yet with {name}={getattr(config, name)}; "
                f"use {name}=1, or the method 'ngram' or 'suffix'"
            )
