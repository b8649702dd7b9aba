"""One data set over many processes: each takes every n-th batch, and the results are put back in order.

A batch is computed as a single process would: the result is the same to the digit.
"""
from collections.abc import Iterable, Iterator
from datetime import timedelta
from itertools import islice

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from open_clip_mdc.progress import progress_bar


def start(device_type: str) -> None:
    # The first process scores captions alone, by programs that take their time, while the others wait.
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=timedelta(days=1))
    if device_type == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())


def rank_and_size() -> tuple[int, int]:
    started = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if started else (0, 1)


def own_batches(dataloader: Iterable, description: str) -> Iterator[tuple[int, tuple]]:
    """Yield this process's batches with their numbers, behind a progress bar. A stream is read whole by each."""
    rank, size = rank_and_size()
    indexed = isinstance(dataloader, DataLoader) and not isinstance(dataloader.dataset, IterableDataset)
    if indexed and size > 1:
        batches = list(dataloader.batch_sampler)[rank::size]
        own = DataLoader(dataloader.dataset, batch_sampler=batches, num_workers=dataloader.num_workers,
                         collate_fn=dataloader.collate_fn)
        total = len(batches)
    else:
        own = islice(dataloader, rank, None, size)
        total = len(dataloader) if indexed else None
    for i, batch in enumerate(progress_bar(own, description, "batch", total=total, disable=rank != 0)):
        yield rank + i * size, batch


def merge(numbered: list[tuple[int, object]]) -> list:
    """Return the results of all processes' (batch number, result), in the order of the batches, on every process."""
    _, size = rank_and_size()
    parts = [numbered]
    if size > 1:
        parts = [None] * size
        dist.all_gather_object(parts, numbered)
    return [result for _, result in sorted((x for part in parts for x in part), key=lambda x: x[0])]


def everywhere(condition: bool) -> bool:
    return all(merge([(rank_and_size()[0], condition)]))
