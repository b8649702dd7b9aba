"""Masked diffusion captioning (MDC, arXiv 2510.26799) as a plug-in for OpenCLIP.

Importing this package changes nothing in OpenCLIP. `register()` does, and `unregister()` undoes it.
"""
from typing import TYPE_CHECKING

from .integration.patches import packaged_configs, register, unregister
from .integration.plugins import load_plugin
from .version import __version__

if TYPE_CHECKING:
    from .integration.pretrained import PretrainedCaptioner


def load(pretrained: str, model_name: str | None = None, device: str | None = None,
         precision: str | None = None, compile: bool = False) -> "PretrainedCaptioner":
    """Return a trained captioner with its transform and tokenizer (see `integration.pretrained.load`)."""
    from .integration.pretrained import load as load_pretrained
    return load_pretrained(pretrained, model_name, device, precision, compile)


def create_model_and_transforms(model_name: str, *args, **kwargs):
    """Call `register()`, then `open_clip.create_model_and_transforms`, which then also builds captioners."""
    import open_clip
    register()
    return open_clip.create_model_and_transforms(model_name, *args, **kwargs)


def get_tokenizer(model_name: str, *args, **kwargs):
    """Call `register()`, then `open_clip.get_tokenizer`, which then also knows captioners."""
    import open_clip
    register()
    return open_clip.get_tokenizer(model_name, *args, **kwargs)


def is_captioner(model_name: str) -> bool:
    """Call `register()`, and return whether a name is that of a captioner."""
    from .integration import configs
    register()
    return configs.is_captioner(model_name)


__all__ = [
    "__version__", "create_model_and_transforms", "get_tokenizer", "is_captioner", "load", "load_plugin",
    "packaged_configs", "register", "unregister",
]
