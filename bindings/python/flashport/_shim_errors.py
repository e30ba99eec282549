"""What shims raise where the library that they stand in for refuses an argument, too: of its class and of flashport's.

Its words stand after the name of our function and before what was expected and what came.
"""

from __future__ import annotations


class ShimError(ValueError, RuntimeError):
    """A wrong argument: the other library raises RuntimeError for it, and flashport ValueError."""


class ShimTypeError(ShimError, TypeError):
    """What is no tensor, number or text, or a tensor of a type that is not served."""


class ShimIndexError(ShimError, IndexError):
    """A tensor with too few axes, for which torch raises IndexError."""


class ShimAttributeError(ShimTypeError, AttributeError):
    """What is no tensor, where the other library first calls a method of it."""
