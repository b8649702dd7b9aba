"""Train a captioner's image tower at a learning rate of its own, and lock it in the first epochs.

OpenCLIP's optimizer holds the tower's parameters from the start, in its usual groups. The changes made here last for
one epoch. So a checkpoint is as OpenCLIP writes it, and a run resumes bit for bit before and after the unlocking.
"""
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn import parallel

from ..models.towers import patch_tower
from .configs import has_patch_tower
from .factory import trains_captioner
from .openclip import hook, version
from .training import fuse, reproducible, unwrap

Schedule = Callable[[int], float]


@hook
def train_one_epoch(original, *args, **kwargs):
    """Wrap `open_clip_train.main.train_one_epoch`: make it `reproducible`, and apply the image tower's own rates.

    A captioner's AdamW is fused on a GPU.
    """
    @contextmanager
    def around(model, data, loss, epoch, optimizer, schedule, args):
        if trains_captioner(args) and torch.device(args.device).type == "cuda":
            fuse(optimizer)
        with reproducible(model, data, loss, epoch, args), of_epoch(model, optimizer, schedule, epoch, args) as own:
            yield own
    version.run_epoch(around, original, *args, **kwargs)


@contextmanager
def of_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Schedule, epoch: int,
             args) -> Iterator[tuple[nn.Module, Schedule]]:
    """Yield the model and the schedule of an epoch, by --unlock-image-after and --image-lr-scale."""
    with ExitStack() as stack:
        if has_patch_tower(getattr(args, "model", "")):
            patch_tower(unwrap(model)).freeze_bn_stats = freeze_bn_stats(args)
        if trains_captioner(args) and epoch < (getattr(args, "unlock_image_after", None) or 0):
            stack.enter_context(_locked(unwrap(model)))
            model = _wrapped_again(model)
        if trains_captioner(args) and (scale := getattr(args, "image_lr_scale", None)):
            schedule = stack.enter_context(_scaled(optimizer, schedule, unwrap(model).visual, scale))
        yield model, schedule


def freeze_bn_stats(args) -> bool:
    """Return whether the BatchNorm of a free image tower keeps the statistics that it has.

    A decoder has learnt to read tokens by those of a pretrained tower. Those of a batch give others: of
    EfficientNet-Lite0 on photographs their cosine is 0.3 to 0.5 (docs/reproduce.md). A tower with random weights learns
    them.
    """
    had = (getattr(args, flag, None) for flag in ("pretrained", "pretrained_image", "unlock_image_after"))
    return (any(had) or ":" in args.model) and not getattr(args, "learn_image_bn_stats", False)


@contextmanager
def _locked(captioner: nn.Module) -> Iterator[None]:
    free = [p for p in captioner.visual.parameters() if p.requires_grad]
    captioner.lock_image_tower()
    try:
        yield
    finally:
        for p in free:
            p.requires_grad_(True)


def _wrapped_again(model: nn.Module) -> nn.Module:
    """Return a model in a new DDP, as DDP waits for the parameters that needed a gradient when it was made."""
    ddp = getattr(model, "_orig_mod", model)
    if not isinstance(ddp, parallel.DistributedDataParallel):
        return model
    again = type(ddp)(ddp.module, device_ids=ddp.device_ids, static_graph=ddp.static_graph)
    return again if ddp is model else torch.compile(again)


@contextmanager
def _scaled(optimizer: torch.optim.Optimizer, schedule: Schedule, tower: nn.Module, scale: float) -> Iterator[Schedule]:
    ids = set(map(id, tower.parameters()))
    whole = list(optimizer.param_groups)

    def parts(of_tower: bool) -> list[dict]:
        return [{**group, "params": [p for p in group["params"] if (id(p) in ids) == of_tower]} for group in whole]
    decoder, image = parts(False), parts(True)  # OpenCLIP logs the rate of the first group

    def scale_rates() -> None:
        for group in image:
            group["lr"] *= scale

    def scaled(step: int) -> float:
        rate = schedule(step)
        scale_rates()
        return rate
    scale_rates()  # with --skip-scheduler `scaled` is never called
    optimizer.param_groups[:] = [group for group in decoder + image if group["params"]]  # timm's lookahead shares it
    try:
        yield scaled
    finally:
        for group, part in zip(whole, decoder, strict=True):
            group.update(part, params=group["params"])
        optimizer.param_groups[:] = whole
