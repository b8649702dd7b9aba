"""Write a trained captioner as a folder that OpenCLIP, timm, transformers and torch load, with a model card.

    open_clip_mdc export --pretrained logs/RUN --out DIR
    open_clip_mdc export --pretrained logs/RUN --out DIR --to open_clip timm --results results/*.json --push ORG/NAME
    open_clip_mdc export --pretrained logs/RUN --out DIR --to open_clip --half --about about.md

    open_clip      the whole captioner: open_clip_config.json, open_clip_model.safetensors and the vocabulary
    timm           the image tower: config.json, model.safetensors, which transformers' AutoModel reads too
    transformers   the image tower as CLIPVisionModel, for LLaVA and the like: clip_vision_model/
    torch          images -> features and patch tokens, a torch.export program: encode_image.pt2

Pixels and features of every format are compared with the captioner's before the folder appears, from files of pictures
that are not square. Only --push uses the network.
"""
import argparse
import json
import logging
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory

import open_clip
import torch
from open_clip.transformer import QuickGELU
from PIL import Image
from timm.layers import to_2tuple
from torch import Tensor, nn

from ..data import weights
from ..data.files import new_folder, write_json
from ..data.images import Transform
from ..data.paths import for_shell
from ..errors import need
from ..integration.pretrained import PretrainedCaptioner, load
from ..integration.runs import CONFIG, IMAGE_SETTINGS, Checkpoint, find
from ..models.towers import patch_tokens
from ..text.vocabulary import write_merges
from . import conversion
from .model_card import model_card

TOLERANCE = 1e-4  # largest difference of a feature, whose scale is 1, computed by other kernels
ROUNDING = 3 / 255  # largest difference of a pixel from 0 to 1, if the resize of another library works on bytes
PICTURES = (200, 300), (300, 200)  # height and width
CLIP_FOLDER = "clip_vision_model"
PROGRAM = "encode_image.pt2"


def write_open_clip(loaded: PretrainedCaptioner, model_name: str, folder: Path) -> None:
    model, config = loaded.model, deepcopy(open_clip.get_model_config(model_name))
    if [config["vision_cfg"]["image_size"]] * 2 != (size := list(model.tower.core.image_size)):
        config["vision_cfg"]["image_size"] = size
    config["text_cfg"]["context_length"] = model.context_length
    config["quick_gelu"] = any(isinstance(module, QuickGELU) for module in model.modules())
    if model.logit_bias is not None:  # trained with --siglip
        config["init_logit_bias"] = float(model.logit_bias)
    options = config["text_cfg"].get("tokenizer_kwargs", {})
    if "bpe_path" in options:
        options["bpe_path"] = name = Path(options["bpe_path"]).name
        write_merges(folder / name, loaded.tokenizer.bpe_ranks)
    preprocess = {name: model.visual.preprocess_cfg[name] for name in IMAGE_SETTINGS}
    write_json(folder / CONFIG, {"model_cfg": config, "preprocess_cfg": preprocess}, indent=2)
    weights.save(model.state_dict(), folder / "open_clip_model.safetensors")


def interpolation(visual: nn.Module) -> str:
    # OpenCLIP's evaluation transform takes "random" as bicubic, and also what is not square and has its shortest edge.
    (height, width), cfg = visual.image_size, visual.preprocess_cfg
    always = height != width and cfg["resize_mode"] == "shortest"
    return "bilinear" if cfg["interpolation"] == "bilinear" and not always else "bicubic"


def write_timm(loaded: PretrainedCaptioner, model_name: str, folder: Path) -> None:
    from timm.data import create_transform
    from timm.models import save_for_hf
    visual = loaded.model.visual
    model, cfg = conversion.timm_model(visual), visual.preprocess_cfg
    crop = {"shortest": "center", "longest": "border", "squash": "squash"}[cfg["resize_mode"]]
    data = {"input_size": (3, *visual.image_size), "mean": cfg["mean"], "std": cfg["std"],
            "interpolation": interpolation(visual), "crop_pct": 1.0, "crop_mode": crop}
    averages = getattr(visual, "has_last_norm", True)  # what it averages are the tokens
    compare(loaded, lambda image: conversion.timm_tokens(visual, model, image), model if averages else None,
            create_transform(**data))
    save_for_hf(model, folder, safe_serialization=True, data_config=data)
    config = json.loads((folder / "config.json").read_text())
    for name in ("num_classes", "in_chans"):  # transformers passes them itself
        config["model_args"].pop(name, None)
    write_json(folder / "config.json", config, indent=2)
    weights.add_checksum(folder / "model.safetensors")


def write_transformers(loaded: PretrainedCaptioner, model_name: str, folder: Path) -> None:
    need("transformers", "export", "this format")
    from transformers import CLIPImageProcessor
    visual = loaded.model.visual
    model, cfg = conversion.clip_vision_model(visual), visual.preprocess_cfg
    norm = getattr(model, "vision_model", model).post_layernorm
    side = visual.image_size[0]
    squash, square = cfg["resize_mode"] == "squash", {"height": side, "width": side}
    processor = CLIPImageProcessor(
        size=square if squash else {"shortest_edge": side}, do_center_crop=not squash, crop_size=square,
        resample={"bilinear": 2, "bicubic": 3}[interpolation(visual)], image_mean=list(cfg["mean"]),
        image_std=list(cfg["std"]))
    compare(loaded, lambda image: norm(model(image).last_hidden_state[:, 1:]),
            pixels=lambda image: processor(image, return_tensors="pt")["pixel_values"][0], rounding=ROUNDING)
    processor.save_pretrained(folder / CLIP_FOLDER)
    model.save_pretrained(folder / CLIP_FOLDER)
    weights.add_checksum(folder / CLIP_FOLDER / "model.safetensors")


