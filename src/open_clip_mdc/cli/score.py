"""Scores image-text pairs by a captioner's likelihood: a CSV or JSONL file with a line per image and caption.

    open_clip_mdc score --pretrained RUN --images cat.jpg photos/ --captions captions.txt --out scores.csv

    open_clip_mdc score --pretrained RUN --pairs 'shards/{000..009}.tar' --out scores/          (pairs.py)

Every caption of the file (one a line) is scored for every image. Columns: image, caption, score = log p(c | i),
blind = log p(c), debiased = score - alpha * blind, and tokens: the per-token log-likelihoods in reading order, with the
step at which the heuristic revealed each. The blind score sees the mean of many images: --blind-images, or all given.
With --plain, or of fewer than 32 images, blind and debiased are left out.

Place in the paper: Eq. 7 and the heuristic of Sec. 4.2. Dimensions: B images, C captions, L positions, P patches,
D image width.
"""
import argparse
import csv
import json
from pathlib import Path

import torch

from ..data.files import new_file
from ..data.images import Images
from ..data.paths import find_images
from ..data.text import read_lines
from ..errors import complain, plural
from ..likelihood.log_likelihood import log_likelihood
from ..models.captioner import Captioner
from ..progress import progress_bar
from ..text.special_tokens import decode_captions, target_tokens, tokenize_whole
from . import pairs
from .shared import load_captioner, prior_image


def read_captions(path: str) -> list[str]:
    """The lines of a file that are not empty.

    Raises:
        ValueError: there is none.
    """
    captions = read_lines(path)
    if not captions:
        raise ValueError(f"{path} has no caption")
    return captions


def score_pairs(model: Captioner, image: torch.Tensor, captions: list[str], text: torch.Tensor, tokenizer,
                prior: list[float] | None, alpha: float) -> list[list[dict]]:
    """Columns for each of B images and each of C captions.

    Args:
        image: [B, 3, height, width].
        text: the captions' ids, [C, L].
        prior: the captions' blind scores, None to leave them out.
    """
    scores = log_likelihood(model, image, text.expand(len(image), -1, -1), return_details=True)
    target = target_tokens(text, model.vocab_size)
    rows = []
    for i in range(len(image)):
        rows.append([])
        for c, caption in enumerate(captions):
            places = target[c].nonzero().flatten().tolist()
            likelihoods = scores.token_log_likelihood[i, c].tolist()
            order = scores.order[i, c].tolist() if scores.order is not None else range(-1, len(likelihoods))
            words = decode_captions(text[c, places][:, None], tokenizer)
            score = float(scores.log_likelihood[i, c])
            rows[-1].append({
                "caption": caption, "score": score,
                **({} if prior is None else {"blind": prior[c], "debiased": score - alpha * prior[c]}),
                "tokens": [{"token": word or "<end>", "log_likelihood": likelihoods[p], "step": order[p]}
                           for p, word in zip(places, words, strict=True)]})
    return rows


def run(args: argparse.Namespace) -> None:
    """Writes --out in one go at the end; of pairs shard by shard.

    Raises:
        ValueError: images had to be skipped (all else is written by then), --out is no .csv or .jsonl file, or as
            `pairs.check`.
    """
    if args.pairs:
        return pairs.run(args)
    pairs.check(args)
    out = Path(args.out)
    captions, paths = read_captions(args.captions), find_images(args.images)
    loaded = load_captioner(args)
    model = loaded.model
    text = tokenize_whole(captions, loaded.tokenizer, model.context_length).to(loaded.device)
    blind, _ = prior_image(loaded, paths, args)
    with loaded.autocast():
        prior = None if blind is None else log_likelihood(model, None, text[None], blind=blind)[0].tolist()
    count, skipped = 0, []
    with progress_bar(total=len(paths), what="scores") as bar, new_file(out) as partial, partial.open(
            "w", encoding="utf-8", errors="backslashreplace", newline="") as file:  # names of files are any bytes
        columns = ["image", "caption", "score", *(() if prior is None else ("blind", "debiased")), "tokens"]
        writer = csv.DictWriter(file, columns)
        if out.suffix == ".csv":
            writer.writeheader()
        images = Images(paths, loaded.to_bytes, args.batch_size)
        for batch in images.loader(args.workers):
            skipped += batch.problems
            bar.update(len(batch.names) + len(batch.problems))
            if not batch.new:
                continue
            with loaded.autocast():
                scored = score_pairs(model, loaded.from_bytes(batch.image), captions, text, loaded.tokenizer, prior,
                                     args.alpha)
            count += len(batch.names)
            for name, rows in zip(batch.names, scored, strict=True):
                for row in rows:
                    if out.suffix == ".csv":
                        writer.writerow({"image": name, **row, "tokens": json.dumps(row["tokens"])})
                    else:
                        file.write(json.dumps({"image": name, **row}) + "\n")
    print(f"{plural(count, 'image')} x {plural(len(captions), 'caption')}: {out}")
    complain(skipped)
