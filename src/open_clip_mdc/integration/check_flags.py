"""Flags of open_clip_train that cannot work, refused before the model is built, and those that are hardly meant."""
import logging
import math
import os
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import open_clip
import torch

from ..data import weights
from ..data.captions import warnings_of
from ..data.shards import find_shards
from ..errors import Problem, close_names, flag
from ..models.precision import emulated
from . import image_source
from .check_data import find_data_problem, has_own_keys, is_csv, number_of_processes, warn_of_rows
from .configs import has_patch_tower, is_captioner
from .factory import class_named
from .openclip import version
from .runs import PHOTO, PHOTO_MODEL, check_folder, has_latest, latest_checkpoint, read_params, without_settings
from .trials import find_augmentation_problem, find_list_problem, find_optimizer_problem

# Flags for contrastive training, distillation or a text tower, which a captioner refuses: why, or what to do instead.
LEAVE_OUT = "leave it out"
NOT_FOR_CAPTIONERS = {
    "siglip": "a captioner has one loss. Leave it out, or add -contrastive to the model's name",
    "distill_model": LEAVE_OUT,
    "distill_pretrained": LEAVE_OUT,
    "lock_text": "the loss is the text decoder's. Use --lock-image to train the decoder alone",
    "horovod": "start with torchrun instead",
    "trace": "a traced model cannot train. Leave it out",
    "torchscript": "use --torchcompile",
    "imagenet_val": "use clip_benchmark on the checkpoint",
    "imagenet_v2": "use clip_benchmark on the checkpoint",
    "use_bnb_linear": "its layers would also replace the length head. Leave it out",
    "use_naflex": "the decoder attends to images of one size. Leave it out",
    "force_naflex_vision": "the decoder attends to images of one size. Leave it out",
    "audio_zeroshot_dataset": LEAVE_OUT,
    "pretrained_audio": LEAVE_OUT,
}
# Flags without effect on a captioner, with their defaults. With a contrastive loss, features are gathered.
GATHERED = {"local_loss": False, "gather_with_grad": False, "loss_dist_impl": None}
WITHOUT_EFFECT = {
    "coca_caption_loss_weight": 2.0, "coca_contrastive_loss_weight": 1.0, "lock_text_unlocked_layers": 0,
    "lock_text_freeze_layer_norm": False, "lock_image_freeze_bn_stats": False, "force_custom_text": False,
    "length_bucketing": False, "text_pad_multiple": None, "zeroshot_frequency": 2}
OF_SHARDS = {"train_num_samples": None, "dataset_resampled": False, "train_data_upsampling_factors": None}
GREATEST, ABOVE_0 = sys.float_info.max, sys.float_info.min
# Ranges of numbers: in words, the least, the greatest, the flags.
NUMBERS = [
    ("1 or more", 1, math.inf, ("batch_size", "epochs", "epochs_cooldown", "accum_freq", "log_every_n_steps",
                                "train_num_samples", "remote_sync_frequency", "force_image_size")),
    ("0 or more", 0, math.inf, ("warmup", "save_frequency", "zeroshot_frequency", "val_frequency",
                                "val_num_samples", "lock_image_unlocked_groups", "lock_text_unlocked_layers")),
    ("0 or more and finite", 0, GREATEST, ("lr", "wd", "eps", "lr_cooldown_end", "lr_cooldown_power",
                                          "coca_caption_loss_weight", "coca_contrastive_loss_weight")),
    ("0 or more and below 1", 0, math.nextafter(1, 0), ("beta1", "beta2", "momentum", "force_patch_dropout")),
    ("above 0", ABOVE_0, math.inf, ("grad_clip_norm",)),
    ("0 to 1000", 0, 1000, ("workers",)),
    ("3 or more, for SOT, a word and EOT", 3, math.inf, ("force_context_length",)),
    ("0 to 4294901760", 0, 2**32 - 2**16, ("seed",)),  # OpenCLIP adds a process's number, and NumPy takes 32 bits
    ("above 0 and finite", ABOVE_0, GREATEST, ("image_lr_scale",)),
]


