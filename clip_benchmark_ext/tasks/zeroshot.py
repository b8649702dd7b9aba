"""Zero-shot classification, for captioners by the likelihood of the classes' captions and for CLIP models by cosine.

Dimensions: B images, N all images, K classes, T templates, L tokens.
"""
import logging
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from random import Random

import torch
from clip_benchmark.metrics import zeroshot_classification as upstream
from sklearn.metrics import balanced_accuracy_score
from torch import Tensor
from torch.utils.data import DataLoader

from open_clip_mdc.data import weights
from open_clip_mdc.decoding.options import MIN_NULL_IMAGES, NULL_IMAGES
from open_clip_mdc.integration.saving import save_whole
from open_clip_mdc.likelihood.log_likelihood import decoder_passes, log_likelihood
from open_clip_mdc.models.captioner import Captioner
from open_clip_mdc.text.special_tokens import tokenize_whole

from ..distributed import merge, own_batches
from ..evaluation_job import Job
from ..foreign_datasets import check_names
from ..metrics.classes import Names, average_precisions, by_class, map_11_points
from ..metrics.selection_metrics import debiased_score, suffix_of
from .linear_probe import class_report, top_k_accuracy
from .selection import null_image

MANY_CALLS = 10_000  # decoder passes per image from which a warning is given


def class_captions(classnames: Sequence[str], templates: Sequence[str] | dict[str, list[str]]) -> list[list[str]]:
    if isinstance(templates, dict):
        return [templates[name] for name in classnames]
    return [[template.format(c=name) for template in templates] for name in classnames]


def likelihood_logits(model: Captioner, dataloader: DataLoader, tokenizer: Callable, captions: list[list[str]],
                      device: str, options: dict, alpha: float) -> tuple[dict[str, Tensor], Tensor]:
    """Return the mean score of each class's captions, [N, K], by row (plain, blind, debiased), and the targets [N].

    Debiased is log p(c | i) - alpha * log p(c) (IG Captioner, arXiv 2311.17072). Without it a class with a short or
    common name wins whatever the image shows.

    Every caption is scored for every image. With K classes, T templates and captions of n tokens an image costs
    K * T * n decoder passes with the heuristic, and K * T with an autoregressive model. So use a single template.
    """
    flat = [caption for one in captions for caption in one]
    tokens = tokenize_whole(flat, tokenizer, model.context_length).to(device)
    if (passes := int(decoder_passes(model, tokens, **options).sum())) > MANY_CALLS:
        logging.warning("%d captions of classes take %d decoder passes per image: use a single template to save time",
                        len(flat), passes)

    def of_classes(scores: Tensor) -> Tensor:  # [B, K * T] -> [B, K]
        return torch.stack([x.mean(1) for x in scores.cpu().split(list(map(len, captions)), dim=1)], dim=1)

    results, kept, draw = [], [], Random(0)
    for i, (images, target) in own_batches(dataloader, "zero-shot by likelihood"):
        scores = log_likelihood(model, images.to(device), tokens.expand(len(images), -1, -1), **options)
        results.append((i, (of_classes(scores), torch.as_tensor(target))))
        kept += zip((draw.random() for _ in images), images, strict=True)
        kept = sorted(kept, key=itemgetter(0))[:NULL_IMAGES]
    # Images drawn from all, as data sets are often sorted by class. Each process has its own.
    null = [(0, null_image(model, zip(torch.stack([image for _, image in kept]).split(MIN_NULL_IMAGES), strict=True),
                           device).cpu())] if kept else []  # a process may have no batch
    null = torch.stack(merge(null)).mean(0).to(device)
    blind = of_classes(log_likelihood(model, None, tokens[None], blind=null, **options))
    plain, targets = (torch.cat(x) for x in zip(*merge(results), strict=True))
    return {"plain": plain, "blind": blind.expand_as(plain),
            "debiased": torch.as_tensor(debiased_score(plain, blind, alpha))}, targets


def cosine_logits(job: Job, batches: DataLoader) -> tuple[Tensor, Tensor]:
    args, dataset = job.args, batches.dataset
    if args.load_clfs:
        parts = [read_classifier(path, len(dataset.classes)) for path in args.load_clfs]
        classifier = sum(part / len(parts) for part in parts).to(args.device)
    else:
        classifier = upstream.zero_shot_classifier(job.model, job.tokenizer, dataset.classes, dataset.templates,
                                                   args.device, amp=args.amp)
    if args.save_clf is not None:
        save_whole(classifier, args.save_clf)
    return upstream.run_classification(job.model, classifier, batches, args.device, amp=args.amp)


def read_classifier(path: str, classes: int) -> Tensor:
    content = weights.read(Path(path))  # [D, K]
    if not isinstance(content, Tensor) or content.ndim != 2 or content.shape[1] != classes:
        raise ValueError(f"--load_clfs {path} is not a classifier of {classes} classes from --save_clf")
    if content.dtype not in weights.FLOATS:
        raise weights.wrong_type(content, Path(path), "the classifier")
    weights.check_finite(content, Path(path))
    return content


def classification_metrics(logits: Tensor, targets: Tensor, verbose: bool = False, suffix: str = "",
                           names: Names = None) -> dict:
    if targets.ndim == 2:
        mean = upstream.average_precision_per_class(logits, targets.clamp(min=0)).mean()
        return {f"mean_average_precision{suffix}": mean.item(),
                f"map_11_points{suffix}": map_11_points(logits, targets)}
    predicted, classes = logits.argmax(1), logits.shape[1]
    if verbose:
        print(suffix.strip("_"), class_report(targets, predicted, names), sep="\n")
    acc1, acc5 = top_k_accuracy(logits, targets, (1, 5))
    five = {f"acc5{suffix}": acc5} if classes >= 5 else \
        {f"acc5{suffix}": None, f"acc5{suffix}_missing": f"only {classes} classes"}
    return {f"acc1{suffix}": acc1, **five,
            f"mean_per_class_recall{suffix}": float(balanced_accuracy_score(targets, predicted))}


def of_classes(logits: dict[str, Tensor], targets: Tensor, names: Sequence[str]) -> list[dict]:
    if targets.ndim == 1:
        return by_class(targets, {way: x.argmax(1) for way, x in logits.items()}, names)
    return [{**row, "by": way} for way, x in logits.items() for row in average_precisions(x, targets, names)]


def classify(job: Job, batches: DataLoader) -> dict:
    args, dataset = job.args, batches.dataset
    check_names(dataset)
    if not getattr(dataset, "classes", None) or not getattr(dataset, "templates", None):
        raise ValueError(f"{args.dataset} has no class names or no templates, which zero-shot classification needs")
    if job.by_cosine:
        logits, targets = cosine_logits(job, batches)
        rows, about = {"cosine": logits}, {"scorer": "cosine"}
    else:
        options = dict(job.options)
        alpha = options.pop("alpha")
        with job.autocast():
            rows, targets = likelihood_logits(job.model, batches, job.tokenizer, class_captions(
                dataset.classes, dataset.templates), args.device, options, alpha)
        about = {"scorer": options["method"], "alpha": alpha, "blind": "mean image"}
    metrics = {}
    for row, logits in rows.items():
        metrics |= classification_metrics(logits, targets, args.verbose, suffix_of(row), dataset.classes)
    return {**metrics, **about, "of_classes": of_classes(rows, targets, dataset.classes)}
