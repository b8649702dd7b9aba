"""Load a CLIP model that guides or ranks captions."""
import os

from ..decoding.clip_guidance import Clip
from . import checkpoints


def load(name: str, pretrained: str | None = None, device: str = "cpu") -> Clip:
    """Return a CLIP model by name and weights: a file, a run folder, or a tag of OpenCLIP, which is downloaded.

    A `name` such as local-dir:DIR or hf-hub:ID brings its weights. Raises ValueError or FileNotFoundError in one line.
    """
    import open_clip
    tags = open_clip.list_pretrained_tags_by_model(name)
    if ":" in name:
        model, transform, tokenizer = checkpoints.load(name, device=device)
    elif os.path.exists(pretrained or ""):
        model, transform, tokenizer = checkpoints.load(pretrained, name, device)
    elif pretrained in tags:
        try:
            model, _, transform = open_clip.create_model_and_transforms(name, pretrained, device=device)
        except (RuntimeError, OSError) as problem:
            raise ValueError(f"cannot load {name} {pretrained}: {str(problem).splitlines()[0]}") from problem
        tokenizer = open_clip.get_tokenizer(name)
    else:
        raise ValueError(f"{pretrained} is no file and no tag of {name} ({', '.join(tags) or 'it has none'})")
    if not hasattr(model, "encode_text"):
        raise ValueError(f"{name} cannot compare images with texts: give a CLIP model")
    return Clip(model.eval(), transform, tokenizer)


def parse(spec: str) -> tuple[str, str | None]:
    """Split MODEL:FILE into the arguments of `load`. local-dir:DIR and hf-hub:ID stay whole."""
    name, colon, pretrained = spec.partition(":")
    if not (name and pretrained):
        raise ValueError(f"{spec!r} should be MODEL:FILE, such as ViT-B-32:clip.pt, or local-dir:DIR or hf-hub:ID")
    return (spec, None) if name in ("local-dir", "hf-hub") else (name, pretrained)
