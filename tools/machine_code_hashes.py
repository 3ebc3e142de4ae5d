"""Hashes of the machine code that tests compile: to show that a change of the kernels' source leaves it.

    python tools/machine_code_hashes.py before.txt                    # every test that compiles, without a GPU
    python tools/machine_code_hashes.py after.txt -k hopper           # those that pytest selects
    python tools/machine_code_hashes.py --compare before.txt after.txt

A line is a kernel, its target and a hash of its instructions. Its name, and the place of its parameters in the
constant bank, are no part of the hash. Kernels are compiled without line tables, for ptxas chooses some registers by
them: with tables, the same PTX from other lines has another hash. The tests run, too: a list is written only if they
pass.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
_FOLDER = "FLASHTILE_MACHINE_CODE_HASHES"

#: Functions that tests of machine code call.
_CHECK = "check_code("


def pytest_configure(config: Any) -> None:
    """As a plugin of pytest: notes every kernel that is compiled."""
    import triton

    compile_source = triton.compile

    def compile_and_note(source: Any, *arguments: Any, **options: Any) -> Any:
        compiled = compile_source(source, *arguments, **options)
        target = compiled.metadata.target
        line = f"{source.fn.__name__} {target.backend}:{target.arch} {_hash(compiled.asm)}\n"
        with open(Path(os.environ[_FOLDER]) / str(os.getpid()), "a", encoding="utf-8") as file:
            file.write(line)
        return compiled

    if _FOLDER in os.environ:
        triton.compile = compile_and_note


def _hash(asm: dict[str, Any]) -> str:
    text = _instructions(asm["cubin"]) if "cubin" in asm else _amd_instructions(asm["amdgcn"])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _instructions(cubin: bytes) -> str:
    """NVIDIA's instructions, each parameter of the kernel in the same place of the constant bank."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile() as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([str(tool), "-c", file.name], check=True, text=True, capture_output=True).stdout
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", text)
    return "\n".join(re.sub(r"c\[0x0\]\[0x[0-9a-f]+\]", "c[0x0][parameter]", line) for line in lines)


def _amd_instructions(assembly: str) -> str:
    code = assembly.partition(".section")[0]
    lines = (line.partition(";")[0].strip() for line in code.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith(".") and not line.endswith(":"))


def record(output: Path, arguments: list[str]) -> int:
    """Runs the tests that compile, and writes what they compiled, each binary once."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            _FOLDER: folder,
            "PYTHONPATH": os.pathsep.join([str(_ROOT / "tools"), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "TRITON_DISABLE_LINE_INFO": "1",
        }
        where = [] if any(a.startswith("tests") for a in arguments) else sorted(map(str, _tests()))
        pytest = "-m pytest -q -p machine_code_hashes --compile-all"
        command = [sys.executable, *pytest.split(), *where, *arguments]
        status = subprocess.run(command, cwd=_ROOT, env=environment, check=False).returncode
        lines = {line for file in Path(folder).iterdir() for line in file.read_text("utf-8").splitlines()}
    if status:
        return status
    output.write_text("\n".join(sorted(lines)) + "\n", encoding="utf-8")
    print(f"{len(lines)} binaries: {output}")
    return 0


def _tests() -> list[Path]:
    """Every file of tests that check machine code."""
    return [path for path in _ROOT.glob("tests/ops/**/test_*.py") if _CHECK in path.read_text("utf-8")]


def compare(before: Path, after: Path) -> int:
    """Prints what differs. Names do not count, for a kernel may be renamed."""
    lists = [[line.split() for line in path.read_text("utf-8").splitlines()] for path in (before, after)]
    old, new = (Counter((target, code) for _, target, code in lines) for lines in lists)
    names = {(target, code): name for lines in lists for name, target, code in lines}
    for title, missing in (("only before", old - new), ("only after", new - old)):
        for key in sorted(missing):
            print(f"{title}: {names[key]} {' '.join(key)}")
    both, gone, added = (sum(part.values()) for part in (old & new, old - new, new - old))
    print(f"{both} binaries in both, {gone} gone, {added} new")
    return int(old != new)


def main() -> int:
    if sys.argv[1:2] == ["--compare"]:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--compare", nargs=2, type=Path)
        return compare(*parser.parse_args().compare)
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 2
    return record(Path(sys.argv[1]), sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
