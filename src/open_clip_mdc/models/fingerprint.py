"""A hash of a model, by which results and caches know which network made them."""
import hashlib
from dataclasses import is_dataclass

import torch

from ..data.weights import hash_tensor


def fingerprint(model: torch.nn.Module) -> str:
    """Return the SHA-256 of a model's weights and settings.

    Weights alone do not decide what a model computes: those of ViT-B-32 also fit ViT-B-32-quickgelu. So the types of
    modules and their plain attributes (number of heads, pooling, image mean and size) are hashed, too.
    """
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        settings = {k: v for k, v in vars(module).items() if k != "training" and _is_plain(v)}
        digest.update(f"{name} {type(module).__name__} {sorted(settings.items())}".encode())
    for name, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, torch.Tensor):
            digest.update(name.encode())
            hash_tensor(digest, tensor)
    return digest.hexdigest()


def _is_plain(value: object) -> bool:
    if is_dataclass(value):  # caption_cfg
        return all(map(_is_plain, vars(value).values()))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
