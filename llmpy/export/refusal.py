"""Why a model of transformers cannot be converted: the module and the node of the traced graph, and the reason."""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import UnsupportedError

ADVICE = "Write the architecture function; llmpy export MODEL prints its beginning"


class Refusal(Exception):
    """A node that no operation of programs expresses.

    Args:
        reason: What is wanted and what is there.
        module: Path of the module that made the node, "" if the model itself did; with its class in parentheses.
        node: Name and target of the node, "" if the reason is not about a node.
        line: Source line of the node.
    """

    def __init__(self, reason: str, module: str = "", node: str = "", line: str = "") -> None:
        super().__init__(reason)
        self.reason, self.module, self.node, self.line = reason, module, node, line

    def error(self, architecture: str) -> UnsupportedError:
        """The error for the user."""
        place = "".join(f"{part}: " for part in (self.module, f"node {self.node}" if self.node else "") if part)
        line = f"; {self.line}" if self.line else ""
        message = f"cannot convert {architecture}: {place}{self.reason}{line}. {ADVICE}"
        return UnsupportedError(message, module=self.module or None, node=self.node or None)


def module_of(node: Any) -> str:
    """Path and class of the module that made a node of a traced graph."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return ""
    path, kind = stack[-1]
    name = kind if isinstance(kind, str) else kind.__qualname__
    return f"{path.removeprefix('model').removeprefix('.')} ({name.rsplit('.', 1)[-1]})".strip()


def refuse(node: Any, reason: str) -> NoReturn:
    """Raises the Refusal of a node."""
    trace = [line.strip() for line in str(node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    line = ""
    if len(trace) > 1 and trace[-2].startswith("File"):
        file, number = trace[-2].split(", ")[:2]
        name = file.removeprefix('File "').rstrip('"').rsplit("/", 1)[-1]
        line = f"{trace[-1]} at {name}:{number.removeprefix('line ')}"
    raise Refusal(reason, module_of(node), f"{node.name} = {node.target}", line)
