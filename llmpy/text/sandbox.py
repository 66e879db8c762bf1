"""The Jinja environment of chat templates: templates cannot reach Python, and depth, size and time are bounded.

A `Meter` counts the work of one rendering. The compiled template calls it in every loop, before every text and comparison, and
around every operator, call, filter and test. The weight of a container is the number of characters and items in its text. So
a list that holds one list twice, which holds another list twice, and so on, is refused when it is made. A call with a result
that could be too large is refused before it runs.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import reduce, wraps
from types import GeneratorType
from typing import Any, cast

from jinja2 import nodes, pass_context, pass_environment
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import Namespace

MAX_TEMPLATE = 1 << 18  # characters
MAX_DEPTH = 200  # of lists in lists
MAX_NUMBER = 100_000  # largest argument of a filter or method in SIZED, and of range()
MAX_BITS = 1 << 14
MAX_WORK = 1 << 30  # most length of a text times length of an argument of its method
MAX_INDENT = 16  # characters, in tojson
MAX_SLOW = 1 << 16  # characters of an argument of a filter in SLOW
SLOW = frozenset({"pprint", "striptags", "urlize", "wordwrap", "xmlattr"})
SIZED = frozenset({"batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice", "to_bytes", "truncate",
                   "wordwrap", "zfill"})  # fmt: skip
CODECS = frozenset({"utf-8", "utf8", "ascii", "latin-1"})
STEPS_PER_CLOCK = 15  # a mask: the clock is read every 16 steps

_VIEWS: tuple[type, ...] = (type({}.items()), type({}.keys()), type({}.values()))
_CONTAINERS: tuple[type, ...] = (list, tuple, dict, set, frozenset, *_VIEWS)
_NUMBER = re.compile(r"\d+")
_WIDTH = re.compile(r"\d{6}")
_WIDTH_GIVEN = re.compile(r"%[-+ #0]*(\d*\.)?\*")


class TemplateLimitError(TemplateError):
    """A template exceeds its limits."""


@dataclass(frozen=True)
class Limits:
    """Limits of one rendering.

    Args:
        seconds: Processor time, in seconds.
        steps: Iterations, calls, filters, operators and comparisons. 200 are added for each list and dict in the messages.
        characters: Length of the result and of every intermediate value. 4 are added for each character of the messages.
        memory_bytes: Sum of the sizes of all values made, including dropped ones. 256 are added for each character of the
            messages.
    """

    seconds: float = 10.0
    steps: int = 1_000_000
    characters: int = 4 << 20
    memory_bytes: int = 512 << 20


DEFAULT_LIMITS = Limits()


class Meter:
    """The remaining budget of one rendering.

    Args:
        limits: Limits of the rendering.
        given: The template's arguments: messages, tools, documents and variables.
    """

    def __init__(self, limits: Limits, given: Mapping[str, Any]) -> None:
        self._known: dict[int, tuple[object, int, int]] = {}  # id of a container -> container, weight, depth
        self._most = 1 << 62
        size = self._weigh(given)[0]
        self._limits = limits
        self._most = limits.characters + 4 * size
        self._steps = limits.steps + 200 * len(self._known)
        self._memory = limits.memory_bytes + 256 * size
        self._end = time.thread_time() + limits.seconds

    def tick(self, num_bytes: int = 0) -> None:
        """Counts a step, and `num_bytes` bytes of a new value."""
        self._steps -= 1
        self._memory -= num_bytes
        if self._memory < 0 or not self._steps & STEPS_PER_CLOCK:
            self._check()

    def _check(self) -> None:
        """Raises if a limit is exceeded."""
        if self._steps < 0:
            raise TemplateLimitError(f"takes more than {self._limits.steps} steps; simplify its loops")
        if self._memory < 0:
            raise TemplateLimitError(f"makes values of more than {self._limits.memory_bytes} bytes in all; make fewer of them")
        if time.thread_time() > self._end:
            raise TemplateLimitError(f"takes more than {self._limits.seconds:g} s; simplify it")

    def made(self, value: Any) -> Any:
        """Counts a value made by the template and returns it."""
        if isinstance(value, str | bytes):
            if len(value) > self._most:
                self.fits(len(value))
            self.tick(value.__sizeof__())
        elif isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise TemplateLimitError(f"makes a number of more than {MAX_BITS} bits")
            self.tick()
        elif isinstance(value, _CONTAINERS):
            self.tick(256 + 8 * len(value))  # type: ignore[arg-type]  # 256: what is kept of it here
            self._weigh(value)
        elif isinstance(value, GeneratorType):
            return self._items(value)
        else:
            self.tick()
        return value

    def fits(self, characters: int) -> None:
        """Refuses a value with too many characters."""
        if characters > self._most:
            raise TemplateLimitError(f"makes a value of more than {self._most} characters")

    def weight(self, value: object) -> int:
        """Number of characters and items in the text of a value."""
        return self._weigh(value)[0]

    def _items(self, source: Iterator[Any]) -> Iterator[Any]:
        for item in source:
            self.tick()
            yield item

    def _weigh(self, value: object) -> tuple[int, int]:
        """Weight and depth of a value."""
        if isinstance(value, str | bytes):
            return len(value) + 1, 0
        if not isinstance(value, _CONTAINERS):
            return 1, 0
        known = self._known.get(id(value))
        if known is not None:
            return known[1], known[2]
        weight, depth = 1, 0
        for part in _parts(value):
            inner = self._weigh(part)
            weight += inner[0]
            depth = max(depth, inner[1])
        self.fits(weight)
        if depth >= MAX_DEPTH:
            raise TemplateLimitError(f"lists and dicts are nested deeper than {MAX_DEPTH}")
        self._known[id(value)] = value, weight, depth + 1
        return weight, depth + 1


def _parts(value: Any) -> Iterator[object]:
    """The items of a container; of a mapping the keys and values."""
    if isinstance(value, _VIEWS):
        value = value.mapping  # type: ignore[attr-defined]
    if not isinstance(value, Mapping):
        yield from value
        return
    for name, item in value.items():
        yield name
        yield item


METER: ContextVar[Meter] = ContextVar("meter")


class _Compiler(CodeGenerator):
    """Compiles templates that report to the meter."""

    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:
        fixed = sum(len(child.data) for child in node.nodes if isinstance(child, nodes.TemplateData))
        self.writeline(f"environment.tick({fixed})", node)
        if node.nodes:
            super().visit_Output(node, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.body.insert(0, nodes.Output([], lineno=node.lineno))  # it compiles to a tick only
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.tilde(context, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(environment.tick() or ")
        super().visit_Compare(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._write_made(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._write_made(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._write_made(super().visit_Dict, node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._write_made(super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def _write_made(self, visit: Callable[[Any, Frame], None], node: nodes.Node, frame: Frame) -> None:
        self.write("environment.made(")
        visit(node, frame)
        self.write(")")


class _Bounded:
    """Formatter of str.format that limits the width of fields."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        _check_widths(format_spec)
        return METER.get().made(super().format_field(value, format_spec))  # type: ignore[misc]


