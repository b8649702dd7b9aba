"""`--pretrained-image SOURCE`: the weights that a captioner's image tower starts from.

SOURCE is a file of weights of OpenCLIP, timm, transformers or big_vision, a folder with one, a training run, an
exported model, or timm:NAME.
"""
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import open_clip
import timm
import torch
from open_clip.model import CLIPVisionCfg

from ..data import weights
from ..data.files import parse_json
from ..errors import close_names
from ..models import tower_weights, towers
from ..models.foreign import big_vision
from .configs import FOLDER, timm_cfg
from .runs import IMAGE_SETTINGS, PHOTO, WEIGHTS_FILES, checked_settings, find, image_settings, params_file, weights_in

CONFIG_FILES = ("config.json", "open_clip_config.json", "preprocessor_config.json")  # beside weights
Facts = dict[str, object]  # by name, None for what is not known


class Source(NamedTuple):
    """The weights that an image tower starts from, and what is known about them (`locate`)."""

    read: Callable[[], weights.Tensors]
    normalization: Facts  # IMAGE_SETTINGS, as far as known
    base: str | None  # name of the model that they belong to, if known
    traits: Facts  # `tower_weights.traits`, as far as known


def locate(source: str) -> Source:
    """Return the weights of a SOURCE and what the files beside them tell. Raises ValueError if there are none."""
    if source.startswith("timm:"):
        return _of_timm(source)
    path = Path(FOLDER / PHOTO if source == PHOTO else source.removeprefix("local-dir:"))
    if not path.exists():
        raise ValueError(f"--pretrained-image {source}: no such file or folder. Give weights, a run, an exported "
                         "folder, or timm:NAME, which may be downloaded")
    try:
        if (path / "checkpoints").is_dir() or path.is_file() and params_file(path).exists():
            base, file, args = find(str(path))
            path = Path(file)
            told = image_settings(path)
            found = _traits_of_config(_config(base), bool(args.get("force_quick_gelu")))
        else:
            folder = path if path.is_dir() else path.parent
            if path.is_dir():
                path = weights_in(path)
            if path is None:
                raise ValueError(f"{folder} has no weights ({', '.join(WEIGHTS_FILES[:1] + WEIGHTS_FILES[4:6])})")
            told, base, found = _read_configs(folder, path.name)
    except (ValueError, FileNotFoundError) as problem:
        raise ValueError(f"--pretrained-image {source}: {problem}") from problem
    if path.suffix == ".npz":
        told = told if told.get("mean") else told | big_vision.NORMALIZATION
        found = big_vision.TRAITS | {name: x for name, x in found.items() if x is not None}
    told = checked_settings({name: told.get(name) for name in IMAGE_SETTINGS}, f"--pretrained-image {source}")
    return Source(lambda: weights.tensors(path), told, base, found)


def _normalization(encoder: str) -> Facts:
    """Return mean and std of the images that timm's encoder was trained on, {} if it is not known."""
    known = timm_cfg(encoder)
    return {"mean": list(known.mean), "std": list(known.std)} if known else {}


def _of_timm(source: str) -> Source:
    name = source.removeprefix("timm:")
    if not (told := _normalization(name)):
        close = close_names(name, timm.list_models())
        raise ValueError(f"--pretrained-image {source}: timm has no such encoder{close}")

    def read() -> weights.Tensors:
        print(f"{source}: timm reads the weights from its cache, or downloads them", file=sys.stderr)
        try:
            return timm.create_model(name, pretrained=True).state_dict()
        except (RuntimeError, OSError, ValueError) as problem:
            raise ValueError(f"--pretrained-image {source}: timm cannot load the weights "
                             f"({str(problem).splitlines()[0][:200]})") from problem
    return Source(read, told, f"timm-{name}", _traits_of_timm(name))


def _traits_of_timm(name: str, options: Mapping | None = None) -> Facts:
    with torch.device("meta"):
        return tower_weights.traits(timm.create_model(name, **(options or {}) | {"num_classes": 0}))