def find_model_problem(args) -> Problem:
    """Check that --model, --pretrained and --resume name what is there."""
    if args.model == PHOTO:
        return f"--model {PHOTO} is the packaged captioner: give --model {PHOTO_MODEL} --pretrained {PHOTO}"
    if open_clip.get_model_config(args.model) is None:
        return f"--model {args.model} is not known{close_names(args.model, open_clip.list_models())}"
    if args.pretrained and ":" not in args.model and not os.path.isfile(args.pretrained) \
            and not open_clip.is_pretrained_cfg(args.model, args.pretrained):
        tags = ", ".join(open_clip.list_pretrained_tags_by_model(args.model))
        return f"--pretrained {args.pretrained} is no file" + (f", and no tag of {args.model}: {tags}" if tags else "")
    if args.pretrained and args.model.startswith(("local-dir:", "hf-hub:")):
        return f"--pretrained {args.pretrained}: --model {args.model} names its own weights: leave one of them out"
    check_folder(args.model)
    for name in ("pretrained", "resume"):
        path = getattr(args, name)
        if path and os.path.isfile(path):
            try:
                weights.check(Path(path))
            except ValueError as problem:
                return f"--{name}: {problem}"
    if args.resume == "latest":
        if not args.name:
            return "--resume latest needs --name: give that of the run"
        run = Path(args.logs, args.name, "params.txt")
        if run.exists() and (trained := read_params(run).get("model", args.model)) != args.model:
            return f"--name {args.name} is a run of {trained}, not of --model {args.model}: give another --name"
    elif args.resume and "://" not in args.resume and not os.path.isfile(args.resume) and not (
            getattr(args, "fsdp", False) and os.path.isfile(os.path.join(args.resume, ".metadata"))):
        return f"--resume {args.resume} is no file: give a checkpoint or 'latest'"
    return None


def find_number_problem(args) -> Problem:
    """Check the range of each flag that takes numbers."""
    for words, least, most, names in NUMBERS:
        for name in names:
            value = getattr(args, name, None)
            for number in value if isinstance(value, list) else [] if value is None else [value]:
                if not least <= number <= most:
                    return f"{flag(name)} {number} should be {words}"
    return None


def find_cache_problem(args) -> Problem:
    """Check --cache-features. The tokens of an image must stay the same while the tower is locked."""
    if not getattr(args, "cache_features", None):
        return None
    config = open_clip.get_model_config(args.model)
    whole = not args.lock_image_unlocked_groups if args.lock_image else getattr(args, "unlock_image_after", None)
    for wrong, why in (
            (not whole, "needs the whole tower locked, by --lock-image, or at first, by --unlock-image-after"),
            (args.aug_cfg, "is refused with augmentation: leave out --aug-cfg"),
            (args.dataset_type == "synthetic" or args.train_data and (
                is_csv(args.train_data, args) or "://" in args.train_data),
             "needs local shards: make them of a table by open_clip_mdc prepare"),
            (has_own_keys(args), "does not work with --text-key, --json-text-key or --image-key: prepare shards by "
             "open_clip_mdc prepare shards"),
            ("vq_cfg" in config or config.get("caption_cfg", {}).get("regions", 1) > 1,
             f"is refused for {args.model}, which trains a part of the image tower: leave it out"),
            (getattr(args, "fsdp", False), "does not work with --fsdp: leave one of them out")):
        if wrong:
            return f"--cache-features {args.cache_features} {why}"
    return None


def find_image_problem(args) -> Problem:
    """Check that the image tower starts from weights that fit it."""
    if isinstance(args.pretrained_image, str) and args.pretrained:
        return f"--pretrained {args.pretrained} has an image tower already: leave out --pretrained-image"
    borrowed = has_patch_tower(args.model) and not is_captioner(args.model)
    if borrowed and args.lock_image and not (args.pretrained_image or args.pretrained or args.resume):
        return f"--model {args.model}: --lock-image locks an untrained image tower: give --pretrained-image RUN"
    if isinstance(args.pretrained_image, str) and has_patch_tower(args.model):
        size = args.force_image_size
        image_source.check(args.pretrained_image, args.model, args.force_quick_gelu,
                           size[0] if isinstance(size, list) and len(size) == 1 else size)
    return None


