"""`pytest -p flashtile.compat.pytest_plugin`: tests written for flash_attn run against flashtile. Options:
`--flash-attn-version` (2 or 1), `--flash-attn-override` (also where a real one is installed)."""

from __future__ import annotations

import pytest

from flashtile.compat.finder import install, uninstall


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("flashtile.compat", "flash_attn served by flashtile")
    group.addoption("--flash-attn-version", type=int, default=2, help="major version of flash_attn: 2 (default) or 1")
    group.addoption(
        "--flash-attn-override", action="store_true", help="also where a real flash_attn is installed or imported"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before any conftest.py, which may import flash_attn."""
    options = early_config.known_args_namespace
    try:
        install("flash_attn", options.flash_attn_version, options.flash_attn_override)
    except (ValueError, RuntimeError) as error:
        raise pytest.UsageError(str(error)) from error


def pytest_unconfigure() -> None:
    uninstall("flash_attn")
