"""Share a data set among processes: each takes every n-th batch, and the results are put back in order.

Batches are those of a single process, so the result is the same to the last digit.
"""
from collections.abc import Iterable, Iterator
from datetime import timedelta
from itertools import islice
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from open_clip_mdc.progress import progress_bar

Result = TypeVar("Result")


def start(device_type: str) -> None:
    # The first process alone scores captions, by slow programs, while the others wait.
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=timedelta(days=1))
    if device_type == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())


def rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def is_first() -> bool:
    return rank_and_size()[0] == 0


def own_batches(dataloader: Iterable, description: str, count: int | None = None) -> Iterator[tuple[int, tuple]]:
    """Yield this process's batches with their numbers, and show a progress bar. A stream is read whole by each process.

    `count` is the number of batches of all processes, if a stream's is known.
    """
    rank, size = rank_and_size()
    if isinstance(dataloader, DataLoader) and not isinstance(dataloader.dataset, IterableDataset):
        batches = list(dataloader.batch_sampler)
        count = len(batches)
        own = DataLoader(dataloader.dataset, batch_sampler=batches[rank::size], num_workers=dataloader.num_workers,
                         collate_fn=dataloader.collate_fn, timeout=dataloader.timeout)
    else:
        own = islice(dataloader, rank, None, size)
    total = count and len(range(rank, count, size))
    for i, batch in enumerate(progress_bar(own, description, "batch", total=total, disable=rank != 0)):
        yield rank + i * size, batch


def merge(numbered: list[tuple[int, object]]) -> list:
    """Return the results of all processes on every process, in the order of their batches, and then of processes.

    `numbered` has (batch number, result) of this process.
    """
    _, size = rank_and_size()
    parts = [numbered]
    if size > 1:
        parts = [None] * size
        dist.all_gather_object(parts, numbered)
    return [result for _, result in sorted(sum(parts, []), key=lambda x: x[0])]


def gathered(numbered: Iterator[tuple[int, Result]]) -> Iterator[Result]:
    """Yield the results of all processes in the order of their batches, one of each process at a time."""
    while found := merge(list(islice(numbered, 1))):
        yield from found


def everywhere(condition: bool) -> bool:
    return all(merge([(0, condition)]))
