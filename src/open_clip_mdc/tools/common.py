"""What several tools share: flags in one spelling, and what these ask for. Imports no torch: `--help` is quick."""
import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ..pretrained import PretrainedCaptioner

MIN_BLIND_IMAGES = 32  # the mean of few images shows them


def positive(value: str) -> int:
    """The type of flags that count something."""
    if int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value} should be at least 1")
    return int(value)


def add_model(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """With `required` false --model may stand alone, for a network that is not trained yet."""
    parser.add_argument("--pretrained", required=required, help="checkpoint, run folder, local-dir: or hf-hub: id")
    parser.add_argument("--model", help="architecture, for a checkpoint outside a run folder" +
                        (", or alone for an untrained network") * (not required))
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")


def add_images(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"),
                        help="of the arithmetic; weights stay float32 (default: bf16 on cuda, else fp32)")
    parser.add_argument("--batch-size", type=positive, default=32, help="images at a time (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2,
                        help="processes that decode images; 0: none but this one (default: %(default)s)")
    parser.add_argument("--blind-images", nargs="+", metavar="PATHS",
                        help=f"images whose mean stands for no image, {MIN_BLIND_IMAGES} or more "
                             f"(default: those given)")


def load_captioner(args: argparse.Namespace) -> "PretrainedCaptioner":
    """The model that the flags name; raises as `pretrained.load`."""
    from ..pretrained import load
    return load(args.pretrained, args.model, args.device, getattr(args, "precision", "fp32"))


def blind_image(loaded: "PretrainedCaptioner", paths: list[Path], args: argparse.Namespace) -> "torch.Tensor":
    """What stands for no image: the mean of --blind-images, or else of these files, [P, D].

    Raises:
        ValueError: there are too few images, or one cannot be read.
    """
    from tqdm import tqdm

    from ..data.pictures import IMAGE_FILES, SHARDS, Pictures, find_pictures
    from ..scoring import mean_image
    if args.blind_images:
        paths = find_pictures(args.blind_images, IMAGE_FILES + SHARDS)
    count = 0

    def images():
        nonlocal count
        for batch in tqdm(Pictures(paths, loaded.transform, args.batch_size).loader(args.workers), "mean image"):
            if batch.problems:
                raise ValueError(batch.problems[0])
            count += len(batch.new)
            yield batch.image.to(loaded.device)

    with loaded.autocast():
        blind = mean_image(loaded.model, images())
    if count < MIN_BLIND_IMAGES:
        raise ValueError(f"the mean of {count} images shows these images: to know what a caption is worth without an "
                         f"image takes {MIN_BLIND_IMAGES} or more; name a folder of them by --blind-images")
    return blind


def need_folder(flag: str, path: str) -> None:
    """Raises FileNotFoundError where a file to write has no folder, before the long work."""
    if not Path(path).absolute().parent.is_dir():
        raise FileNotFoundError(f"{flag} {path}: its folder does not exist")
