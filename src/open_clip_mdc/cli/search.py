"""Find the images that fit a sentence best, or each sentence of a file, ranked by a captioner's likelihood.

    open_clip_mdc search photos/ "a dog in the snow"
    open_clip_mdc search --pretrained RUN 'shards/{000..009}.tar' @sentences.txt --top 5 --html found.html
    open_clip_mdc search photos/ "two people on a beach" --shortlist 50
    open_clip_mdc search photos/ "two people on a beach" --clip ViT-B-32:clip.pt --shortlist 200

A line of OUT is {"sentence", "rank", "image": path or shard::key, "score", "blind", "debiased"}.

    score       log p(sentence | image) in nats. Use it to compare images for one sentence. Do not compare sentences by
                it, as a long or rare one is improbable for any image.
    blind       log p(sentence) given the null image, the mean of many images
    debiased    score - blind. It ranks images like score, and also tells which of several sentences fits an image best.

No score says whether any image fits. A sentence that no image shows still has a best image, even with a high debiased
score, as a rare sentence is very improbable given the null image. With fewer than 32 images blind and debiased are left
out. With --shortlist K the captioner scores only the K best images of each sentence. They are chosen by its own
`parallel` score, one decoder pass an image for all sentences of a length, or by a CLIP model. With --cache-features DIR
the image encoder runs once an image, whatever you search for later. Tokens in 16 bit change a score by about .001 nats.

Dimensions: B images, S sentences, K images of a shortlist, L positions.
"""
import argparse
import os
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import torch.nn.functional as F

from ..data.fingerprint import fingerprint
from ..data.images import Batch, Images, open_image, read_images
from ..data.paths import ANY_IMAGES, find_images
from ..decoding.clip_guidance import TEXTS_PER_BATCH, Clip, encode_text
from ..decoding.options import NULL_IMAGES
from ..errors import complain, complain_of_none, plural
from ..integration import clip as clip_models
from ..integration.pretrained import PretrainedCaptioner
from ..likelihood.log_likelihood import log_likelihood
from ..text.special_tokens import tokenize_whole
from .image_tokens import image_reader
from .noted import noted
from .page import CARDS, printable, shown, shown_lines, shown_model, thumbnail, write_page
from .rows import write_rows
from .score import read_captions
from .shared import load_captioner, prior_image

COLUMNS = ("sentence", "rank", "image", "score", "blind", "debiased")


def read_sentences(sentence: str) -> list[str]:
    if os.path.exists(sentence):
        raise ValueError(f"{sentence} is a file or folder: the last argument should be a sentence, or @FILE")
    return read_captions(sentence[1:]) if sentence.startswith("@") else [sentence]


@torch.no_grad()
def cosines(args: argparse.Namespace, clip: Clip, paths: list[Path], sentences: list[str], device: str,
            part: Path) -> dict[str, list[float]]:
    """Return the cosines [S] of each image with the sentences, by the image's name."""
    texts = torch.cat([encode_text(clip.model, clip.tokenizer(sentences[i:i + TEXTS_PER_BATCH]), device).float()
                       for i in range(0, len(sentences), TEXTS_PER_BATCH)])
    texts = F.normalize(texts, dim=-1)

    def make(batch: Batch) -> Iterator[dict]:
        embs = F.normalize(clip.model.encode_image(batch.image.to(device)).float(), dim=-1)
        yield from ({"image": name, "cosines": row} for name, row in zip(
            batch.new, (embs @ texts.t()).tolist(), strict=True))

    key = {"clip": fingerprint(clip.model), "sentences": sentences}
    images = Images(paths, clip.transform, args.batch_size)
    return {name: rows[name]["cosines"] for batch, rows in noted(
        part, key, images, args.workers, make, "images for CLIP") for name in batch.names}


def best(scores: dict[str, list[float | None]], sentence: int, k: int) -> dict[str, float]:
    """Return the k best images of a sentence, given by its number, with their scores. Unscored ones are left out."""
    named = [(name, row[sentence]) for name, row in scores.items() if row[sentence] is not None]
    return dict(sorted(named, key=lambda pair: -pair[1])[:k])


def scored(loaded: PretrainedCaptioner, text: torch.Tensor, wanted: dict[str, list[int]], method: str | None,
           batch: Batch) -> Iterator[dict]:
    """Yield a row per image with log p of its sentences, None for those that are not `wanted` for it.

    Args:
        text: token ids of the sentences, [S, L].
        wanted: numbers of the sentences by image name. Empty for all sentences of all images.
        method: of `log_likelihood`.
    """
    every = list(range(len(text)))
    of = {i: wanted.get(name, every) for i, name in enumerate(batch.new) if not wanted or name in wanted}
    if not of:
        return
    most = max(map(len, of.values()))
    index = torch.tensor([(own + own[:1] * most)[:most] for own in of.values()])  # repeated texts cost nothing
    with loaded.autocast():
        found = log_likelihood(loaded.model, loaded.from_bytes(batch.image[list(of)]), text[index], method).tolist()
    for (i, own), values in zip(of.items(), found, strict=True):
        row = dict(zip(own, values, strict=False))
        yield {"image": batch.new[i], "scores": [row.get(s) for s in every]}


