"""Flags of open_clip_train that are lists, mappings and names, tried out before the model is built."""
import math
import warnings

import torch
from open_clip.transform import image_transform
from PIL import Image

from ..errors import Problem, flag
from .check_data import is_csv
from .runs import checked_settings


def find_list_problem(args) -> Problem:
    """Check the settings of images, and the factors of sources of shards. Raises ValueError for the former."""
    for given, name in (("image_mean", "mean"), ("image_std", "std"), ("force_image_size", "size")):
        checked_settings({name: getattr(args, given, None)}, flag(given))
    factors, sources = args.train_data_upsampling_factors, (args.train_data or "").split("::")
    if factors is None or is_csv(sources[0], args):
        return None
    try:
        numbers = [float(factor) for factor in factors.split("::")]
    except ValueError:
        numbers = []
    fit = len(numbers) == len(sources) and all(0 <= number < math.inf for number in numbers) and sum(numbers) > 0
    if fit and args.dataset_resampled:
        return None
    return (f"--train-data-upsampling-factors {factors} needs --dataset-resampled, which draws shards by them, and one "
            f"number of 0 or more for each of {len(sources)} sources, joined by ::, such as 2::1")


def find_augmentation_problem(args) -> Problem:
    """Check --aug-cfg by an image."""
    if not args.aug_cfg:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            transform = image_transform(32, True, aug_cfg=args.aug_cfg)
            for _ in range(4):  # some of its parts are drawn
                transform(Image.new("RGB", (48, 40)))
    except Exception as problem:  # torchvision and timm fail in many ways
        given = " ".join(f"{name}={value}" for name, value in args.aug_cfg.items())
        return f"--aug-cfg {given} cannot be used ({str(problem).strip() or type(problem).__name__})"
    return None


def find_optimizer_problem(args) -> Problem:
    """Check --opt timm/NAME by a step, with the flags that OpenCLIP passes on."""
    kind, _, name = args.opt.lower().partition("/")
    if kind != "timm":
        return None
    from timm.optim import create_optimizer_v2
    more, model = {}, torch.nn.Linear(2, 2)
    if args.momentum is not None:
        more["momentum"] = args.momentum
    try:
        if (args.beta1, args.beta2) != (None, None):
            more["betas"] = float(args.beta1), float(args.beta2)
        with torch.enable_grad():
            optimizer = create_optimizer_v2(model, name, lr=float(args.lr), weight_decay=args.wd, eps=args.eps, **more)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    except Exception as problem:  # each optimizer has its own needs
        flags = ("lr", "wd", "eps", "beta1", "beta2", "momentum")
        given = ", ".join(f"--{flag} {getattr(args, flag)}" for flag in flags)
        return f"--opt {args.opt} cannot take a step with {given} ({str(problem).strip()}): give those that it needs"
    return None
