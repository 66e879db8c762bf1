"""Depth, size and time of chat templates are bounded: no template exhausts memory or blocks a thread for minutes."""

import json
import subprocess
import sys
from typing import Any

import pytest

from llmpy.errors import ChatTemplateError, InvalidRequestError
from llmpy.text import chat

LONG = "{% set long = 'a' * 1000000 %}"
DOUBLED = "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = MADE %}{% endfor %}"
BOMBS = {
    "power": "{{ 10 ** (10 ** 10) }}",
    "power of a power": "{{ ((10 ** 1000) ** 1000) ** 1000 }}",
    "text times a number": "{{ 'a' * 10 ** 12 }}",
    "number times a list": "{{ (10 ** 9 * [1])|length }}",
    "sum of texts": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "texts joined by ~": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "block set": DOUBLED.replace("set ns.x = MADE %}", "set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    "loops in loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "loops with a test": "{% for i in range(100000) %}{% for j in range(100000) if false %}{% endfor %}{% endfor %}",
    "filters in a loop": "{{ range(100000)|select('in', range(100000)|map('string')|list)|list|length }}",
    "generators": "{% for i in range(1000) %}{{ range(100000)|map('string')|list|length }}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "text in a loop": "{% for i in range(100000) %}" + "x" * 100_000 + "{% endfor %}",
    "slices": LONG + "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x = ns.x + [long[1:]] %}{% endfor %}",
    "list of lists": DOUBLED.replace("MADE", "[ns.x, ns.x]") + "{{ ns.x }}",
    "tuples": DOUBLED.replace("MADE", "(ns.x, ns.x)") + "{{ ns.x|string }}",
    "dicts": DOUBLED.replace("MADE", "{'a': ns.x, 'b': ns.x}") + "{{ ns.x|tojson }}",
    "dict()": DOUBLED.replace("MADE", "dict(a=ns.x, b=ns.x)") + "{{ ns.x|pprint }}",
    "views": DOUBLED.replace("MADE", "{'a': ns.x, 'b': ns.x}.items()") + "{{ ns.x }}",
    "batches": DOUBLED.replace("MADE", "([ns.x]*2)|batch(2)|list") + "{{ ns.x == ns.x|list }}",
    "nesting": "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x = [ns.x] %}{% endfor %}",
    "width of a format": "{{ '{:1000000000}'.format(1) }}",
    "width by a field": "{{ '{:{}}'.format(1, 10 ** 9) }}",
    "width of a filter's format": "{{ '%1000000000d'|format(1) }}",
    "width of %": "{{ '%1000000000d' % 1 }}",
    "width of % by an argument": "{{ '%*d' % (10 ** 9, 1) }}",
    "precision of % by an argument": "{{ '%.*f' % (10 ** 9, 1) }}",
    "many widths": "{{ ('%9999d' * 10000) % ((1,) * 10000) }}",
    "many fields": LONG + "{{ ('{0}' * 10000).format(long)|length }}",
    "many texts": LONG + "{{ (('%(a)s' * 10000) % {'a': long})|length }}",
    "center": "{{ 'a'.center(10 ** 10) }}",
    "filter center": "{{ 'a'|center(10 ** 10) }}",
    "ljust": "{{ 'a'.ljust(10 ** 10) }}",
    "zfill": "{{ 'a'.zfill(10 ** 10) }}",
    "expandtabs": "{{ ('\t' * 100000).expandtabs(100000)|length }}",
    "indent": "{{ ('a\n' * 100000)|indent(100000)|length }}",
    "join": LONG + "{{ range(100000)|join(long)|length }}",
    "method join": LONG + "{{ long.join(range(100000)|map('string'))|length }}",
    "replace": LONG + "{{ long.replace('a', long)|length }}",
    "filter replace": LONG + "{{ long|replace('a', long)|length }}",
    "translate": LONG + "{{ long.translate({97: long})|length }}",
    "slice": "{{ []|slice(10 ** 10)|list|length }}",
    "batch": "{{ [1]|batch(10 ** 10, 1)|list|length }}",
    "sum of lists": "{{ ([[1] * 100] * 100000)|sum(start=[])|length }}",
    "tojson": "{{ messages|tojson(indent=10 ** 9) }}",
    "separators": "{{ range(1000)|list|tojson(separators=('a' * 1000000, ':'))|length }}",
    "bytes": "{{ (1).to_bytes(10 ** 10, 'big') }}",
    "large number": "{{ ('f' * 1000000)|int(base=16) }}",
    "search from the right": LONG + "{{ (long + long).rfind('b' + long) }}",
    "strip": LONG + "{{ long.strip('b' * 100000 + 'a') }}",
    "tags": "{{ ('<!---->' * 100000)|striptags }}",
    "codec": LONG + "{{ long.encode('punycode') }}",
    "lorem ipsum": "{{ lipsum(n=1000000) }}",
    "autoescape at compile time": "{% autoescape 'a'|center(10 ** 10) %}{% endautoescape %}",
    "parentheses": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "a long template": "x" * 1_000_000,
    "break": "{% break %}",
    "assertion": "{{ 'aaaa'|truncate(1) }}",
    "runtime error": "{{ cycler().next() }}",
    "long message": "{{ raise_exception('a' * 1000000) }}",
}
RUN = """
import json, resource, sys, time
from llmpy.text import chat
messages, limits = [{"role": "user", "content": "x"}], chat.Limits(seconds=2)
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
for name, template in json.load(sys.stdin).items():
    start = time.thread_time()
    try:
        end = "text " + chat.render(messages, chat.Options(template, limits=limits))[0][:100]
    except BaseException as error:
        end = f"{type(error).__name__}: {error}"
    print(json.dumps([name, end, time.thread_time() - start]), flush=True)
status = open("/proc/self/status").read()  # the kernel counts the parent's memory in ru_maxrss, too
print(json.dumps(["peak", "", int(status.partition("VmHWM:")[2].split()[0]) / 1024]))
"""


@pytest.fixture(scope="module")
def ends() -> dict[str, tuple[str, float]]:
    """How each template ends, and the seconds of processor time that it takes, in a process of bounded memory."""
    done = subprocess.run([sys.executable, "-c", RUN], input=json.dumps(BOMBS), capture_output=True, text=True, timeout=600)
    assert not done.returncode, done.stderr
    return {name: (end, took) for name, end, took in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", BOMBS)
def test_is_refused_in_time(ends: dict[str, tuple[str, float]], name: str) -> None:
    end, took = ends[name]
    assert end.startswith("ChatTemplateError: chat template: ")
    assert "MemoryError" not in end
    assert len(end) < 1200
    assert took < 10


def test_memory_stays_small(ends: dict[str, tuple[str, float]]) -> None:
    assert ends["peak"][1] < 1500  # MiB; limits.memory_bytes is 512 MiB


def test_limits_grow_with_the_conversation() -> None:
    """The limits grow with the number and length of messages."""
    quoting = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content|trim|indent(4) }}{{ (m|tojson)[:3] }}{% endfor %}"
    many = [{"role": "user", "content": f"question {place}"} for place in range(20_000)]
    assert len(chat.render(many, chat.Options(quoting))[0]) > 20_000 * 10
    long = [{"role": "user", "content": "word " * 2_000_000}]
    assert len(chat.render(long, chat.Options(quoting))[0]) > 9_000_000
    collecting = "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x + m.content %}{% endfor %}{{ ns.x }}"
    assert len(chat.render([{"role": "user", "content": "a" * 1000}] * 1000, chat.Options(collecting))[0]) == 1_000_000


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("{{ 'a' * 3 ~ [1, 2] + [3] }}", None),
        ("{{ '%s and %-5d|' % ('a', 3) }}{{ '%s %%'|format(1) }}{{ '* %s' % 'item' }}", "a and 3    |1 %* item"),
        ("{{ '{:>5} {a!r}'.format(1, a='b') }}{{ '{a}'.format_map({'a': 2}) }}", "    1 'b'2"),
        (
            "{{ [1, 2]|join(', ') }}{{ '-'.join(['a', 'b']) }}{{ [[1], [2]]|sum(start=[]) }}{{ [{'n': 2}]|sum('n') }}",
            "1, 2a-b[1, 2]2",
        ),
        ("{{ messages|tojson(indent=1) }}", '[\n {\n  "role": "user",\n  "content": "x"\n }\n]'),
        ("{{ messages|map(attribute='role')|list }}{{ messages|length == 1 and 2 ** 10 // 3 }}", "['user']341"),
        ("{% for a, b in {'k': 1}.items() %}{{ a }}{{ b }}{{ loop.length }}{% endfor %}", "k11"),
        ("{{ 10 ** 18 + 1 }}{{ 1000000|string }}{{ 1000000 in [1000000] }}", "10000000000000000011000000True"),
    ],
)
def test_what_templates_use_works(template: str, wanted: str | None) -> None:
    if wanted is None:
        with pytest.raises(ChatTemplateError, match="TypeError"):
            chat.render([{"role": "user", "content": "x"}], chat.Options(template))
    else:
        assert chat.render([{"role": "user", "content": "x"}], chat.Options(template))[0] == wanted


def test_deep_messages_are_refused() -> None:
    for depth in (500, 100_000):
        deep: Any = []
        for _ in range(depth):
            deep = [deep]
        with pytest.raises(InvalidRequestError, match="nested"):
            chat.render([{"role": "user", "content": "x", "deep": deep}], chat.Options("{{ messages[0].content }}"))


def test_half_a_surrogate_pair_is_refused() -> None:
    for content, template in (("caf\ud800", "{{ messages[0].content }}"), ("x", "{{ '\ud800' }}")):
        with pytest.raises(InvalidRequestError, match="lone surrogate at character"):
            chat.render([{"role": "user", "content": content}], chat.Options(template))
