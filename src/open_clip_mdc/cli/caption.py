"""Captions images: a JSONL file with a line per image, and a page that shows how each caption came about.

    open_clip_mdc caption --pretrained RUN photos/ 'more/*.jpg' 'shards/{000..009}.tar' --html captions.html
    open_clip_mdc caption --pretrained RUN cat.jpg --text 'a [MASK] cat on a [MASK]'
    open_clip_mdc caption --pretrained RUN 'shards/{000..999}.tar' --out captions/ --jobs 8       (caption_shards.py)
    open_clip_mdc caption --pretrained RUN photos/ --clip ViT-B-32:clip.pt --clip-scale 1 --out guided.jsonl \\
        --html both.html --compare captions.jsonl

A line is {"image": path or shard::key, "caption": text, "tokens": [{"token", "step", "log_prob"}, ...]}, tokens in
reading order. A token that ends a word ends in a space; step is the one that revealed it, from 0, and log_prob what the
model gave it then (nats); both are null for a token of --text. Where the model itself chose to end the caption, the
last token is "<end>". With --clip a line says by "clip_texts" how many captions CLIP read for this one. Unreadable
images are skipped, the first are named at the end, and make the exit status 1.

Place in the paper: decoding, Eq. 6 and Sec. 3.2. Dimensions: B images, L positions.
"""
import argparse
import json
import sys
from pathlib import Path

from tqdm import tqdm

from ..bulk import units as bulk
from ..data.files import new_file, parse_json
from ..data.images import Batch, Images
from ..data.journal import Journal
from ..data.outputs import is_folder
from ..data.paths import IMAGE_FILES, SHARDS, count_images, find_images
from ..data.text import read_lines
from ..decoding.clip_guidance import Clip, Guide
from ..errors import SHOWN, complain, plural
from ..integration import clip as clip_models
from ..integration.checkpoints import fingerprint
from ..integration.pretrained import PretrainedCaptioner
from ..integration.runs import find
from ..objectives.replace import STEPS
from ..progress import progress_bar
from .caption_rows import check, decoding_options, sampling_of, settings
from .page import card, legend, printable, shown, shown_lines, thumbnail, write_page
from .shared import load_captioner

CLIP = ("clip_scale", "clip_top_k", "clip_rerank")


def checked(token: dict) -> dict:
    """A token as it was read: with step and log-probability, or neither; raises TypeError or KeyError for others."""
    step, log_prob = token["step"], token["log_prob"]
    if not (step is log_prob is None or
            type(step) is int and 0 <= step < 10_000 and type(log_prob) in (int, float) and -1e6 < log_prob < 1):
        raise TypeError(f"{step!r} and {log_prob!r} are no step and its log-probability")
    return {"token": "" + token["token"], "step": step, "log_prob": log_prob}


def read_captions(path: str, name: str | None = None) -> dict[str, dict]:
    """Lines by image of a file that this tool wrote; "image" is then `name` (default: `path`), which says whose.

    Raises:
        ValueError: it is another file. FileNotFoundError: there is none.
    """
    try:
        rows = [parse_json(line) for line in read_lines(path)]
        return {row["image"]: {"image": name or path, "caption": "" + row["caption"],
                               "tokens": [checked(token) for token in row["tokens"]]} for row in rows}
    except (ValueError, KeyError, TypeError) as problem:
        raise ValueError(f"--compare {path} is no file that this tool wrote: {problem!r}") from problem


def page_facts(args: argparse.Namespace, options: dict, causal: bool, images: int, clip_texts: float) -> dict[str, str]:
    """What the head of the page says.

    Args:
        options: those of `decoding_options`.
        clip_texts: that CLIP read for a caption, on average.
    """
    facts = {"Checkpoint": shown(args.pretrained, args.html), "Images": str(images)}
    if args.text:
        facts["To fill in"] = f"{args.text} (what was given is in italics)"
    elif args.length in ("auto", "sample"):
        facts["Length"] = "the model's choice"
    else:
        facts["Length"] = f"at most {args.length} tokens" if causal else f"{args.length} tokens"
    if causal:
        facts["Order"] = "autoregressive, " + (
            f"drawn at temperature {args.temperature}" if args.temperature else "by beam search")
    elif args.sampler == "ancestral":
        facts["Order"] = f"drawn in {args.steps or STEPS} steps (ancestral), tokens at temperature {args.temperature}"
    else:
        count = 1 if args.tokens_per_step is None else args.tokens_per_step
        facts["Order"] = "the most confident first, " + (
            f"all tokens at least {count} probable at once" if isinstance(count, float) else f"{count} at a time") + (
            f", drawn at temperature {args.temperature}" if args.temperature else "")
    if "guidance_scale" in options:
        weak = {"masked": "the image with masked features"}.get(
            options["guidance_weak"], "the mean image" if "blind" in options else "no image")
        facts["Guidance"] = f"scale {args.guidance_scale}, away from {weak}; probabilities are the guided ones"
    if args.clip:
        parts = [f"scale {args.clip_scale} on {args.clip_top_k} tokens a step"] if args.clip_scale else []
        parts += [f"the best of {args.clip_rerank}"] if args.clip_rerank > 1 else []
        name, _, weights = args.clip.partition(":")
        facts["CLIP"] = f"{name}:{shown(weights, args.html)}, {', '.join(parts)}; {clip_texts:.1f} texts a caption"
    if args.compare:
        facts["On the right"] = shown(args.compare, args.html)
    return facts


