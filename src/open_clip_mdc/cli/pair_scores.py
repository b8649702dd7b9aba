"""The scores of a shard's own captions, as one table: the workers' side of `open_clip_mdc score --pairs` (pairs.py).

Place in the paper: Eq. 7 and the heuristic of Sec. 4.2. Dimensions: B images, C captions, L positions.
"""
import argparse
import sys
from functools import partial
from pathlib import Path

import pyarrow as pa
import torch

from ..bulk.units import Unit
from ..data.images import Batch
from ..data.shards import CAPTION_SEPARATOR, warn_of_lines
from ..decoding.options import NULL_IMAGES
from ..integration.checkpoints import fingerprint
from ..integration.pretrained import PretrainedCaptioner
from ..likelihood.log_likelihood import log_likelihood
from ..text.special_tokens import caption_lengths, not_whole
from .shard_table import check_out, write_shard
from .shared import load_captioner, prior_image

SCORES = ("score", "blind", "debiased")
SCHEMA = pa.schema([("key", pa.string()), ("caption", pa.string()), *((name, pa.float32()) for name in SCORES),
                    ("num_tokens", pa.int32())])


def captions_of(text: str | None) -> list[str]:
    """Those of one KEY.txt; white space is a space."""
    return [" ".join(caption.split()) for caption in (text or "").split(CAPTION_SEPARATOR) if caption.strip()]


def score_columns(loaded: PretrainedCaptioner, blind: torch.Tensor | None, alpha: float, batch: Batch) -> dict:
    """A row for each caption of each image; columns of SCHEMA."""
    model, tokenizer = loaded.model, loaded.tokenizer
    captions = [captions_of(text) for text in batch.texts]
    fits = [[c for c in own if not not_whole(c, tokenizer, model.context_length)] for own in captions]
    some, most = [i for i, own in enumerate(fits) if own], max(map(len, fits))
    found: dict[tuple[int, str], tuple] = {}
    if some:
        # Rows of equal length: what is repeated costs nothing.
        text = tokenizer([(fits[i] + fits[i][:1] * most)[c] for i in some for c in range(most)])
        text = text.view(len(some), most, -1).to(loaded.device)
        with loaded.autocast():
            score = log_likelihood(model, batch.image[some], text).cpu()
            prior = log_likelihood(model, None, text, blind=blind).cpu() if blind is not None else None
        count = caption_lengths(text, model.vocab_size).cpu() - 1
        values = score[..., None].tolist() if prior is None else torch.stack(
            (score, prior, score - alpha * prior), -1).tolist()
        for row, i in enumerate(some):
            for c, caption in enumerate(fits[i]):
                found[i, caption] = (*values[row][c], *[None] * (3 - len(values[row][c])), int(count[row, c]))
    rows = [(key, caption, *found.get((i, caption), (None,) * 4))
            for i, (key, own) in enumerate(zip(batch.names, captions, strict=True)) for caption in own]
    return {name: [row[place] for row in rows] for place, name in enumerate(SCHEMA.names)}


def worker(args: argparse.Namespace, units: list[Unit], number: int):
    """The function of a worker (engine.py)."""
    loaded = load_captioner(args, number)
    if number == 0:
        for warning in warn_of_lines([str(unit) for unit in units if isinstance(unit, Path)]):
            print(f"warning: {warning}", file=sys.stderr)
    blind, images = prior_image(loaded, units, args, NULL_IMAGES, say=number == 0)
    settings = {"tool": "score", "model": fingerprint(loaded.model), "precision": loaded.precision,
                "alpha": args.alpha, "blind": images}
    check_out(args.out, settings)
    return partial(write_shard, loaded=loaded, args=args, schema=SCHEMA, settings=settings,
                   columns=partial(score_columns, loaded, blind, args.alpha))
