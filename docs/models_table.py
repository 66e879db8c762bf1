"""Writes the table of docs/use/models.md from what the package knows: python docs/models_table.py.

A family's file says in its docstring what it is, in CHECKPOINTS which released models are of it, in REFERENCE what it is tested
against (else transformers), and in LIMITS what it lacks. Formats are looked up.
"""

import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/use/models.md"
BEGIN, END = "<!-- models_table.py: from here -->", "<!-- models_table.py: to here -->"
HEAD = "| family | architectures | released models | formats | tested against | limits |"


def families() -> dict[ModuleType, list[str]]:
    """The module of every family, in the order of their titles, with the architectures that it registers."""
    from llmpy.models import registry

    found: dict[ModuleType, list[str]] = defaultdict(list)
    for name in registry.names():
        module = sys.modules.get(registry.find(name).build.__module__)
        if module is not None and module.__name__.startswith("llmpy.models."):
            found[module].append(name)
    return dict(sorted(found.items(), key=lambda item: title(item[0]).lower()))


def title(module: ModuleType) -> str:
    """The first line of the module's docstring."""
    return str(module.__doc__).splitlines()[0].rstrip(".")


def cells() -> list[list[str]]:
    """The rows of the table."""
    from llmpy.models import gguf

    in_gguf = {family.architecture for family in gguf.FAMILIES}
    # under the names of Llama, of Granite and of its hybrids
    in_gguf |= {"InternLM2ForCausalLM", "InternLM3ForCausalLM", "MiniCPMForCausalLM", "BambaForCausalLM"}
    rows = []
    for module, names in families().items():
        has_gguf = any(name in in_gguf for name in names)
        rows.append([
            title(module),
            ", ".join(f"`{name}`" for name in shortened(names)),
            getattr(module, "CHECKPOINTS", ""),
            "safetensors, GGUF" if has_gguf else "safetensors",
            getattr(module, "REFERENCE", "transformers"),
            getattr(module, "LIMITS", ""),
        ])  # fmt: skip
    return rows


def shortened(names: list[str]) -> list[str]:
    """The generating architectures of a family; of those that come with them (base models, classifiers) only where there is
    no generating one."""
    generating = [name for name in names if name.endswith("ForCausalLM") or name.endswith("LMHeadModel")]
    return generating or names


def table() -> str:
    """The table as Markdown."""
    lines = [HEAD, "|" + " --- |" * (HEAD.count("|") - 1)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells()]
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with the table as it is now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(page(PAGE.read_text()))
