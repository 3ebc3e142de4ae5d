"""The command line in this process, through typer's runner."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from click.testing import Result


def invoke(*arguments: object) -> Result:
    """Runs `flashtile` with some arguments, in a wide terminal; the test is skipped where typer is missing."""
    testing = pytest.importorskip("typer.testing")
    app = pytest.importorskip("flashtile.cli.app").app
    result: Result = testing.CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "300"})
    return result
