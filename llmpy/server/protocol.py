"""Bodies of requests as structs that check types: fields of OpenAI's API, of vLLM's extensions, and of Anthropic's API."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Json = dict[str, Any]
Inputs = str | list[str | int | list[int]]
"""One prompt as text or ids, or a list of prompts; `requests.prompts_of` distinguishes them."""


class StreamOptions(msgspec.Struct):
    """Options of streams."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Common(msgspec.Struct, kw_only=True):
    """Fields of all text requests that go to the sampler or the engine unchanged."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None

    stop: str | list[str] | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    structured_outputs: Json | None = None
    speculative: bool | None = None

    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None


class Sampling(Common, kw_only=True):
    """Further fields of completions and chat completions."""

    stream_options: StreamOptions | None = None
    kv_transfer_params: Json | None = None
    n: int | None = None
    max_tokens: int | None = None
    response_format: Json | None = None

    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None

    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None

    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream_interval: int | None = None


class CompletionRequest(Sampling, kw_only=True):
    """Body of /v1/completions."""

    prompt: Inputs
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


class ChatRequest(Sampling, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: list[Json]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Json | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[Json] | None = None
    chat_template: str | None = None
    truncation: str | None = None


class ResponsesRequest(Common, kw_only=True):
    """Body of /v1/responses."""

    input: str | list[Json]
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Json | None = None
    text: Json | None = None
    metadata: Json | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    truncation: str | None = None
    stream_options: Json | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    max_tool_calls: int | None = None
    chat_template_kwargs: Json | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of /tokenize: a prompt, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Json] | None = None
    tools: list[Json] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Json | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of /detokenize."""

    tokens: list[int]
    model: str | None = None


class Features(msgspec.Struct, kw_only=True):
    """Images of a body with token ids: their URLs and names, and the keys of their contents, which are compared."""

    image_urls: list[str] = []
    image_uuids: list[str | None] = []
    mm_hashes: dict[str, list[str]] = {}
    mm_placeholders: Json = {}


class GenerateRequest(msgspec.Struct, kw_only=True):
    """Body of /inference/v1/generate: ids in, ids out."""

    token_ids: list[int]
    output_token_ids: list[int] | None = None
    features: Features | None = None
    sampling_params: Json = {}
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    model: str | None = None


class Pooling(msgspec.Struct, kw_only=True):
    """Fields of all pooling requests."""

    model: str | None = None
    use_activation: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    user: str | None = None


class EmbeddingRequest(Pooling, kw_only=True):
    """Body of /v1/embeddings."""

    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class PoolingRequest(EmbeddingRequest, kw_only=True):
    """Body of /pooling."""

    task: str | None = None
    normalize: bool | None = None


class ClassifyRequest(Pooling, kw_only=True):
    """Body of /classify."""

    input: Inputs


class ScoreRequest(Pooling, kw_only=True):
    """Body of /score: one text against several, or pairs."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None


class RerankRequest(Pooling, kw_only=True):
    """Body of /rerank."""

    query: str
    documents: list[str | Json]
    top_n: int | None = None
    return_documents: bool | None = None


class MessagesRequest(msgspec.Struct, kw_only=True):
    """Body of Anthropic's /v1/messages and count_tokens; count_tokens does not need max_tokens."""

    messages: list[Json]
    model: str | None = None
    system: str | list[Json] | None = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    tools: list[Json] | None = None
    tool_choice: Json | None = None
    metadata: Json | None = None
    thinking: Json | None = None
    output_config: Json | None = None
    output_format: Json | None = None
