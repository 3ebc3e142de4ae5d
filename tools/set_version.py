"""Writes a version into the files that have one, and its date: the first step of a release (CONTRIBUTING.md).

python tools/set_version.py 0.3.0                     # work on 0.3.0 begins: an empty section of the changelog
python tools/set_version.py 0.3.0 --date 2027-01-31   # 0.3.0 is released
"""

from __future__ import annotations

import argparse
import datetime
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def changelog(text: str, version: str, date: str) -> str:
    """The changelog with the date of a version, which is the newest one or comes before it."""
    newest = re.search(r"^## \[([\d.]+)\] - (.*)$", text, re.MULTILINE)
    assert newest is not None, "CHANGELOG.md: expected a heading ## [version] - date"
    heading = f"## [{version}] - {date}"
    if newest[1] == version:
        return text.replace(newest[0], heading, 1)
    if newest[2] == "unreleased" or _numbers(version) <= _numbers(newest[1]):
        raise SystemExit(
            f"version: expected {newest[1]}, which is unreleased, or one after a released one, got {version}"
        )
    return text.replace(newest[0], f"{heading}\n\n{newest[0]}", 1)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def set_version(root: Path, version: str, date: str) -> None:
    """Writes both into a checkout. `date`: "unreleased", or the day."""
    log = root / "CHANGELOG.md"
    log.write_text(changelog(log.read_text("utf-8"), version, date), "utf-8")
    package = root / "src" / "flashtile" / "__init__.py"
    package.write_text(_replaced(package, r'^__version__ = ".*"$', f'__version__ = "{version}"'), "utf-8")
    if date != "unreleased":
        citation = root / "CITATION.cff"
        dated = f"version: {version}\ndate-released: {date}"
        citation.write_text(_replaced(citation, r"^version: .*(\ndate-released: .*)?$", dated), "utf-8")


def _replaced(path: Path, pattern: str, line: str) -> str:
    text, count = re.subn(pattern, line, path.read_text("utf-8"), flags=re.MULTILINE)
    assert count == 1, f"{path.name}: expected one line {pattern}, got {count}"
    return text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", help="such as 0.3.0")
    parser.add_argument("--date", default="unreleased", type=lambda day: datetime.date.fromisoformat(day).isoformat())
    arguments = parser.parse_args()
    if not re.fullmatch(r"\d+\.\d+\.\d+", arguments.version):
        parser.error(f"version: expected three numbers such as 0.3.0, got {arguments.version}")
    set_version(ROOT, arguments.version, arguments.date)