def find_value_problem(args) -> Problem:
    """Check values that OpenCLIP reads only after the model is built, or never checks."""
    if args.copy_codebase:
        return "--copy-codebase would copy all of Python's packages: leave it out, and keep the output of pip freeze"
    if args.delete_previous_checkpoint and args.save_frequency > 1 and not args.save_most_recent:
        return "--delete-previous-checkpoint would leave no checkpoint between two: add --save-most-recent"
    for logger in ("wandb", "tensorboard"):
        if (logger in args.report_to or "all" in args.report_to) and find_spec(logger) is None:
            return f"--report-to {args.report_to} needs {logger}: pip install {logger}"
    if unknown := set(filter(None, args.report_to.split(","))) - {"all", *version.LOGGERS}:
        return f"--report-to {', '.join(sorted(unknown))} is not known: give wandb, tensorboard or wandb,tensorboard"
    if getattr(args, "trace", False) and args.train_data:  # 4.x has no such flag
        return f"--trace: {NOT_FOR_CAPTIONERS['trace']}"
    if getattr(args, "horovod", False) and find_spec("horovod") is None:
        return f"--horovod needs horovod, which is not installed: {NOT_FOR_CAPTIONERS['horovod']}"
    if args.distill_model and args.distill_pretrained and (args.accum_freq > 1 or "coca" in args.model.lower()):
        return (f"--distill-model {args.distill_model} works with --accum-freq 1 only, and with no CoCa: OpenCLIP's "
                "distillation has neither")
    for name, value, known in (
            ("device", re.sub(r":\d+$", "", args.device), ("cuda", "cpu", "mps", "xpu", "npu", "hpu")),
            ("opt", re.sub("^timm/.*", "timm/NAME", args.opt.lower()), (*version.OPTIMIZERS, "timm/NAME")),
            ("lr_scheduler", args.lr_scheduler, ("cosine", "const", "const-cooldown"))):
        if value not in known:
            return f"{flag(name)} {getattr(args, name)} is not known: give {', '.join(known)}"
    device, _, number = args.device.partition(":")
    if device == "cuda" and torch.cuda.is_available() and int(number or 0) >= torch.cuda.device_count():
        return f"--device {args.device}: there are only {torch.cuda.device_count()} GPUs, counted from 0"
    if args.lr_scheduler == "const-cooldown" and not 0 < (args.epochs_cooldown or 0) <= args.epochs:
        return f"--lr-scheduler const-cooldown needs --epochs-cooldown, at most --epochs {args.epochs}"
    return None


def find_captioner_problem(args) -> Problem:
    """Check flags that only captioners take, and those that captioners do not take."""
    contrasts = getattr(class_named(args.model), "contrasts", False)
    for name, instead in NOT_FOR_CAPTIONERS.items():
        if getattr(args, name, None) and is_captioner(args.model) and not (contrasts and name == "siglip"):
            return f"{flag(name)} is not supported for the captioner {args.model}: {instead}"
    for name, fits in (("image_lr_scale", is_captioner), ("unlock_image_after", is_captioner),
                       ("cache_features", has_patch_tower), ("learn_image_bn_stats", has_patch_tower)):
        if getattr(args, name, None) is not None and not fits(args.model):
            return f"{flag(name)} is for captioners, which {args.model} is not: leave it out"
    if contrasts and number_of_processes() > 1 and not (args.gather_with_grad or args.siglip):
        # OpenCLIP's loss would lack the gradients from other processes, and the mean would divide by their number.
        return (f"--model {args.model} on several processes needs --gather-with-grad (and --local-loss, to save "
                "memory): without it the contrastive gradient is divided by their number, and the captions' is not")
    locked = getattr(args, "unlock_image_after", None)
    if locked is None:
        return None
    if getattr(args, "fsdp", False):
        return "--unlock-image-after does not work with --fsdp, which shards before it: use DDP, or --lock-image"
    if args.lock_image:
        return f"--unlock-image-after {locked} locks the image tower itself: leave out --lock-image"
    if locked >= args.epochs:
        return f"--unlock-image-after {locked} never unlocks within --epochs {args.epochs}: use --lock-image"
    return None


def find_vq_problem(args) -> Problem:
    """Check that the VQ-VAE of the model, if it has one, is trained, and runs as it was trained."""
    vq_cfg = open_clip.get_model_config(args.model).get("vq_cfg")
    if vq_cfg is None:
        return None
    if args.precision not in ("fp32", "amp", "amp_bf16", "amp_bfloat16"):
        return f"--precision {args.precision}: a VQ-VAE in 16 bit gives other codes. Use fp32, amp or amp_bf16"
    if getattr(args, "fsdp", False):
        return f"--fsdp is not supported for {args.model}, whose VQ-VAE is frozen: leave it out, the model is small"
    if not args.pretrained and not (has_latest(args) if args.resume == "latest" else args.resume):
        return (f"{args.model}: its VQ-VAE is untrained. Train one by open_clip_mdc vq fit --model {args.model} ... "
                f"--out vq.pt and give it by --pretrained vq.pt")
    from ..models.vq import VQCfg, convolutions
    convolutions(VQCfg(**vq_cfg))  # raises if diffusers is missing
    return None


