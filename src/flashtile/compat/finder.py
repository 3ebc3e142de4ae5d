"""The meta-path finder that serves other libraries' module names, and what it refuses to take the place of.

A served module is made of its table (`flashtile.compat.signatures`): each name in it is that of a module of
`flashtile.compat`. A served module within a package that nobody provides gets an empty package around it.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from flashtile.compat.signatures import SERVED, Served

_HERE = Path(__file__).parent


class ServedDistribution(Distribution):
    """Metadata of a distribution whose modules flashtile serves; it has no files."""

    def __init__(self, module: str, served: Served) -> None:
        self._module = module
        self._served = served

    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            return (
                f"Metadata-Version: 2.1\nName: {self._served.distribution}\nVersion: {self._served.release}\n"
                f"Summary: The names of {self._module}, served by flashtile.compat\nRequires-Dist: torch\n"
            )
        return f"{self._module.partition('.')[0]}\n" if filename == "top_level.txt" else None

    def locate_file(self, path):
        return _HERE / path


class _Installed(NamedTuple):
    """One name that is served now. `served`: what it resolves to. `portions`: folders of other distributions that add
    to the name without being it (namespace packages, such as that of flash_attn.cute); their modules stay there.
    `replaced`: the modules of that name that were there before."""

    served: Served
    portions: list[str]
    replaced: dict[str, ModuleType]


class _Loader(Loader):
    """Makes one module of a version."""

    def __init__(self, served: Served, below: str) -> None:
        self._served, self._below = served, below

    def exec_module(self, module: ModuleType) -> None:
        names = self._served.modules.get(self._below)
        found = {} if names is None else names.found()
        vars(module).update(found, __all__=[name for name in found if not name.startswith("_")])
        module.__doc__ = f"{module.__name__} of version {self._served.version}, served by flashtile."
        if self._below == ".":
            vars(module)["__version__"] = self._served.release


class Finder(DistributionFinder):
    """Finds the modules that are installed, and tells their distributions. `installed`: name -> what it is served by.
    `on_disk`: names of distributions of `packaging/`, which load their own first module."""

    def __init__(self) -> None:
        self.installed: dict[str, _Installed] = {}
        self.on_disk: dict[str, Served] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in self.installed:
            entry = self.installed[fullname]
            return _spec(fullname, entry.served, ".", entry.portions)
        roots = self.on_disk | {name: entry.served for name, entry in self.installed.items()}
        for name, served in roots.items():
            below = fullname.removeprefix(f"{name}.")
            if below != fullname and any(f"{module}.".startswith(f"{below}.") for module in served.modules):
                return _spec(fullname, served, below, [])
        return self._around(fullname, path)

    def _around(self, fullname: str, path: Sequence[str] | None) -> ModuleSpec | None:
        """An empty package for what is served below a name that no other finder knows; else None."""
        if not any(name.startswith(f"{fullname}.") for name in self.installed) or _elsewhere(fullname, path):
            return None
        spec = ModuleSpec(fullname, None, is_package=True)
        spec.submodule_search_locations = []
        return spec

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        wanted = None if context is None else context.name
        for module, entry in self.installed.items():
            if wanted is None or _normalised(wanted) == _normalised(entry.served.distribution):
                yield ServedDistribution(module, entry.served)


def _spec(fullname: str, served: Served, below: str, portions: list[str]) -> ModuleSpec:
    """The spec of a module; its file is that of the names in it."""
    package = any(module.startswith("" if below == "." else f"{below}.") for module in served.modules if module != ".")
    names = served.modules.get(below)
    home = "__init__" if names is None else names.homes[0]
    spec = ModuleSpec(fullname, _Loader(served, below), origin=str(_HERE / f"{home}.py"), is_package=package)
    spec.has_location = True
    if package:
        spec.submodule_search_locations = portions
    return spec


_finder = Finder()


def fill(name: str, version: int) -> None:
    """Gives a module of `packaging/`, which is being imported, its names, and serves the modules below it."""
    served = _served(name, version)
    _Loader(served, ".").exec_module(sys.modules[name])
    _finder.on_disk[name] = served
    _begin()


def _begin() -> None:
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    importlib.invalidate_caches()


def install(name: str = "flash_attn", version: int | None = None, override: bool = False) -> None:
    """Makes `import <name>` resolve to flashtile, in this process, until `uninstall`.

    Call it before anything imports the name. A second call for the same version changes nothing.

    Args:
        name: "flash_attn", "flash_attn_interface", "flash_attn.cute", or an extension of flash_attn 1, one of
            `flashtile.compat.signatures.EXTENSIONS`.
        version: the major version whose names and meanings are served: 2 or 1 for "flash_attn", 3 for
            "flash_attn_interface", 4 for "flash_attn.cute", 1 for extensions; the first of these where left out.
        override: take the place of a real installation, and of its modules where they were imported already. What
            has taken names from those modules keeps them.

    Raises:
        ValueError: a name or version that is not served.
        RuntimeError: the name is there already, from elsewhere or as another version, and override is False.
    """
    served = _served(name, version)
    current = _finder.installed.get(name)
    if current is not None:
        if current.served is served:
            return
        if not override:
            raise RuntimeError(
                f"version: expected {current.served.version}, which is installed already as {name!r}, got "
                f"{served.version}; call flashtile.compat.uninstall({name!r}) first, or pass override=True"
            )
        uninstall(name)
    if not override:
        _refuse_to_replace(name)
    portions, empty = _portions(name), _is_around(name)
    replaced = _taken_out(name)
    _finder.installed[name] = _Installed(served, portions, {} if empty else replaced)
    _begin()


def uninstall(name: str = "flash_attn") -> None:
    """Undoes `install`: the name's modules are forgotten, and those that it replaced are back.

    Modules that were imported meanwhile keep the functions that they took. A name that is not installed is no error.

    Raises:
        ValueError: a name that is never served.
    """
    _served(name, None)
    entry = _finder.installed.pop(name, None)
    if entry is None:
        return
    _taken_out(name)
    sys.modules.update(entry.replaced)
    around, _, own = name.rpartition(".")
    if around in sys.modules and name in entry.replaced:
        setattr(sys.modules[around], own, entry.replaced[name])
    if _is_around(around) and not any(other.startswith(f"{around}.") for other in _finder.installed):
        del sys.modules[around]
    if not (_finder.installed or _finder.on_disk):
        sys.meta_path.remove(_finder)
    importlib.invalidate_caches()


def installed() -> dict[str, int]:
    """The names that are served now, each with its major version."""
    return {name: entry.served.version for name, entry in _finder.installed.items()}


def _served(name: str, version: int | None) -> Served:
    if name not in SERVED:
        raise ValueError(f"name: expected one of {', '.join(map(repr, SERVED))}, got {name!r}")
    versions = {served.version: served for served in SERVED[name]}
    if version is None:
        return SERVED[name][0]
    if version not in versions:
        raise ValueError(
            f"version: expected {' or '.join(map(str, versions))} for {name!r}, got {version!r}; it is the major "
            "version, a number"
        )
    return versions[version]


def _refuse_to_replace(name: str) -> None:
    """Raises where the name is there already, imported or on disk, and not as flashtile's own distribution of it."""
    if _is_shim(name):
        return
    module = sys.modules.get(name)
    if module is not None and not _is_around(name):
        where = getattr(module, "__file__", None) or "without a file"
        raise RuntimeError(
            f"{name}: expected it not to be imported yet, got the module of {where}; call "
            "flashtile.compat.install before the first import, or pass override=True to take its place"
        )
    spec = _elsewhere(name)
    if spec is not None and spec.origin is not None:
        raise RuntimeError(
            f"{name}: expected it not to be installed, got {spec.origin}; remove that distribution, or pass "
            "override=True to take its place"
        )


