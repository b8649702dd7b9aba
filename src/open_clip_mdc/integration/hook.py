"""The decorator of functions that replace one of OpenCLIP's (patches.py)."""
from collections.abc import Callable
from functools import wraps


def hook(function: Callable) -> Callable:
    """Turn function(original, ...) into a function that takes the original and returns its replacement.

    Where `@hook def g(original, x)` replaces OpenCLIP's `f`, a call f(x) becomes g(f, x).
    """
    def replace(original: Callable) -> Callable:
        @wraps(original, updated=())  # a class has attributes that a function cannot take
        def stand_in(*args, **kwargs):
            return function(original, *args, **kwargs)
        return stand_in
    return wraps(function)(replace)
