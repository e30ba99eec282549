"""flashport.flash_attn under the name of flash_attn, as long as a program wants it.

A finder at the front of sys.meta_path finds flash_attn, its modules that are here, and flash_attn_2_cuda; and
importlib.metadata finds the distribution. Packages, such as flash_attn itself, are modules of their own, whose path
has the folders of a real flash_attn, so that modules which are not here, such as flash_attn.cute, come from there. All
other modules are those of flashport.flash_attn.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_PACKAGE = "flashport.flash_attn"
_VERSION = "2.8.4"  # of flash-attn; flashport.flash_attn says the same
_NAME = "flash_attn"
_COMPILED = "flash_attn_2_cuda"


def _ours(name: str) -> str | None:
    """Our module of this name, or None."""
    if name == _COMPILED:
        return f"{_PACKAGE}.{_COMPILED}"
    head, _, tail = name.partition(".")
    if head != _NAME or tail.startswith("_") or tail == _COMPILED:
        return None
    own = f"{_PACKAGE}.{tail}" if tail else _PACKAGE
    try:
        return own if find_spec(own) is not None else None
    except ModuleNotFoundError:  # of a parent
        return None


class _Loader(Loader):
    """Gives a module of ours under another name; a package is a copy, as its path differs."""

    def __init__(self, own: str) -> None:
        self.module = importlib.import_module(own)
        self._spec = self.module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if spec.submodule_search_locations is None:
            return self.module
        copied = ModuleType(spec.name, self.module.__doc__)
        for name in ("__version__", "__all__", *getattr(self.module, "__all__", ())):
            if hasattr(self.module, name):
                setattr(copied, name, getattr(self.module, name))
        copied.__file__ = self.module.__file__
        return copied

    def exec_module(self, module: ModuleType) -> None:
        if module is self.module:
            module.__spec__ = self._spec  # which the import system has replaced
            return
        for name, loaded in list(sys.modules.items()):  # those of a real flash_attn that stay
            parent, _, child = name.rpartition(".")
            if parent == module.__name__:
                setattr(module, child, loaded)
        if module.__name__ == _NAME:  # flash-attn imports this one itself, so that it is an attribute
            importlib.import_module(f"{_NAME}.flash_attn_interface")


_ANY = DistributionFinder.Context()


class _Finder(MetaPathFinder):
    """It finds modules, and the distribution."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        own = _ours(fullname)
        if own is None:
            return None
        loader = _Loader(own)
        spec = ModuleSpec(
            fullname, loader, origin=loader.module.__file__, is_package=hasattr(loader.module, "__path__")
        )
        if spec.submodule_search_locations is not None:
            real = PathFinder.find_spec(fullname, path)
            spec.submodule_search_locations = list((real and real.submodule_search_locations) or ())
        return spec

    def find_distributions(self, context: Any = _ANY) -> Iterator[Any]:
        if context.name is None or re.sub(r"[-_.]+", "-", context.name).lower() == "flash-attn":
            yield _FlashAttn()


class _FlashAttn(Distribution):
    """The metadata of flash-attn."""

    def read_text(self, filename: str) -> str | None:
        texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: flash_attn\nVersion: {_VERSION}\n",
            "top_level.txt": f"{_NAME}\n{_COMPILED}\n",
        }
        return texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: flash_attn is a drop-in of flashport, whose files are flashport's")


_finder = _Finder()
_count = 0  # of installations
_aside: dict[str, ModuleType] = {}  # modules of a real flash_attn that ours stand in for


def _loaded() -> list[str]:
    """Names of loaded modules for which there are ours."""
    return [name for name in list(sys.modules) if name.partition(".")[0] in (_NAME, _COMPILED) and _ours(name)]


def install() -> None:
    """Once more."""
    global _count
    _count += 1
    if _count == 1:
        _aside.update({name: sys.modules.pop(name) for name in _loaded()})
        sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """Once less."""
    global _count
    _count -= 1
    if _count == 0:
        sys.meta_path.remove(_finder)
        for name in _loaded():
            del sys.modules[name]
        sys.modules.update(_aside)
        _aside.clear()
