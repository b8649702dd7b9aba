"""OpenCLIP's factory functions extended to captioners: config, tokenizer and model by name.

Dimensions: B images, C candidates, L positions.
"""
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import open_clip
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from torch import Tensor

from ..models.captioner import Captioner
from ..models.towers import patch_tower
from ..objectives.loss import CaptionLoss
from . import configs
from .configs import has_patch_tower, is_captioner
from .openclip import hook
from .runs import image_settings

if TYPE_CHECKING:
    from ..decoding.sampling import Decoded

Config = Mapping[str, Any]  # of a model, or its `caption_cfg`
CHARACTERS = 10_000  # of a text, which BPE reads in quadratic time. No token of CLIP's has more than 24


class OpenCLIPCaptioner(Captioner):
    """The captioner that OpenCLIP's factory returns, which also decodes and scores."""

    contrasts = False  # True if its features fit OpenCLIP's contrastive validation

    @classmethod
    def caption_loss(cls, caption_cfg: Config, openclip_loss: Callable[[], Callable]) -> CaptionLoss:
        """Return the loss of such a captioner. `openclip_loss()` makes OpenCLIP's own for the same flags."""
        return CaptionLoss()

    def generate(self, image: Tensor, **options) -> "Tensor | Decoded":
        """Return captions as token ids from SOT to EOT, then padding, int64 [B, L] (`decoding.generate.generate`)."""
        from ..decoding.generate import generate
        return generate(self, image, **options)

    def log_likelihood(self, image: Tensor, text: Tensor, method: str | None = None, **options) -> Tensor:
        """Return log p(caption | image) in nats: [B] for captions [B, L], [B, C] for candidates [B, C, L]."""
        from ..likelihood.log_likelihood import log_likelihood
        return log_likelihood(self, image, text, method, **options)


# Functions that return the class for a config, or None. The first that knows a config decides.
CLASSES = [lambda config: OpenCLIPCaptioner if "caption_cfg" in config else None]


def class_of(config: Config) -> type | None:
    """Return the class that a config of ours is for, or None for a model of OpenCLIP."""
    return next(filter(None, (choose(config) for choose in CLASSES)), None)


def class_named(model_name: str) -> type | None:
    """Return the class that `create_model` would make, or None for a model of OpenCLIP."""
    return class_of(open_clip.get_model_config(model_name) or {})


@hook
def get_model_config(original, model_name):
    """Wrap `open_clip.get_model_config`: add captioners and LiT models of any base, and check configs from files."""
    if ":" in model_name:
        return checked_config(original, model_name)
    made = (make(model_name, original) for make in configs.MAKERS)
    return original(model_name) or next(filter(None, made), None)


def checked_config(read, model_name: str) -> dict:
    """Return the config of a local-dir: or hf-hub: id. Raises ValueError if it is damaged or refers to other places."""
    where = f"{model_name.partition(':')[2]}/open_clip_config.json"
    try:
        config = read(model_name)
        towers = {**config["vision_cfg"], **config["text_cfg"], **config["text_cfg"].get("tokenizer_kwargs", {})}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise ValueError(f"{where} is no config of a model ({type(problem).__name__}: {problem})") from problem
    for name, value in towers.items():
        text_tower = name == "hf_model_name" and "caption_cfg" not in config and model_name.startswith("local-dir:")
        if isinstance(value, str) and (":" in value or text_tower and not Path(value).is_dir()):
            raise ValueError(f"{where}: {name} is {value[:80]!r}, which lies elsewhere: only what you name is fetched")
    return config


def vocabulary_beside(model_name: str, cache_dir: str | None) -> dict[str, str]:
    """Return {"bpe_path": PATH} if the vocabulary of a local-dir: or hf-hub: captioner lies beside its weights."""
    try:
        config = open_clip.get_model_config(model_name)
        name = Path(config["text_cfg"].get("tokenizer_kwargs", {}).get("bpe_path", "")).name
        if "caption_cfg" not in config or not name:
            return {}
        source, _, place = model_name.partition(":")
        path = Path(place) / name if source == "local-dir" else Path(hf_hub_download(place, name, cache_dir=cache_dir))
    except (FileNotFoundError, EntryNotFoundError):  # no captioner, or a packaged vocabulary
        return {}
    return {"bpe_path": str(path)} if path.is_file() else {}


