"""The installed OpenCLIP: its version, and the decorator of functions that replace one of its own (patches.py).

`version` is the module with all that differs between 3.3 and 4.x.
"""
from collections.abc import Callable
from functools import wraps
from importlib import metadata

from . import openclip3, openclip4

try:
    MAJOR = int(metadata.version("open_clip_torch").partition(".")[0])
except metadata.PackageNotFoundError:  # listing the models needs no OpenCLIP
    MAJOR = 0
version = openclip4 if MAJOR > 3 else openclip3


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
