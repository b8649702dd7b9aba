"""A cache of tensors: files FOLDER/NAME.safetensors that appear once they are complete, named by what decides them.

A file is memory-mapped, so what is read of it need not fit into memory.
"""
import hashlib
import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor


def name_of(key: dict | str, digits: int = 24) -> str:
    """Return the name of a key, a hash in hexadecimal. A dictionary is the same key in any order."""
    text = key if isinstance(key, str) else json.dumps(key, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, memory-mapped. Raises ValueError if it is damaged."""
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError) as problem:
        raise ValueError(f"{path} is damaged ({problem}): remove it, and it is computed again") from problem