class _Formatter(_Bounded, SandboxedFormatter):
    pass


class _EscapeFormatter(_Bounded, SandboxedEscapeFormatter):
    pass


class Environment(ImmutableSandboxedEnvironment):
    """A sandbox with templates that report to the meter of their rendering."""

    code_generator_class = _Compiler
    intercepted_binops = frozenset({"+", "-", "*", "**", "%", "//"})

    def __init__(self, **options: Any) -> None:
        super().__init__(optimized=False, finalize=_text, **options)
        del self.globals["lipsum"]
        self.globals.update(dict=_Dict(), namespace=_Namespace)
        filters: dict[str, Callable[..., Any]] = self.filters | {"sum": _sum, "tojson": _tojson}
        self.filters = {name: _bounded(name, function) for name, function in filters.items()}
        tests = cast(dict[str, Callable[..., Any]], self.tests)
        self.tests = {name: _bounded(name, function) for name, function in tests.items()}

    def tick(self, num_bytes: int = 0) -> None:
        """Counts a step of the rendering, and `num_bytes` bytes of a new value."""
        METER.get().tick(num_bytes)

    def made(self, value: Any) -> Any:
        """Counts a value made by the template and returns it."""
        return METER.get().made(value)

    def tilde(self, context: Context, parts: tuple[Any, ...]) -> Any:
        """The operator ~."""
        meter = METER.get()
        meter.fits(sum(map(meter.weight, parts)))
        return meter.made((markup_join if context.eval_ctx.autoescape else str_join)(parts))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Runs an operator; refuses it if the result would be too large."""
        meter = METER.get()
        if operator in _GROWING:
            _check_operator(meter, operator, left, right)
        return meter.made(self.binop_table[operator](left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs a call; refuses a method of a text or number if the result would be too large."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes | int | float):
            args = _check_arguments(getattr(__obj, "__name__", ""), owner, args, kwargs)
        return METER.get().made(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """str.format and str.format_map with limited field widths."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text = value.__self__
        make = _EscapeFormatter(self, escape=text.escape) if hasattr(text, "escape") else _Formatter(self)
        of_map = value.__name__ == "format_map"

        @wraps(wrapped)
        def run(*args: Any, **kwargs: Any) -> str:
            if of_map:
                (kwargs,), args = args, ()
            made: str = type(text)(make.vformat(text, args, kwargs))
            return made

        return run


