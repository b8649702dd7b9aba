"""Masked diffusion captioning (MDC, arXiv 2510.26799) as a plug-in for OpenCLIP.

Importing this package changes nothing upstream; `register()` does, `unregister()` undoes it.
"""
from .integration import is_captioner, packaged_configs, register, unregister

__version__ = "0.1.0"


def create_model_and_transforms(model_name: str, *args, **kwargs):
    """`open_clip.create_model_and_transforms`, registered first: also makes MDC and ARC models."""
    import open_clip
    register()
    return open_clip.create_model_and_transforms(model_name, *args, **kwargs)


def get_tokenizer(model_name: str, *args, **kwargs):
    """`open_clip.get_tokenizer`, registered first."""
    import open_clip
    register()
    return open_clip.get_tokenizer(model_name, *args, **kwargs)


__all__ = [
    "__version__", "create_model_and_transforms", "get_tokenizer", "is_captioner", "packaged_configs", "register",
    "unregister",
]
