"""Linear probe of image features (Sec. 4.1 and Table 1), on CPU and GPU.

On the same features the accuracy equals clip_benchmark's to the last digit. Its defaults are the paper's protocol:
AdamW, learning rate 0.1, batch 64, 10 epochs, cosine schedule and no weight decay. With a validation split the weight
decay is chosen by CLIP's search (arXiv 2103.00020, A.3). Unlike clip_benchmark's code, this draws the same few-shot
subset whether features were cached or not, and refuses classes with too few images.

Dimensions: N images, D width, C classes.
"""
import itertools
import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from sklearn.metrics import balanced_accuracy_score, classification_report
from torch import Tensor, nn
from torch.utils.data import DataLoader, random_split

from open_clip_mdc.data.fingerprint import fingerprint
from open_clip_mdc.data.markdown import markdown_table
from open_clip_mdc.data.weights import save_tensors
from open_clip_mdc.progress import progress_bar

from ..evaluation_job import Job
from ..features import Rows, cache_key, cached_features, default_feature, extract_features, feature_fn, note_of
from ..metrics.classes import UNSURE, Names, average_precisions, by_class, map_11_points, named

Data = dict[str, tuple[Tensor | Rows, Tensor]]  # features [N, D] and targets by split


def run(job: Job, batches: DataLoader) -> dict:
    """Train a linear classifier on a model's image features and measure it on the test split.

    A validation split, or --val_proportion of the training rows, chooses the weight decay. --save_clf is a safetensors
    file to write, with `weight` [C, D] and `bias` [C].

    Returns lp_acc1, lp_acc5 (None, with the reason, for five or fewer classes), lp_mean_per_class_recall, the settings,
    items with 1 for each test image that is classified correctly, and `of_classes`, a row for each class. With several
    classes of an image it returns lp_map_11_points in place of the former.
    """
    args, loaders = job.args, job.load_splits(batches)
    share, feature = args.val_proportion, job.flags.feature or default_feature(job.model)
    if args.fewshot_k == 0 or args.fewshot_epochs < 1:
        raise ValueError(f"--fewshot_k {args.fewshot_k}, --fewshot_epochs {args.fewshot_epochs}: give -1 or at least 1 "
                         "for --fewshot_k, and at least 1 for --fewshot_epochs")
    if share is not None and ("val" in loaders or not 0 < share < 1):
        raise ValueError(f"--val_proportion {share}: give a share between 0 and 1, and no --val_split")
    if args.save_clf is not None:
        Path(args.save_clf).parent.mkdir(parents=True, exist_ok=True)  # fail before the long work

    rng_state = torch.get_rng_state()
    data = _load_splits(job.model, loaders, feature, args)
    torch.set_rng_state(rng_state)
    # Draw the split and then a seed per loader, as clip_benchmark does before it orders the training rows, whether
    # features were cached or not.
    if share is not None:
        features, targets = data["train"]
        for split, part in zip(("train", "val"), random_split(range(len(targets)), [1 - share, share]), strict=True):
            rows = torch.tensor(part.indices)
            data[split] = Rows((features, rows)), targets[rows]
    torch.empty(len(data), dtype=torch.int64).random_()
    probe, result = probe_features(data, args, args.fewshot_k, args.verbose, getattr(batches.dataset, "classes", None))
    result |= {"normalized": args.normalize, "feature": feature}
    if args.save_clf is not None:
        tensors = {name: tensor.cpu().contiguous() for name, tensor in probe.state_dict().items()}
        about = {name: value for name, value in result.items() if name not in ("items", "of_classes")}
        save_tensors(args.save_clf, tensors, {"note": note_of(args), "result": json.dumps(about)})
    return result


