"""Changes of one node of a traced graph: a conversion refuses it, or its comparison finds it, or the logits stay."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from modules import load

from llmpy.models.interpret import Interpreter

helpers = load(Path(__file__).with_name("conftest.py"))
torch = pytest.importorskip("torch")

from llmpy.export import stored, trace, verify  # noqa: E402
from llmpy.export.conversion import RULES  # noqa: E402
from llmpy.export.names import Names  # noqa: E402
from llmpy.export.refusal import Refusal  # noqa: E402
from llmpy.export.tidy import tidy  # noqa: E402
from llmpy.export.walk import Walk  # noqa: E402
from llmpy.models import Model, ModelConfig  # noqa: E402
from llmpy.models.source import Source  # noqa: E402

OTHERS = {
    "aten.cos.default": torch.ops.aten.sin.default, "aten.sin.default": torch.ops.aten.cos.default,
    "aten.add.Tensor": torch.ops.aten.sub.Tensor, "aten.sub.Tensor": torch.ops.aten.add.Tensor,
    "aten.mul.Tensor": torch.ops.aten.add.Tensor, "aten.neg.default": torch.ops.aten.alias.default,
    "aten.rsqrt.default": torch.ops.aten.reciprocal.default, "aten.tanh.default": torch.ops.aten.sin.default,
    "aten.sigmoid.default": torch.ops.aten.tanh.default, "aten.mean.dim": torch.ops.aten.sum.dim_IntList,
}  # fmt: skip
"""Operation -> another one of the same arguments and shape, which takes its place."""
KINDS = {"gemma2": {"final_logit_softcapping": 3.0}, "afmoe": {}, "gpt_oss": {}, "biogpt": {}, "hunyuan_v1_dense": {}}


def places(node: Any) -> Iterator[tuple[str, object]]:
    """Names and new values of what may change in a node: its target, or its arguments."""
    args = node.args
    if (other := OTHERS.get(str(node.target))) is not None:
        yield "target", other
    first = [each for each in args if isinstance(each, torch.fx.Node)]
    shape = node.meta["val"].shape if isinstance(node.meta.get("val"), torch.Tensor) else None
    for each in first:
        if isinstance(each.meta.get("val"), torch.Tensor) and each.meta["val"].shape == shape:
            yield "alias", (each,)
    if len(first) >= 2 and args[:2] == tuple(first[:2]):
        yield "args", (args[1], args[0], *args[2:])
    for i, each in enumerate(args):
        if isinstance(each, bool):
            yield "args", (*args[:i], not each, *args[i + 1 :])
        elif isinstance(each, int | float):
            for new in (each + 1, -each, each * 2):
                yield "args", (*args[:i], new, *args[i + 1 :])
        elif isinstance(each, list | tuple) and len(each) > 1:
            yield "args", (*args[:i], each[::-1], *args[i + 1 :])


@pytest.fixture(scope="module")
def traced() -> Callable[[str], SimpleNamespace]:
    """The graph of a tiny model of a kind, and what converts it as it is now."""
    found: dict[str, SimpleNamespace] = {}

    def make(kind: str) -> SimpleNamespace:
        if kind in found:
            return found[kind]
        config = helpers.config_of(kind, num_hidden_layers=2, **KINDS[kind])
        cls = helpers.transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model = trace.build(cls, config)
        graph = trace.trace(model)
        fields = stored.fields_of(model.config.get_text_config()) | {"architectures": [cls.__name__]}

        def convert() -> Any:
            assert RULES
            m = Model(ModelConfig(fields, "config.json"), None, Source(), "checkpoint")
            Walk(graph, model, m, Names(model)).run()
            tidy(m.spec)
            return m.spec

        found[kind] = SimpleNamespace(cls=cls, config=config, graph=graph.graph, convert=convert, spec=convert())
        return found[kind]

    return make


def largest_difference(found: SimpleNamespace, spec: Any) -> float:
    """Of the logits of a program and of the class, for lengths and weights that no conversion tries."""
    model = trace.build(found.cls, found.config)
    trace.randomise(model, 1.5)
    weights = verify._checkpoint(model)
    ids = np.random.default_rng(7).integers(0, spec["vocab_size"], 61)
    with torch.no_grad():
        wanted = model(torch.from_numpy(ids)[None], use_cache=False).logits[0].double().numpy()
    own = Interpreter(spec, lambda name, shape: weights[name].reshape(shape)).logits(ids.tolist())
    return float(np.abs(own - wanted).max() / np.abs(wanted).max())


def outcome(found: SimpleNamespace) -> str:
    """Of the graph as it is now: refused, compared, same program, or same logits."""
    try:
        spec = found.convert()
    except Exception:  # a rule may meet what no class writes; nothing is converted then
        return "refused"
    if spec == found.spec:
        return "same program"
    try:
        verify._compare(found.cls, found.config, spec)
    except Refusal:
        return "compared"
    assert largest_difference(found, spec) <= 2 * verify.TOLERANCE
    return "same logits"


@contextmanager
def changed(node: Any, what: str, new: Any) -> Iterator[None]:
    """The graph with one node changed."""
    before = node.target, node.args
    if what == "target":
        node.target = new
    else:
        node.target, node.args = (torch.ops.aten.alias.default if what == "alias" else node.target), new
    yield
    node.target, node.args = before


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(("kind", "n"), [("gemma2", 10), *(pytest.param(kind, 60, marks=pytest.mark.slow) for kind in KINDS)])
def test_a_changed_node_is_found(kind, n, traced) -> None:
    found = traced(kind)
    spots = [(node, *place) for node in found.graph.nodes if node.op == "call_function" for place in places(node)]
    outcomes = []
    for spot in random.Random(n).sample(spots, n):
        with changed(*spot):
            outcomes.append(outcome(found))
    assert found.convert() == found.spec
    assert outcomes.count("refused") + outcomes.count("compared") >= n // 3


def test_the_comparison_names_the_first_other_module(traced) -> None:
    """A norm's eps, which only small rows show, and a factor behind a linear."""
    found = traced("gemma2")
    nodes = {node.name: node for node in found.graph.nodes}
    (norm, _), *_ = [(n, n.args) for n in nodes.values() if str(n.target) == "aten.add.Tensor" and isinstance(n.args[1], float)]
    with changed(norm, "args", (norm.args[0], 4 * norm.args[1])), pytest.raises(Refusal, match="differs from") as caught:
        verify._compare(found.cls, found.config, found.convert())
    assert caught.value.module == "model.layers.0.input_layernorm (Gemma2RMSNorm)"
