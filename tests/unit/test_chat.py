"""Chat templates render byte for byte as in transformers; templates of the kinds that real models carry."""

import json
from datetime import datetime
from typing import Any

import pytest

from llmpy.errors import ChatTemplateError, InvalidRequestError, UnsupportedError
from llmpy.text import chat, token_texts
from llmpy.text.tokenizer import Tokenizer

CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}\
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{{- "Today Date: " + date_string + "\n\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'tool' or 'tool_calls' in message %}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {{- '{"name": "' + call.function.name + '", "parameters": ' }}
                {{- call.function.arguments | tojson }}
                {{- "}" }}
            {%- endfor %}
        {%- else %}
            {{- message.content | tojson(indent=2) }}
        {%- endif %}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, roles must alternate') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.first and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + " [/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + " [/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] + eos_token}}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported") }}
    {%- endif %}
{%- endfor %}
"""

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {{- "# Tools\n\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- endif %}
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string %}
        {%- set ns.multi_step = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" and loop.index > 6 %}
        {%- break %}
    {%- endif %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {%- if loop.index0 > ns.last and reasoning %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- message.content.lstrip('\n') }}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {{- '\n<tool_call>\n{"name": "' }}{{- tool_call.function.name }}{{- '", "arguments": ' }}
                {%- if tool_call.function.arguments is string %}
                    {{- tool_call.function.arguments }}
                {%- else %}
                    {{- tool_call.function.arguments | tojson }}
                {%- endif %}
                {{- '}\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""

PARTS = """{% for message in messages %}
{{ message.role }}:{% if message.content is string %} {{ message.content }}
{% else %}{% for part in message.content %}{% if part.type == 'text' %} {{ part.text }}{% endif %}{% endfor %}

{% endif %}
{% endfor %}
{% if documents %}{% for document in documents %}[{{ document.title }}]{% endfor %}{% endif %}
"""

GENERATION = """{% for message in messages %}{% if message.role == 'assistant' %}\
<|im_start|>assistant
{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}

{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}"""

TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "qwen": QWEN,
    "parts": PARTS,
    "generation": GENERATION,
}

USER = {"role": "user", "content": " Hi <b>\"there\"</b> & 'you' \n"}
ASSISTANT = {"role": "assistant", "content": "  Héllo 😀  "}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "turns": [USER, ASSISTANT, {"role": "user", "content": "And?"}],
    "system": [{"role": "system", "content": "  Be brief. "}, USER],
    "open": [USER, {"role": "assistant", "content": "Once upon a time "}],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "<a> & 'b' é", "parameters": {"x": [1, 2.5, None, True]}},
    }
]
CALLS: list[dict[str, Any]] = [
    USER,
    {
        "role": "assistant",
        "content": "",
        "reasoning": "think\n",
        "tool_calls": [{"function": {"name": "add", "arguments": {"é": "<x>", "n": [1, {"a": None}]}}}],
    },
    {"role": "tool", "content": '{"sum": 3}', "name": None},
]


@pytest.fixture(scope="module")
def backend() -> Any:
    """A small byte-level tokenizer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {char: place for place, char in enumerate(token_texts.byte_characters())}
    made = Tokenizer(models.BPE({**vocabulary, "Ġa": 256, "he": 257}, [("Ġ", "a"), ("h", "e")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    names = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]
    made.add_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return made


@pytest.fixture(scope="module")
def theirs(backend: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def ours(backend: Any) -> Tokenizer:
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(backend, token_texts.of_backend(backend), [], named, [], {})


OPTIONS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": True},
    {"add_generation_prompt": True, "enable_thinking": False, "date_string": "1 Jan"},
    {"tools": TOOLS, "documents": [{"title": "é", "text": "x"}]},
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("messages", [*CONVERSATIONS, "calls"])
@pytest.mark.parametrize("options", range(len(OPTIONS)))
def test_equals_transformers(template: str, messages: str, options: int, ours: Tokenizer, theirs: Any) -> None:
    given = CALLS if messages == "calls" else CONVERSATIONS[messages]
    call = {**OPTIONS[options], "chat_template": TEMPLATES[template]}
    before = json.dumps(given)
    try:
        wanted = theirs.apply_chat_template(given, tokenize=False, **call)
    except Exception as error:
        with pytest.raises(ChatTemplateError, match=str(error).split("\n")[0].split("(")[0][:40]):
            ours.apply_chat_template(given, tokenize=False, **call)
        return
    assert ours.apply_chat_template(given, tokenize=False, **call) == wanted
    ids = theirs.apply_chat_template(given, tokenize=True, return_dict=False, **call)
    assert ours.apply_chat_template(given, **call) == ids
    assert json.dumps(given) == before


@pytest.mark.parametrize("template", ["chatml", "llama3", "parts", "generation", "qwen"])
def test_continue_final_message(template: str, ours: Tokenizer, theirs: Any) -> None:
    for content in ("Once upon", "Once upon ", "  Once\n"):
        messages = [USER, {"role": "assistant", "content": content}]
        call = {"tokenize": False, "continue_final_message": True, "chat_template": TEMPLATES[template]}
        text = ours.apply_chat_template(messages, **call)
        assert text == theirs.apply_chat_template(messages, **call)
        assert text.rstrip().endswith(content.strip())


def test_continue_reasoning_and_parts(ours: Tokenizer, theirs: Any) -> None:
    messages: list[dict[str, Any]] = [USER, {"role": "assistant", "content": "", "reasoning": "so far"}]
    call: dict[str, Any] = {"tokenize": False, "continue_final_message": "reasoning_content", "chat_template": QWEN}
    text = ours.apply_chat_template(messages, **call)
    assert text == theirs.apply_chat_template(messages, **call)
    assert text.endswith("so far")
    parts = [USER, {"role": "assistant", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    call = {"tokenize": False, "continue_final_message": True, "chat_template": PARTS}
    assert ours.apply_chat_template(parts, **call) == theirs.apply_chat_template(parts, **call)


def test_generation_mask(ours: Tokenizer, theirs: Any) -> None:
    messages = [USER, ASSISTANT, USER, {"role": "assistant", "content": "he said a"}]
    call: dict[str, Any] = {"chat_template": GENERATION, "return_assistant_tokens_mask": True}
    wanted = theirs.apply_chat_template(messages, return_dict=True, **call)
    ids, mask = ours.apply_chat_template(messages, **call)
    assert ids == wanted["input_ids"]
    assert mask == wanted["assistant_masks"]
    assert 0 < sum(mask) < len(mask)
    shown = ours.decode([token for token, inside in zip(ids, mask, strict=True) if inside])
    assert shown == "  Héllo 😀  <|im_end|>he said a<|im_end|>"
    text, characters = ours.apply_chat_template(messages, tokenize=False, **call)
    inside = "".join(char for char, one in zip(text, characters, strict=True) if one)
    assert inside == shown


def test_several_conversations(ours: Tokenizer) -> None:
    both = [CONVERSATIONS["user"], CONVERSATIONS["system"]]
    texts = ours.apply_chat_template(both, tokenize=False, chat_template=CHATML)
    assert texts == [ours.apply_chat_template(one, tokenize=False, chat_template=CHATML) for one in both]


def test_strftime_now(ours: Tokenizer) -> None:
    text = ours.apply_chat_template([USER], tokenize=False, chat_template="{{ strftime_now('%Y') }}")
    assert text == datetime.now().strftime("%Y")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% set n = namespace(__class__=1) %}",
        "{{ dict.__subclasses__() }}",
        "{% for x in range(10 ** 9) %}{% endfor %}",
        "{{ messages[0].nothing.more }}",
        "{{ 1 + 'a' }}",
        "{{ raise_exception('no') }}",
        "{% if %}",
        "{% generation %}",
    ],
)
def test_bad_templates_raise(template: str, ours: Tokenizer) -> None:
    with pytest.raises(ChatTemplateError):
        ours.apply_chat_template([USER], chat_template=template)


def test_refused(ours: Tokenizer) -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        ours.apply_chat_template([USER])
    with pytest.raises(InvalidRequestError, match="Cannot set both `add_generation_prompt` and `continue_final_message`"):
        ours.apply_chat_template([USER], chat_template=CHATML, add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="empty"):
        ours.apply_chat_template([], chat_template=CHATML)
    with pytest.raises(ChatTemplateError, match="drops the final message"):
        ours.apply_chat_template([USER], chat_template="{{ messages[0].role }} content", continue_final_message=True)
    with pytest.raises(UnsupportedError, match="tools"):
        ours.apply_chat_template([USER], chat_template=CHATML, tools=[print])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="got object"):
        ours.apply_chat_template([{"role": "user", "content": object()}], chat_template=CHATML)


def test_choice_of_template() -> None:
    templates = {"default": "d", "tool_use": "t"}
    assert chat.choose(templates, None, False) == "d"
    assert chat.choose(templates, None, True) == "t"
    assert chat.choose(templates, "tool_use", False) == "t"
    assert chat.choose(templates, "{{ 1 }}", True) == "{{ 1 }}"
    with pytest.raises(ChatTemplateError, match="those named rag"):
        chat.choose({"rag": "r"}, None, False)


def test_conversation_forms() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "one"}, "two"]}]
    assert chat.conversation("Hi", CHATML) == [{"role": "user", "content": "Hi"}]
    assert chat.conversation(parts, CHATML) == [{"role": "user", "content": "one\ntwo"}]
    assert chat.conversation(parts, PARTS)[0]["content"] == [{"type": "text", "text": text} for text in ("one", "two")]
    assert chat.conversation([{"role": "assistant", "content": None}], CHATML) == [{"role": "assistant", "content": None}]
    with pytest.raises(UnsupportedError, match="content part of type 'image_url'"):
        chat.conversation([{"role": "user", "content": [{"type": "image_url"}]}], CHATML)
    with pytest.raises(TypeError, match="messages must be dicts"):
        chat.conversation(["hello"], CHATML)  # type: ignore[list-item]
