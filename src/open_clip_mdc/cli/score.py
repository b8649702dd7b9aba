"""Score image-text pairs by a captioner's log-likelihood, in nats.

    open_clip_mdc score --pretrained RUN --images cat.jpg photos/ --captions captions.txt --out scores.csv
    open_clip_mdc score --pretrained RUN --pairs 'shards/{000..009}.tar' --out scores/
    open_clip_mdc score --pretrained RUN --pairs pairs.csv --out scores/ --top 0.3 --out-shards kept/
    open_clip_mdc score --model hf:FOLDER --pairs pairs.csv --out scores/

Captioners of other projects are named as for `clip_benchmark eval` (docs/evaluation.md).

With --images and --captions every caption is scored for every image, in one CSV or JSONL file. Its columns are image,
caption, score = log p(c | i), blind = log p(c), debiased = score - alpha * blind, and tokens. These are the
log-likelihoods per token in reading order, with the step at which the heuristic revealed each. The blind score is
conditioned on the null image, the mean of --blind-images or of all images. With --plain or fewer than 32 images, blind
and debiased are left out. score_pairs.py describes --pairs.

Dimensions: B images, C captions, L positions.
"""
import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from ..data.captions import split_captions, warnings_of
from ..data.images import Batch, Images
from ..data.paths import find_images
from ..data.text import read_lines
from ..decoding.options import NULL_IMAGES
from ..errors import complain, complain_of_none, plural
from ..integration.pretrained import PretrainedCaptioner
from ..likelihood.exact import Likelihood
from ..likelihood.log_likelihood import log_likelihood
from ..models.captioner import Captioner
from ..progress import progress_bar
from ..text.special_tokens import caption_lengths, decode_captions, not_whole, target_tokens, tokenize_whole
from . import score_pairs
from .rows import write_rows
from .shared import load_captioner, prior_image

COLUMNS = ("key", "caption", "score", "blind", "debiased", "num_tokens")  # of the table of a shard


# ---- each image with each caption


def read_captions(path: str) -> list[str]:
    captions = read_lines(path)
    if not captions:
        raise ValueError(f"{path} has no caption")
    return captions


def score_rows(model: Captioner, image: torch.Tensor, captions: list[str], text: torch.Tensor, tokenizer,
               prior: list[float] | None, alpha: float) -> list[list[dict]]:
    """Return the columns of each of B images with each of C captions.

    Args:
        image: [B, 3, height, width].
        text: token ids of the captions, [C, L].
        prior: log p(c) of the captions, or None to leave out blind and debiased scores.
    """
    scores = log_likelihood(model, image, text.expand(len(image), -1, -1), return_details=True)
    scores = Likelihood(*(None if x is None else x.cpu() for x in scores))
    target = target_tokens(text, model.vocab_size)

    def columns(i: int, c: int) -> dict:
        places = target[c].nonzero().flatten().tolist()
        likelihoods = scores.token_log_likelihood[i, c].tolist()
        order = scores.order[i, c].tolist() if scores.order is not None else range(-1, len(likelihoods))
        words = decode_captions(text[c, places][:, None], tokenizer)
        score = float(scores.log_likelihood[i, c])
        return {"caption": captions[c], "score": score,
                **({} if prior is None else {"blind": prior[c], "debiased": score - alpha * prior[c]}),
                "tokens": [{"token": word or "<end>", "log_likelihood": likelihoods[p], "step": order[p]}
                           for p, word in zip(places, words, strict=True)]}

    return [[columns(i, c) for c in range(len(captions))] for i in range(len(image))]


# ---- each image with its own captions, one table per shard


def pair_captions(text: str | None) -> list[str]:
    return [" ".join(caption.split()) for caption in split_captions(text or "")]


def score_columns(loaded: PretrainedCaptioner, blind: torch.Tensor | None, alpha: float, batch: Batch) -> dict:
    model, tokenizer = loaded.model, loaded.tokenizer
    captions = [pair_captions(text) for text in batch.texts]
    fits = [[c for c in own if not not_whole(c, tokenizer, model.context_length)] for own in captions]
    some, most = [i for i, own in enumerate(fits) if own], max(map(len, fits))
    found: dict[tuple[int, str], tuple] = {}
    if some:
        # Rows get equal length by repeated captions, which cost nothing.
        text = tokenizer([(fits[i] + fits[i][:1] * most)[c] for i in some for c in range(most)])
        text = text.view(len(some), most, -1).to(loaded.device)
        with loaded.autocast():
            score = log_likelihood(model, batch.image[some], text).cpu()
            prior = log_likelihood(model, None, text, blind=blind).cpu() if blind is not None else None
        count = caption_lengths(text, model.vocab_size).cpu() - 1
        columns = [score] if prior is None else [score, prior, score - alpha * prior]
        values, lacking = torch.stack(columns, -1).tolist(), [None] * (3 - len(columns))
        for row, i in enumerate(some):
            for c, caption in enumerate(fits[i]):
                found[i, caption] = (*values[row][c], *lacking, int(count[row, c]))
    rows = [(key, caption, *found.get((i, caption), (None,) * 4))
            for i, (key, own) in enumerate(zip(batch.names, captions, strict=True)) for caption in own]
    return {name: [row[place] for row in rows] for place, name in enumerate(COLUMNS)}


def worker(args: argparse.Namespace, units: list, number: int):
    import pyarrow as pa

    from .shard_table import table_worker
    loaded = load_captioner(args, number, any_project=True)
    if number == 0:
        for warning in warnings_of([str(unit) for unit in units if isinstance(unit, Path)]):
            print(f"warning: {warning}", file=sys.stderr)
    blind, images = prior_image(loaded, units, args, NULL_IMAGES, say=number == 0)
    kinds = ("string", "string", "float32", "float32", "float32", "int32")
    return table_worker(args, loaded, pa.schema(zip(COLUMNS, kinds, strict=True)),
                        partial(score_columns, loaded, blind, args.alpha), alpha=args.alpha, blind=images)


def run(args: argparse.Namespace) -> None:
    if args.pairs:
        return score_pairs.run(args, worker)
    score_pairs.check(args)
    out = Path(args.out)
    captions, paths = read_captions(args.captions), find_images(args.images)
    loaded = load_captioner(args, any_project=True)
    model = loaded.model
    text = tokenize_whole(captions, loaded.tokenizer, model.context_length).to(loaded.device)
    blind, _ = prior_image(loaded, paths, args)
    with loaded.autocast():
        prior = None if blind is None else log_likelihood(model, None, text[None], blind=blind)[0].tolist()
    names, skipped = [], []

    def rows() -> Iterator[dict]:
        images = Images(paths, loaded.to_bytes, args.batch_size)
        with progress_bar(total=len(paths), what="scores") as bar:
            for batch in images.loader(args.workers):
                skipped.extend(batch.problems)
                bar.update(len(batch.names) + len(batch.problems))
                if not batch.new:
                    continue
                with loaded.autocast():
                    scored = score_rows(model, loaded.from_bytes(batch.image), captions, text, loaded.tokenizer, prior,
                                        args.alpha)
                names.extend(batch.names)
                for name, own in zip(batch.names, scored, strict=True):
                    yield from ({"image": name, **row} for row in own)
        complain_of_none(names, skipped)

    write_rows(out, ["image", "caption", "score", *(() if prior is None else ("blind", "debiased")), "tokens"], rows())
    print(f"{plural(len(names), 'image')} x {plural(len(captions), 'caption')}: {out}")
    complain(skipped)
