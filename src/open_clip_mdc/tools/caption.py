"""Captions images: a JSONL file with a line per image, and a page that shows how each caption came about.

    open_clip_mdc caption --pretrained RUN photos/ 'more/*.jpg' 'shards/{000..009}.tar' --html captions.html
    open_clip_mdc caption --pretrained RUN cat.jpg --text 'a [MASK] cat on a [MASK]'
    open_clip_mdc caption --pretrained RUN 'shards/{000..999}.tar' --out captions/ --jobs 8       (caption_shards.py)

A line is {"image": path or shard::key, "caption": text, "tokens": [{"token", "step", "log_prob"}, ...]}, tokens in
reading order. A token that ends a word ends in a space; step is the one that revealed it, from 0, and log_prob what the
model gave it then (nats); both are null for a token of --text. Where the model itself chose to end the caption, the
last token is "<end>". Unreadable images are skipped, listed at the end, and make the exit status 1.

Place in the paper: decoding, Eq. 6 and Sec. 3.2. Dimensions: B images, L positions.
"""
import argparse
import json
from pathlib import Path

from tqdm import tqdm

from ..checkpoints import find
from ..data.files import new_file
from ..data.journal import Journal
from ..data.pictures import IMAGE_FILES, SHARDS, Pictures, find_pictures
from ..objective import STEPS
from ..sampling import Sampling
from .caption_rows import decoding_options, sampling_of, settings
from .common import is_folder, load_captioner, need_folder
from .page import card, legend, printable, thumbnail, write_page


def check(args: argparse.Namespace) -> None:
    """Raises ValueError or FileNotFoundError for flags that cannot work, whatever the model."""
    if args.text and args.length:
        raise ValueError("--text says how many tokens there are; leave out --length")
    if args.text and "[MASK]" not in args.text:
        raise ValueError(f"--text {args.text!r} has no [MASK] to fill in")
    if args.min_length and isinstance(args.length, int) and args.min_length > args.length:
        raise ValueError(f"--min-length {args.min_length} is more than --length {args.length}")
    Sampling(args.temperature, args.top_k, args.top_p).check()
    if args.sampler == "ancestral" and args.tokens_per_step:
        raise ValueError("--tokens-per-step is of --sampler confidence; ancestral has --steps")
    if args.sampler == "confidence" and args.steps:
        raise ValueError("--steps is of --sampler ancestral; confidence has --tokens-per-step")
    if args.guidance_weak and args.guidance_scale == 1:
        raise ValueError("--guidance-weak changes nothing without --guidance-scale")
    if not is_folder(args.out) and Path(args.out).suffix != ".jsonl":
        raise ValueError(f"--out {args.out} should end in .jsonl, or be a folder (no suffix) for the tables of shards")
    if is_folder(args.out) and (args.html or args.limit):
        raise ValueError("--html and --limit go with an --out that ends in .jsonl")
    need_folder("--out", args.out)
    if args.html:
        need_folder("--html", args.html)


def page_facts(args: argparse.Namespace, options: dict, causal: bool, images: int) -> dict[str, str]:
    """What the head of the page says; `options` are those of `decoding_options`."""
    facts = {"Checkpoint": args.pretrained, "Images": str(images)}
    if args.text:
        facts["To fill in"] = f"{args.text} (what was given is in italics)"
    elif args.length in ("auto", "sample") or (causal and args.length is None):
        facts["Length"] = "the model's choice"
    else:
        facts["Length"] = f"at most {args.length} tokens" if causal else f"{args.length or 15} tokens"
    if causal:
        facts["Order"] = "autoregressive, " + (
            f"drawn at temperature {args.temperature}" if args.temperature else "by beam search")
    elif args.sampler == "ancestral":
        facts["Order"] = f"drawn in {args.steps or STEPS} steps (ancestral), tokens at temperature {args.temperature}"
    else:
        facts["Order"] = f"the most confident first, {args.tokens_per_step or 1} at a time"
    if "guidance_scale" in options:
        weak = {"masked": "the image with masked features"}.get(
            options["guidance_weak"], "the mean image" if "blind" in options else "no image")
        facts["Guidance"] = f"scale {args.guidance_scale}, away from {weak}; probabilities are the guided ones"
    return facts


def run(args: argparse.Namespace) -> None:
    """Writes --out and --html when every image was looked at; interrupted, the same command resumes.

    Raises:
        ValueError: images had to be skipped (all else is written by then), or flags make no sense.
    """
    check(args)
    if is_folder(args.out):
        from . import caption_shards  # pyarrow is for tables only
        return caption_shards.run(args)
    paths = find_pictures(args.paths, IMAGE_FILES + SHARDS)
    loaded = load_captioner(args)
    options = decoding_options(args, loaded, paths)
    key = settings(args, loaded, options, args.blind_images or args.paths)
    part = Path(f"{args.out}.part")
    total = None if any(path.suffix.lower() in SHARDS for path in paths) else len(paths[:args.limit])
    names, cards, skipped = [], [], []
    with Journal(part, key, id="image") as journal, tqdm(total=total, desc="captions", unit=" images") as bar:
        pictures = Pictures(paths, loaded.transform, args.batch_size, args.limit, known=frozenset(journal.rows),
                            thumbnail=thumbnail if args.html else None)
        for batch in pictures.loader(args.workers):
            if batch.new:
                rows = loaded.decode(batch.image.to(loaded.device, non_blocking=True),
                                     sampling=sampling_of(args, batch.new, loaded.device), **options)
                for name, row in zip(batch.new, rows, strict=True):
                    journal.append({"image": name, **row})
            for name, url in zip(batch.names, batch.thumbnails, strict=True):
                tqdm.write(printable(f"{name}: {journal.rows[name]['caption']}"))
                cards += [card(journal.rows[name], url)] if args.html else []
            names += batch.names
            skipped += map(printable, batch.problems)
            bar.update(len(batch.names))
    if args.html:
        title = f"Captions by {find(args.pretrained, args.model).model_name}"
        facts = page_facts(args, options, loaded.model.causal, len(names))
        write_page(args.html, title, facts, legend(), cards, skipped)
    with new_file(args.out) as partial, partial.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(journal.rows[name]) + "\n" for name in names)
    part.unlink(missing_ok=True)
    print(f"{len(names)} captions: {args.out}" + (f", {args.html}" if args.html else ""))
    if skipped:
        raise ValueError("\n  ".join([f"{len(skipped)} skipped, all else is written:", *skipped]))
