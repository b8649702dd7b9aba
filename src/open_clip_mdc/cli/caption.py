"""Caption images, into one file and a page that shows how each was decoded, or into Parquet tables of shards.

    open_clip_mdc caption --pretrained RUN photos/ 'more/*.jpg' 'shards/{000..009}.tar' --html captions.html
    open_clip_mdc caption --pretrained RUN cat.jpg --text 'a [MASK] cat on a [MASK]'
    open_clip_mdc caption --pretrained RUN 'shards/{000..999}.tar' --out captions/ --jobs 8
    open_clip_mdc caption --pretrained RUN val2014/ --out captions_val2014_mdc_results.json
    open_clip_mdc caption --pretrained RUN photos/ --clip ViT-B-32:clip.pt --clip-scale 1 --out guided.jsonl \\
        --html both.html --compare captions.jsonl

A line is {"image": path or shard::key, "caption": text, "tokens": [{"token", "step", "log_prob"}, ...]}. With --clip it
also has "clip_texts", the number of texts that CLIP read for it. Tokens are as in `pretrained.describe_captions`. A CSV
file or Parquet table has the same columns, with tokens in CSV as JSON. A .json is COCO's results format
(data/image_ids.py), with image_id from the KEY.json beside an image or the digits of its name. A table
OUT/SHARD.parquet has the columns key, caption and tokens. Unreadable images are skipped, the first are named at the
end, and the exit status is 2.
"""
import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from ..data.files import write_json
from ..data.fingerprint import fingerprint
from ..data.image_ids import coco_results, read_image_ids
from ..data.images import Batch, Images
from ..data.outputs import is_folder
from ..data.paths import ANY_IMAGES, find_images
from ..decoding import options as decoding
from ..decoding.clip_guidance import TOP_K, Clip, Guide
from ..decoding.lengths import default_length
from ..errors import complain, complain_of_none, plural
from ..integration import clip as clip_models
from ..integration.decoding_flags import DEFAULTS, OF_CLIP
from ..integration.pretrained import PretrainedCaptioner
from .caption_page import page_facts, read_captions
from .noted import noted
from .page import card, legend, printable, shown, shown_lines, shown_model, thumbnail, write_page
from .rows import write_rows
from .shared import check_jobs, check_length, load_captioner, null_image

# Settings that decide a caption, in the order in which journals and tables list them.
SETTINGS = ("length", "min_length", "tokens_per_step", "repeats", "sampler", "steps", "text", "temperature", "top_k",
            "top_p", "seed", "guidance_scale", "uncond")


# ---- what the flags ask for


def given_options(args: argparse.Namespace) -> dict:
    return {name: value for name in (*SETTINGS, "samples", "select", *OF_CLIP)
            if (value := getattr(args, name)) not in (None, DEFAULTS.get(name))}


def check(args: argparse.Namespace) -> None:
    given = given_options(args)
    # The captions that --select chooses from have several lengths, unless --length is given.
    length = args.length or ("top" if args.select else None)
    if args.text is not None:
        decoding.check_text(args.text, args.length)
    decoding.check_clip(given)
    decoding.checked({**given, "length": length, "samples": max(args.samples, args.clip_rerank)},
                     causal=bool(given.keys() & decoding.OF_SEARCH) or args.sampler == decoding.BEAM,
                     sampling=decoding.Sampling(args.temperature, args.top_k, args.top_p))
    if args.compare and not args.html:
        raise ValueError("--compare needs --html, the page that shows captions side by side")
    if is_folder(args.out) and (args.html or args.limit or args.clip):
        raise ValueError("--html, --limit and --clip need an --out that is one file, such as captions.jsonl")
    if args.samples > 1 and not args.select:
        raise ValueError("--samples draws several captions, but only one is written: add --select consensus")
    check_jobs(args)
    check_length(args)


def decoding_options(args: argparse.Namespace, loaded: PretrainedCaptioner, paths: list) -> tuple[dict, str | None]:
    """Return options of `generate.generate`, and a description of their null image.

    Sets args.length and args.repeats if not given.
    """
    model, blind = loaded.model, None
    causal = decoding.searches(given_options(args), model.objective)
    if causal and not model.causal:
        args.sampler = decoding.BEAM  # a length would ask for unmasking
    if args.text is None and args.length is None:
        args.length = "auto" if causal else default_length(model)
        if args.select and args.length == "auto" and model.objective.order == "any" and not causal:
            args.length = "top"  # auto would decode several lengths for each sample
    options = decoding.readable({name: value for name, value in given_options(args).items()
                                 if name in (decoding.SEARCH if causal else decoding.UNMASKING)}, causal)
    args.repeats = options.get("repeats")
    if args.text:
        options["text"] = loaded.masked_text(args.text)
    if decoding.guides(options):
        options["uncond"] = args.uncond or model.caption_cfg.default_uncond
    if decoding.needs_null_image(options, model):
        try:
            options["blind"], blind = null_image(loaded, paths, args, decoding.NULL_IMAGES)
        except decoding.TooFewImages as problem:
            raise ValueError(f"{problem}, or --guidance-scale 1, which is without guidance") from problem
    elif args.blind_images:
        raise ValueError("--blind-images changes nothing without guidance by the mean image: give --guidance-scale")
    return options, blind


