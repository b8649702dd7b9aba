"""Write the model card of `open_clip_mdc export`: what the model is, how to load it, its training and results."""
import argparse
import re
from importlib import metadata
from numbers import Number
from pathlib import Path

from open_clip.timm_model import TimmModel
from open_clip_train.params import parse_args
from torch import nn

from ..data.files import parse_json
from ..data.markdown import markdown_table
from ..data.text import read_text
from ..errors import flag
from ..integration.runs import Checkpoint, params_file, read_params
from ..models.captioner import Captioner
from ..models.towers import tower
from .page import ENVIRONMENT

# Flags that concern the machine, not the model.
NOT_TOLD = set(
    "logs name log_path checkpoint_path tensorboard_path tensorboard wandb resume remote_sync rank local_rank device "
    "debug distributed distill log_level report_to wandb_notes wandb_project_name copy_codebase pretrained_image_path "
    "pretrained_text_path imagenet_val imagenet_v2 cache_dir dist_url dist_backend".split())


def training_flags(weights: str | None) -> dict[str, str]:
    """Return the flags of open_clip_train in a checkpoint's run folder that differ from their defaults."""
    params = params_file(Path(weights or ""))
    if weights is None or not params.is_file():
        return {}
    values = read_params(params)
    usual = {name: str(value) for name, value in vars(parse_args(["--model", values.get("model", "ViT-B-32")])).items()}
    # A place is one of this machine, and an address or a command may hold a key. --about tells of the data.
    return {name: value for name, value in values.items() if value != usual.get(name, "None")
            and name not in NOT_TOLD and not re.search(r"[/\\]|pipe:", value)}


def result_rows(paths: list[str]) -> list[list[str]]:
    rows = []
    for path in paths:
        try:
            result = parse_json(Path(path).read_bytes())
            about, metrics = [result["dataset"], result["task"]], result["metrics"].items()
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise ValueError(f"--results {path} is not a result file of clip_benchmark eval: {problem!r}") from problem
        rows += [[*about, name, str(value) if isinstance(value, int) else f"{value:.4g}"] for name, value in metrics
                 if isinstance(value, Number) and not isinstance(value, bool)]
    return rows


def map_layout(visual: nn.Module) -> str:
    """Return the code that makes tokens [B, P, D] of timm's feature maps, or "" if the encoder gives tokens."""
    if not isinstance(visual, TimmModel) or hasattr(visual.trunk, "num_prefix_tokens"):
        return ""
    return ".flatten(2).mT" if visual.channels_first else ".flatten(1, -2)"


def model_card(model: Captioner, args: argparse.Namespace, found: Checkpoint, destinations: list[str],
               licences: list[str]) -> str:
    flags, rows = training_flags(found.weights), result_rows(args.results)
    rows_of_patches, columns = tower(model.tower.core).grid
    regions = model.tower.num_patches // (rows_of_patches * columns)
    patches = f"{regions} regions x " * (regions > 1) + f"{rows_of_patches} x {columns}"
    markdown = ENVIRONMENT.overlay(autoescape=False, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=False)
    return markdown.get_template("model_card.md.jinja").render(
        title=(args.push or args.out).rstrip("/").rpartition("/")[2],
        model_name=flags.get("model", found.model_name.rpartition("/")[2].rpartition(":")[2]),
        model=model, folder=args.push or Path(args.out).name,
        scheme="hf-hub" if args.push else "local-dir", local=not args.push, destinations=destinations,
        layout=map_layout(model.visual), normalised=getattr(model.visual, "has_last_norm", True),
        patches=patches, parameters=f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}",
        open_clip_version=metadata.version("open_clip_torch"), about=args.about and read_text(args.about),
        licences=", ".join(f"`{name}`" for name in licences),
        flags=flags and markdown_table(["flag", "value"], [[f"`{flag(k)}`", f"`{v}`"] for k, v in flags.items()]),
        results=rows and markdown_table(["data set", "task", "metric", "value"], rows))