@pass_context
def _text(context: Context, value: Any) -> str:
    """The output text of a value. It takes a context, so that Jinja does not evaluate constants before there is a meter."""
    text = value if isinstance(value, str) else str(value)
    METER.get().tick(len(text))
    return text


@pass_environment
def _sum(environment: Environment, iterable: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    """The filter `sum`; each addition is checked against the limits."""
    meter = METER.get()

    def add(left: Any, right: Any) -> Any:
        return meter.made(left + right)

    return reduce(add, iterable if attribute is None else map(make_attrgetter(environment, attribute), iterable), start)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` as in transformers, counted piece by piece."""
    meter = METER.get()
    meter.weight(value)
    if len(str(separators)) > MAX_INDENT or (indent if isinstance(indent, int) else len(indent or "")) > MAX_INDENT:
        raise TemplateLimitError(f"gives tojson an indent or separators of more than {MAX_INDENT} characters")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return encoder.encode(value)
    return "".join([meter.made(piece) for piece in encoder.iterencode(value)])


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test that reports to the meter and refuses results that would be too large."""
    first = int(hasattr(function, "jinja_pass_arg"))

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        before, value, rest = args[:first], args[first : first + 1], args[first + 1 :]
        if value:
            subject = value[0]
            if name == "join":
                subject = list(subject)
            METER.get().tick()
            rest = _check_arguments(name, subject, rest, kwargs)
            value = (subject,)
        return METER.get().made(function(*before, *value, *rest, **kwargs))

    return run


_GROWING = frozenset({"*", "**", "%"})  # + at most doubles the size


def _check_operator(meter: Meter, operator: str, left: Any, right: Any) -> None:
    """Refuses an operator if its result would be too large."""
    if operator == "*":
        for sequence, times in ((left, right), (right, left)):
            if isinstance(times, int) and isinstance(sequence, str | bytes | list | tuple):
                meter.fits(meter.weight(sequence) * max(times, 0))
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MAX_BITS:
            raise TemplateLimitError(f"makes a number of more than {MAX_BITS} bits")
    elif operator == "%" and isinstance(left, str | bytes):
        _check_percent(meter, left, right)


def _check_percent(meter: Meter, pattern: str | bytes, given: Any) -> None:
    """Refuses a % format if its result would be too long."""
    text = pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern
    _check_widths(text)
    if _WIDTH_GIVEN.search(text):
        raise TemplateLimitError("gives the width of a % format as an argument; write the width into the format")
    values = given if isinstance(given, tuple) else given.values() if isinstance(given, Mapping) else (given,)
    longest = max(map(meter.weight, values), default=1)
    widest = max(map(int, _NUMBER.findall(text)), default=0)
    meter.fits(len(text) + text.count("%") * max(longest, widest))


def _check_widths(text: str) -> None:
    """Refuses a format with a width of more than five digits."""
    if _WIDTH.search(text):
        raise TemplateLimitError(f"gives a format a width of more than {MAX_NUMBER - 1}")


def _check_arguments(name: str, subject: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Refuses a filter or method that would be too slow or make too much; returns the arguments with iterators as lists."""
    meter = METER.get()
    if name == "join" and isinstance(subject, str | bytes) and args:
        args = (list(args[0]), *args[1:])
    given = (*args, *kwargs.values())
    for value in given:
        if name in SIZED and isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise TemplateLimitError(f"gives {name} the number {value:.6g}; at most {MAX_NUMBER} is allowed")
    if name in SLOW and meter.weight(subject) > MAX_SLOW:
        raise TemplateLimitError(f"gives {name} more than {MAX_SLOW} characters")
    if name in ("encode", "decode") and str(next(iter(given), "utf-8")).lower() not in CODECS:
        raise TemplateLimitError(f"gives {name} another codec than {', '.join(sorted(CODECS))}")
    if isinstance(subject, str | bytes):
        longest = max((len(value) for value in given if isinstance(value, str | bytes)), default=0)
        if len(subject) * longest > MAX_WORK:
            raise TemplateLimitError(f"gives {name} of {len(subject)} characters an argument of {longest}")
    if (predict := _PREDICTED.get(name)) is not None:
        meter.fits(predict(meter, subject, args, kwargs))
    return args


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int, name: str, default: Any) -> Any:
    """An argument given by position or by name."""
    return args[place] if len(args) > place else kwargs.get(name, default)


def _joined(meter: Meter, subject: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Length of a join. The subject of the filter is the list; the subject of the method is the separator."""
    items, between = subject, _argument(args, kwargs, 0, "d", "")
    if isinstance(subject, str | bytes) and args and isinstance(args[0], list):
        items, between = args[0], subject
    return meter.weight(items) + len(items) * meter.weight(between)


def _replaced(meter: Meter, subject: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Length of a replacement."""
    old, new = _argument(args, kwargs, 0, "old", ""), _argument(args, kwargs, 1, "new", "")
    if isinstance(subject, bytes):
        return len(subject) + subject.count(old) * meter.weight(new)
    text = str(subject)
    return len(text) + text.count(str(old)) * meter.weight(new)


def _indented(meter: Meter, subject: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Length of indented lines."""
    width = _argument(args, kwargs, 0, "width", 4)
    lines = len(str(subject).splitlines()) + 1
    return meter.weight(subject) + lines * (width if isinstance(width, int) else meter.weight(width))


def _stretched(meter: Meter, subject: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Length of a text if each character became the longest argument."""
    return meter.weight(subject) * max((_reach(meter, value) for value in (*args, *kwargs.values())), default=1)


def _reach(meter: Meter, value: Any) -> int:
    """Most characters by which an argument may replace one character."""
    if isinstance(value, Mapping):
        return max(map(meter.weight, value.values()), default=1)
    return abs(value) if isinstance(value, int) else meter.weight(value)


def _of_format(meter: Meter, subject: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """0, after a check of a % format that is used as a filter."""
    if isinstance(subject, str):
        _check_percent(meter, subject, kwargs or args)
    return 0


_PREDICTED: dict[str, Callable[[Meter, Any, tuple[Any, ...], Mapping[str, Any]], int]] = {
    "join": _joined,
    "replace": _replaced,
    "indent": _indented,
    "expandtabs": _stretched,
    "translate": _stretched,
    "wordwrap": _stretched,
    "format": _of_format,
}


class _Dict:
    """dict() of templates, without the attributes of the real one."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """namespace() of templates, without names that reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self` parameter: a template may use that name for an attribute
        self, *rest = args
        found = dict(*rest, **kwargs)
        for name in found:
            _check_name(name)
        Namespace.__init__(self, found)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:  # not the content, which may be nested namespaces
        return "<Namespace>"


def _check_name(name: object) -> None:
    """Refuses names that reach into Python."""
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore, got {name!r}")
