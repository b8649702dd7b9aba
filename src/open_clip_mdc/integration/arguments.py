"""The flags of open_clip_train: OpenCLIP's own and those that this package adds (train_flags.json).

This file imports no torch, so that `--help` is quick.
"""
import argparse
import json
from collections.abc import Callable
from pathlib import Path

from ..errors import read_flags
from . import plugins
from .configs import has_patch_tower
from .decoding_flags import add_row
from .openclip import hook


def split(original: Callable, argv: list[str]) -> tuple[argparse.Namespace, argparse.Namespace]:
    """Return the flags that this package adds, and those that OpenCLIP parses."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    for row in json.loads(Path(__file__).with_name("train_flags.json").read_bytes()):
        add_row(own, row)
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
    # Given flags only: otherwise params.txt stays as OpenCLIP writes it.
    vars(args).update({name: x for name, x in vars(flags).items() if x is not None and x is not False})
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
