"""Select the caption that fits the image (Table 2), with captioners by likelihood and CLIP models by cosine.

Dimensions: B cases, I images of a case, C captions of a case, P patches, D width.
"""
import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from open_clip_mdc.decoding.options import MIN_NULL_IMAGES, NULL_IMAGES
from open_clip_mdc.likelihood.log_likelihood import log_likelihood, mean_image
from open_clip_mdc.models.captioner import Captioner
from open_clip_mdc.text.special_tokens import not_whole

from ..distributed import merge, own_batches
from ..evaluation_job import Job
from ..metrics.selection_metrics import SURFACES, clip_benchmarks_metrics, debiased_score, selection_metrics
from ..metrics.statements import statement_metrics
from ..selection_datasets import SelectionDataset

ROWS = ("plain", "blind", "debiased")

Texts = Sequence[Sequence[str]]  # B lists of C texts
Scores = list[dict[str, np.ndarray]]  # for each case arrays [C] or [I, C] by name
Scorer = Callable[[Tensor, Texts], Scores]  # images are [B, 3, H, W] or [B, I, 3, H, W]


def null_image(model: Captioner, dataloader: DataLoader, device: str) -> Tensor:
    """Return the null image: patch tokens averaged over the data set's first images, [P, D].

    It is the same on every process. A warning tells if there are so few that their mean still shows them.
    """
    images, seen = [], 0
    for image, *_ in dataloader:
        images.append(image.flatten(0, -4)[:NULL_IMAGES - seen].to(device))
        seen += len(images[-1])
        if seen == NULL_IMAGES:
            break
    if seen < MIN_NULL_IMAGES:
        logging.warning("the null image is the mean of %d images and still shows them: read no blind number", seen)
    return mean_image(model, images)


def likelihood_scorer(model: Captioner, tokenizer: Callable, device: str, blind: Tensor, options: dict,
                      alpha: float) -> Scorer:
    """Return the scorer of plain, blind and debiased scores, with the number of draws. `blind` is `null_image(...)`."""
    def score(images: Tensor, texts: Texts) -> Scores:
        if len({len(captions) for captions in texts}) > 1:
            return [row for i, captions in enumerate(texts) for row in score(images[i:i + 1], [captions])]
        images = images if images.ndim == 5 else images[:, None]
        tokens = tokenizer([caption for captions in texts for caption in captions]).to(device)
        tokens = tokens.view(len(texts), -1, tokens.shape[-1])  # [B, C, L]
        per_image = tokens.repeat_interleave(images.shape[1], 0)
        plain = log_likelihood(model, images.flatten(0, 1).to(device), per_image, return_details=True, **options)
        prior = log_likelihood(model, None, tokens, blind=blind, **options)
        scores = {"plain": plain.log_likelihood, "blind": prior.repeat_interleave(images.shape[1], 0)}
        scores["debiased"] = debiased_score(scores["plain"].cpu(), scores["blind"].cpu(), alpha)
        if plain.draws is not None:
            scores["draws"] = plain.draws
        return per_case(scores, len(texts), images.shape[1])
    return score


def cosine_scorer(model: torch.nn.Module, tokenizer: Callable, device: str) -> Scorer:
    """Return the scorer by cosine, in float32 and, like clip_benchmark ("upstream"), in the embeddings' precision."""
    @torch.no_grad()
    def score(images: Tensor, texts: Texts) -> Scores:
        images = images if images.ndim == 5 else images[:, None]
        image_embs = F.normalize(model.encode_image(images.flatten(0, 1).to(device)), dim=-1)
        text_embs = F.normalize(model.encode_text(
            tokenizer([caption for captions in texts for caption in captions]).to(device)), dim=-1)
        pairs = zip(image_embs.split(images.shape[1]), text_embs.split(list(map(len, texts))), strict=True)
        scores = []
        with torch.autocast(device, enabled=False):  # as clip_benchmark multiplies outside of it
            for image, text in pairs:
                scores += per_case({"plain": image.float() @ text.float().t(), "upstream": image @ text.t()}, 1,
                                   len(image))
        return scores
    return score


def count_cut(dataset: SelectionDataset, tokenizer: Callable, context_length: int) -> int:
    cut = [case.key for case in dataset.cases
           if any(not_whole(caption, tokenizer, context_length) for caption in case.captions)]
    if cut:
        logging.warning("%s: %d of %d cases have a caption that is cut at %d tokens, such as %s", dataset.name,
                        len(cut), len(dataset.cases), context_length, cut[0])
    return len(cut)


def per_case(scores: dict[str, Tensor | np.ndarray], cases: int, num_images: int) -> Scores:
    arrays = {name: torch.as_tensor(x).double().cpu().numpy().reshape(cases, num_images, -1)
              for name, x in scores.items()}
    return [{name: x[case, 0] if num_images == 1 else x[case] for name, x in arrays.items()} for case in range(cases)]


def run(job: Job, batches: DataLoader) -> dict:
    """Return the metrics of a selection data set, for captioners plain, blind and debiased."""
    model, tokenizer, device, options = job.model, job.tokenizer, job.args.device, dict(job.options)
    dataset = batches.dataset
    facts, alpha, surfaces = dict(dataset.facts), options.pop("alpha", 1.0), SURFACES
    with job.autocast():
        if job.by_cosine:
            score = cosine_scorer(model, tokenizer, device)
        else:
            facts["cases_cut"] = count_cut(dataset, tokenizer, model.context_length)
            score = likelihood_scorer(model, tokenizer, device, null_image(model, batches, device), options, alpha)
            # A sum over tokens, so that length may decide.
            surfaces = SURFACES | {"length": lambda text: len(tokenizer.encode(text))}
        cases = [case for batch in merge([(i, score(images, texts)) for i, (images, texts) in own_batches(
            batches, dataset.name)]) for case in batch]
    rows = {row: [case[row] for case in cases] for row in ROWS if row in cases[0]}
    if dataset.metric.statements:
        metrics, items = statement_metrics(rows, dataset.cases)
    else:
        metrics, items = selection_metrics(dataset.metric, rows, dataset.cases, surfaces)
    metrics |= {**facts, "items": items}
    if job.by_cosine:
        theirs = {} if any(case.right != 1 for case in dataset.cases) else clip_benchmarks_metrics(
            [case["upstream"] for case in cases])  # clip_benchmark's metrics need one right caption
        return {**metrics, **theirs, "scorer": "cosine"}
    scorer = options.pop("method")
    metrics |= {"scorer": scorer, "alpha": alpha, "blind": "mean image", **options}
    if "draws" in cases[0]:
        metrics["mean_draws"] = float(np.mean([case["draws"].mean() for case in cases]))
    return metrics
