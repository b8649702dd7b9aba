"""What clip_benchmark asks of a captioner's likelihoods: the right caption (Table 2), or the right class.

Dimensions: B images or cases, I images of a case, C captions of a case, K classes, T templates, L tokens.
"""
import logging

import numpy as np
import torch
from clip_benchmark.metrics.zeroshot_classification import accuracy
from sklearn.metrics import balanced_accuracy_score

from open_clip_mdc.scoring import log_likelihood, mean_image

from .distributed import merge, own_batches
from .flags import options
from .selection_metrics import debiased_score, selection_metrics

BLIND_IMAGES = 256  # the first of a data set, whose mean stands for "no image"


def scoring_arguments(model) -> dict:
    """The estimator that the flags ask for, as arguments of `scoring.log_likelihood`."""
    method = options.scorer or ("autoregressive" if model.causal else "heuristic")
    arguments = dict(method=method)
    if method == "monte_carlo":
        cfg = model.caption_cfg
        arguments.update(num_samples=options.num_samples, stop_confidence=options.stop_confidence,
                         interval=(cfg.t_min, cfg.t_max) if options.trained_interval else None)
    return arguments


def blind_image(model, dataloader, device: str) -> torch.Tensor:
    """Patch tokens averaged over the data set's first images, [P, D]; the same on every process."""
    images, seen = [], 0
    for image, _ in dataloader:
        images.append(image.flatten(0, -4).to(device))
        seen += len(images[-1])
        if seen >= BLIND_IMAGES:
            break
    return mean_image(model, images)


def score_cases(model, images: torch.Tensor, texts: list[list[str]], tokenizer, device: str, blind: torch.Tensor,
                arguments: dict) -> list[dict[str, np.ndarray]]:
    """The rows of `selection_metrics` of each case, and the draws that were spent on it.

    Cases of a batch may have different numbers of captions; they are scored case by case then, else all at once.

    Args:
        images: [B, 3, H, W], or [B, I, 3, H, W] of cases with several images.
    """
    images = images if images.ndim == 5 else images[:, None]
    num_images = images.shape[1]
    if len({len(captions) for captions in texts}) > 1:
        return [row for i, captions in enumerate(texts)
                for row in score_cases(model, images[i:i + 1], [captions], tokenizer, device, blind, arguments)]
    tokens = tokenizer([caption for captions in texts for caption in captions]).to(device)
    tokens = tokens.view(len(texts), -1, tokens.shape[-1])  # [B, C, L]
    per_image = tokens.repeat_interleave(num_images, 0)
    plain = log_likelihood(model, images.flatten(0, 1).to(device), per_image, return_details=True, **arguments)
    no_stop = {**arguments, "stop_confidence": None} if "stop_confidence" in arguments else arguments
    prior = log_likelihood(model, None, tokens, blind=blind, **no_stop).repeat_interleave(num_images, 0)
    draws = plain.draws if plain.draws is not None else torch.zeros_like(plain.log_likelihood)

    def per_case(x: torch.Tensor) -> list[np.ndarray]:
        x = x.double().cpu().numpy().reshape(len(texts), num_images, -1)
        return list(x[:, 0] if num_images == 1 else x)

    rows = zip(per_case(plain.log_likelihood), per_case(prior), per_case(draws), strict=True)
    return [{"plain": p, "blind": b, "debiased": debiased_score(p, b, options.alpha), "draws": d} for p, b, d in rows]


def evaluate_selection(model, dataloader, tokenizer, device: str, amp: bool = True) -> dict:
    """Which caption fits the image: plain, blind and debiased. The data set is one of datasets.py.

    Returns:
        the metrics of selection.py, the data set's facts, and how the scores were made.
    """
    dataset = dataloader.dataset
    arguments = scoring_arguments(model)
    with torch.autocast(torch.device(device).type, enabled=amp):
        blind = blind_image(model, dataloader, device)
        scored = [(i, score_cases(model, images, texts, tokenizer, device, blind, arguments))
                  for i, (images, texts) in own_batches(dataloader, dataset.name)]
    cases = [case for batch in merge(scored) for case in batch]
    rows = {row: [case[row] for case in cases] for row in ("plain", "blind", "debiased")}
    metrics = {**selection_metrics(dataset.name, rows, dataset.cases), **dataset.facts,
               "scorer": arguments["method"], "alpha": options.alpha, "blind": "mean image"}
    if arguments["method"] == "monte_carlo":
        metrics.update(num_samples=options.num_samples, stop_confidence=options.stop_confidence,
                       trained_interval=options.trained_interval,
                       mean_draws=float(np.mean([case["draws"].mean() for case in cases])))
    return metrics


def class_captions(classnames: list[str], templates: list[str] | dict[str, list[str]]) -> list[list[str]]:
    """K lists of captions, as clip_benchmark fills its templates."""
    if isinstance(templates, dict):
        return [templates[name] for name in classnames]
    return [[template.format(c=name) for template in templates] for name in classnames]


def evaluate_zeroshot(model, dataloader, tokenizer, classnames, templates, device: str, amp: bool = True,
                      verbose: bool = False, **_) -> dict:
    """The class whose captions are most likely, averaged over templates.

    The image is encoded once, but every caption is decoded for every image: with K classes, T templates and captions
    of N tokens an image costs K * T * N decoder passes of the heuristic, K * T of an autoregressive model. 1,000
    classes with CLIP's 80 templates are out of reach; one template is the thing to use.
    """
    captions = class_captions(classnames, templates)
    flat = [caption for one in captions for caption in one]
    sizes = [len(one) for one in captions]
    tokens = tokenizer(flat).to(device)
    arguments = scoring_arguments(model)
    calls = len(flat) * (1 if arguments["method"] == "autoregressive" else options.num_samples
                         if arguments["method"] == "monte_carlo" else int(tokens.ne(0).sum(1).float().mean()))
    if calls > 10_000:
        logging.warning("%d classes x templates: about %d decoder passes for every image; a single template is cheaper",
                        len(flat), calls)
    results = []
    with torch.autocast(torch.device(device).type, enabled=amp):
        for i, (images, target) in own_batches(dataloader, "zero-shot by likelihood"):
            scores = log_likelihood(model, images.to(device), tokens.expand(len(images), -1, -1), **arguments)
            results.append((i, (torch.stack([x.mean(1) for x in scores.cpu().split(sizes, dim=1)], dim=1), target)))
    logits, targets = (torch.cat(x) for x in zip(*merge(results), strict=True))
    acc1, acc5 = accuracy(logits, targets, (1, 5)) if len(captions) >= 5 else \
        (accuracy(logits, targets, (1,))[0], float("nan"))
    recall = float(balanced_accuracy_score(targets.numpy(), logits.argmax(1).numpy()))
    return {"acc1": acc1, "acc5": acc5, "mean_per_class_recall": recall, "scorer": arguments["method"]}
