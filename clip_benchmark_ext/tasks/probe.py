"""k-NN, linear and attentive probes of all layers, from one pass over the images.

The encoder is compared with two baselines: "untrained", its architecture with random weights, and "pixels", the image
at 32 x 32. Weight decay and learning rate are chosen on held-out training images, never on test images.

Dimensions: B images of a batch, N images, P patches, D width, C classes.
"""
import math

import torch
import torch.nn.functional as F
from sklearn.metrics import balanced_accuracy_score
from torch import Tensor
from torch.utils.data import DataLoader

from open_clip_mdc.models.towers import tower

from ..evaluation_job import Job
from ..features import Rows
from ..metrics.classes import by_class
from ..token_cache import Encode, Tensors, TokenCache
from . import heads
from .knn import knn_votes
from .linear_probe import class_table, predict, probe_features
from .splits import Splits, load_splits

PIXELS = 32
LEARNING_RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)  # of the attentive probe
WEIGHT_DECAY = 0.1


def encode_fn(job: Job, kind: str) -> Encode:
    """Return the function from images to features of all layers and patch tokens, with one pass through each tower."""
    trained, untrained = job.model.trained, job.model.untrained

    def feature(tokens: Tensor, extra: Tensor | None) -> Tensor:
        return (tokens.mean(1) if kind == "gap" else extra[:, 0]).float()

    def encode(images: Tensor) -> Tensors:
        layers, floor = tower(trained).layers(images), tower(untrained).layers(images)[-1]
        size = [min(PIXELS, side) for side in images.shape[2:]]
        return {**{f"layer.{number}": feature(*layer) for number, layer in enumerate(layers, 1)},
                "tokens": layers[-1][0].half(), "untrained.tokens": floor[0].half(), "untrained": feature(*floor),
                "pixels": F.adaptive_avg_pool2d(images, size).flatten(1)}

    return encode


def accuracy(name: str, predicted: Tensor, targets: Tensor) -> dict[str, float | str]:
    """Return the accuracy, its mean over classes, and its binomial standard error or why there is none."""
    share = predicted.eq(targets).double().mean().item()
    error = {f"{name}_se": math.sqrt(share * (1 - share) / len(targets))} if len(targets) > 1 else \
        {f"{name}_se_missing": "there is one image"}
    return {f"{name}_acc1": share, f"{name}_macro": float(balanced_accuracy_score(targets, predicted)), **error}


def by_features(job: Job, splits: Splits, name: str, labels: Tensor, targets: Tensor,
                classes: int) -> tuple[dict, Tensors]:
    """Return the weight decay of the linear probe, and the classes [N] that k-NN and the linear probe predict.

    `labels` are the classes of the images of `splits.learn`, and `targets` [N] those of `splits.test`.
    """
    args, learn, test = job.args, splits.learn.column(name), splits.test.column(name)
    if args.normalize:
        for features in (learn, test):
            F.normalize(features, dim=-1, out=features)
    data = {"train": (Rows((learn, splits.train)), labels[splits.train]),
            "val": (Rows((learn, splits.val)), labels[splits.val]), "test": (test, targets)}
    torch.manual_seed(args.seed)
    linear, about = probe_features(data, args)
    votes = knn_votes(learn.to(args.device), labels.to(args.device), test.to(args.device), classes)
    votes["linear"] = predict(linear, test, args)
    return {"linear_weight_decay": about["weight_decay"]}, {name: x.argmax(1) for name, x in votes.items()}


def by_attention(job: Job, splits: Splits, name: str, classes: int) -> tuple[dict, Tensor]:
    """Return the learning rate of the attentive probe on patch tokens, and the classes [N] that it predicts."""
    args, labels = job.args, splits.learn.column("targets").to(job.args.device)
    mean, std = heads.moments(splits.learn.batches(name))

    def loss_of(head: heads.AttentiveProbe, rows: Tensor) -> Tensor:
        return F.cross_entropy(head(splits.learn.rows(name, rows.tolist()).to(args.device)), labels[rows])

    @torch.no_grad()
    def classify(head: heads.AttentiveProbe, cache: TokenCache, rows: Tensor) -> Tensor:
        return torch.cat([head(cache.rows(name, part.tolist()).to(args.device)).argmax(1).cpu()
                          for part in rows.split(args.batch_size)])

    def on_held_out(head: heads.AttentiveProbe) -> float:
        found = classify(head, splits.learn, splits.val)
        return found.eq(labels[splits.val].cpu()).double().mean().item()

    lr, head = heads.fit(lambda: heads.AttentiveProbe(mean, std, classes).to(args.device), splits, loss_of, on_held_out,
                         LEARNING_RATES, args.seed, weight_decay=WEIGHT_DECAY, epochs=args.fewshot_epochs,
                         batch_size=args.batch_size, desc=f"attentive probe of {name}")
    return {"attentive_learning_rate": lr}, classify(head, splits.test, torch.arange(len(splits.test)))


def run(job: Job, batches: DataLoader) -> dict:
    """Return the accuracies of all probes by row ("", "layer_1/", ..., "untrained/", "pixels/"), and items."""
    kind = job.flags.feature or job.model.feature
    if kind == "cls" and not tower(job.model.trained).has_class_token or kind == "pooled":
        raise ValueError(f"--feature {kind} cannot be probed here: give gap, or cls for a tower with a class token")
    splits = load_splits(job, batches, encode_fn(job, kind), kind)
    targets = splits.test.column("targets")
    labels = splits.learn.column("targets")
    for found in (labels, targets):
        if found.ndim != 1 or found.is_floating_point():
            raise ValueError(f"a probe needs one class id per image, not targets {list(found.shape)}. If an image has "
                             "several classes, give --task linear_probe")
    classes = 1 + int(max(labels.max(), targets.max()))
    layers = sum(name.startswith("layer.") for name in splits.test.part(0))
    rows = {"": f"layer.{layers}", **{f"layer_{n}/": f"layer.{n}" for n in range(1, layers)},
            "untrained/": "untrained", "pixels/": "pixels"}
    metrics = {"feature": kind, "layers": layers, "held_out": len(splits.val), "images": len(targets),
               "epochs": job.args.fewshot_epochs, "seed": job.args.seed}
    values = {}
    for row, name in rows.items():
        about, predicted = by_features(job, splits, name, labels, targets, classes)
        if row in ("", "untrained/"):
            more, predicted["attentive"] = by_attention(job, splits, "untrained.tokens" if row else "tokens", classes)
            about |= more
        for probe, found in predicted.items():
            about |= accuracy(probe, found, targets)
            values[f"{row}{probe}_acc1"] = found.eq(targets).int().tolist()
        metrics |= {f"{row}{name}": value for name, value in about.items()}
        if job.args.verbose:
            print(f"{row or 'encoder/'} " + ", ".join(f"{probe} {about[f'{probe}_acc1']:.3f}" for probe in predicted))
        if not row:
            metrics["of_classes"] = by_class(targets, predicted, getattr(batches.dataset, "classes", None))
    if job.args.verbose:
        print(class_table(metrics["of_classes"]))
    return metrics | {"items": {"images": list(range(len(targets))), "values": values}}