def lines_of(batch: Batch, loaded: PretrainedCaptioner, clip: Clip | None, options: dict,
             args: argparse.Namespace) -> list[dict]:
    """The lines of the images that are new."""
    guide = None
    if clip:
        with loaded.autocast():
            guide = Guide(clip, batch.other.to(loaded.device), loaded.tokenizer, args.clip_scale, args.clip_top_k)
    rows = loaded.decode(loaded.from_bytes(batch.image), guide=guide,
                         sampling=sampling_of(args, batch.new, loaded.device), **options)
    return [{"image": name, **row, **({"clip_texts": guide.texts[i]} if guide else {})}
            for i, (name, row) in enumerate(zip(batch.new, rows, strict=True))]


def run(args: argparse.Namespace) -> None:
    """Writes --out and --html when every image was looked at; interrupted, the same command resumes.

    Raises:
        ValueError: images had to be skipped (all else is written by then), or flags make no sense.
    """
    check(args)
    if is_folder(args.out):
        return bulk.run(args)
    paths = find_images(args.paths, IMAGE_FILES + SHARDS)
    others = read_captions(args.compare, shown(args.compare, args.html)) if args.compare else {}
    loaded = load_captioner(args)
    options, blind = decoding_options(args, loaded, paths)
    if args.clip_rerank > 1:
        options |= {"samples": args.clip_rerank, "rerank": True}
    clip = clip_models.load(*clip_models.parse(args.clip), loaded.device) if args.clip else None
    key = settings(args, loaded, blind)
    if clip:
        key |= {"clip": fingerprint(clip.model), **{name: getattr(args, name) for name in CLIP}}
    part = Path(f"{args.out}.part")
    since = part.stat().st_mtime_ns if part.exists() else 0
    changed = [str(path) for path in paths if path.exists() and path.stat().st_ctime_ns > since > 0]
    total = count_images(paths, args.limit)
    names, cards, skipped = [], [], []
    with Journal(part, key, id="image") as journal, progress_bar(total=total, what="captions") as bar:
        stale = {name for name in journal.rows for path in changed if name == path or name.startswith(f"{path}::")}
        images = Images(paths, loaded.to_bytes, args.batch_size, args.limit, known=journal.rows.keys() - stale,
                        thumbnail=thumbnail if args.html else None, other_transform=clip and clip.transform)
        for batch in images.loader(args.workers):
            for row in lines_of(batch, loaded, clip, options, args) if batch.new else ():
                if row["image"] not in journal.rows or row["image"] in stale:
                    journal.append(row)
                    stale.discard(row["image"])
                if sys.stdout.isatty():  # a file has them in --out
                    tqdm.write(printable(f"{row['image']}: {row['caption']}"))
            if args.html:
                cards += [card({**journal.rows[name], "image": shown(name, args.html)}, url, others.get(name))
                          for name, url in zip(batch.names, batch.thumbnails, strict=True)]
            names += batch.names
            skipped += map(printable, batch.problems)
            bar.update(len(batch.names))
    if not names:
        raise ValueError("\n  ".join([f"no image can be read, and {args.out} is not written:", *skipped[:SHOWN]]))
    if args.html:
        title = f"Captions by {find(args.pretrained, args.model).model_name}"
        texts = [journal.rows[name]["clip_texts"] for name in names] if clip else []
        facts = page_facts(args, options, loaded.model.causal, len(names), sum(texts) / max(len(texts), 1))
        write_page(args.html, title, facts, legend(), cards, shown_lines(skipped, paths, args.html))
    with new_file(args.out) as partial, partial.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(journal.rows[name]) + "\n" for name in names)
    part.unlink(missing_ok=True)
    print(f"{plural(len(names), 'caption')}: {args.out}" + (f", {args.html}" if args.html else ""))
    complain(skipped)
