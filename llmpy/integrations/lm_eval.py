"""llmpy as a model of lm-evaluation-harness, named `llmpy`; `llmpy eval --tasks` runs the harness's tasks through it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(f"tasks of lm-evaluation-harness need lm_eval ({error}): pip install 'llmpy[eval]'") from error

from ..errors import InvalidRequestError, UnsupportedError

if TYPE_CHECKING:
    from .. import LLM, SamplingParams

_KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"}


@register_model("llmpy")
class HarnessModel(TemplateLM):
    """An engine as the harness's model: `simple_evaluate(model="llmpy", model_args="pretrained=MODEL")`, or with an LLM.

    Args:
        pretrained: The model's name, as `LLM` takes it; or an engine, which stays open.
        add_bos_token: Put a beginning-of-sequence token before texts if the tokenizer does so.
        max_gen_toks: Longest answer where a task names none.
        batch_size, max_batch_size: Of no effect: the engine batches by itself.
        device: As `LLM` takes it.
        **options: Other options of `LLM`.
    """

    def __init__(
        self,
        pretrained: str | LLM,
        add_bos_token: bool = False,
        max_gen_toks: int = 256,
        batch_size: object = None,
        max_batch_size: object = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        from .. import LLM

        super().__init__()
        self.llm = LLM(pretrained, device=device, **options) if isinstance(pretrained, str) else pretrained
        self.tokenizer = self.llm.tokenizer
        self.add_bos_token, self.max_gen_toks = add_bos_token, max_gen_toks
        self.max_length = int(self.llm.config.max_model_len or 0)

    @property
    def eot_token_id(self) -> int:
        """Id of the end of a sequence."""
        return self.tokenizer.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """The id before a text whose first token is scored."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """What the harness's cache calls the tokenizer."""
        return str(self.llm.config.model).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text."""
        wants = self.add_bos_token if add_special_tokens is None else add_special_tokens
        return self.tokenizer.encode(string, add_special_tokens=wants)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as the text that the model expects."""
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        return str(self.tokenizer.apply_chat_template(chat_history, tokenize=False, **options))

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Logprob of each continuation, and whether its tokens are the most probable ones."""
        wholes = [([*context, *text][-self.max_length :], len(text)) for _, context, text in requests]
        for ids, length in wholes:
            if length >= len(ids):
                raise InvalidRequestError(f"a continuation of {length} tokens does not fit in max_model_len {self.max_length}")
        starts = [len(ids) - length for ids, length in wholes]
        scores = self.llm.score([ids for ids, _ in wholes], start=starts, use_tqdm=not disable_tqdm)
        found = [(score.sum_logprob, bool((score.ranks == 1).all())) for score in scores]
        for (pair, _, _), answer in zip(requests, found, strict=True):
            if pair is not None:
                self.cache_hook.add_partial("loglikelihood", pair, answer)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Logprob of whole texts, in windows of the model's length, each token once."""
        pieces, counts = [], []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length - 1, 1)
            made = [(None, *make_disjoint_window(window)) for window in windows]
            pieces += made
            counts.append(len(made))
        values = iter(self._loglikelihood_tokens(pieces, disable_tqdm))
        return [sum(next(values)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations, each up to one of its stop texts."""
        prompts, params = [], []
        for context, wanted in (request.args for request in requests):
            one = self._params(dict(wanted))
            room = self.max_length - (one.max_tokens or 0)
            if room < 1:
                raise InvalidRequestError(f"max_gen_toks={one.max_tokens} leaves no room in max_model_len {self.max_length}")
            prompts.append(self.tok_encode(context)[-room:])
            params.append(one)
        texts = [str(text) for text in self.llm.generate(prompts, params, use_tqdm=not disable_tqdm).texts]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _params(self, wanted: dict[str, Any]) -> SamplingParams:
        """Sampling parameters of a task's keywords."""
        from .. import SamplingParams

        if unknown := sorted(wanted.keys() - _KNOWN):
            raise UnsupportedError(f"generation_kwargs: {unknown[0]!r} is not supported; have {', '.join(sorted(_KNOWN))}")
        until = wanted.pop("until", None) or []
        stop = [until] if isinstance(until, str) else list(until)
        max_tokens = int(wanted.pop("max_gen_toks", self.max_gen_toks))
        if wanted.pop("do_sample", None) is False or "temperature" not in wanted:
            wanted["temperature"] = 0
        return SamplingParams(stop=stop, max_tokens=max_tokens, **wanted)
