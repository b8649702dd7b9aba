"""Replacements of patches.py as functions that take the original first."""
from collections.abc import Callable
from functools import wraps


def hook(function: Callable) -> Callable:
    """Make function(original, ...) a hook: given the original, it returns what stands in for it.

    Registered where OpenCLIP has `f`, `@hook def g(original, x)` makes f(x) call g(original f, x).
    """
    def replace(original: Callable) -> Callable:
        @wraps(original, updated=())  # a class has attributes that a function cannot take
        def stand_in(*args, **kwargs):
            return function(original, *args, **kwargs)
        return stand_in
    return wraps(function)(replace)