@hook
def get_tokenizer(original, model_name="", context_length=None, cache_dir=None, **kwargs):
    """Wrap `open_clip.get_tokenizer`: give a captioner CLIP's BPE, or the part of it that its config names."""
    if ":" in model_name:
        kwargs = vocabulary_beside(model_name, cache_dir) | kwargs
    if ":" in model_name or not is_captioner(model_name):
        return original(model_name, context_length=context_length, cache_dir=cache_dir, **kwargs)
    text_cfg = open_clip.get_model_config(model_name)["text_cfg"]
    return open_clip.factory.SimpleTokenizer(context_length=context_length or text_cfg.get("context_length", 77),
                                             **text_cfg.get("tokenizer_kwargs", {}) | kwargs)


@hook
def model_class(original, *args, **kwargs):
    """Wrap `open_clip.factory.CustomTextCLIP`: make the class that `CLASSES` names for a config of ours."""
    return (class_of(kwargs) or original)(*args, **kwargs)


def _pair(size) -> list:
    return list(size) * (2 // len(size)) if isinstance(size, (list, tuple)) else [size, size]


@hook
def create_model(original, model_name, pretrained=None, *args, pretrained_image=False, pretrained_image_path=None,
                 force_preprocess_cfg=None, **kwargs):
    """Wrap `open_clip.create_model`: load `pretrained_image`, a SOURCE, into the image tower of a captioner or LiT.

    A file of weights, `pretrained`, brings its `image_settings`, as the model would see other pixels without them.
    OpenCLIP's own `pretrained_image_path` is such a SOURCE too. OpenCLIP would load a part of it without a warning.
    """
    source = pretrained_image_path or pretrained_image
    if not source or not has_patch_tower(model_name):
        if isinstance(pretrained_image, (str, Path)):
            raise ValueError(f"--pretrained-image {pretrained_image} is for captioners and LiT-{model_name}: give "
                             f"{model_name} the weights of the whole model by --pretrained")
        of_file = pretrained and ":" not in model_name and Path(pretrained).is_file()
        told = (image_settings(Path(pretrained)) if of_file else None) or {}
        size = told.pop("size", None)
        model = original(model_name, pretrained, *args, pretrained_image=pretrained_image,
                         pretrained_image_path=pretrained_image_path,
                         force_preprocess_cfg=told | (force_preprocess_cfg or {}), **kwargs)
        own = size and getattr(getattr(model, "visual", None), "image_size", None)
        if own and (trained := _pair(size)) != (takes := _pair(own)):
            logging.warning("%s was trained on images of %dx%d pixels, and this model takes %dx%d: --force-image-size "
                            "%d takes the same", pretrained, *trained, *takes, trained[0])
        return model
    if pretrained:
        raise ValueError(f"--pretrained {pretrained} has an image tower already: leave out --pretrained-image")
    from . import image_source
    source = image_source.resolve(source, model_name)
    preprocess_cfg = image_source.normalization(source, model_name) | (force_preprocess_cfg or {})
    model = original(model_name, None, *args, force_preprocess_cfg=preprocess_cfg, **kwargs)
    image_source.load(patch_tower(model), source, model_name)
    logging.info("The image tower has the weights of %s", source)  # OpenCLIP has said that all weights are random
    return model


def clean_and_cut(clean: Callable[[str], str], characters: int, text: str) -> str:
    return clean(text[:100 * characters])[:characters]


@hook
def tokenizer_class(original, *args, bpe_path=None, **kwargs):
    """Wrap `open_clip.factory.SimpleTokenizer`: cut texts, and take a `bpe_path` that is no file for a packaged one."""
    if bpe_path is not None:
        kwargs["bpe_path"] = bpe_path if Path(bpe_path).exists() else str(configs.FOLDER / Path(bpe_path).name)
    tokenizer = original(*args, **kwargs)
    most = max(CHARACTERS, 32 * (tokenizer.context_length or 0))
    tokenizer.clean_fn = partial(clean_and_cut, tokenizer.clean_fn, most)
    return tokenizer


def trains_captioner(args) -> bool:
    """Return whether a captioner is being trained. OpenCLIP's functions may be called with `args` without a model."""
    return is_captioner(getattr(args, "model", ""))
