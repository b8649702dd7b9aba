"""The flags of open_clip_train: OpenCLIP's, and those that it does not have. Imports no torch: `--help` is quick."""
import argparse
from collections.abc import Callable

from ..errors import number_from, read_flags
from . import plugins
from .configs import is_captioner, is_lit
from .hook import hook


def split(original: Callable, argv: list[str]) -> tuple[argparse.Namespace, argparse.Namespace]:
    """Return the flags that OpenCLIP does not have, and what its parser makes of the others."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    own.add_argument("--plugin", action="append", metavar="MODULE",
                     help="Module or file.py that registers the model's objective (may be repeated).")
    own.add_argument("--allow-nonfinite-loss", action="store_true",
                     help="Keep training and saving when a captioner's loss or weights are not finite.")
    own.add_argument("--pretrained-image", nargs="?", const=True, metavar="SOURCE",
                     help="Start the image tower of a captioner or LiT from weights of OpenCLIP, timm or transformers "
                     "(a file or a folder), a run, an export, or timm:NAME, which may be downloaded.")
    own.add_argument("--image-lr-scale", type=float, metavar="SCALE",
                     help="Learning rate of a captioner's image tower, as a multiple of the decoder's.")
    own.add_argument("--unlock-image-after", type=number_from(1), metavar="EPOCHS",
                     help="Lock a captioner's image tower for this many epochs, then train it as well.")
    own.add_argument("--cache-features", metavar="DIR",
                     help="Compute the patch tokens of a locked image tower once, without augmentation, and keep them "
                     "in DIR for all epochs and runs.")
    flags, rest = own.parse_known_args(argv)
    try:
        return flags, original(rest)
    except SystemExit as end:
        if not end.code:
            own.print_help()
        raise


@hook
def parse_args(original, argv):
    """Wrap `open_clip_train.main.parse_args`: add the flags that OpenCLIP does not have."""
    flags, args = split(original, argv)
    for plugin in flags.plugin or ():
        plugins.load_plugin(plugin)
    given = {name: x for name, x in vars(flags).items() if x is not None and x is not False}
    vars(args).update(given)  # without them params.txt is as OpenCLIP's
    if args.pretrained_image and (is_captioner(args.model) or is_lit(args.model)):
        from . import image_source
        args.pretrained_image = image_source.of(args.pretrained_image, args.model)
        of_images = image_source.normalization(args.pretrained_image, args.model)  # which the run has to remember
        args.image_mean = args.image_mean or of_images.get("mean")
        args.image_std = args.image_std or of_images.get("std")
    if flags.plugin:
        args.plugin = ", ".join(map(plugins.name_of, flags.plugin))
    return args


def parse_first(argv: list[str]) -> None:
    """Answer --help, and refuse wrong flags in one line, before OpenCLIP is imported."""
    from open_clip_train import params
    read_flags(lambda given: split(params.parse_args, given), argv)


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the parsed flags. Exits with one line, without the usage of 90 flags."""
    from open_clip_train.main import parse_args
    return read_flags(parse_args, argv)
