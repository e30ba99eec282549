"""Errors of a function that another one calls, under the name and the arguments of the one that the user called."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

REFUSALS = (ValueError, TypeError, NotImplementedError)

_Error = TypeVar("_Error", bound=Exception)


def reworded(error: _Error, prefix: str, names: Mapping[str, str]) -> _Error:
    """The same error with ``prefix`` in place of its function, and with the caller's names of arguments.

    ``names`` is not empty; it maps the names of the function that raised, where they stand as whole words.
    """
    _, _, text = str(error).partition(": ")
    words = "|".join(names)
    return type(error)(prefix + re.sub(rf"\b(?:{words})\b", lambda word: names[word[0]], text))
