"""The flags of open_clip_train: OpenCLIP's own and those that this package adds.

This file imports no torch, so that `--help` is quick.
"""
import argparse
from collections.abc import Callable
from pathlib import Path

from ..errors import number_from, read_flags
from . import plugins
from .configs import has_patch_tower
from .openclip import hook


def split(original: Callable, argv: list[str]) -> tuple[argparse.Namespace, argparse.Namespace]:
    """Return the flags that this package adds, and those that OpenCLIP parses."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    own.add_argument("--plugin", action="append", metavar="MODULE",
                     help="Module or file.py that registers the model's objective (may be repeated).")
    own.add_argument("--allow-nonfinite-loss", action="store_true",
                     help="Keep training and saving when a captioner's loss or weights are not finite.")
    own.add_argument("--pretrained-image", nargs="?", const=True, metavar="SOURCE",
                     help="Initialize the image tower of a captioner or LiT model from weights of OpenCLIP, timm or "
                     "transformers (a file or a folder), a training run, an exported model, or timm:NAME (downloaded "
                     "unless cached).")
    own.add_argument("--image-lr-scale", type=float, metavar="SCALE",
                     help="Learning rate of a captioner's image tower, as a multiple of the decoder's.")
    own.add_argument("--unlock-image-after", type=number_from(1), metavar="EPOCHS",
                     help="Lock a captioner's image tower for this many epochs, then train it as well.")
    own.add_argument("--learn-image-bn-stats", action="store_true",
                     help="Let BatchNorm in a pretrained image tower of a captioner or LiT model take the statistics "
                     "of the batches where it is not locked. Otherwise it keeps those that it has.")
    own.add_argument("--cache-features", metavar="DIR",
                     help="Compute the patch tokens of a locked image tower once, without augmentation, and keep them "
                     "in DIR for all epochs and runs. With --unlock-image-after the epochs before it read them.")
    flags, rest = own.parse_known_args(argv)
    try:
        return flags, original(rest)
    except (ValueError, SyntaxError) as problem:  # OpenCLIP's --aug-cfg alone raises them
        raise ValueError(f"--aug-cfg takes NAME=VALUE, such as 'scale=(0.5, 1)' ({problem})") from problem
    except SystemExit as end:
        if not end.code:
            own.print_help()
        raise


@hook
def parse_args(original, argv):
    """Wrap `open_clip_train.main.parse_args`: add the flags of this package."""
    flags, args = split(original, argv)
    for plugin in flags.plugin or ():
        plugins.load_plugin(plugin)
    given = {name: x for name, x in vars(flags).items() if x is not None and x is not False}
    vars(args).update(given)  # given flags only: otherwise params.txt stays as OpenCLIP writes it
    import open_clip

    from . import runs
    known = {}  # goes to the run's params.txt
    if args.pretrained_image and has_patch_tower(args.model):
        from . import image_source
        args.pretrained_image = image_source.resolve(args.pretrained_image, args.model)
        known = image_source.normalization(args.pretrained_image, args.model)
    elif args.pretrained and ":" not in args.model and not open_clip.is_pretrained_cfg(args.model, args.pretrained):
        try:
            args.pretrained = runs.weights_file(args.pretrained, args.model)
            known = (runs.image_settings(Path(args.pretrained)) if Path(args.pretrained).is_file() else None) or {}
        except (ValueError, FileNotFoundError) as problem:
            raise ValueError(f"--pretrained {args.pretrained}: {problem}") from problem
    vars(args).update({f"image_{name}": getattr(args, f"image_{name}") or known.get(name)
                       for name in runs.IMAGE_SETTINGS})
    if flags.plugin:
        args.plugin = ", ".join(map(plugins.name_of, flags.plugin))
    return args


def parse_first(argv: list[str]) -> None:
    """Print --help, or one line about a wrong flag, before OpenCLIP is imported, which takes seconds."""
    from open_clip_train import params
    read_flags(lambda given: split(params.parse_args, given), argv)


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the parsed flags. A wrong flag ends the process with one line, without the usage of 90 flags."""
    from open_clip_train.main import parse_args
    return read_flags(parse_args, argv)
