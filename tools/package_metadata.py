"""The page of flashtile on a package index: addresses of the project, and a README whose links work there.

In the repository the README's links are relative, so that they work in a checkout and in a fork. An index has no files
beside the README, so a build makes them absolute, by the `repository` in `pyproject.toml`. As long as that is empty,
there is no address: links become plain text and pictures go, because a link to nothing is worse.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

try:
    from hatchling.metadata.plugin.interface import MetadataHookInterface
except ImportError:  # the tests of the function below need no hatchling
    MetadataHookInterface = object  # type: ignore[assignment, misc]

#: A picture or a link whose target is a file of the repository.
_LOCAL = re.compile(r"(!?)\[((?:[^\[\]]|\n)*?)\]\((?!https?://|mailto:|#)([^)\s]+)\)")


def readme_for_index(text: str, repository: str) -> str:
    """The README with absolute links; without an address, with none to files."""

    def replaced(link: re.Match[str]) -> str:
        picture, words, target = link.groups()
        if not repository:
            return "" if picture else words
        return f"{picture}[{words}]({repository}/{'raw' if picture else 'blob'}/HEAD/{target})"

    return _LOCAL.sub(replaced, text)


def addresses(repository: str) -> dict[str, str]:
    """The entries of `[project.urls]`."""
    if not repository:
        return {}
    paths = {
        "Source": "",
        "Documentation": "/blob/HEAD/README.md#documents",
        "Changelog": "/blob/HEAD/CHANGELOG.md",
        "Issues": "/issues",
    }
    return {name: repository + path for name, path in paths.items()}


class Metadata(MetadataHookInterface):
    """Read by hatchling when it builds."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository = self.config["repository"].rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": readme_for_index(text, repository)}
        metadata["urls"] = addresses(repository)