def _config(name: str) -> dict:
    config = open_clip.get_model_config(name)
    if config is None:
        raise ValueError(f"it was trained as {name}, which is not a known model")
    return config


def _traits_of_config(config: dict, quick_gelu: bool = False) -> Facts:
    if "vq_cfg" in config:
        return {}
    return tower_weights.traits(towers.tower(_on_meta(config, quick_gelu)).network)


def _on_meta(config: dict, quick_gelu: bool, image_size=None) -> torch.nn.Module:
    """Return the image tower of a config on the meta device, without memory for its weights."""
    vision_cfg = config["vision_cfg"] | ({"image_size": image_size} if image_size else {})
    with torch.device("meta"):
        return towers.build(CLIPVisionCfg(**vision_cfg), quick_gelu or config.get("quick_gelu", False),
                             vq_cfg=config.get("vq_cfg"), caption_cfg=config.get("caption_cfg"))


def _read_configs(folder: Path, file: str) -> tuple[dict, str | None, dict]:
    """Return image settings, the base and the traits that the config files beside weights tell."""
    found = {}
    for name in CONFIG_FILES:
        path = folder / name
        if path.is_file():
            found[name] = parse_json(path.read_bytes(), path)
    config = found.get("config.json", {})
    try:
        if "open_clip_config.json" in found and (file.startswith("open_clip") or len(found) == 1):
            return found["open_clip_config.json"].get("preprocess_cfg", {}), None, _traits_of_config(
                _config(f"local-dir:{folder}"))
        if isinstance(config.get("architecture"), str):
            of_images, name = config.get("pretrained_cfg", {}), config["architecture"]
            known = timm.is_model(name)
            return ({key: of_images.get(key) for key in ("mean", "std")}, f"timm-{name}" if known else None,
                    _traits_of_timm(name, config.get("model_args")) if known else {})
        images = found.get("preprocessor_config.json", {})
        config = config.get("vision_config") or config
        return ({"mean": images.get("image_mean"), "std": images.get("image_std")}, None,
                {"heads": config.get("num_attention_heads"), "activation": config.get("hidden_act"),
                 "eps of LayerNorm": config.get("layer_norm_eps")})
    except (KeyError, TypeError, AttributeError, RuntimeError, AssertionError) as problem:
        raise ValueError(f"the config beside {folder / file} describes no image encoder "
                         f"({type(problem).__name__}: {problem})") from problem


def resolve(source: str | bool, model_name: str) -> str:
    """Return SOURCE as text. True, from the flag without a value, means timm's weights of the model's image tower."""
    if source is True:
        name = _config(model_name)["vision_cfg"].get("timm_model_name")
        if name is None:
            raise ValueError("--pretrained-image needs a SOURCE: a file of weights, a run, an exported folder, or "
                             "timm:NAME")
        return f"timm:{name}"
    return str(source)


def normalization(source: str, model_name: str) -> Facts:
    """Return how images are prepared: as told beside the weights, else by timm's mean and std of the tower, or {}."""
    told = locate(source).normalization
    name = _config(model_name)["vision_cfg"].get("timm_model_name")
    return told if told or name is None else _normalization(name)


def load(visual: torch.nn.Module, source: str, model_name: str) -> None:
    """Load SOURCE into an image tower. Raises ValueError if it does not fit."""
    tower_weights.fill(visual, _converted(visual, source, model_name))


def check(source: str, model_name: str, quick_gelu: bool = False, image_size=None) -> None:
    """Raise ValueError if SOURCE does not fit the image tower, before the model is built."""
    _converted(_on_meta(_config(model_name), quick_gelu, image_size), source, model_name)


def _converted(visual: torch.nn.Module, source: str, model_name: str) -> weights.Tensors:
    located = locate(source)
    given = located.read()
    try:
        tower_weights.check_traits(visual, located.traits)
        return tower_weights.converted(visual, given)
    except weights.Misfit as problem:
        advice = f"It is the tower of {located.base}" if located.base else "Give weights of the same encoder"
        raise ValueError(f"--pretrained-image {source} does not fit the image tower of {model_name}: {problem}. "
                         f"{advice}") from problem
