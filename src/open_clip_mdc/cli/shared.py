"""The model and the null image that flags of several tools name, and checks of these flags. Imports no torch."""
import argparse
import ast
import hashlib
import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..data.outputs import is_folder
from ..decoding.options import TooFewImages, check_null_images, spread
from ..errors import flag, number_from

if TYPE_CHECKING:
    import torch

    from ..integration.pretrained import PretrainedCaptioner
    from .image_tokens import Reader

natural, positive = number_from(0), number_from(1)
MOST_WORKERS = 16  # per GPU: each worker reads the whole shard to decode its own batches


def docstring(module: str) -> str:
    """Return a module's docstring, without importing the module."""
    return ast.get_docstring(ast.parse(find_spec(module).loader.get_source(module)))


def check_jobs(args: argparse.Namespace) -> None:
    """Raise ValueError for --jobs with an --out that is one file."""
    if args.jobs and not is_folder(args.out):
        raise ValueError(f"--jobs is for tables of shards: make --out {args.out} a folder (no suffix)")


def check_length(args: argparse.Namespace) -> None:
    """Raise ValueError for --length or --min-length beyond the context in the model's config, before loading it."""
    from ..integration import checkpoints
    for name in ("length", "min_length"):
        checkpoints.check_length(flag(name), getattr(args, name, None), args.pretrained, args.model)


def load_captioner(args: argparse.Namespace, number: int = 0, any_project: bool = False) -> "PretrainedCaptioner":
    """Load the model that the flags name.

    `number` is that of the process among --jobs, which share the machine's GPUs or cores. With `any_project`, the model
    may be a captioner of another project, which can only be scored.
    """
    import torch

    from ..integration.checkpoints import default_device
    from ..integration.pretrained import PRECISIONS, PretrainedCaptioner, load
    from ..integration.processes import keep_freed_memory
    from ..models.precision import emulated
    device, jobs = default_device(args.device), getattr(args, "jobs", None) or 1
    on_cuda = device.startswith("cuda")
    if getattr(args, "batch_size", 0) is None:
        args.batch_size = 128 if on_cuda else 32
    if getattr(args, "workers", 0) is None:
        args.workers = max(1, min(MOST_WORKERS if on_cuda else 2, ((os.cpu_count() or 1) - 1) // jobs))
    if device == "cuda":
        device = f"cuda:{number % torch.cuda.device_count()}"
        torch.cuda.set_device(device)  # a thread that pins memory would make a context on the first one
    if jobs > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // jobs))
    keep_freed_memory(device)
    precision = getattr(args, "precision", "fp32")
    if emulated(device, PRECISIONS.get(precision)) and number == 0:
        print(f"warning: --precision {precision}: this CPU is tens of times slower than in fp32", file=sys.stderr)
    if any_project:
        from clip_benchmark_ext.models import load_foreign
        if found := load_foreign(args.model, args.pretrained, device):
            return PretrainedCaptioner(*found, device, precision or ("bf16" if on_cuda else "fp32"))
    return load(args.pretrained, args.model, device, precision, getattr(args, "compile", False))


def null_image(loaded: "PretrainedCaptioner", paths: list, args: argparse.Namespace, limit: int | None = None,
               read: "Reader | None" = None) -> tuple["torch.Tensor", str]:
    """Average --blind-images, or else `limit` readable images of `paths`, into the null image [P, D].

    `read` replaces the reading of the images (`image_reader`).
    Returns it with a description that a resumed run compares: the number of images and a hash of their pixels.
    """
    from ..data.images import Images
    from ..data.paths import ANY_IMAGES, find_images
    from ..data.shards import count_images
    from ..data.weights import hash_tensor
    from ..likelihood.log_likelihood import mean_image
    from ..progress import progress_bar
    if args.blind_images:
        paths = find_images(args.blind_images, ANY_IMAGES)
        limit = None
    elif limit:
        paths = spread(paths)
    names, problems, digest = [], [], hashlib.sha256()

    def images():
        batches = read(paths, limit) if read else Images(paths, loaded.to_bytes, args.batch_size, limit)
        with progress_bar(total=count_images(paths, limit), what="mean image") as bar:
            for batch in batches.loader(args.workers):
                if batch.problems and args.blind_images:
                    raise ValueError(batch.problems[0])
                names.extend(batch.new)
                problems.extend(batch.problems)
                bar.update(len(batch.new))
                if batch.new:
                    for image in batch.image:
                        hash_tensor(digest, image)
                    yield loaded.from_bytes(batch.image)
        if problems and not names:
            raise ValueError(problems[0])

    with loaded.autocast():
        blind = mean_image(loaded.model, images())
    check_null_images(len(names), "--blind-images")
    return blind, f"the mean of {len(names)} images, {digest.hexdigest()[:12]}"


def prior_image(loaded: "PretrainedCaptioner", paths: list, args: argparse.Namespace, limit: int | None = None,
                say: bool = True, read: "Reader | None" = None) -> tuple["torch.Tensor | None", str | None]:
    """Return `null_image`, or (None, None) if --plain or too few images leave out blind and debiased scores."""
    if args.plain:
        return None, None
    try:
        return null_image(loaded, paths, args, limit, read)
    except TooFewImages as problem:
        if args.blind_images or vars(args).get("out_shards"):  # --top chooses by the debiased score
            raise
        if say:
            print(f"blind and debiased scores are left out: {problem}", file=sys.stderr)
        return None, None
