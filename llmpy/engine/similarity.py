"""The similarity of texts: the score of a cross-encoder, or the cosine of embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequestError, UnsupportedError
from ..pooling_outputs import PoolingOutputs, PoolingRequestOutput, ScoringOutput, ScoringRequestOutput
from .frontend import check_text

if TYPE_CHECKING:
    from ..inputs import TokensPrompt
    from ..logprobs import Floats
    from .driver import Driver
    from .frontend import Frontend
    from .pooling import Pooler
    from .progress import UseTqdm


def cosine(first: Floats, second: Floats) -> float:
    """The cosine of two vectors of length 1, added up in float64 and rounded to float32."""
    return float((first.astype("float64") * second).sum().astype("float32"))


def is_cross_encoder(pooler: Pooler, call: str) -> bool:
    """Whether pairs are scored by a classifier; else by the cosine of embeddings.

    Args:
        pooler: The model's Pooler.
        call: The call, for errors.

    Raises:
        UnsupportedError: The model is a classifier of several labels, or does not embed.
    """
    if "classify" not in pooler.tasks:
        pooler.check("embed", call)
        return False
    if len(pooler.labels) != 1:
        raise UnsupportedError(f"{call} wants a classifier with one label, or embeddings; this one has {len(pooler.labels)}")
    return True


def joined(frontend: Frontend, first: str, second: str) -> TokensPrompt:
    """A pair as one prompt of a cross-encoder."""
    tokenizer = frontend.tokenizer
    if tokenizer is None:
        raise InvalidRequestError("a pair of texts needs a tokenizer; skip_tokenizer_init is True", parameter="data_1")
    for text in (first, second):
        check_text(tokenizer, text, frontend.max_model_len)
    ids, types = tokenizer.encode_pair(first, second)
    if frontend.pooler.has_token_types:
        return {"prompt_token_ids": ids, "token_type_ids": types}
    return {"prompt_token_ids": ids}


class SimilarityCalls:
    """LLM's call for pairs of texts."""

    if TYPE_CHECKING:
        _driver: Driver
        _frontend: Frontend

        def classify(self, prompts: Any, *, use_tqdm: UseTqdm, lora_request: object, on_error: str) -> Any: ...

        def embed(self, prompts: Any, *, use_tqdm: UseTqdm, lora_request: object, on_error: str, normalize: bool) -> Any: ...

    def similarity(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        use_tqdm: UseTqdm = None,
        lora_request: object = None,
        on_error: str = "raise",
    ) -> PoolingOutputs[ScoringRequestOutput]:
        """How similar texts are: what vLLM's `LLM.score` computes.

        A classifier with one label is a cross-encoder: it reads each pair as one prompt. Other models embed each text once;
        the score of a pair is the cosine.

        Args:
            data_1: One text, or as many as `data_2`. One text is compared with each of `data_2`.
            data_2: One text or many.
            use_tqdm, on_error: As in `embed`.
            lora_request: A LoRARequest, the name of a loaded adapter, or None; for all pairs.

        Returns:
            One ScoringRequestOutput per pair, in order, the score in `.outputs.score`.

        Raises:
            TypeError: Something is no text.
            UnsupportedError: The model is a classifier of several labels, or does not embed.
            InvalidRequestError: The numbers of texts do not fit, or a text cannot run. Nothing ran.

        Example:
            >>> [one.outputs.score for one in llm.similarity("a cat", ["a kitten", "stock prices"])]
        """
        self._driver.check()
        firsts, seconds = _texts("data_1", data_1), _texts("data_2", data_2)
        if len(firsts) not in (1, len(seconds)):
            message = f"data_1 must be one text or as many as data_2 ({len(seconds)}), got {len(firsts)}."
            raise InvalidRequestError(message, parameter="data_1", value=len(firsts))
        pairs = list(zip(firsts * len(seconds) if len(firsts) == 1 else firsts, seconds, strict=True))
        how: dict[str, Any] = {"use_tqdm": use_tqdm, "lora_request": lora_request, "on_error": on_error}
        if is_cross_encoder(self._frontend.pooler, "LLM.similarity()"):
            scored = self.classify([joined(self._frontend, *pair) for pair in pairs], **how)
            return PoolingOutputs(_output(i, (one,), lambda row: float(row[0])) for i, one in enumerate(scored))
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        rows = dict(zip(texts, self.embed(texts, normalize=True, **how), strict=True))
        return PoolingOutputs(_output(i, (rows[one], rows[other]), cosine) for i, (one, other) in enumerate(pairs))


def _texts(name: str, given: object) -> list[str]:
    """The texts of an argument."""
    texts: list[Any] = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{name} must be text or a list of texts, but has {type(text).__name__}")
    return texts


def _output(index: int, parts: tuple[PoolingRequestOutput[Any], ...], score: Any) -> ScoringRequestOutput:
    """The output of a pair.

    Args:
        index: Number of the pair.
        parts: What the model gave for it: one output, or one for each text.
        score: Makes the score of their results.
    """
    import numpy as np

    finished = all(part.finished for part in parts)
    return ScoringRequestOutput(
        request_id="_".join(part.request_id for part in parts),
        index=index,
        prompt=None,
        prompt_token_ids_array=np.concatenate([part.prompt_token_ids_array for part in parts]),
        outputs=ScoringOutput(score=score(*(part.outputs.data for part in parts)) if finished else math.nan),
        num_cached_tokens=sum(part.num_cached_tokens for part in parts),
        weight_version=parts[-1].weight_version,
        error=next((part.error for part in parts if part.error is not None), None),
        finished=finished,
    )
