"""Zero-shot classification, of captioners by the likelihood of the classes' captions, and retrieval.

Dimensions: B images, N all images, K classes, T templates, L tokens.
"""
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from clip_benchmark.metrics import zeroshot_classification as upstream
from clip_benchmark.metrics import zeroshot_retrieval
from sklearn.metrics import balanced_accuracy_score, classification_report
from torch import Tensor
from torch.utils.data import DataLoader

from open_clip_mdc.data import weights
from open_clip_mdc.likelihood.log_likelihood import log_likelihood
from open_clip_mdc.models.captioner import Captioner
from open_clip_mdc.text.special_tokens import caption_lengths, tokenize_whole

from ..distributed import merge, own_batches
from ..job import Job
from ..other_sets import check_names
from .linear_probe import top_k_accuracy

MANY_CALLS = 10_000  # of the decoder for an image


def class_captions(classnames: Sequence[str], templates: Sequence[str] | dict[str, list[str]]) -> list[list[str]]:
    if isinstance(templates, dict):
        return [templates[name] for name in classnames]
    return [[template.format(c=name) for template in templates] for name in classnames]


def likelihood_logits(model: Captioner, dataloader: DataLoader, tokenizer: Callable, captions: list[list[str]],
                      device: str, options: dict) -> tuple[Tensor, Tensor]:
    """Return the mean log-likelihood of each class's captions, [N, K], and the targets [N].

    Every caption is decoded for every image: with K classes, T templates and captions of n tokens an image costs K * T
    * n decoder passes of the heuristic, K * T of an autoregressive model. One template is the thing to use.
    """
    if options.get("stop_confidence") is not None:
        raise ValueError("--stop_confidence finds the best of some captions, and a class's score is a mean over "
                         "captions: leave it out for zero-shot classification")
    flat = [caption for one in captions for caption in one]
    tokens = tokenize_whole(flat, tokenizer, model.context_length).to(device)
    passes = {"autoregressive": 1, "monte_carlo": options.get("num_samples"), "bound": options.get("num_samples")}.get(
        options["method"], int(caption_lengths(tokens, model.vocab_size).float().mean()))
    if len(flat) * passes > MANY_CALLS:
        logging.warning("%d classes x templates: about %d decoder passes for every image; a single template is cheaper",
                        len(flat), len(flat) * passes)
    results = []
    for i, (images, target) in own_batches(dataloader, "zero-shot by likelihood"):
        scores = log_likelihood(model, images.to(device), tokens.expand(len(images), -1, -1), **options).cpu()
        means = [x.mean(1) for x in scores.split([len(one) for one in captions], dim=1)]
        results.append((i, (torch.stack(means, dim=1), torch.as_tensor(target))))
    logits, targets = (torch.cat(x) for x in zip(*merge(results), strict=True))
    return logits, targets


def cosine_logits(job: Job, batches: DataLoader) -> tuple[Tensor, Tensor]:
    args, dataset = job.args, batches.dataset
    if args.load_clfs:
        parts = [read_classifier(path, len(dataset.classes)) for path in args.load_clfs]
        classifier = sum(part / len(parts) for part in parts).to(args.device)
    else:
        classifier = upstream.zero_shot_classifier(job.model, job.tokenizer, dataset.classes, dataset.templates,
                                                   args.device, amp=args.amp)
    if args.save_clf is not None:
        torch.save(classifier, args.save_clf)
    return upstream.run_classification(job.model, classifier, batches, args.device, amp=args.amp)


def read_classifier(path: str, classes: int) -> Tensor:
    content = weights.read(Path(path))  # [D, K]
    if not isinstance(content, Tensor) or content.ndim != 2 or content.shape[1] != classes:
        raise ValueError(f"--load_clfs {path} holds no classifier of {classes} classes, as --save_clf writes it")
    weights.check_finite(content, Path(path))
    return content


def classification_metrics(logits: Tensor, targets: Tensor, verbose: bool = False) -> dict:
    if targets.ndim == 2:
        return {"mean_average_precision": upstream.average_precision_per_class(logits, targets).mean().item()}
    predicted, classes = logits.argmax(1).numpy(), logits.shape[1]
    if verbose:
        print(classification_report(targets.numpy(), predicted, digits=3))
    acc1, acc5 = top_k_accuracy(logits, targets, (1, 5)) if classes >= 5 else \
        (*top_k_accuracy(logits, targets, (1,)), None)
    return {"acc1": acc1, "acc5": acc5, **({} if acc5 is not None else {"acc5_missing": f"only {classes} classes"}),
            "mean_per_class_recall": float(balanced_accuracy_score(targets.numpy(), predicted))}


def classify(job: Job, batches: DataLoader) -> dict:
    args, dataset = job.args, batches.dataset
    check_names(dataset)
    if not getattr(dataset, "classes", None) or not getattr(dataset, "templates", None):
        raise ValueError(f"{args.dataset} has no class names or no templates, which zero-shot classification needs")
    if not isinstance(job.model, Captioner):
        return classification_metrics(*cosine_logits(job, batches), args.verbose)
    with torch.autocast(torch.device(args.device).type, enabled=args.amp):
        logits, targets = likelihood_logits(job.model, batches, job.tokenizer, class_captions(
            dataset.classes, dataset.templates), args.device, job.options)
    return {**classification_metrics(logits, targets, args.verbose), "scorer": job.options["method"]}


def retrieve(job: Job, batches: DataLoader) -> dict:
    if not hasattr(job.model, "encode_text"):
        raise ValueError(f"{job.args.model} embeds no texts, which retrieval compares: give another --task")
    return zeroshot_retrieval.evaluate(job.model, batches, job.tokenizer, recall_k_list=job.args.recall_k,
                                       **job.common)
