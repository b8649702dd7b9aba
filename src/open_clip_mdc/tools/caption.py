"""Captions pictures: a JSONL file with a line per picture, and a page that shows how each caption came about.

    open_clip_mdc caption --pretrained RUN photos/ 'more/*.jpg' 'shards/{000..009}.tar' --html captions.html
    open_clip_mdc caption --pretrained RUN cat.jpg --text 'a [MASK] cat on a [MASK]'

A line is {"image": path or shard::key, "caption": text, "tokens": [{"token", "step", "log_prob"}, ...]}, tokens in
reading order. A token that ends a word ends in a space; step is the one that revealed it, from 0, and log_prob what the
model gave it then (nats); both are null for a token of --text. Where the model itself chose to end the caption, the
last token is "<end>". Unreadable pictures are skipped, listed at the end, and make the exit status 1.

Dimensions: B images, L positions.
"""
import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import torch
from tqdm import tqdm

from ..checkpoints import find, load
from ..data.pictures import PICTURES, SHARDS, find_pictures, open_picture, read_pictures
from ..interface import Decoded
from ..model import Captioner
from ..tokens import caption_lengths, decode_captions, decode_tokens
from ..unmask import tokenize_with_masks
from .page import card, data_url, printable, write_page


def count(value: str) -> int:
    """The type of flags that count something."""
    if int(value) < 1:
        raise ValueError
    return int(value)


