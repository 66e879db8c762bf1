"""Wheels: the tag of their platform, and what is in them (CycloneDX, in dist-info/sboms, as PEP 770 says)."""

import json
import re
import shutil
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import compiling
import linking
from setuptools.command.bdist_wheel import bdist_wheel


class Wheel(bdist_wheel):
    """A wheel that says what is in it, and which glibc it needs."""

    has_cuda: ClassVar[bool] = False

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, _ = super().get_tag()
        system = f"manylinux_{compiling.glibc().replace('.', '_')}" if compiling.glibc() else "linux"
        return python, abi, f"{system}_{compiling.machine()}"

    def write_wheelfile(self, wheelfile_base: str, *rest: Any, **named: Any) -> None:
        super().write_wheelfile(wheelfile_base, *rest, **named)
        has_cuda = self.has_cuda or (Path(self.bdist_dir) / "llmpy/_backends" / linking.LIBRARY).exists()
        folder, name = Path(wheelfile_base), self.distribution.get_name()
        (folder / "sboms").mkdir(exist_ok=True)
        needed = [*(self.distribution.install_requires or [])]
        parts = linking.components(None) + (linking.components(compiling.find_nvcc()) if has_cuda else [])
        text = bill(name, self.distribution.get_version(), list(dict.fromkeys(parts)), needed)
        (folder / "sboms" / f"{name}.cdx.json").write_text(text)
        if self.has_cuda:
            shutil.copy2(compiling.ROOT / "LICENSE", folder / "licenses")


def bill(name: str, version: str, parts: list[linking.Component], needed: list[str]) -> str:
    """The bill of materials: what is linked in, and which packages an installation needs besides."""
    own = f"pkg:pypi/{name}@{version}"
    packages = sorted({re.match(r"[\w.-]+", text)[0].lower() for text in needed})  # type: ignore[index]
    linked = [
        {"type": "library", "bom-ref": f"pkg:generic/{quote(one.name)}@{one.version}", "name": one.name, "version": one.version,
         "licenses": [{"expression": one.licence}]}
        for one in parts
    ]  # fmt: skip
    outside = [
        {"type": "library", "bom-ref": f"pkg:pypi/{one}", "name": one, "purl": f"pkg:pypi/{one}", "scope": "required"}
        for one in packages
    ]
    top = {"type": "library", "bom-ref": own, "name": name, "version": version, "purl": own}
    content = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {**top, "licenses": [{"expression": "Apache-2.0"}]}},
        "components": [*linked, *outside],
        "dependencies": [{"ref": own, "dependsOn": [one["bom-ref"] for one in [*linked, *outside]]}],
    }
    return json.dumps(content, indent=1) + "\n"
