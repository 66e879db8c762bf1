"""Names from other libraries, and advice on what to use here: keywords of calls, names of the package, engine methods.

Names in backquotes must exist; a test looks them up: options, sampling fields, arguments, classes, methods, variables.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from .checks import refuse_names

Given = ParamSpec("Given")
Result = TypeVar("Result")

_LENGTH = "use `max_model_len`"
_THREADS = "set the variable `LLMPY_NUM_THREADS` before the engine is made"
_BITS = "quantised .gguf files and FP8, GPTQ, AWQ and INT8 checkpoints are run as they are; leave it out"
_ONE_BACKEND = "there is one backend, llguidance; leave it out"
_SPECULATION = "use `speculative_config`, a dict with 'method' and 'k'"
_STRUCTURED = "use `structured_outputs`, a dict with 'json', 'regex', 'choice' or 'grammar'"
_BEAMS = "call `beam_search()` with `BeamSearchParams`"
_CUT = "cut the token ids yourself, and pass them as `prompts`"
_IDS = "pass token ids, or lists of them, as `prompts`"
_GRAPHS = "nothing is compiled; `enforce_eager` leaves CUDA graphs out"

KEYWORDS = {
    # options of an engine
    "swap_space": "`host_cache_bytes` with `preemption` does this; leave it out",
    "task": "the method says the task: `generate()`, `embed()`, `classify()` or `encode()`",
    "device_map": "use `device`",
    "n_gpu_layers": "all layers lie on one device; use `device`",
    "torch_dtype": "use `dtype`",
    "download_dir": "set the variable `HF_HUB_CACHE`",
    "cache_dir": "set the variable `HF_HUB_CACHE`",
    "token": "use `hf_token`",
    "model_path": "use `model`",
    "model_name": "use `model`",
    "max_seq_len": _LENGTH,
    "n_ctx": _LENGTH,
    "num_ctx": _LENGTH,
    "context_length": _LENGTH,
    "max_length": "use `max_tokens` for the output, `max_model_len` for prompt and output together",
    "max_batch_size": "use `max_num_seqs`",
    "n_batch": "use `max_num_batched_tokens`",
    "cpu_cores": _THREADS,
    "num_threads": _THREADS,
    "n_threads": _THREADS,
    "load_in_4bit": _BITS,
    "load_in_8bit": _BITS,
    "quantization_config": _BITS,
    "allowed_local_media_path": "use `allowed_image_folder`",
    "media_io_kwargs": "images are decoded by Pillow; leave it out",
    "multi_modal_data": "pass `prompts` that are dicts with 'prompt' and 'multi_modal_data'",
    "guided_decoding_backend": _ONE_BACKEND,
    "structured_outputs_config": _ONE_BACKEND,
    "compilation_config": _GRAPHS,
    "cuda_graph_sizes": _GRAPHS,
    "max_seq_len_to_capture": _GRAPHS,
    "speculative_model": _SPECULATION,
    "num_speculative_tokens": _SPECULATION,
    "kv_transfer_config": "`kv_connector` or `disk_cache` with `prefix_cache_seed` does this; leave it out",
    "attention_backend": "the device decides on its kernels; leave it out",
    "attn_implementation": "the device decides on its kernels; leave it out",
    "low_cpu_mem_usage": "weight files are read in pieces; leave it out",
    "disable_log_requests": "prompts are not logged; leave it out",
    "served_model_name": "it is an option of the command `llmpy serve`; leave it out",
    "override_pooler_config": "pass `PoolingParams` to `embed()`, `classify()` or `encode()`",
    "pooler_config": "pass `PoolingParams` to `embed()`, `classify()` or `encode()`",
    "verbose": "set the variable `LLMPY_LOG`",
    # sampling
    "max_new_tokens": "use `max_tokens`",
    "n_predict": "use `max_tokens`",
    "num_predict": "use `max_tokens`",
    "min_new_tokens": "use `min_tokens`",
    "do_sample": "`temperature=0` is greedy, a higher one draws",
    "num_return_sequences": "use `n`",
    "best_of": "draw `n` samples with `logprobs`, and keep the one with the highest cumulative_logprob",
    "use_beam_search": _BEAMS,
    "num_beams": _BEAMS,
    "beam_width": _BEAMS,
    "length_penalty": _BEAMS,
    "early_stopping": _BEAMS,
    "guided_decoding": _STRUCTURED,
    "guided_json": _STRUCTURED,
    "guided_regex": _STRUCTURED,
    "guided_choice": _STRUCTURED,
    "guided_grammar": _STRUCTURED,
    "response_format": _STRUCTURED,
    "json_schema": _STRUCTURED,
    "grammar": _STRUCTURED,
    "stop_strings": "use `stop`",
    "stop_sequences": "use `stop`",
    "eos_token_id": "use `stop_token_ids`",
    "bad_words_ids": "use `bad_token_ids`",
    "repeat_penalty": "use `repetition_penalty`",
    "top_logprobs": "use `logprobs`",
    "num_logprobs": "use `logprobs`",
    "return_logprobs": "use `logprobs`",
    "flat_logprobs": "`logprobs` lie in arrays anyway; leave it out",
    "echo": "an output holds its prompt beside the new text; leave it out",
    "logits_processors": "there are no Python logits processors; use `logit_bias`, `allowed_token_ids` or `bad_words`",
    "logits_processor": "there are no Python logits processors; use `logit_bias`, `allowed_token_ids` or `bad_words`",
    "truncate_prompt_tokens": _CUT,
    "truncation": _CUT,
    "max_input_length": _CUT,
    # arguments of calls
    "prompt_token_ids": _IDS,
    "input_ids": _IDS,
    "inputs": "use `prompts`",
    "prompt": "use `prompts`",
    "stream": "call `stream()`",
    "request_id": "call `add_request()`, which takes a request_id",
    "conversation": "use `messages`",
    "tool_choice": "the model decides about calls; to force one, use `structured_outputs` or the server",
    "text_1": "`score()` gives logprobs of given tokens; for similarity, call `similarity()`",
    "text_2": "`score()` gives logprobs of given tokens; for similarity, call `similarity()`",
    "data_1": "`score()` gives logprobs of given tokens; for similarity, call `similarity()`",
    "data_2": "`score()` gives logprobs of given tokens; for similarity, call `similarity()`",
}
"""Keyword arguments that no call has -> advice."""

NAMES = {
    "AsyncLLM": "use `AsyncEngine`",
    "AsyncLLMEngine": "use `AsyncEngine`",
    "AsyncEngineArgs": "pass the options to `AsyncEngine`; `EngineConfig` holds them",
    "EngineArgs": "pass the options to `LLM`; `EngineConfig` holds them",
    "LLMEngine": "use `LLM`, whose `add_request()` and `step()` run an engine step by step",
    "GuidedDecodingParams": "use `StructuredOutputsParams`",
    "ModelRegistry": "use the decorator `architecture`",
    "ScoringOutput": "`similarity()` returns `ScoringRequestOutput`, whose outputs have a score",
    "TokenInputs": "use `TokensPrompt`",
    "token_inputs": "use `TokensPrompt`",
    "EmbedsPrompt": "prompts as embeddings are not supported; use `TokensPrompt`",
    "MultiModalDataDict": "use `TextPrompt`, whose multi_modal_data is a dict",
    "initialize_ray_cluster": "one process runs one engine; llmpy.distributed.ray serves several",
    "AutoModelForCausalLM": "use `LLM`",
    "AutoTokenizer": "use `Tokenizer`, or the `tokenizer` of an `LLM`",
    "pipeline": "use `LLM`, whose `generate()` and `chat()` take many prompts",
    "Llama": "use `LLM`",
    "SamplingParam": "use `SamplingParams`",
}
"""Names that the package and its modules do not have -> advice."""

METHODS = {
    "llm_engine": "the LLM is the engine: `add_request()`, `step()` and `abort_request()` are its methods",
    "engine": "the object is the engine: call its methods",
    "reward": "call `classify()`, which gives rewards with a reward model",
    "shutdown": "call `close()`",
    "start_profile": "`step_log()` and `histograms()` tell what the steps took",
    "stop_profile": "`step_log()` and `histograms()` tell what the steps took",
    "set_tokenizer": "pass `tokenizer` when the engine is made",
    "preprocess_chat": "call `get_tokenizer()` and its apply_chat_template()",
    "model_config": "`config` holds the options",
    "vllm_config": "`config` holds the options",
    "get_model_config": "`config` holds the options",
    "get_vllm_config": "`config` holds the options",
    "do_log_stats": "call `stats()`",
    "from_engine_args": "pass the options to the class, or call `from_config()`",
    "create_chat_completion": "call `chat()`",
    "create_completion": "call `generate()`",
    "tokenize": "call `get_tokenizer()` and its encode()",
    "detokenize": "call `get_tokenizer()` and its decode()",
}
"""Attributes that no engine has -> advice."""

def plain(advice: str) -> str:
    """An advice without its backquotes."""
    return advice.replace("`", "")


def missing(owner: str, name: str, known: dict[str, str]) -> AttributeError:
    """The error for a missing attribute, with advice if the name is known."""
    hint = f"; {plain(known[name])}" if name in known else ""
    return AttributeError(f"{owner} has no attribute {name!r}{hint}", name=name)


def lazy(module: str, homes: dict[str, str], name: str) -> object:
    """Loads an attribute from its module in the package, for a module's `__getattr__`.

    A name with advice raises ImportError, because `from llmpy import name` drops the text of an AttributeError.
    """
    if name not in homes:
        if name in NAMES:
            raise ImportError(f"{module} has no {name}; {plain(NAMES[name])}", name=module)
        raise missing(f"module {module!r}", name, NAMES)
    from importlib import import_module

    return getattr(import_module(f"llmpy.{homes[name]}"), name)


def advised(method: Callable[Given, Result]) -> Callable[Given, Result]:
    """Wraps a method: if its first argument is missing and a keyword is unknown, the error gives advice on that keyword."""
    code = method.__code__
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

    @wraps(method)
    def call(*args: Given.args, **given: Given.kwargs) -> Result:
        if len(args) < 2 and named[1] not in given:
            refuse_names(method.__qualname__, [name for name in given if name in KEYWORDS and name not in named], named)
        return method(*args, **given)

    return call
