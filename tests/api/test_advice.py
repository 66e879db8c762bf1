"""Advice on names of other libraries: every name that an advice recommends exists and works."""

import ast
import inspect
import re
import subprocess
import sys

import pytest

import llmpy
from llmpy import LLM, AsyncEngine, EngineConfig, SamplingParams, UnsupportedError, advice, config, environment, options

CODE = re.compile(r"`([^`]+)`")
TABLES = {"keyword": advice.KEYWORDS, "name": advice.NAMES, "method": advice.METHODS}
ADVICES = [(f"{kind} {name}", text) for kind, table in TABLES.items() for name, text in table.items()]
VARIABLES = {*environment.VARIABLES, "HF_HUB_CACHE"}
COMMANDS = {"llmpy serve"}


def refuses(call):
    """Whether a call raises that it is not supported yet."""
    try:
        call()
    except UnsupportedError:
        return True
    except Exception:
        return False
    return False


def check_option(name):
    """Checks that an option can have another value than its default."""
    rule = config.RULES[name]
    assert rule.__qualname__ != options.only(None, "").__qualname__, f"{name} has one value only"


def check_method(name):
    owner, _, method = name.rpartition(".")
    assert owner in ("", "LLM") and not method.startswith("_")
    found = getattr(LLM, method)
    bare = object.__new__(LLM)
    assert not refuses(lambda: found(bare)), f"{name}() is not supported"


def check(code, llm):
    """Checks one piece of code in an advice."""
    if code in VARIABLES or code in COMMANDS:
        return
    if code.endswith("()"):
        check_method(code[:-2])
    elif "=" in code:
        name, _, value = code.partition("=")
        kind = EngineConfig if name in EngineConfig.__dataclass_fields__ else SamplingParams
        fields = {"model": "x"} if kind is EngineConfig else {}
        kind(**fields, **{name: ast.literal_eval(value)})
    elif code in SamplingParams.__dataclass_fields__:
        defaults = {"n": 2, "temperature": 1, "logprobs": 1, "logit_bias": {1: 1.0}, "allowed_token_ids": [1]}
        SamplingParams(**{code: defaults.get(code, getattr(SamplingParams(), code))})
    elif code in EngineConfig.__dataclass_fields__:
        check_option(code)
    elif code[0].isupper() or code == "architecture":
        found = getattr(llmpy, code)
        assert not refuses(lambda: found("x")), f"{code} is not supported"
    else:
        parameters = {name for call in (LLM.generate, LLM.chat) for name in inspect.signature(call).parameters}
        assert code in parameters or hasattr(llm, code), f"{code} is no argument and no attribute"


@pytest.mark.parametrize(("name", "text"), ADVICES, ids=[name for name, _ in ADVICES])
def test_an_advice_names_what_works(fake_llm, name, text):
    codes = CODE.findall(text)
    assert codes or re.search(r"leave it out|merge the adapter|call its methods|llmpy\.distributed\.ray", text)
    for code in codes:
        check(code, fake_llm())
        assert code.removesuffix("()") not in advice.KEYWORDS.keys() - {"stream"}, "an advice that needs another one"


def test_names_with_an_advice_are_not_there():
    calls = (LLM.generate, LLM.chat, LLM.score, LLM.embed, LLM.add_request)
    known = {*config.RULES, *SamplingParams.__dataclass_fields__}
    assert not known & advice.KEYWORDS.keys()
    assert not {*llmpy.__all__} & advice.NAMES.keys()
    assert not [name for name in advice.METHODS if hasattr(LLM, name) or (hasattr(AsyncEngine, name) and name != "shutdown")]
    assert all(callable(call) for call in calls)


IMPORTS = {
    "from llmpy import AsyncLLMEngine": "use AsyncEngine",
    "from llmpy import AsyncEngineArgs": "pass the options to AsyncEngine; EngineConfig holds them",
    "from llmpy import EngineArgs": "pass the options to LLM; EngineConfig holds them",
    "from llmpy import LLMEngine": "use LLM, whose add_request() and step()",
    "from llmpy.sampling_params import GuidedDecodingParams": "use StructuredOutputsParams",
    "from llmpy import ScoringOutput": "similarity() returns ScoringRequestOutput",
    "import llmpy; llmpy.LLM.generate(None, prompt_token_ids=[[1]], sampling_params=1)": "pass token ids, or lists of them",
    "import llmpy; llmpy.LLM.generate(None, inputs=['a'])": "use prompts",
    "import llmpy; llmpy.LLM('m', num_threads=2)": "LLMPY_NUM_THREADS",
    "import llmpy; llmpy.SamplingParams(length_penalty=1.0)": "call beam_search() with BeamSearchParams",
    "import llmpy; llmpy.LLM('m', compilation_config=3)": "nothing is compiled",
    "import llmpy; llmpy.StructuredOutputsParams(regx='a')": "Did you mean 'regex'",
    "import llmpy; llmpy.SamplingParams(temprature=1)": "Did you mean 'temperature'",
}  # fmt: skip


@pytest.mark.parametrize("code", IMPORTS)
def test_code_written_for_others_is_told_what_to_use(code):
    with pytest.raises((ImportError, TypeError, UnsupportedError), match=re.escape(IMPORTS[code])) as caught:
        exec(code, {})
    assert "\n" not in str(caught.value) and "`" not in str(caught.value)


def test_what_is_there_is_where_vllm_has_it():
    code = (
        "from llmpy import PromptType, LLM, SamplingParams, RequestOutput, TokensPrompt, PoolingParams\n"
        "from llmpy.sampling_params import StructuredOutputsParams, BeamSearchParams, RequestOutputKind\n"
        "from llmpy.outputs import EmbeddingRequestOutput, PoolingRequestOutput, CompletionOutput\n"
        "from llmpy.lora.request import LoRARequest\n"
        "import llmpy; assert llmpy.LoRARequest is LoRARequest and not hasattr(llmpy, 'Foo')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_attributes_of_an_engine(fake_llm):
    llm = fake_llm()
    for name, text in {"llm_engine": "add_request", "reward": r"classify\(\)", "start_profile": r"step_log\(\)"}.items():
        with pytest.raises(AttributeError, match=rf"^'LLM' object has no attribute '{name}'; .*{text}"):
            getattr(llm, name)
    with pytest.raises(AttributeError, match=r"^'LLM' object has no attribute 'foo'$"):
        _ = llm.foo
    assert not hasattr(llm, "shutdown") and hasattr(AsyncEngine, "shutdown")


def test_params_with_dicts_have_a_hash():
    one, two = (SamplingParams(logit_bias=bias, structured_outputs={"json": {"type": "object", "enum": [1]}})
                for bias in ({1: 2.0, 3: 4.0}, {3: 4, 1: 2}))  # fmt: skip
    assert one == two and hash(one) == hash(two) and len({one, two, SamplingParams()}) == 2
