"""Results of embed(), classify() and encode()."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .errors import LlmpyError
from .outputs import to_plain
from .results.output_lists import OutputList

if TYPE_CHECKING:
    from .logprobs import Floats, Ints


@dataclass(slots=True, eq=False, kw_only=True)
class PoolingOutput:
    """The pooled states of a prompt.

    Args:
        data: float32 [D], or [P, D] for tasks that return every token. For a classifier D is the number of labels.
    """

    data: Floats


@dataclass(slots=True, eq=False, kw_only=True)
class EmbeddingOutput:
    """An embedding.

    Args:
        embedding: float32 [D].
    """

    embedding: Floats

    @property
    def data(self) -> Floats:
        """`embedding`, by the name that all pooling outputs have."""
        return self.embedding

    @property
    def hidden_size(self) -> int:
        """Number of elements, D."""
        return len(self.embedding)


@dataclass(slots=True, eq=False, kw_only=True)
class ClassificationOutput:
    """A classification.

    Args:
        probs: float32 [labels]: probabilities, or the head's raw scores if use_activation is False.
    """

    probs: Floats

    @property
    def data(self) -> Floats:
        """`probs`, by the name that all pooling outputs have."""
        return self.probs

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.probs)


@dataclass(slots=True, eq=False, kw_only=True)
class ScoringOutput:
    """The similarity of two texts.

    Args:
        score: A cosine, from -1 to 1, or the score of a cross-encoder.
    """

    score: float

    @property
    def data(self) -> Floats:
        """`score` as float32 [], by the name that all pooling outputs have."""
        import numpy as np

        return np.asarray(self.score, np.float32)


Outputs = TypeVar("Outputs", PoolingOutput, EmbeddingOutput, ClassificationOutput, ScoringOutput)


@dataclass(slots=True, eq=False, kw_only=True, repr=False)
class PoolingRequestOutput(Generic[Outputs]):
    """One prompt's pooled states. P is the number of its tokens.

    Args:
        request_id: Id of the request.
        index: Index of the prompt in the call's input.
        prompt: Text of the prompt; None for token ids.
        prompt_token_ids_array: int32 [P].
        outputs: The result; empty if the request failed.
        num_cached_tokens: Number of tokens found in the prefix cache.
        weight_version: Version of the weights.
        error: Why the request failed, or None.
        finished: Whether the result is complete; False if the request failed or was aborted.
    """

    request_id: str
    index: int
    prompt: str | None
    prompt_token_ids_array: Ints
    outputs: Outputs
    num_cached_tokens: int = 0
    weight_version: int | str = 0
    error: LlmpyError | None = None
    finished: bool = True

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's ids as a list."""
        ids: list[int] = self.prompt_token_ids_array.tolist()
        return ids

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, ready for JSON."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "outputs"}
        values["prompt_token_ids"] = values.pop("prompt_token_ids_array")
        values["outputs"] = {item.name: getattr(self.outputs, item.name) for item in fields(self.outputs)}
        return {name: to_plain(value) for name, value in values.items()}

    def __repr__(self) -> str:
        shape = "x".join(str(size) for size in self.outputs.data.shape)
        state = f"error: {self.error}" if self.error is not None else f"{len(self.prompt_token_ids_array)} tokens, {shape}"
        return f"{type(self).__name__}({self.index}, {state})"[:120]


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """One prompt's embedding, in `.outputs.embedding`."""

    __slots__ = ()


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """One prompt's classification, in `.outputs.probs`."""

    __slots__ = ()


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The similarity of a pair, in `.outputs.score`. Prompt and ids are those of a cross-encoder, or of both texts."""

    __slots__ = ()


Output = TypeVar("Output", bound=PoolingRequestOutput[Any])


class PoolingOutputs(OutputList[Output]):
    """The outputs of `embed`, `classify` or `encode`, in the order of the prompts.

    It is a list; `.numpy()` stacks the results and `.to_pandas()` has one row per prompt.

    Args:
        outputs: The outputs.
        elapsed: 0.
    """

    def numpy(self) -> Floats:
        """Stacks the results, float32 [B, D].

        Raises:
            ValueError: A request failed or was aborted, so it has no result; or the results have different shapes, such as
                results of every token.
        """
        left = [output for output in self if not output.finished]
        if left:
            raise ValueError(
                f"numpy(): {len(left)} of {len(self)} prompts have no result; number {left[0].index}: {left[0].error}; "
                "stack those whose .finished is True"
            )
        import numpy as np

        rows: Floats = np.stack([output.outputs.data for output in self])
        return rows