def sampling_of(args: argparse.Namespace, names: list[str], device: str) -> decoding.Sampling:
    # Draws depend on --seed and the images of the batch, not on what was captioned before.
    digest = hashlib.sha256(json.dumps([args.seed, names]).encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return decoding.Sampling(args.temperature, args.top_k, args.top_p, generator)


def settings(args: argparse.Namespace, loaded: PretrainedCaptioner, blind: str | None) -> dict:
    """Return what a resumed run must share, by the names that journals and tables have."""
    weak = (args.uncond or loaded.model.caption_cfg.default_uncond) if decoding.guides(given_options(args)) else None
    return {"model": fingerprint(loaded.model), "precision": loaded.precision, "blind": blind,
            **decoding.in_files({name: getattr(args, name) for name in SETTINGS} |
                                {"sampler": args.sampler or "confidence"}),
            **({"batch_size": args.batch_size} if args.temperature or args.length == "sample" or
               args.sampler == "ancestral" or weak == "masked_image" else {}),  # a batch draws from one generator
            **({"samples": args.samples, "select": args.select} if args.select else {})}


# ---- one table per shard


def schema_of(name: str, clip: bool = False):
    import pyarrow as pa
    token = pa.struct([("token", "string"), ("step", "int32"), ("log_prob", "float32")])
    return pa.schema([(name, "string"), ("caption", "string"), ("tokens", pa.list_(token)),
                      *[("clip_texts", "int32")] * clip])


def worker(args: argparse.Namespace, units: list, number: int):
    from ..bulk.units import files_of
    from .shard_table import table_worker
    schema = schema_of("key")
    loaded = load_captioner(args, number)
    options, blind = decoding_options(args, loaded, [file for unit in units for file in files_of(unit)])

    def columns(batch: Batch) -> dict:
        rows = loaded.decode(batch.image, sampling=sampling_of(args, batch.names, loaded.device), **options)
        return {name: [row[name] for row in rows] for name in ("caption", "tokens")}

    return table_worker(args, loaded, schema, columns, **settings(args, loaded, blind))


# ---- one file, and a page


def lines_of(batch: Batch, loaded: PretrainedCaptioner, clip: Clip | None, options: dict,
             args: argparse.Namespace) -> Iterator[dict]:
    guide = None
    if clip:
        with loaded.autocast():
            guide = Guide(clip, batch.other.to(loaded.device), loaded.tokenizer, args.clip_scale)
    rows = loaded.decode(loaded.from_bytes(batch.image), guide=guide,
                         sampling=sampling_of(args, batch.new, loaded.device), **options)
    for i, (name, row) in enumerate(zip(batch.new, rows, strict=True)):
        if sys.stdout.isatty():  # elsewhere --out is enough
            tqdm.write(printable(f"{name}: {row['caption']}"))
        yield {"image": name, **row, **({"clip_texts": guide.texts[i]} if guide else {})}


def run(args: argparse.Namespace) -> None:
    """Write --out and --html once all images are captioned. If interrupted, the same command resumes."""
    check(args)
    if is_folder(args.out):
        from ..bulk import units
        return units.run(args, worker)
    paths = find_images(args.paths, ANY_IMAGES)
    others = read_captions(args.compare, shown(args.compare, args.html)) if args.compare else {}
    coco = Path(args.out).suffix.lower() == ".json"
    ids = read_image_ids(paths, args.limit) if coco else {}  # fail before the long work
    loaded = load_captioner(args)
    options, blind = decoding_options(args, loaded, paths)
    if args.clip_rerank > 1:
        options |= {"samples": args.clip_rerank, "rerank": True}
    clip = clip_models.load(*clip_models.parse(args.clip), loaded.device) if args.clip else None
    key = settings(args, loaded, blind)
    if clip:
        key |= {"clip": fingerprint(clip.model), "clip_scale": args.clip_scale, "clip_top_k": TOP_K,
                "clip_rerank": args.clip_rerank}
    part, rows, names, cards, skipped = Path(f"{args.out}.part"), {}, [], [], []
    images = Images(paths, loaded.to_bytes, args.batch_size, args.limit, thumbnail=thumbnail if args.html else None,
                    other_transform=clip and clip.transform)
    for batch, rows in noted(part, key, images, args.workers,
                             lambda batch: lines_of(batch, loaded, clip, options, args), "captions"):
        if args.html:
            cards += [card({**rows[name], "image": shown(name, args.html)}, url, others.get(os.path.abspath(name)))
                      for name, url in zip(batch.names, batch.thumbnails, strict=True)]
        names += batch.names
        skipped += batch.problems
    complain_of_none(names, skipped)
    if others.keys().isdisjoint(map(os.path.abspath, names)) and args.compare:
        print(f"warning: --compare {args.compare} has captions of other images", file=sys.stderr)
    if args.html:
        title = f"Captions by {shown_model(args, args.html)}"
        given = {**given_options(args), **({"uncond": options["uncond"]} if "uncond" in options else {})}
        facts = page_facts(args, given, decoding.searches(given, loaded.model.objective),
                           [rows[name].get("clip_texts") for name in names])
        write_page(args.html, title, facts, legend(), cards, shown_lines(skipped, paths, args.html))
    if coco:
        write_json(args.out, coco_results({name: rows[name]["caption"] for name in names}, ids))
    else:
        columns = ["image", "caption", "tokens", *["clip_texts"] * bool(clip)]
        write_rows(args.out, columns, (rows[name] for name in names), partial(schema_of, "image", bool(clip)))
    part.unlink(missing_ok=True)
    print(f"{plural(len(names), 'caption')}: {args.out}" + (f", {args.html}" if args.html else ""))
    complain(skipped)
