"""Hooks for OpenCLIP's training of captioners: epoch, validation, gradient clipping and DDP (patches.py)."""
import json
import logging
from contextlib import contextmanager, nullcontext
from functools import partial
from inspect import signature
from pathlib import Path

import numpy as np
import open_clip
import torch

from ..data import weights
from ..data.files import new_file
from ..models.captioner import Captioner
from ..models.towers import patch_tower
from .data import seed_noise
from .factory import class_named, trains_captioner
from .nan_guard import WatchedLoss, check_weights
from .openclip import hook, version
from .validation import nelbo


def caption_loss(args, contrastive):
    """Return the loss of a captioner, which ends the training where it is not finite.

    `contrastive()` returns OpenCLIP's own loss for the same flags, which some captioners add to theirs.
    """
    caption_cfg = open_clip.get_model_config(args.model)["caption_cfg"]
    return WatchedLoss(class_named(args.model).caption_loss(caption_cfg, contrastive), args)


def unwrap(model):
    """Return the model inside a task, DDP and torch.compile."""
    for wrapper in ("trainable_module", "_orig_mod", "module", "_orig_mod"):
        model = getattr(model, wrapper, model)
    return model


@hook
def create_loss(original, args, *model, **rest):
    """Wrap OpenCLIP's `create_loss` (4.x: `create_task`): a captioner has a loss of its own."""
    if not trains_captioner(args):
        return original(args, *model, **rest)
    return version.with_loss(partial(caption_loss, args), original, args, *model, **rest)


@contextmanager
def reproducible(model, data, loss, epoch, args):
    """Run an epoch whose random numbers are a function of --seed, rank and epoch.

    A captioner's texts are noised and packed before they go to the device, once for both passes of --accum-freq. Raises
    FloatingPointError on all ranks if the loss or the weights are not finite, before OpenCLIP saves the epoch.
    """
    model, captioner, seed = unwrap(model), trains_captioner(args), getattr(args, "seed", 0)
    if captioner:
        model.seed_t(np.random.SeedSequence([seed, epoch]))
        data["train"].dataloader.prepare = model.prepare
    cache = getattr(data["train"].dataloader, "cache", None)
    if cache is not None and epoch < cache.epochs:  # a run that resumes later has another tower by then
        cache.fill(patch_tower(model), args.precision, args.device, getattr(args, "rank", 0),
                   getattr(args, "world_size", 1))
    seed_noise(seed, epoch, getattr(args, "rank", 0))
    watched = isinstance(loss, WatchedLoss)
    if watched:
        loss.start(epoch)
    # DDP would split the compiled graph, and compile each part for several lengths of captions. Older PyTorch fails.
    whole_graphs = captioner and getattr(args, "torchcompile", False)
    with torch._dynamo.config.patch(optimize_ddp=False) if whole_graphs else nullcontext():
        yield
    if watched:
        loss.check()
        check_weights(model, epoch)


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """Let AdamW update all weights in one kernel: 7 passes over their memory, where PyTorch's default takes 20."""
    if type(optimizer) is torch.optim.AdamW:
        for group in optimizer.param_groups:
            group["fused"] = True
        for weights, state in optimizer.state.items():  # a resumed run may have counted its steps on the CPU
            state["step"] = state["step"].to(weights.device)


def forget_from(epoch: int, path: Path) -> None:
    """Remove the rows of this epoch and later ones, which a run has left that was killed before it saved.

    A row without an epoch, as OpenCLIP writes for zero-shot classification alone, stays.
    """
    if not path.exists():
        return
    kept = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            if json.loads(line).get("epoch", 0) >= epoch:
                break
        except (ValueError, AttributeError, TypeError):
            logging.warning("%s: line %d is incomplete, so it and all lines after it are removed", path, number)
            break
        kept.append(f"{line}\n")
    with new_file(path) as partial:
        partial.write_text("".join(kept), encoding="utf-8")


@hook
def evaluate(original, model, data, epoch, args, **rest):
    """Wrap `open_clip_train.main.evaluate`: OpenCLIP logs what `validation_metrics` returns for a captioner."""
    if getattr(args, "save_logs", False) and getattr(args, "train_data", None):
        forget_from(epoch, Path(args.checkpoint_path) / "results.jsonl")
    if not trains_captioner(args):
        return original(model, data, epoch, args, **rest)
    if "val" in data:
        data = {**data, "captions": data["val"]}
        if not class_named(args.model).contrasts:  # OpenCLIP runs its contrastive validation if there is a "val"
            del data["val"]
    try:
        return original(model, data, epoch, args, **rest)
    except Exception:
        if "train" not in data:
            raise
        logging.exception(f"Validation of epoch {epoch} failed. The checkpoint is saved and training continues.")
        return {}


@hook
def validation_metrics(original, model, data, epoch, args, tokenizer=None):
    """Wrap `open_clip_train.train.zero_shot_eval` (4.x: `zero_shot_eval_all`): return the NELBO of held-out captions.

    The result of any model names its epoch, which `forget_from` reads. Under --fsdp all ranks call this function, each
    on all captions, as all ranks must take part in a forward pass.
    """
    if not trains_captioner(args):
        metrics = original(model, data, epoch, args, tokenizer=tokenizer)
        return {**metrics, "epoch": epoch} if metrics else metrics
    due = args.val_frequency and (epoch % args.val_frequency == 0 or epoch == args.epochs)
    if "captions" not in data or not due:
        return {}
    precision = "fp32" if getattr(args, "fsdp", False) else args.precision  # FSDP2 casts by itself
    metrics = nelbo(unwrap(model), data["captions"].dataloader, args.device, precision,
                    getattr(args, "val_num_samples", None))
    return {**metrics, "epoch": epoch}


@hook
def clip_grad_norm(original, parameters, *args, **kwargs):
    """Wrap `torch.nn.utils.clip_grad_norm_`: leave out parameters that are marked `unclipped`."""
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    return original([p for p in parameters if not getattr(p, "unclipped", False)], *args, **kwargs)


def distributed_data_parallel(original):
    """Return a subclass of `DistributedDataParallel` that works on the CPU, and costs a captioner less."""
    parameters = signature(original)
    sync_buffers = "forward_sync_buffers" if "forward_sync_buffers" in parameters.parameters else "broadcast_buffers"

    class DistributedDataParallel(original):
        def __init__(self, *args, **kwargs):
            call = parameters.bind(*args, **kwargs)
            module = call.arguments["module"]
            if "device_ids" in call.arguments and next(module.parameters()).device.type == "cpu":
                call.arguments["device_ids"] = None
            if isinstance(unwrap(module), Captioner):  # its buffers are constant, and no one needs a copy of gradients
                if not {"broadcast_buffers", "forward_sync_buffers"} & set(call.arguments):
                    call.arguments[sync_buffers] = False
                call.arguments.setdefault("gradient_as_bucket_view", True)
            super().__init__(*call.args, **call.kwargs)

        def load_state_dict(self, state_dict, strict=True, assign=False):
            return self.module.load_state_dict(weights.bare_names(state_dict), strict, assign)
    return DistributedDataParallel