def write_torch(loaded: PretrainedCaptioner, model_name: str, folder: Path) -> None:
    program = conversion.exported_program(loaded.model)
    compare(loaded, lambda image: program.module()(image)[1], lambda image: program.module()(image)[0])
    torch.export.save(program, folder / PROGRAM)


DESTINATIONS = {"open_clip": write_open_clip, "timm": write_timm, "transformers": write_transformers,
                "torch": write_torch}


@torch.no_grad()
def compare(loaded: PretrainedCaptioner, tokens: Callable[[Tensor], Tensor],
            feature: Callable[[Tensor], Tensor] | None = None, pixels: Transform | None = None,
            rounding: float = 0.0) -> None:
    """Raise ValueError unless files of pictures give the same patch tokens (and feature) by another network.

    The pictures are noise, 3:2 and 2:3.

    Args:
        pixels: the transform that belongs to the network. Without one it is given the captioner's pixels.
        rounding: the largest difference of pixels, on a scale from 0 to 1.
    """
    visual = loaded.model.visual
    with TemporaryDirectory() as folder:
        paths = []
        for height, width in PICTURES:
            noise = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(0))
            paths.append(Path(folder, f"{height}.png"))
            Image.fromarray(noise.byte().numpy()).save(paths[-1])
        image = next(loaded.batches(paths))
        if pixels is not None:
            own, image = image, torch.stack([pixels(Image.open(path)) for path in paths])
            levels = (image - own).abs().amax((0, 2, 3)) * torch.tensor(visual.preprocess_cfg["std"])
            if not levels.max() <= rounding + 1e-6:
                raise ValueError(f"it would cut, pad or resize pictures that are not square in another way "
                                 f"(resize mode {visual.preprocess_cfg['resize_mode']}): pixels from 0 to 1 would "
                                 f"differ by {levels.max():.2g}")
    expected = patch_tokens(visual, image)
    differences = [(tokens(image) - expected).abs().max()]
    if feature is not None:
        differences.append((feature(image) - expected.mean(1)).abs().max())
    if not max(differences) <= TOLERANCE:
        raise ValueError(f"its features would differ by {max(differences):.2g}")


def write_all(loaded: PretrainedCaptioner, model_name: str, formats: list[str] | None, folder: Path) -> list[str]:
    """Write the model in `formats`, or in all that can hold it, and return those that were written."""
    done = []
    for name in formats or DESTINATIONS:
        try:
            DESTINATIONS[name](loaded, model_name, folder)
            done.append(name)
        except ValueError as problem:
            if formats:
                raise ValueError(f"{model_name} cannot be exported to {name}: {problem}") from problem
            print(f"not exported to {name}: {problem}")
    return done


def push(folder: Path, repo: str) -> str:
    """Upload to the Hugging Face hub and return the URL. Takes HF_ENDPOINT, and the token of `hf auth login`."""
    from huggingface_hub import HfApi
    api = HfApi(library_name="open_clip_mdc")
    repo = api.create_repo(repo, exist_ok=True).repo_id
    api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Export by open_clip_mdc")
    return f"{api.endpoint}/{repo}"


def copy_licences(found: Checkpoint, folder: Path) -> list[str]:
    """Copy the licences that lie beside the weights, with their card as SOURCE.md. Returns the names of the copies."""
    name, file, _ = found
    here = Path(name.removeprefix("local-dir:")) if file is None else Path(file).parent
    names = {path.name: path.name for path in sorted(here.glob("LICENSE*")) if path.is_file()}
    if names and (here / "README.md").is_file():
        names["README.md"] = "SOURCE.md"
    for name, copy in names.items():
        shutil.copyfile(here / name, folder / copy)
    return list(names.values())


def run(args: argparse.Namespace) -> None:
    if args.push and args.push.count("/") != 1:
        raise ValueError(f"--push {args.push} should be ORG/NAME")
    if args.half and "open_clip" not in (args.to or DESTINATIONS):
        raise ValueError("--half is for the format open_clip: add open_clip to --to")
    logging.getLogger("timm").setLevel(logging.ERROR)
    loaded = load(args.pretrained, args.model, "cpu")  # as are the networks that `compare` runs
    visual, found = loaded.model.visual, find(args.pretrained, args.model)
    visual.image_size = to_2tuple(visual.image_size)  # one number in a ResNet
    out = Path(args.out)
    with new_folder(out) as folder:
        done = write_all(loaded, found.model_name, args.to, folder)
        if args.half:
            weights.halve(folder / "open_clip_model.safetensors")
        card = model_card(loaded.model, args, found, done, copy_licences(found, folder))
        (folder / "README.md").write_text(card, encoding="utf-8")
        for path in filter(Path.is_file, folder.rglob("*")):
            path.chmod(0o644)  # safetensors makes files that only their owner can read
    print(f"{', '.join(done)}: {out}")
    if args.push:
        try:
            print(push(out, args.push))
        except (OSError, ValueError) as problem:
            raise ValueError(f"{out} is written, but not uploaded: {problem}\n  To try again, run: "
                             f"hf upload {for_shell(args.push)} {for_shell(out)}") from problem