def _is_shim(name: str) -> bool:
    """Whether what is installed is a distribution of `packaging/`, which forwards to flashtile as well."""
    served = SERVED[name][0]
    try:
        return version_of(served.shim or served.distribution).endswith("+flashtile")
    except PackageNotFoundError:
        return False


def _portions(name: str) -> list[str]:
    """Folders of a namespace package of this name; none where it is a module, or not there."""
    spec = None if name in sys.modules and not _is_around(name) else _elsewhere(name)
    if spec is None or spec.origin is not None:
        return []
    return list(spec.submodule_search_locations or ())


def _elsewhere(name: str, path: Sequence[str] | None = None) -> ModuleSpec | None:
    """The spec that other finders have for a name. Imports neither the module nor the packages around it."""
    around = name.rpartition(".")[0]
    if around and path is None:
        package = sys.modules.get(around)
        found = None if package is not None else _elsewhere(around)
        path = getattr(package, "__path__", None) if found is None else found.submodule_search_locations
        if path is None:
            return None
    for finder in sys.meta_path:
        if finder is not _finder and hasattr(finder, "find_spec"):
            spec = finder.find_spec(name, path)
            if spec is not None:
                return spec
    return None


def _is_around(name: str) -> bool:
    """Whether the module of a name is an empty package, such as this finder makes around what it serves."""
    module = sys.modules.get(name)
    path = getattr(module, "__path__", None)
    return path is not None and not list(path) and getattr(module, "__file__", None) is None


def _taken_out(name: str) -> dict[str, ModuleType]:
    """The modules of a name and all below it, which are no longer in `sys.modules`, nor known to the package around."""
    names = [module for module in sys.modules if module == name or module.startswith(f"{name}.")]
    around, _, own = name.rpartition(".")
    if around in sys.modules:
        vars(sys.modules[around]).pop(own, None)
    return {module: sys.modules.pop(module) for module in names}


def _normalised(name: str) -> str:
    """A distribution's name as `importlib.metadata` compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