def write_found(args: argparse.Namespace, hits: list[list[dict]], paths: list[Path], facts: dict[str, str],
                skipped: list[str]) -> None:
    hits = list(filter(None, hits))  # all images of a sentence may be unreadable
    wanted = {hit["image"] for own in hits for hit in own}
    small = {name: thumbnail(open_image(source, name)) for name, source, _ in read_images(paths) if name in wanted}
    cards = [CARDS.found(own[0]["sentence"], [{**hit, "image": shown(hit["image"], args.html),
                                               "thumbnail": small[hit["image"]]} for hit in own]) for own in hits]
    write_page(args.html, f"Found by {shown_model(args, args.html)}", facts,
               CARDS.found_explanation("debiased" in hits[0][0]), cards, shown_lines(skipped, paths, args.html),
               "search.css.jinja")


def run(args: argparse.Namespace) -> None:
    """Print and write the best images of each sentence. If interrupted, the same command resumes."""
    if args.clip and not args.shortlist:
        raise ValueError("--clip MODEL:FILE needs --shortlist K, the number of images that it chooses")
    if args.shortlist and args.shortlist < args.top:
        raise ValueError(f"--shortlist {args.shortlist} should be at least --top {args.top}")
    sentences = read_sentences(args.sentence)
    paths = find_images(args.paths, ANY_IMAGES)
    loaded = load_captioner(args)
    text = tokenize_whole(sentences, loaded.tokenizer, loaded.model.context_length)
    if args.shortlist and not args.clip and "parallel" not in loaded.model.objective.scorers:
        raise ValueError("--shortlist K needs --clip MODEL:FILE: this model reads captions in order, so it has no "
                         "cheap score of its own")
    clip = clip_models.load(*clip_models.parse(args.clip), loaded.device) if args.clip else None
    read = image_reader(args, loaded, paths)
    blind, mean = prior_image(loaded, paths, args, NULL_IMAGES, read=read)
    with loaded.autocast():
        prior = None if blind is None else log_likelihood(loaded.model, None, text[None], blind=blind)[0].tolist()
    part, wanted, first = Path(f"{args.out}.part"), {}, {}
    key = {"model": fingerprint(loaded.model), "precision": loaded.precision, "sentences": sentences,
           **({"tokens": "16 bit"} if args.cache_features else {})}
    images = read(paths)
    if clip:
        first = cosines(args, clip, paths, sentences, loaded.device, Path(f"{part}.clip"))
        key |= {"clip": fingerprint(clip.model)}
    elif args.shortlist:
        first = {name: rows[name]["scores"] for batch, rows in noted(
            Path(f"{part}.first"), {**key, "method": "parallel"}, images, args.workers,
            partial(scored, loaded, text, {}, "parallel"), "images at first sight") for name in batch.names}
    if args.shortlist:
        for s in range(len(sentences)):
            for name in best(first, s, args.shortlist):
                wanted.setdefault(name, []).append(s)
        key |= {"shortlist": args.shortlist}
    found, skipped = {}, []

    def has_all(row: dict) -> bool:  # when images come or go, a shortlist changes, and rows of the old one lack scores
        return all(row["scores"][s] is not None for s in wanted.get(row["image"], ()))

    for batch, rows in noted(part, key, images, args.workers, partial(scored, loaded, text, wanted, None),
                             "scores", first.keys() - wanted.keys(), has_all):
        found |= {name: rows[name]["scores"] for name in batch.names if not wanted or name in wanted}
        skipped += batch.problems
    complain_of_none(found, skipped)
    hits = [[{"sentence": sentence, "rank": rank, "image": name, "score": score,
              **({} if prior is None else {"blind": prior[s], "debiased": score - prior[s]})}
             for rank, (name, score) in enumerate(best(found, s, args.top).items(), 1)]
            for s, sentence in enumerate(sentences)]
    if args.html:
        facts = {"Checkpoint": shown(args.pretrained, args.html), "Images": str(len(first or found))}
        if mean:
            facts["Null image"] = mean.partition(",")[0]
        if args.shortlist:
            by = args.clip.partition(":")[0] if clip else "one pass of the captioner"
            facts["Shortlist"] = f"the {args.shortlist} best images by {by}"
        write_found(args, hits, paths, facts, skipped)
    write_rows(args.out, COLUMNS if prior else COLUMNS[:4], chain.from_iterable(hits))
    for suffix in ("", ".clip", ".first"):
        Path(f"{part}{suffix}").unlink(missing_ok=True)
    for sentence, own in zip(sentences, hits, strict=True):
        print(printable(sentence))
        for hit in own:
            shown_score = f"{hit['debiased']:+8.1f}" if "debiased" in hit else f"{hit['score']:8.1f}"
            print(f"{shown_score}  {printable(hit['image'])}")
    print(f"{plural(len(first or found), 'image')}, {plural(len(sentences), 'sentence')}: {args.out}"
          + (f", {args.html}" if args.html else ""))
    complain(skipped)
