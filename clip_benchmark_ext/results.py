"""Name, write and compare result files, which hold all settings of their numbers.

Besides model, data set and task, "settings" has everything that decides the numbers, with the SHA-256 of the weights,
of files that options name, and of the data (`fingerprint.of_dataset`). `--skip_existing` keeps only a result of exactly
the same settings. Result files are strict JSON, without NaN.
"""
import json
import logging
import math
import os
import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from open_clip_mdc.data.files import files_below, parse_json, sha256, write_json
from open_clip_mdc.data.paths import is_shard
from open_clip_mdc.data.shards import find_shards
from open_clip_mdc.decoding.options import in_files
from open_clip_mdc.environment import made
from open_clip_mdc.integration.configs import FOLDER
from open_clip_mdc.integration.runs import PHOTO, find

from .flags import DEFAULTS, Flags, filled

DEFAULT_OUTPUT = "{dataset}_{pretrained}_{model}_{language}_{task}.json"
USUAL = {"split": "test", "fewshot_k": -1, "seed": 0}  # clip_benchmark's, which its own names of files leave out
OF_EVERY_TASK = ("dataset_root", "split", "model_type")


def precision(args: Namespace) -> str:
    return f"autocast on {args.device}" if args.amp else "that of the weights"


def shown(name: str) -> str:
    """Return the name of a model or of weights, "photo" for those of the package, wherever it is installed."""
    return PHOTO if name == f"local-dir:{FOLDER / PHOTO}" else name


def file_name(template: str, args: Namespace) -> str:
    pretrained = shown(args.pretrained)
    names = dict(
        model=shown(args.model), pretrained=os.path.basename(pretrained) if os.path.isfile(pretrained) else pretrained,
        pretrained_full_path=pretrained, task=args.task, dataset=args.dataset.removeprefix("wds/"),
        language=args.language)
    return filled("--output", template, **{name: value.replace("/", "_") for name, value in names.items()})


def output_file(args: Namespace, flags: Flags, names: tuple[str, ...], captioner: bool) -> Path:
    template = args.output
    if template == DEFAULT_OUTPUT:
        template = template.removesuffix(".json")
        if captioner:
            template = template.replace("{pretrained}", "{pretrained_full_path}")
        asked = vars(args) | flags._asdict()
        for name, usual in ({name: DEFAULTS[name] for name in names} | USUAL).items():
            if (value := asked[name]) != usual:
                template += f"_{name}-" + re.sub(r"[^\w.-]+", "_", str(value))
        template += ".json"
    return Path(file_name(template, args))


def named_files(option: str, value: object) -> list[str]:
    if str(value).startswith("local-dir:"):
        return files_below(value.removeprefix("local-dir:"))
    if option == "clip" and value is not None:
        from open_clip_mdc.integration import clip as clip_models
        _, value = clip_models.parse(value)
    paths = [path for path in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(path, str)]
    if option == "train_captions":
        paths = [shard for path in paths for shard in (find_shards(path) if is_shard(path) else [path])]
    if option in ("clip", "clipscore_pretrained"):
        paths = [find(path, "CLIP").weights or path if os.path.exists(path) else path for path in paths]
    return [path for path in paths if os.path.isfile(path)]


def describe(args: Namespace, arguments: tuple[str, ...], options: Mapping, data: Mapping[str, str]) -> dict:
    """Return the names and settings of a result, as plain JSON values.

    Args:
        arguments: names of clip_benchmark's arguments that decide this task's numbers.
        options: our options.
        data: the fingerprint of the data by split.
    """
    settings = {name: getattr(args, name) for name in (*OF_EVERY_TASK, *arguments)} | dict(options)
    settings |= {f"{name}_sha256": [sha256(path) for path in files] for name, value in settings.items()
                 if (files := named_files(name, value))}
    settings["data_sha256"] = dict(data)
    settings["precision"] = precision(args)
    if os.path.isfile(args.pretrained):
        settings["weights_sha256"] = sha256(args.pretrained)
    elif os.path.isdir(folder := args.pretrained.removeprefix("local-dir:")):
        settings["weights_sha256"] = [sha256(path) for path in files_below(folder)]
    about = {name: shown(getattr(args, name)) for name in ("dataset", "model", "pretrained", "task", "language")}
    return json.loads(json.dumps({**about, "settings": settings}))


def given(about: Mapping) -> dict:
    """Return what a result says of itself, without settings that are None: an older version may have had more flags.

    Options of decoding have the names of older versions.
    """
    settings = about.get("settings")
    return {**about, "settings": {name: value for name, value in in_files(settings).items() if value is not None}
            if isinstance(settings, dict) else None}


def is_there(path: Path, about: dict) -> bool:
    try:
        # Refuses NaN, which is no int, and a byte order mark, as other readers do.
        saved = parse_json(path.read_text(encoding="utf-8"), parse_constant=int)
    except FileNotFoundError:
        return False
    except ValueError:
        saved = None
    if isinstance(saved, dict) and given(saved) | given(about) == given(saved):
        return True
    logging.warning("%s is the result of another run (%s): it is computed again", path, unlike(saved, about))
    return False


def unlike(saved: object, about: Mapping) -> str:
    settings = saved.get("settings") if isinstance(saved, dict) else None
    if not isinstance(settings, dict):
        return "it has no settings"
    old, new = ({name: one.get(name) for name in about if name != "settings"} | one["settings"]
                for one in (saved, about))
    return "other " + ", ".join(name for name in new | old if old.get(name) != new.get(name))


def without_nan(values: Mapping) -> dict:
    clean = {}
    for name, value in values.items():
        clean[name] = value
        if isinstance(value, float) and not math.isfinite(value):
            clean |= {name: None, f"{name}_missing": f"it came out as {value}"}
    return clean


def write_items(path: Path, items: Mapping) -> None:
    """Write the values of single images into items/ beside the result, for paired comparisons of models.

    `items` has "images", the name of each case, "values" by metric, "weights" by metric unless all are equal, and for
    selection tasks "..._differs".
    """
    folder = path.parent / "items"  # apart, as `clip_benchmark build *.json` takes every file for a result
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / path.name, items, allow_nan=False)


def write(path: Path, about: dict, metrics: Mapping, **more: object) -> None:
    """Write a result file, whole or not at all. "made" says when and by what, and decides nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {**about, "metrics": without_nan(metrics), **more, "made": made()}, allow_nan=False)