def length(value: str) -> int | str:
    """The type of --length."""
    return value if value == "auto" else count(value)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="PATHS", help="pictures, folders, webdataset shards, patterns")
    parser.add_argument("--pretrained", required=True, help="checkpoint, run folder, local-dir: or hf-hub: id")
    parser.add_argument("--model", help="architecture, for a checkpoint outside a run folder")
    parser.add_argument("--out", default="captions.jsonl", help="JSONL file to write (default: %(default)s)")
    parser.add_argument("--html", help="page to write, one file with the pictures in it; for hundreds, not millions")
    parser.add_argument("--length", type=length, metavar="N|auto",
                        help="tokens of a caption (default: 15), or the model's choice; of ARC, at most")
    parser.add_argument("--tokens-per-step", type=count, metavar="K", help="tokens revealed at a time (default: 1)")
    parser.add_argument("--text", help="caption to fill in, e.g. 'a [MASK] dog on a [MASK]', a token each")
    parser.add_argument("--limit", type=count, help="only the first so many pictures")
    parser.add_argument("--batch-size", type=count, default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def decoding_options(args: argparse.Namespace, model: Captioner, tokenizer) -> dict:
    """What was asked for, as options of `generate.generate`.

    Raises:
        ValueError: a flag does not fit the model or another flag.
    """
    if model.causal and (args.tokens_per_step or args.text):
        raise ValueError("--tokens-per-step and --text are for masked diffusion; this model writes left to right")
    if args.text and args.length:
        raise ValueError("--text says how many tokens there are; leave out --length")
    if args.text and "[MASK]" not in args.text:
        raise ValueError(f"--text {args.text!r} has no [MASK] to fill in")
    options = {name: value for name in ("length", "tokens_per_step") if (value := getattr(args, name)) is not None}
    if args.text:
        options["text"] = tokenize_with_masks(tokenizer, args.text, model.context_length).to(args.device)
    return options


def traced_captions(decoded: Decoded, tokenizer) -> list[dict]:
    """`caption` and `tokens` of the lines described above."""
    rows = []
    captions = decode_captions(decoded.text, tokenizer)
    lengths = caption_lengths(decoded.text, tokenizer.vocab_size).tolist()
    for caption, n, *columns in zip(captions, lengths, *map(torch.Tensor.tolist, decoded), strict=True):
        ids, steps, log_probs = (column[1:n] for column in columns)  # without SOT
        words = [*decode_tokens(ids[:-1], tokenizer), "<end>"]
        tokens = [{"token": word, "step": None, "log_prob": None} if step < 0 else
                  {"token": word, "step": step, "log_prob": log_prob}
                  for word, step, log_prob in zip(words, steps, log_probs, strict=True)]
        rows.append({"caption": caption, "tokens": tokens if steps[-1] >= 0 else tokens[:-1]})
    return rows


def partial_path(out: str | Path, model: Captioner, args: argparse.Namespace) -> Path:
    """Where the lines are kept until all are there: another name for other weights or options."""
    digest = hashlib.sha256(repr((args.length, args.tokens_per_step, args.text)).encode())
    for name, value in model.state_dict().items():
        digest.update(name.encode() + value.float().cpu().numpy().tobytes())
    return Path(f"{out}.{digest.hexdigest()[:8]}.part")


def take_up(file: BinaryIO, name: str) -> dict | None:
    """The line that an interrupted run left for this picture; at the first that does not fit the file is cut off."""
    start = file.tell()
    line = file.readline()
    row = json.loads(line) if line.endswith(b"\n") else {}
    if row.get("image") == name:
        return row
    file.seek(start)
    file.truncate()
    return None


def caption_pictures(pictures: Iterable, file: BinaryIO, model: Captioner, transform, tokenizer,
                     args: argparse.Namespace, skipped: list[str]) -> Iterator[tuple[dict, str | None]]:
    """Lines of pictures as they are written to `file`, and with --html the picture as a data URL.

    Args:
        pictures: of `read_pictures`.
        file: what an interrupted run has left, at its beginning.
        skipped: gets a line for every picture that cannot be read.
    """
    options = decoding_options(args, model, tokenizer)
    pictures = iter(pictures)
    while batch := list(islice(pictures, args.batch_size)):
        names, images, urls = [], [], []
        for name, source in batch:
            try:
                picture = open_picture(source, name)
            except ValueError as problem:
                skipped.append(printable(str(problem)))
                continue
            names.append(name)
            images.append(transform(picture))
            urls.append(data_url(picture) if args.html else None)
        rows = [take_up(file, name) for name in names]
        new = [i for i, row in enumerate(rows) if row is None]
        if new:
            new_images = torch.stack([images[i] for i in new]).to(args.device)
            decoded = model.generate(new_images, return_trace=True, **options)
            for i, row in zip(new, traced_captions(decoded, tokenizer), strict=True):
                rows[i] = {"image": names[i], **row}
                file.write(json.dumps(rows[i]).encode() + b"\n")
            file.flush()
        yield from zip(rows, urls, strict=True)


def page_facts(args: argparse.Namespace, model: Captioner, pictures: int) -> dict[str, str]:
    """What the head of the page says."""
    facts = {"Checkpoint": args.pretrained, "Pictures": str(pictures)}
    if args.text:
        facts["To fill in"] = f"{args.text} (what was given is in italics)"
    elif args.length == "auto" or (model.causal and args.length is None):
        facts["Length"] = "the model's choice"
    else:
        facts["Length"] = f"at most {args.length} tokens" if model.causal else f"{args.length or 15} tokens"
    facts["Order"] = "left to right, by beam search" if model.causal else \
        f"the most confident first, {args.tokens_per_step or 1} at a time"
    return facts


def run(args: argparse.Namespace) -> None:
    """Writes --out and --html when every picture was looked at; interrupted, the same command goes on.

    Raises:
        ValueError: pictures had to be skipped (all else is written by then), or flags make no sense.
    """
    paths = find_pictures(args.paths, PICTURES + SHARDS)
    for path in filter(None, (args.out, args.html)):
        if not Path(path).absolute().parent.is_dir():
            raise FileNotFoundError(f"{path}: its folder does not exist")
    model, transform, tokenizer = load(args.pretrained, args.model, args.device)
    if not isinstance(model, Captioner):
        raise ValueError(f"{args.pretrained} is no captioner")
    part = partial_path(args.out, model, args)
    total = None if any(path.suffix.lower() in SHARDS for path in paths) else len(paths[:args.limit])
    cards, skipped, done = [], [], 0
    try:
        with part.open("a+b") as file, tqdm(total=total, desc="captions", unit=" pictures") as bar:
            file.seek(0)
            pictures = islice(read_pictures(paths), args.limit)
            for row, url in caption_pictures(pictures, file, model, transform, tokenizer, args, skipped):
                tqdm.write(printable(f"{row['image']}: {row['caption']}"))
                cards += [card(row, url)] if args.html else []
                done += 1
                bar.update()
        if args.html:
            title = f"Captions by {find(args.pretrained, args.model).model_name}"
            write_page(args.html, title, page_facts(args, model, done), cards, skipped)
        os.replace(part, args.out)
    except KeyboardInterrupt:
        sys.exit(f"interrupted: the same command goes on where it was ({part})")
    finally:
        if part.exists() and not part.stat().st_size:  # nothing to go on from
            part.unlink()
    print(f"{done} captions: {args.out}" + (f", {args.html}" if args.html else ""))
    if skipped:
        raise ValueError("\n  ".join([f"{len(skipped)} skipped, all else is written:", *skipped]))