def probe_features(data: Data, args: Namespace, fewshot_k: int = -1, verbose: bool = False,
                   names: Names = None) -> tuple[nn.Linear, dict]:
    """Train the classifier on (features [N, D], class ids [N]) by split, and measure it.

    If an image may have several classes, targets are [N, C] of 1, 0 or UNSURE. With a split "val" the weight decay is
    chosen on it, and the final training uses it too, unless few-shot, with this number of images per class. Returns the
    classifier, and the same metrics as `run`.
    """
    features, targets = data["train"]
    several = targets.ndim == 2
    if several and fewshot_k > 0:
        raise ValueError("--fewshot_k needs one class per image, and these have several: leave it out")
    rows = choose_rows(targets, fewshot_k)
    train_data = Rows((features, rows)), targets[rows]
    num_classes = targets.shape[1] if several else \
        1 + max(int(data[split][1].max()) for split in data if split != "test")

    weight_decay = 0
    if "val" in data:
        def validation_accuracy(weight_decay: float) -> float:
            probe = train(*train_data, num_classes, weight_decay, args)
            features, targets = data["val"]
            acc1 = quality(predict(probe, features, args), targets)
            if verbose:
                print(f"Valid accuracy with weight_decay {weight_decay}: {acc1}")
            return acc1

        weight_decay = best_weight_decay(validation_accuracy)
        if fewshot_k < 0:
            # The whole training set, with val. In few-shot that would be more than k images per class.
            features, targets = zip(train_data, data["val"], strict=True)
            train_data = Rows(*((x, torch.arange(len(x))) for x in features)), torch.cat(targets)

    probe = train(*train_data, num_classes, weight_decay, args)
    features, targets = data["test"]
    logits = predict(probe, features, args)
    about = {"weight_decay": weight_decay, "epochs": args.fewshot_epochs, "seed": args.seed, "fewshot_k": fewshot_k}
    if several:
        of_classes = average_precisions(logits, targets, names)
        if verbose:
            print(class_table(of_classes))
        return probe, {"lp_map_11_points": quality(logits, targets), **about, "of_classes": of_classes}
    predicted = logits.argmax(dim=1)
    classes = min(num_classes, int(targets.max()) + 1)
    acc1, acc5 = top_k_accuracy(logits, targets, (1, 5))
    if verbose:
        print(class_report(targets, predicted, names))
        print(f"Test acc1: {acc1} with weight_decay: {weight_decay}")
    result = {
        "lp_acc1": acc1,
        "lp_acc5": acc5 if classes > 5 else None,
        "lp_mean_per_class_recall": float(balanced_accuracy_score(targets.numpy(), predicted.numpy())),
        **about, "of_classes": by_class(targets, {"linear": predicted}, names),
    }
    if classes <= 5:
        result["lp_acc5_missing"] = f"there are only {classes} classes"
    right = predicted.eq(targets).int().tolist()
    return probe, {**result, "items": {"images": list(range(len(right))), "values": {"lp_acc1": right}}}


def _load_splits(model: nn.Module, loaders: dict[str, DataLoader], kind: str, args: Namespace) -> Data:
    model.eval().to(args.device)
    encode = feature_fn(model, kind)
    scale = (lambda image: F.normalize(encode(image), dim=-1)) if args.normalize else encode
    model_key = fingerprint(model)
    data = {}
    for split, loader in loaders.items():
        key = cache_key(model_key, loader, split, kind, args.normalize, args)
        extract = partial(extract_features, scale, loader, args, f"{split} features")
        data[split] = cached_features(args, key, extract)
        targets = data[split][1]
        if targets.ndim > 2 or targets.ndim == 1 and targets.is_floating_point():
            raise ValueError(f"{split}: a linear probe needs class ids of images, not targets {list(targets.shape)}")
    return data


def choose_rows(targets: Tensor, fewshot_k: int) -> Tensor:
    """Return random row numbers by torch's global generator: all in random order, or the first k of each class."""
    order = torch.randperm(len(targets))
    if fewshot_k < 0:
        return order
    classes = pd.Series(targets[order].numpy())
    counts = classes.value_counts().sort_index()
    scarce = counts[counts < fewshot_k]
    if len(scarce):
        raise ValueError(
            f"insufficient data: {len(scarce)} of {len(counts)} classes have fewer than {fewshot_k} training images "
            f"(class {scarce.index[0]} has {scarce.iloc[0]}): give a smaller --fewshot_k")
    return order[classes.groupby(classes).head(fewshot_k).index.to_numpy()]


