"""Zero-shot retrieval, for captioners by likelihood and for CLIP models by cosine, with clip_benchmark's recall.

    image_retrieval_recall@k   text -> image: the share of captions with their image among the k best
    text_retrieval_recall@k    image -> text: the share of images with one of their captions among the k best

Rows are plain, log p(c | i), blind, log p(c) given the null image, and debiased, log p(c | i) - alpha * log p(c), as in
VisualGPTScore (arXiv 2306.01879) and IG Captioner (arXiv 2311.17072). log p(c) does not depend on the image. So for
text -> image plain and debiased are equal, and blind is chance. `text_retrieval_recall@k_by_alpha` has a value for each
alpha of `alphas`. If you choose alpha by it, measure on other images.

With a shortlist of K, the likelihood re-ranks the K best in each direction: by a CLIP model's cosine, or without one by
the captioner's own `parallel` score, plain for text -> image and debiased for image -> text.

Dimensions: N images, C captions of all images, B images at once, L tokens, Q queries, R ranked items.
"""
import logging
from argparse import Namespace
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from clip_benchmark.metrics import zeroshot_retrieval
from torch import Tensor
from torch.utils.data import DataLoader

from open_clip_mdc.data.fingerprint import fingerprint
from open_clip_mdc.decoding.clip_guidance import Clip
from open_clip_mdc.integration import clip as clip_models
from open_clip_mdc.likelihood.log_likelihood import SCORERS, decoder_passes, log_likelihood
from open_clip_mdc.models.precision import without_autocast
from open_clip_mdc.text.special_tokens import not_whole

from ..datasets.caption_data import read_batch
from ..distributed import is_first, own_batches
from ..evaluation_job import Job
from ..features import cached_features, describe_data, feature_path
from ..metrics.clipscore import Captioned, encode_texts, read_captioned
from ..metrics.selection_metrics import debiased_score, suffix_of
from ..results import precision
from ..resume import journals, resumed
from .selection import null_image

ALPHAS = [i / 10 for i in range(16)]
PAIRS = 1024  # at once and in a row of the journal, or all of one image if these are more
MOST_IMAGES = 64  # at once
MANY_CALLS = 10_000_000  # decoder passes from which a warning is given


def read_captions(job: Job, batches: DataLoader, clip: Clip | None) -> Captioned:
    """Return the images' ids, their captions, and with a CLIP model all cosines [N, C], on every process."""
    device = job.args.device
    if not clip:
        return read_captioned(None, batches, device, "captions")
    ids, texts, images = read_captioned(clip, job.load_test(clip.transform), device, "images for CLIP")
    embs = encode_texts(clip, [text for own in texts for text in own], device, "captions for CLIP")
    with without_autocast("cpu"):  # bfloat16 would make ties, and list other pairs
        return ids, texts, F.normalize(images, dim=-1) @ F.normalize(embs, dim=-1).t()


def best(scores: Tensor, k: int) -> Tensor:
    return torch.zeros(scores.shape, dtype=torch.bool).scatter(1, scores.topk(min(k, scores.shape[1])).indices, True)


def hits(scores: Tensor, positive: Tensor, k: int) -> Tensor:
    """Return 1 for each row of scores [Q, R] with a positive among its k best, else 0: float32 [Q].

    `positive` is a boolean mask [Q, R].
    """
    # clip_benchmark's `recall_at_k` > 0 is the same, but its tensor of k x R for each row would be large.
    return positive.gather(1, scores.topk(k).indices).any(1).float()


