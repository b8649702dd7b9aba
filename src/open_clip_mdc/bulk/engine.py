"""Runs a function on shards: in this process, in several processes of this machine, or in Ray actors.

    --engine local --jobs 4      four processes, each on its own GPU if there are several
    --engine ray                 an actor per GPU of the cluster at $RAY_ADDRESS (ray://HOST:10001), or of a local one

A worker makes its function once, which loads the model. Existing files are skipped. Several runs can share an output
folder (locks.py).
"""
import argparse
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..errors import need
from .locks import make_once

MAX_SHOWN = 20  # problems in a message
Make = Callable[[int], Callable[[object, Path], object]]  # worker's number -> function (shard, file to write)


class Result(NamedTuple):
    """The state of a file. If `there` is False without a `problem`, another run is making it."""

    there: bool
    problem: str | None = None  # why it cannot be made


class Worker:
    """Makes files of shards. It loads the model at the first one."""

    def __init__(self, number: int = 0):
        self.number, self.function = number, None

    def do(self, make: Make, shard: object, target: Path, wait: bool) -> Result:
        """Make `target` from the shard, unless it exists. `wait` says to wait for another run that is making it."""
        if self.function is None:
            self.function = make(self.number)
        try:
            return Result(make_once(target, lambda part: self.function(shard, part), wait))
        except (ValueError, OSError) as problem:  # the other shards are still made
            return Result(False, str(problem))


_do: Callable  # set in each process of the pool


def _do_here(*item) -> Result:
    return _do(*item)


def _start(make: Make, number) -> None:
    global _do
    with number.get_lock():
        _do, number.value = partial(Worker(number.value).do, make), number.value + 1


def _or_end(function: Callable, *item):
    try:
        return function(*item)
    except SystemExit as end:  # raised on SIGTERM. The executor would take it for a result
        os._exit(end.code)


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
            yield lambda function, *items: pool.map(partial(_or_end, function), *items)
        except BrokenProcessPool as problem:
            raise ValueError(killed) from problem


@contextmanager
def local_workers(make: Make, jobs: int) -> Iterator[Callable]:
    if jobs == 1:
        worker = Worker()
        yield lambda items: (worker.do(make, *item) for item in items)
        return
    number = multiprocessing.get_context("fork").Value("i", 0)
    with process_pool(jobs, "a worker process was killed, possibly out of memory: run the same command to resume",
                      _start, make, number) as map_all:
        yield lambda items: map_all(_do_here, *zip(*items, strict=True))


@contextmanager
def ray_workers(make: Make, jobs: int | None) -> Iterator[Callable]:
    need("ray", "ray", "--engine ray")
    import ray
    own = not ray.is_initialized()
    if own:  # $RAY_ADDRESS names a cluster to join
        try:
            ray.init(**({} if os.environ.get("RAY_ADDRESS") else {"include_dashboard": False,
                                                                  "logging_level": "ERROR"}))
        except Exception as problem:  # a node that does not start in time raises errors of many kinds
            ray.shutdown()
            why = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            where = os.environ.get("RAY_ADDRESS")
            raise ValueError(f"Ray did not start{f' at {where}' if where else ''} ({why}): run the command again, "
                             "or use --engine local") from problem
    try:
        gpus = int(ray.cluster_resources().get("GPU", 0))
        if gpus and jobs and jobs > gpus:
            raise ValueError(f"--jobs {jobs}: the cluster has {gpus} GPUs")  # more actors would wait forever
        actor = ray.remote(Worker).options(num_gpus=int(gpus > 0), num_cpus=0, scheduling_strategy="SPREAD",
                                           max_restarts=-1, max_task_retries=-1)
        pool = ray.util.ActorPool([actor.remote(number) for number in range(jobs or gpus or 1)])
        make = ray.put(make)

        def results(items: list[tuple]) -> Iterator[Result]:
            try:
                yield from pool.map(lambda worker, item: worker.do.remote(make, *item), items)
            except ray.exceptions.RayTaskError as problem:
                raise problem.cause from None  # Ray's own message contains a traceback
        yield results
    finally:
        if own:
            ray.shutdown()


def make_each(make: Make, work: list[tuple[object, Path]], args: argparse.Namespace) -> Iterator[Path]:
    """Yield the file of each (shard, file) in `work` as soon as it exists, existing ones first.

    Give absolute paths, for other machines. `make` must be picklable. If some files cannot be made, all others are, and
    then ValueError is raised.
    """
    there, todo = [], []
    for item in work:
        (there if item[1].exists() else todo).append(item)
    yield from (target for _, target in there)
    if not todo:
        make(0)  # this also checks the flags
        return
    problems: dict[str, int] = {}  # with their counts, as a wrong flag is wrong for every shard
    with (ray_workers(make, args.jobs) if args.engine == "ray" else
          local_workers(make, min(args.jobs or 1, len(todo)))) as results:
        for wait in (False, True):
            items, todo = todo, []
            if not items:
                break
            for item, result in zip(items, results([(*item, wait) for item in items]), strict=True):
                if result.there:
                    yield item[1]
                elif result.problem:
                    problems[result.problem] = problems.get(result.problem, 0) + 1
                else:
                    todo.append(item)
    if problems:
        hidden = [f"... and {len(problems) - MAX_SHOWN} more"] * (len(problems) > MAX_SHOWN)
        raise ValueError("\n  ".join([f"{sum(problems.values())} of {len(work)} shards cannot be used, all else is "
                                      "written:", *list(problems)[:MAX_SHOWN], *hidden]))
