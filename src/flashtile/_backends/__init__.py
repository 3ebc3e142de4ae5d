"""How kernels are described, compiled, launched and watched, for all operations."""

from __future__ import annotations

from collections.abc import Callable

#: Functions that empty each memory of decisions about calls and launches (`launch.clear_plans`).
forgetters: list[Callable[[], None]] = []