def likelihoods(job: Job, tokens: Tensor, needed: Tensor, options: dict, file: Path, key: dict) -> Tensor:
    """Return log p(c | i) of the `needed` pairs, float32 [N, C], with -inf elsewhere.

    Each image is encoded once for all of its captions. Finished batches are written to journals beside `file`.

    Args:
        tokens: token ids of the captions, [C, L].
        needed: bool [N, C], True for pairs to score.
    """
    most = int(needed.sum(1).max())
    # Independent of --batch_size, so that a run resumes with any. One text a length costs the same for any pairs.
    size = 16 if SCORERS[options["method"]].by_length else min(MOST_IMAGES, max(1, PAIRS // most))
    loader = job._replace(args=Namespace(**vars(job.args) | {"batch_size": size})).load_test()

    def score(number: int, batch: Sequence) -> dict:
        own = [row.nonzero().flatten() for row in needed[number * size:][:len(batch[0])]]
        # Rows get equal length by repeated captions, which cost nothing.
        index = torch.stack([F.pad(row, (0, most - len(row)), value=int(row[0])) for row in own])
        found = log_likelihood(job.model, batch[0].to(job.args.device), tokens[index], **options).float().cpu()
        values = torch.cat([x[:len(row)] for x, row in zip(found, own, strict=True)])
        return {"scores": b64encode(values.numpy().tobytes()).decode()}

    rows = resumed(own_batches(loader, "likelihoods", -(-len(needed) // size)), file, key, score)
    values = np.concatenate([np.frombuffer(b64decode(row["scores"]), np.float32) for row in rows])
    return torch.full(needed.shape, -torch.inf).masked_scatter(needed, torch.from_numpy(values.copy()))


def scores(job: Job, batches: DataLoader, tokens: Tensor, needed: Tensor, options: dict, more: dict,
           null: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """Return log p(c | i) of the `needed` pairs as `likelihoods` does, and log p(c), float32 [C]. Both are kept.

    `more` is what else the result depends on. `null` makes the null image, [P, D], if scores are not kept already.
    """
    args = job.args
    key = {"model": fingerprint(job.model), "split": f"{args.split}-likelihoods", "data": describe_data(batches),
           "likelihood": options, "precision": precision(args), **more}
    file = Path(feature_path(args.feature_root, key))

    def extract() -> tuple[Tensor, Tensor]:
        with job.autocast():
            blind = log_likelihood(job.model, None, tokens[None], blind=null(), **options)
            return likelihoods(job, tokens, needed, options, file, key), blind[0].float().cpu()

    found = cached_features(args, key, extract)
    if is_first():
        for part in journals(file):
            part.unlink()
    return found


def measure(rows: dict[str, Tensor], positive: Tensor, ks: Sequence[int], listed: tuple[Tensor, Tensor],
            ids: Sequence[str]) -> dict:
    """Return the recalls of scores [N, C] by row, and items.

    `listed` has the pairs to rank as boolean masks [N, C] for text -> image and image -> text.
    """
    metrics, values, weights, counts = {}, {}, {}, positive.sum(1)
    for row, scores in rows.items():
        by_text, by_image = (scores.masked_fill(~mask, -torch.inf) for mask in listed)
        for k in ks:
            of_texts, of_images = hits(by_text.t(), positive.t(), k), hits(by_image, positive, k)
            to_image, to_text = (f"{way}_retrieval_recall@{k}{suffix_of(row)}" for way in ("image", "text"))
            metrics |= {to_image: of_texts.mean().item(), to_text: of_images.mean().item()}
            values |= {to_image: ((positive * of_texts).sum(1) / counts).tolist(), to_text: of_images.tolist()}
            weights[to_image] = counts.tolist()
    return {**metrics, "items": {"images": list(ids), "values": values, "weights": weights}}


def run(job: Job, batches: DataLoader) -> dict:
    args, model, tokenizer, options = job.args, job.model, job.tokenizer, dict(job.options)
    if job.by_cosine:
        pairs = (read_batch(i, batch, batches)[1:] for i, batch in enumerate(batches))
        return zeroshot_retrieval.evaluate(model, pairs, tokenizer, args.device, args.amp, args.recall_k)
    alpha, spec, shortlist = options.pop("alpha"), options.pop("clip", None), options.pop("shortlist", None)
    clip = clip_models.load(*clip_models.parse(spec), args.device) if spec else None
    with job.autocast():
        ids, texts, cosines = read_captions(job, batches, clip)
    flat = [text for own in texts for text in own]
    if max(args.recall_k) > min(len(ids), len(flat)):
        raise ValueError(f"--recall_k {max(args.recall_k)} is too large for {len(ids)} images and {len(flat)} captions")
    tokens = tokenizer(flat)
    owners = torch.tensor([image for image, own in enumerate(texts) for _ in own])
    positive = owners == torch.arange(len(ids))[:, None]
    null = cache(lambda: null_image(model, batches, args.device))  # both stages need it
    every = torch.ones_like(positive)
    listed, more, first = (every, every), {}, 0
    if clip:
        listed = best(cosines.t(), shortlist).t(), best(cosines, shortlist)
        more = {"clip": fingerprint(clip.model), "shortlist": shortlist}
    elif shortlist:
        rough = {"method": "parallel"}
        plain, blind = scores(job, batches, tokens, every, rough, {}, null)
        listed = best(plain.t(), shortlist).t(), best(plain - blind, shortlist)
        more = {"shortlist": shortlist}
        first = (len(ids) + 1) * int(decoder_passes(model, tokens, **rough).sum())
    needed = listed[0] | listed[1]
    passes = decoder_passes(model, tokens, **options)
    total = first + int(needed.sum(0) @ passes + passes.sum())
    if total > MANY_CALLS:
        logging.warning("%d images x %d captions take about %d decoder passes: add --shortlist K to score only "
                        "the K best by a first stage", len(ids), len(flat), total)

    plain, blind = scores(job, batches, tokens, needed, options, more, null)
    rows = {"plain": plain, "blind": blind.expand_as(plain),
            "debiased": torch.as_tensor(debiased_score(plain, blind, alpha)), **({"clip": cosines} if clip else {})}
    ranked, scorer = plain.masked_fill(~listed[1], -torch.inf), options.pop("method")
    metrics = {**measure(rows, positive, args.recall_k, listed, ids), "alphas": ALPHAS,
               **{f"text_retrieval_recall@{k}_by_alpha": [
                   hits(torch.as_tensor(debiased_score(ranked, blind, x)), positive, k).mean().item() for x in ALPHAS]
                  for k in args.recall_k},
               "images": len(ids), "captions": len(flat), "pairs": int(needed.sum()), "decoder_passes": total,
               "captions_cut": sum(bool(not_whole(text, tokenizer, model.context_length)) for text in flat),
               "scorer": scorer, "alpha": alpha, "blind": "mean image", **options}
    if shortlist:
        metrics |= {"shortlist": shortlist, "shortlist_by": "clip" if clip else "parallel",
                    "decoder_passes_without_shortlist": int((len(ids) + 1) * passes.sum()),
                    "image_retrieval_shortlist": (listed[0] & positive).any(0).float().mean().item(),
                    "text_retrieval_shortlist": (listed[1] & positive).any(1).float().mean().item()}
    return metrics
