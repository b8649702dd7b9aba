"""Runs a function on shards: in this process, or in several processes, each on its own GPU if there are several.

A worker makes its function once, which loads the model. Existing files are skipped. Several runs, on any machines, can
share an output folder (locks.py).
"""
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from ..errors import NO_ROOM, with_reasons
from .locks import make_once

MAX_SHOWN = 20  # problems in a message
Make = Callable[[int], Callable[[object, Path], object]]  # worker's number -> function (shard, file to write)


class Result(NamedTuple):
    """The state of a file. If `there` is False without a `problem`, another run is making it."""

    there: bool
    problem: str | None = None  # why it cannot be made


def worker(make: Make, number: int = 0) -> Callable[[object, Path, bool], Result]:
    """Return the function (shard, target, wait) that makes the target of a shard, unless it exists.

    It loads the model at its first call. `wait` says to wait for another run that is making the target.
    """
    loaded = cache(make)

    def do(shard: object, target: Path, wait: bool) -> Result:
        function = loaded(number)
        try:
            return Result(make_once(target, partial(function, shard), wait))
        except (ValueError, OSError) as problem:  # the other shards are still made, if there is room
            if getattr(problem, "errno", None) in NO_ROOM:
                raise
            return Result(False, str(problem))
    return do


_do: Callable  # set in each process of the pool


def _do_here(item: tuple[object, Path, bool]) -> Result:
    return _do(*item)


def _start(make: Make, number) -> None:
    global _do
    with number.get_lock():
        _do, number.value = worker(make, number.value), number.value + 1


def _or_end(function: Callable, item: object):
    try:
        return function(item)
    except (SystemExit, KeyboardInterrupt) as end:  # on SIGTERM or Ctrl-C. The executor would take it for a result
        os._exit(getattr(end, "code", 130))


def _end_with_the_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _start_process(start: Callable | None, *args) -> None:
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    if start:
        start(*args)


@contextmanager
def process_pool(jobs: int, killed: str, start: Callable | None = None, *args) -> Iterator[Callable]:
    """Yield a `map` over forked processes. They end with this process, as they would keep the locks they inherited.

    `start(*args)` is called in each. Raises ValueError(`killed`) if one is killed.
    """
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(jobs, context, _start_process, (start, *args)) as pool:
        try:
            yield lambda function, items: pool.map(partial(_or_end, function), items)
        except BrokenProcessPool as problem:
            raise ValueError(killed) from problem


@contextmanager
def local_workers(make: Make, jobs: int) -> Iterator[Callable]:
    if jobs == 1:
        do = worker(make)
        yield lambda items: (do(*item) for item in items)
        return
    number = multiprocessing.get_context("fork").Value("i", 0)
    with process_pool(jobs, "a worker process was killed, possibly out of memory: run the same command to resume",
                      _start, make, number) as map_all:
        yield partial(map_all, _do_here)


def make_each(make: Make, work: list[tuple[object, Path]], jobs: int | None) -> Iterator[Path]:
    """Yield the file of each (shard, file) in `work` as soon as it exists, existing ones first.

    If some files cannot be made, all others are, and then ValueError is raised.
    """
    todo = []
    for shard, target in work:
        if target.exists():
            yield target
        else:
            todo.append((shard, target))
    if not todo:
        make(0)  # this also checks the flags
        return
    problems = Counter()  # as a wrong flag is wrong for every shard
    with local_workers(make, min(jobs or 1, len(todo))) as results:
        for wait in (False, True):
            items, todo = todo, []
            for item, result in zip(items, results([(*item, wait) for item in items]), strict=True):
                if result.there:
                    yield item[1]
                elif result.problem:
                    problems[result.problem] += 1
                else:
                    todo.append(item)
    if problems:
        raise with_reasons(f"{problems.total()} of {len(work)} shards cannot be used, all else is written:",
                           list(problems), len(problems), MAX_SHOWN)