def train(features: Tensor | Rows, targets: Tensor, num_classes: int, weight_decay: float,
          args: Namespace) -> nn.Linear:
    """Train a linear classifier of features [N, D] with AdamW and a cosine schedule down to 0, without warm-up.

    Weights and batches are drawn from torch's global generator, which is seeded here.
    """
    torch.manual_seed(args.seed)
    probe = nn.Linear(features.shape[1], num_classes).to(args.device)
    optimizer = torch.optim.AdamW(probe.parameters(), args.fewshot_lr, weight_decay=weight_decay)  # refuses one below 0
    # Row numbers, not rows, as gathering by index is much faster than loading rows one by one.
    batches = DataLoader(range(len(features)), args.batch_size, shuffle=True)
    steps = args.fewshot_epochs * len(batches)
    # Each pass shuffles anew.
    row_batches = itertools.chain.from_iterable(itertools.repeat(batches, args.fewshot_epochs))
    progress = progress_bar(row_batches, f"probe, weight decay {weight_decay:.3g}", "step", total=steps, leave=False)
    for step, rows in enumerate(progress):
        optimizer.param_groups[0]["lr"] = 0.5 * (1 + float(np.cos(np.pi * step / steps))) * args.fewshot_lr
        optimizer.zero_grad()
        with torch.autocast(args.device, enabled=args.amp):
            logits = probe(features[rows].to(args.device, torch.float32))
            loss = loss_of(logits, targets[rows].to(args.device))
        loss.backward()
        optimizer.step()
    return probe


def quality(logits: Tensor, targets: Tensor) -> float:
    """Return the accuracy, or the mean average precision if an image may have several classes."""
    return map_11_points(logits, targets) if targets.ndim == 2 else top_k_accuracy(logits, targets, (1,))[0]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    if targets.ndim == 1:
        return F.cross_entropy(logits, targets)
    return F.binary_cross_entropy_with_logits(logits, targets.clamp(min=0), (targets != UNSURE).float())


@torch.no_grad()
def predict(probe: nn.Linear, features: Tensor | Rows, args: Namespace) -> Tensor:
    with torch.autocast(args.device, enabled=args.amp):
        return torch.cat([probe(features[rows].to(args.device, torch.float32)).float().cpu()
                          for rows in torch.arange(len(features)).split(args.batch_size)])


def best_weight_decay(validation_accuracy: Callable[[float], float]) -> float:
    """Return the best of 97 weight decays from 1e-6 to 1e2 by clip_benchmark's `find_peak`, the smaller of equals."""
    candidates = np.logspace(-6, 2, num=97).tolist()
    accuracy = cache(validation_accuracy)
    best = candidates.index(max(candidates[::16], key=accuracy))  # the first of equals
    for span in (8, 4, 2, 1):
        around = candidates[max(best - span, 0):best + span + 1:span]
        best = candidates.index(max(around, key=accuracy))
    return candidates[best]


def class_report(targets: Tensor, predicted: Tensor, names: Names) -> str:
    """Return scikit-learn's report of class ids [N], with the names of the classes if they are known."""
    found = sorted({*targets.tolist(), *predicted.tolist()})
    shown = [named(i, names) for i in found]
    return classification_report(targets, predicted, labels=found, target_names=shown, digits=3, zero_division=0)


def class_table(rows: Sequence[dict]) -> str:
    """Return the rows of `by_class` or `average_precisions` as Markdown."""
    return markdown_table(list(rows[0]), ([f"{x:.3f}" if isinstance(x, float) else x for x in row.values()]
                                          for row in rows))


def top_k_accuracy(logits: Tensor, targets: Tensor, ks: tuple[int, ...]) -> list[float]:
    """Return for each k the share of rows of logits [N, C] with the target among the k largest.

    Of equal logits the first come first, as in argmax.
    """
    hits = logits.sort(dim=1, descending=True, stable=True).indices[:, :max(ks)] == targets[:, None]  # [N, max k]
    return [hits[:, :k].sum().item() / len(targets) for k in ks]
