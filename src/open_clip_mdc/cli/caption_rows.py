"""What the flags of `caption` ask for, for its file and for its tables.

Place in the paper: decoding, Eq. 6 and Sec. 3.2.
"""
import argparse
import hashlib
import json

import torch

from ..data.outputs import is_folder
from ..decoding import options as decoding
from ..decoding.confidence import tokenize_with_masks
from ..decoding.generate import default_length
from ..decoding.options import NULL_IMAGES
from ..decoding.sampling import Sampling
from ..integration.checkpoints import fingerprint
from ..integration.pretrained import PretrainedCaptioner
from .shared import check_engine, check_length, flag, null_image

DECODING = ("length", "min_length", "tokens_per_step", "sampler", "steps", "text", "temperature", "top_k", "top_p",
            "seed", "guidance_scale", "guidance_weak")


def asked(args: argparse.Namespace) -> dict:
    """The options of decoding that are not at their defaults."""
    return {name: value for name, value in vars(args).items() if name in (
        *decoding.OF_UNMASKING, *decoding.OF_SEARCH, "length", "clip", "clip_rerank") and value not in (
        None, decoding.DEFAULTS.get(name))}


def check(args: argparse.Namespace) -> None:
    """Raises ValueError or FileNotFoundError for flags that cannot work, whatever the model."""
    if args.min_length and isinstance(args.length, int) and args.min_length > args.length:
        raise ValueError(f"--min-length {args.min_length} is more than --length {args.length}")
    Sampling(args.temperature, args.top_k, args.top_p).check()
    decoding.check(asked(args), flag)
    if args.compare and not args.html:
        raise ValueError("--compare needs --html, the page on which captions stand side by side")
    if is_folder(args.out) and (args.html or args.limit or args.clip):
        raise ValueError("--html, --limit and --clip go with an --out that ends in .jsonl")
    check_engine(args)
    check_length(args)


def decoding_options(args: argparse.Namespace, loaded: PretrainedCaptioner, paths: list) -> tuple[dict, str | None]:
    """What was asked for, as options of `generate.generate`, and what their mean image is of (`null_image`).

    A length that nobody gave is from now on the default of this model.

    Raises:
        ValueError: a flag does not fit the model.
    """
    model = loaded.model
    decoding.check_kind(asked(args), model.causal, flag)
    if args.text is None and args.length is None:
        args.length = default_length(model)
    blind, options = None, {name: value for name in ("length", "min_length", "tokens_per_step", "steps")
                            if (value := getattr(args, name)) is not None}
    if args.text:
        options["text"] = tokenize_with_masks(loaded.tokenizer, args.text, model.context_length).to(loaded.device)
    if args.sampler == "ancestral":
        options["sampler"] = args.sampler
    if decoding.guides(vars(args)):
        options |= {"guidance_scale": args.guidance_scale,
                    "guidance_weak": args.guidance_weak or model.caption_cfg.default_uncond}
    if decoding.needs_null_image(options, model):
        options["blind"], blind = null_image(loaded, paths, args, NULL_IMAGES)
    return options, blind


def sampling_of(args: argparse.Namespace, names: list[str], device: str) -> Sampling:
    """Draws for a batch that depend on --seed and its images, not on what was captioned before."""
    digest = hashlib.sha256(json.dumps([args.seed, names]).encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return Sampling(args.temperature, args.top_k, args.top_p, generator)


def settings(args: argparse.Namespace, loaded: PretrainedCaptioner, blind: str | None) -> dict:
    """What captions depend on; `blind` is what the mean image is of.

    Drawn ones depend on the batch, whose draws come from one generator (`sampling_of`).
    """
    drawn = args.temperature or args.length == "sample" or args.sampler == "ancestral"
    return {"model": fingerprint(loaded.model), "precision": loaded.precision, "blind": blind,
            **{name: getattr(args, name) for name in DECODING}, **({"batch_size": args.batch_size} if drawn else {})}
