"""Drop-ins under the names of the packages that they stand in for; :mod:`flashport._shim_finder` finds them."""

from __future__ import annotations

import importlib
from types import TracebackType

_FINDER = "flashport._shim_finder"  # which takes longer to import than all else here


class InstalledShims:
    """What :func:`install_shims` gives. Leaving it as a context undoes the installation, as :meth:`undo` does.

    Source:
        bindings/python/flashport/_shims.py.
    """

    def __init__(self) -> None:
        self._is_installed = True

    def undo(self) -> None:
        """Takes the drop-in away if nothing else has it installed; a second call does nothing.

        Programs keep what they have imported from it. Later imports find the real package, or nothing.
        """
        if self._is_installed:
            self._is_installed = False
            importlib.import_module(_FINDER).uninstall()

    def __enter__(self) -> InstalledShims:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def install_shims(name: str = "flash_attn") -> InstalledShims:
    """Lets programs that import flash_attn have :mod:`flashport.flash_attn` in its place::

        with flashport.install_shims("flash_attn"):
            from flash_attn import flash_attn_func

    Never done by default. To be called before a program imports flash_attn or asks for its version: Transformers
    remembers the answer. A real flash_attn that has been imported is put aside meanwhile.

    Args:
        name: "flash_attn".

    Returns:
        What undoes it: a context, or an object whose ``undo`` does. Several may be installed; the last one counts.

    Raises:
        TypeError: ``name`` is no str.
        ValueError: There is no drop-in of that name to install.
        ImportError: torch is not there.

    Source:
        bindings/python/flashport/_shims.py.
    """
    if not isinstance(name, str):
        raise TypeError(f"install_shims: name must be a str, got {type(name).__name__}")
    if name != "flash_attn":
        raise ValueError(
            f'install_shims: name must be "flash_attn", got "{name}"; import other drop-ins by their own name'
        )
    importlib.import_module("flashport.flash_attn")  # errors belong to this call
    importlib.import_module(_FINDER).install()
    return InstalledShims()
