"""Data that all requests of an engine share: vocabulary, tokenizer, labels of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..inputs import Prompt
    from ..sampling_params import SamplingParams
    from ..text.sample_text import SampleText
    from ..text.tokenizer import Tokenizer


class Context:
    """Data that all requests of an engine share. It does not refer to the engine, so outputs may outlive the engine.

    Args:
        vocab_size: Rows of the vocabulary.
        tokenizer: The tokenizer; None: outputs have no text.
        token_bytes: Text bytes of every token; None if a text is not the concatenation of its tokens' bytes.
        version: Label of the loaded weights; None = their epoch, 0.
        has_axes: Whether positions have several axes (M-RoPE).
    """

    __slots__ = ("has_axes", "token_bytes", "tokenizer", "versions", "vocab_size")

    def __init__(
        self,
        vocab_size: int,
        tokenizer: Tokenizer | None = None,
        token_bytes: list[bytes] | None = None,
        version: int | str | None = None,
        has_axes: bool = False,
    ) -> None:
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.token_bytes = token_bytes
        self.has_axes = has_axes
        self.versions: dict[int, int | str] = {} if version is None else {0: version}
        """The labels that callers set, by epoch. A label is set before its epoch begins."""

    def version(self, epoch: int) -> int | str:
        """Label of an epoch's weights: the caller's label, or else the epoch itself."""
        return self.versions.get(epoch, epoch)

    def decode(self, token: int) -> str | None:
        """Text of one token, partial bytes as U+FFFD; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        table = self.token_bytes
        if table is not None and token < len(table) and table[token]:
            return table[token].decode("utf-8", "replace")
        text: str = self.tokenizer.decode([token])
        return text

    def make_text(self, prompt: Prompt, params: SamplingParams) -> SampleText | None:
        """A text maker for one sample; None if no text is wanted."""
        if self.tokenizer is None or prompt.ids is None or not params.detokenize:
            return None
        from ..text.sample_text import SampleText

        text = SampleText(self.tokenizer, prompt.ids.tolist(), params)
        if prompt.prior is not None:
            text.prime(prompt.prior.tolist())
        return text
