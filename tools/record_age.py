"""Lists the benchmark records that are older than the kernels that they time.

    python tools/record_age.py            # prints the table
    python tools/record_age.py --write    # writes it into benchmarks/results/README.md

For each record: how many of the functions that its kernels consist of today were the same at its commit. Only
instructions count, not names, comments or places. Needs the repository's history.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import json
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN = "<!-- Begin of what `python tools/record_age.py --write` writes. -->\n"
END = "<!-- End of what `python tools/record_age.py --write` writes. -->\n"

_ATTENTION = "src/flashtile/ops/attention/"
#: Folders of the kernels of an operation of a record; other operations are attention.
_FOLDERS = {
    "decode": ("src/flashtile/ops/kv_cache/triton", "src/flashtile/ops/common/split_keys"),
    "serving": ("src/flashtile/ops/kv_cache", "src/flashtile/ops/common/split_keys"),
    "causal_softmax": ("src/flashtile/ops/softmax",),
    "cross_entropy": ("src/flashtile/ops/cross_entropy",),
    "dropout_add_layer_norm": ("src/flashtile/ops/layer_norm",),
    "fused_mlp": ("src/flashtile/ops/dense",),
    "apply_rotary": ("src/flashtile/ops/rotary",),
}


def functions(source: str, jitted: bool) -> Iterator[str]:
    """The instructions of each function of a file; `jitted`: only of kernels' functions."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef):
            continue
        if jitted and not any("jit" in ast.unparse(each) for each in node.decorator_list):
            continue
        body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        for inner in body:
            for call in ast.walk(inner):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id.islower():
                    call.func.id = ""  # what a function is called
        yield "\n".join(map(ast.dump, body))


@functools.cache
def functions_at(commit: str, jitted: bool) -> frozenset[str]:
    """The instructions of all functions of operations at a commit."""
    command = ["git", "archive", commit, "src/flashtile/ops"]
    archive = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        texts = [files.extractfile(member) for member in files if member.name.endswith(".py")]
        return frozenset(each for file in texts if file for each in functions(file.read().decode(), jitted))


def kernels_now(record: dict) -> tuple[tuple[str, ...], bool]:
    """Folders of the kernels of a record, and whether they are jitted."""
    impls = {row.get("impl", "") for row in record["rows"]} | {record.get("command", "")}
    operations = {row.get("op", "attention") for row in record["rows"]}
    folders = [folder for operation in sorted(operations & _FOLDERS.keys()) for folder in _FOLDERS[operation]]
    if "cpu" in str(record["machine"]).lower() and not record["machine"].get("gpu"):
        return (f"{_ATTENTION}cpu",), False
    if folders:
        return tuple(folders), True
    portable = any("triton" in impl for impl in impls) and not any("hopper" in impl for impl in impls)
    return (f"{_ATTENTION}{'triton' if portable else 'hopper'}", f"{_ATTENTION}gpu"), True


def table() -> str:
    lines = ["| record | commit | functions of its kernels that were the same |\n| --- | --- | --- |\n"]
    for path in sorted(RESULTS.glob("*.json")):
        record = json.loads(path.read_text("utf-8"))
        commit = record["commit"].removesuffix("-dirty")
        if subprocess.run(["git", "cat-file", "-e", commit], cwd=ROOT, capture_output=True, check=False).returncode:
            lines.append(f"| `{path.name}` | {commit[:9]} | its commit is not in the history |\n")
            continue
        folders, jitted = kernels_now(record)
        files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
        now = [each for file in files for each in functions(file.read_text("utf-8"), jitted)]
        then = functions_at(commit, jitted)
        same = sum(each in then for each in now)
        lines.append(f"| `{path.name}` | {commit[:9]} | {same} of {len(now)} |\n")
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table into benchmarks/results/README.md")
    found = table()
    if not parser.parse_args().write:
        print(found, end="")
        return
    readme = RESULTS / "README.md"
    before, rest = readme.read_text("utf-8").split(BEGIN)
    readme.write_text(before + BEGIN + found + END + rest.split(END)[1], "utf-8")


if __name__ == "__main__":
    main()
