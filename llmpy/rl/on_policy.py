"""OnPolicy: log-probabilities in a training step with the engine's values and the trainer's gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequestError
from ..hardware import ordinal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..llm import LLM
    from ..weights.updates import UpdateReport

    Ids = Sequence[Sequence[int]]


class OnPolicy:
    """Log-probabilities of completions: the values are the rollout's bits, the gradients are torch's.

    A trainer and an engine round differently, so their log-probabilities of the same token differ, and the importance
    ratio of a first update is not 1. Here the forward value is the engine's `score`, which has the bits of `generate`. The
    backward pass goes through the trainer's own forward pass. So the ratio exp(new - old) is exactly 1 until the weights
    change, and the gradient is that of torch, weighted with this exact ratio.

    Args:
        llm: The engine. Its weights are updated before they are used whenever the trainer's have changed.
        model: A torch module; `model(input_ids=, attention_mask=, use_cache=False).logits` are its logits.
        rename: As in `LLM.update_weights`.
        in_place: There is one copy of the model's matrices. On the CPU the engine reads the model's (`borrow` of
            `LLM.update_weights`), on CUDA the model's parameters move into the engine's memory (`LLM.share_weights`) until
            `release`. Parameters of another type than the engine's have a copy.

    Example:
        >>> policy = OnPolicy(llm, model)
        >>> policy.update()
        >>> outputs = llm.generate(prompts, params)
        >>> new = policy.logprobs(prompt_ids, completion_ids, temperature=params.temperature)
        >>> ratio = torch.exp(new[0] - torch.tensor(outputs[0].outputs[0].sampled.full))  # 1.0 for every token
    """

    def __init__(
        self, llm: LLM, model: Any, rename: Callable[[str], str | None] | None = None, *, in_place: bool = False
    ) -> None:
        self.llm = llm
        self.model = model
        self.last_update: UpdateReport | None = None
        """The report of the last update."""
        self._rename, self._in_place = rename, in_place
        self._shares = in_place and ordinal(str(llm.config.device)) >= 0
        self._moved: set[str] = set()
        self._seen: list[tuple[int, int]] | None = None

    def update(self, version: int | str | None = None) -> bool:
        """Makes the engine use the trainer's weights if they have changed since the last call.

        torch counts the in-place changes of a tensor. A parameter counts as changed if this number or its address differs.

        Args:
            version: As in `LLM.update_weights`.

        Returns:
            Whether they had changed.
        """
        seen = [(parameter.data_ptr(), parameter._version) for parameter in self.model.parameters()]
        if seen == self._seen:
            return False
        named = list(self.model.named_parameters())
        borrow = self._in_place and not self._shares
        self.last_update = self.llm.update_weights(named, version=version, rename=self._rename, borrow=borrow)
        if self._shares:
            self._move(named)
        self._seen = [(parameter.data_ptr(), parameter._version) for parameter in self.model.parameters()]
        return True

    def _move(self, named: list[tuple[str, Any]]) -> None:
        """Makes the parameters tensors in the engine's memory, which has their values already."""
        import torch

        matrices = self.llm.share_weights()
        for name, parameter in named:
            matrix = matrices.get((name if self._rename is None else self._rename(name)) or "")
            if matrix is None or getattr(torch, matrix.dtype) != parameter.dtype or matrix.shape != tuple(parameter.shape):
                continue
            if matrix.address != parameter.data_ptr():
                parameter.data = torch.as_tensor(matrix, device=parameter.device).view(parameter.dtype)
                self._moved.add(name)

    def release(self) -> None:
        """Gives the parameters memory of their own again, on CUDA; the next `update` with `in_place` moves them back."""
        for name, parameter in self.model.named_parameters():
            if name in self._moved:
                parameter.data = parameter.data.clone()
        self._moved.clear()

    def logprobs(self, prompts: Ids, completions: Ids, *, temperature: float = 1.0, reference: Any = None) -> list[Any]:
        """Log-probabilities of the completions' tokens under log_softmax(logits / temperature).

        Args:
            prompts: Token ids, one list for each completion.
            completions: Token ids; none is empty.
            temperature: Divides the logits; that of the rollout.
            reference: Log-probabilities by the trainer, with gradients, one tensor [len(completion)] each; None = this
                method computes them by one forward pass over all sequences, padded behind.

        Returns:
            One float32 tensor [len(completion)] for each completion, on the trainer's device. Its values are those of
            `LLM.score`; its gradient flows into the trainer's log-probabilities.

        Raises:
            InvalidRequestError: The numbers of prompts, completions or tokens differ.
        """
        _check("completions", len(completions), "prompts", len(prompts))
        if reference is None:
            reference = reference_logprobs(self.model, prompts, completions, temperature)
        _check("reference", len(reference), "completions", len(completions))
        for i, (have, ids) in enumerate(zip(reference, completions, strict=True)):
            _check(f"reference[{i}]", len(have), f"completions[{i}]", len(ids))
        self.update()
        sequences = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
        scores = self.llm.score(sequences, start=[len(prompt) for prompt in prompts], temperature=temperature)
        return [with_values(have, score.token_logprobs) for have, score in zip(reference, scores, strict=True)]


def reference_logprobs(model: Any, prompts: Ids, completions: Ids, temperature: float) -> list[Any]:
    """The trainer's log-probabilities of the completions' tokens, float32, with gradients."""
    import torch

    sequences = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
    longest = max(map(len, sequences), default=0)
    device = next(model.parameters()).device
    ids = torch.tensor([one + [0] * (longest - len(one)) for one in sequences], device=device)
    mask = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in sequences], device=device)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    found = []
    for row, prompt, one in zip(range(len(sequences)), prompts, sequences, strict=True):
        table = torch.log_softmax(logits[row, len(prompt) - 1 : len(one) - 1].float() / temperature, -1)
        found.append(table.gather(1, ids[row, len(prompt) : len(one), None])[:, 0])
    return found


def with_values(reference: Any, values: Any) -> Any:
    """A tensor with the values of an array; its gradient flows unchanged into `reference`, a tensor of the same shape.

    reference + (values - reference).detach() would round; this has the bits of `values`.
    """
    import torch

    class Replace(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, reference: Any, values: Any) -> Any:
            return values

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad, None

    apply: Callable[[Any, Any], Any] = Replace.apply
    return apply(reference, torch.tensor(values, dtype=torch.float32, device=reference.device))


def _check(name: str, have: int, of: str, want: int) -> None:
    if have != want:
        raise InvalidRequestError(f"{name}: wanted {want}, one for each of {of}, have {have}", parameter=name, value=have)
