"""Writes flashtile as a repository of the kernels hub: a folder of plain Python for CPUs and one for CUDA.

    python tools/kernels_repository.py FOLDER --version 1

The kernels package loads a variant under a name of its own (`id` in its metadata), several versions in one process.
Modules and operators are therefore renamed to that: `import flashtile` and another version of flashtile do not meet it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "flashtile"

#: Parts of the package that a model needs.
_PARTS = ("__init__.py", "_public.py", "_backends", "ops", "modules")

BACKENDS = ("cpu", "cuda")

#: Places that mean the package, not its name in a message or a comment; each with what follows the name.
_NAMES = [
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        r"(?P<before>^\s*from )flashtile(?=[. ])",
        r"(?P<before>torch\.ops\.)flashtile\b",
        r"(?P<before>Library\(\")flashtile(?=\")",
        r"(?P<before>modules\[\")flashtile(?=\")",
        r"(?P<before>serialized_type_name=\")flashtile(?=\.)",
        r"(?P<before>\")flashtile(?=::|\.\"|\.ops\b|\._)",
    )
]
_IMPORT = re.compile(r"^(\s*)import flashtile$", re.MULTILINE)


def renamed(text: str, name: str) -> str:
    """A module's source for a package of that name."""
    text = _IMPORT.sub(rf"\1import {name} as flashtile", text)
    for pattern in _NAMES:
        text = pattern.sub(rf"\g<before>{name}", text)
    return text


def sources() -> dict[str, str]:
    """The modules of the package, by their paths in it."""
    files = [path for part in _PARTS for path in (SOURCE / part, *(SOURCE / part).rglob("*.py")) if path.is_file()]
    found = {path.relative_to(SOURCE).as_posix(): path.read_text("utf-8") for path in files}
    found["layers.py"] = (ROOT / "packaging" / "kernels-hub" / "layers.py").read_text("utf-8")
    found["__init__.py"] += "\nfrom flashtile import layers as layers\n"
    return dict(sorted(found.items()))


def write(folder: Path, version: int) -> None:
    """`folder/build/torch-<backend>/`, instead of what was there. `version`: of the repository on the hub."""
    files = sources()
    digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:12]
    for backend in BACKENDS:
        variant = folder / "build" / f"torch-{backend}"
        shutil.rmtree(variant, ignore_errors=True)
        name = f"_flashtile_{backend}_{digest}"
        for path, text in files.items():
            place = variant / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(renamed(text, name), "utf-8")
        metadata = {
            "id": name,
            "name": "flashtile",
            "version": version,
            "license": "BSD-3-Clause",
            "python-depends": [],
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", "utf-8")
    shutil.copy(ROOT / "LICENSE", folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--version", type=int, default=1, help="of the repository on the hub")
    arguments = parser.parse_args()
    write(arguments.folder, arguments.version)