def find_problem(args) -> Problem:
    """Return the first problem of the flags, in one line that says what to do, or None."""
    try:
        return next(filter(None, (find(args) for find in (
            find_model_problem, find_captioner_problem, find_vq_problem, find_number_problem, find_list_problem,
            find_value_problem, find_augmentation_problem, find_optimizer_problem, find_data_problem,
            find_cache_problem, find_image_problem))), None)
    except (ValueError, OSError) as problem:  # an impossible model name or an unreadable file
        return str(problem)


def find_warnings(args) -> Iterator[str]:
    """Yield a warning for each setting that runs but is probably a mistake."""
    on_cuda = args.device.startswith("cuda") and torch.cuda.is_available()
    kind = "bfloat16" if "bf" in args.precision else "float16"
    device = "cpu" if args.device.startswith("cuda") and not on_cuda else args.device  # OpenCLIP takes the CPU then
    if args.precision != "fp32" and emulated(device, getattr(torch, kind)):
        yield f"--precision {args.precision}: this CPU is tens of times slower in {kind} than in float32. Use fp32"
    if args.pretrained and ":" not in args.model and os.path.isfile(args.pretrained) and not (
            args.image_mean or args.image_std) and (said := without_settings(args.pretrained, args.model)):
        yield f"{said}. Give --image-mean and --image-std if the weights had others"
    if args.precision in ("fp16", "pure_fp16"):
        yield (f"--precision {args.precision} has no gradient scaler, so that small gradients become 0 and the loss "
               f"stays far above that of fp32: give amp_bf16, amp or fp32")
    resumed = latest_checkpoint(Path(args.logs, args.name, "checkpoints")) if (
        args.resume == "latest" and has_latest(args)) else Path(args.resume or "")
    epoch = weights.stored_epoch(resumed) if resumed.is_file() else None
    if args.train_data and epoch is not None and epoch >= args.epochs:
        yield (f"--resume {args.resume} is of epoch {epoch}, so there is nothing to train up to --epochs "
               f"{args.epochs}: give more")
    table = args.train_data and is_csv(args.train_data, args)
    if table:
        yield from (f"--train-data: {warning}" for warning in warn_of_rows(args.train_data, args))
    yield from flags_without_effect(args, table)
    if args.precision == "amp" and on_cuda and is_captioner(args.model):
        yield ("--precision amp is float16, whose gradient scaler waits for the GPU at every step: "
               "--precision amp_bf16 --torchcompile is faster")
    if is_captioner(args.model) and "vit" not in args.model.lower() and args.beta2 == 0.999:
        yield f"no 'vit' in {args.model}, so OpenCLIP set Adam's beta2 to 0.999. The paper's is --beta2 0.98"
    for path in (args.train_data, args.val_data):
        if path and args.dataset_type != "synthetic" and not is_csv(path, args):
            yield from warnings_of(find_shards(path))


def flags_without_effect(args, table: bool) -> Iterator[str]:
    """Yield a warning for each flag that changes nothing. `table` tells that the training data are a CSV file."""
    locked = args.lock_image and not args.lock_image_unlocked_groups
    of_captioners = WITHOUT_EFFECT | ({} if getattr(class_named(args.model), "contrasts", False) else GATHERED)
    for applies, where, flags in (
            (not args.lock_image, "without --lock-image", {"lock_image_unlocked_groups": 0}),
            (locked, "with --lock-image", {"image_lr_scale": None, "learn_image_bn_stats": False,
                                           "force_patch_dropout": None}),
            (args.lr_scheduler != "const-cooldown", "without --lr-scheduler const-cooldown",
             {"epochs_cooldown": None, "lr_cooldown_end": 0.0, "lr_cooldown_power": 1.0}),
            (table, "on a CSV file", OF_SHARDS), (is_captioner(args.model), "on a captioner", of_captioners)):
        for name, default in flags.items() if applies else ():
            if getattr(args, name, default) != default:
                yield f"{flag(name)} has no effect {where}"


def warn_of_warmup(args, batches: int) -> None:
    """Warn if --warmup, 10,000 steps by default, is longer than a run of `batches` per epoch."""
    steps = batches // args.accum_freq * args.epochs
    if not args.skip_scheduler and args.warmup > steps:
        logging.warning("--warmup %d is longer than this run of %d steps: the learning rate ends at %.2g and does "
                        "not reach %g. Give --warmup %d, say",
                        args.warmup, steps, args.lr * steps / args.warmup, args.lr, steps // 10)
