"""Segmentation by a linear layer on frozen patch tokens, compared with an untrained network and pixels.

Like DINOv2's linear head (arXiv 2304.07193) on the last layer: standardised tokens, a linear layer, and logits enlarged
bilinearly to the mask. Unlike theirs, the whole image is squashed to the tower's size, without sliding windows.
"pixels" is the same head on the pixels of each patch. The learning rate is chosen on held-out training images.

Dimensions: B images, P patches, D width, C classes, S places in an image, G groups of images.
"""
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from open_clip_mdc.models.towers import patch_tokens, tower

from ..datasets.masks import VOID
from ..evaluation_job import Job
from ..metrics.mask_metrics import class_iou, confusion, measures, with_errors
from ..token_cache import Encode, Tensors, TokenCache
from . import heads
from .splits import Splits, load_splits

LEARNING_RATES = (1e-4, 1e-3, 1e-2, 1e-1)
WEIGHT_DECAY = 1e-4
BATCH = 16  # images
PLACES = 2048  # random pixels per image in a training step
GROUPS = 20  # of the jackknife


def encode_fn(job: Job) -> Encode:
    """Return the function from images to the patch tokens of both towers and the pixels of the patches."""
    trained, untrained = job.model.trained, job.model.untrained
    grid = tower(trained).grid

    def encode(images: Tensor) -> Tensors:
        return {"tokens": patch_tokens(trained, images).half(),
                "untrained": patch_tokens(untrained, images).half(), "pixels": patches(images, grid).half()}

    return encode


def patches(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the pixels [B, P, D] of each patch of a grid over images [B, 3, H, W], enlarged to whole patches."""
    size = [-(-side // count) for side, count in zip(images.shape[2:], grid, strict=True)]
    whole = [side * count for side, count in zip(size, grid, strict=True)]
    images = images if whole == list(images.shape[2:]) else F.interpolate(images, whole, mode="bilinear")
    return F.unfold(images, size, stride=size).mT


def at_places(logits: Tensor, places: Tensor) -> Tensor:
    """Return the logits [B, C, S] at `places`, by bilinear interpolation of logits [B, C, rows, columns].

    `places` are (x, y) from 0 to 1, [B, S, 2].
    """
    return F.grid_sample(logits, 2 * places[:, None] - 1, padding_mode="border", align_corners=False)[:, :, 0]


def sampled_loss(logits: Tensor, masks: list[Tensor]) -> Tensor:
    """Return the mean cross-entropy at PLACES random pixels of each mask, without void pixels."""
    places, targets = [], []
    for mask in masks:
        height, width = mask.shape
        pixels = torch.randint(mask.numel(), (PLACES,))
        targets.append(mask.flatten()[pixels])
        places.append(torch.stack(((pixels % width + 0.5) / width, (pixels // width + 0.5) / height), dim=1))
    places, targets = (torch.stack(x).to(logits.device) for x in (places, targets))
    losses = F.cross_entropy(at_places(logits, places), targets.long(), ignore_index=VOID, reduction="sum")
    return losses / (targets != VOID).sum().clamp_min(1)


@torch.no_grad()
def confusions(head: heads.LinearMask, cache: TokenCache, name: str, rows: Tensor, classes: int, device: str) -> Tensor:
    """Return the confusion matrices of GROUPS groups of images, long [G, C, C]."""
    groups = torch.zeros(min(GROUPS, len(rows)), classes, classes, dtype=torch.long)
    for start in range(0, len(rows), BATCH):
        part = rows[start:start + BATCH].tolist()
        for number, (logits, mask) in enumerate(zip(head(cache.rows(name, part).to(device)), cache.masks(part),
                                                    strict=True), start):
            found = F.interpolate(logits[None], mask.shape, mode="bilinear")[0].argmax(0).cpu()
            groups[number % len(groups)] += confusion(found, mask, classes)
    return groups


def by_head(job: Job, splits: Splits, name: str, classes: int, grid: tuple[int, int]) -> tuple[float, Tensor]:
    """Return the best learning rate on held-out images, and the confusion matrices of the test images."""
    args = job.args
    mean, std = heads.moments(splits.learn.batches(name))

    def loss_of(head: heads.LinearMask, rows: Tensor) -> Tensor:
        rows = rows.tolist()
        return sampled_loss(head(splits.learn.rows(name, rows).to(args.device)), splits.learn.masks(rows))

    def on_held_out(head: heads.LinearMask) -> float:
        found = confusions(head, splits.learn, name, splits.val, classes, args.device)
        return measures(found.sum(0))["miou"]

    lr, head = heads.fit(lambda: heads.LinearMask(mean, std, classes, grid).to(args.device), splits, loss_of,
                         on_held_out, LEARNING_RATES, args.seed, weight_decay=WEIGHT_DECAY,
                         epochs=args.fewshot_epochs, batch_size=BATCH, desc=f"masks by {name}")
    return lr, confusions(head, splits.test, name, torch.arange(len(splits.test)), classes, args.device)


def run(job: Job, batches: DataLoader) -> dict:
    """Return mIoU, pixel accuracy, their standard errors and the IoUs by row ("", "untrained/", "pixels/")."""
    names, grid = batches.dataset.classes, tower(job.model.trained).grid
    splits = load_splits(job, batches, encode_fn(job), "patches and masks")
    metrics = {"grid": list(grid), "held_out": len(splits.val), "images": len(splits.test),
               "epochs": job.args.fewshot_epochs, "seed": job.args.seed}
    for row, name in (("", "tokens"), ("untrained/", "untrained"), ("pixels/", "pixels")):
        lr, groups = by_head(job, splits, name, len(names), grid)
        found = with_errors(groups) | {"learning_rate": lr}
        found |= {f"iou {one}": x for one, x in zip(names, class_iou(groups.sum(0)).tolist(), strict=True)}
        metrics |= {f"{row}{name}": value for name, value in found.items()}
        if job.args.verbose:
            print(f"{row or 'encoder/'} mIoU {found['miou']:.3f}, pixel accuracy {found['pixel_acc']:.3f}")
    return metrics
