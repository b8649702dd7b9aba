"""Processes that decode images: as many as shared memory holds batches for. Imports no torch."""
import os
import sys
from collections.abc import Callable
from functools import cache

from PIL import Image

SHARED = "/dev/shm"  # workers hand over tensors and make their locks there
PREFETCHED = 2  # batches that PyTorch lets each worker have ready
IN_USE = 2  # more: the one that is worked on, until the next has been taken
EXTRA = 2 ** 17  # bytes of a batch beside its images: captions, and a page of memory for each tensor
STUCK = 1800  # seconds without a batch, after which a worker is taken for stuck


@cache
def _say(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)


def image_bytes(*transforms: Callable | None) -> int:
    """Return the bytes of an image's tensors, 0 for a transform that gives no tensor."""
    return sum(getattr(transform(Image.new("RGB", (32, 32))), "nbytes", 0) for transform in transforms if transform)


def shared_memory(folder: str) -> int:
    """Return the free bytes of shared memory, 0 if there is none or if it is read-only."""
    try:
        place = os.statvfs(folder)
    except OSError:
        return 0
    return 0 if place.f_flag & os.ST_RDONLY else place.f_bavail * place.f_frsize


def fitting(workers: int, batch_bytes: int, folder: str = SHARED) -> int:
    """Return how many of the workers can have their batches in shared memory at once. Fewer are said in a line."""
    free = shared_memory(folder) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    fit = min(workers, max(0, free // (batch_bytes + EXTRA) - IN_USE) // PREFETCHED)
    if fit < workers:
        _say(f"{folder} has {free / 2 ** 20:.0f} MB for batches of {batch_bytes / 2 ** 20:.1f} MB, so {fit} of "
             f"{workers} workers read them: give more (docker run --shm-size 2g) or a smaller batch")
    return fit
