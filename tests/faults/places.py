"""The places where commands write: SIGTERM, mount points, planted links, and another run that hangs."""
import os
import signal
import subprocess
import time

import process
from disk import left_over, mounted
from kill import JOBS, finish
from world import Cases, World, check_json, first, unlike

from open_clip_mdc.bulk.locks import Locks

TERMINATED = ("train-csv", "probe", "caption", "caption-shards", "score-shards", "scenes", "prepare")
FOLDERS = ("caption-shards", "score-shards", "scenes", "prepare", "probe")  # whose `out` is a folder
HELD = 90  # seconds: a busy machine loads a model, and waits for so long that it says so
NAMES = (".claims", ".lock", "00000_stats.json", ".00000.parquet.part", ".00000.parquet.0123456789ab")


def terminated(world: World) -> Cases:
    """SIGTERM at a moment drawn over the undisturbed run: nothing hidden stays, and the same command ends right."""
    rng = world.rng("sigterm")
    for name in TERMINATED:
        job, whole, begun = JOBS[name], world.fresh(f"term-{name}/whole"), time.monotonic()
        ended = finish(world, job, whole)
        duration, expected = time.monotonic() - begun, job.result(whole)
        if problem := ended.problem(0):
            yield f"{name}: undisturbed", problem
            continue
        for number in range(max(1, world.args.kills // 4)):
            folder, moment = world.fresh(f"term-{name}/{number}"), rng.uniform(0.1, 1) * duration
            ended = process.run_until(job.main, *job.argv(world), cwd=folder, log=whole.parent / "log", moment=moment,
                                      signal_=signal.SIGTERM)
            problem = None if ended.code in (0, 143, -15) else f"exit status {ended.code}: {ended.last_line()[:200]}"
            if ended.code == 143:
                problem = problem or left_over(job, folder, expected)
            again = finish(world, job, folder)
            yield f"{name}: after {moment:.2f} s of {duration:.2f}", first(
                problem, again.problem(), unlike(job.result(folder), expected), check_json(folder))


def mount_points(world: World) -> Cases:
    """An output that is a file system of its own, as of a container."""
    for name in FOLDERS:
        job, whole, folder = JOBS[name], world.fresh(f"mount-{name}/whole"), world.fresh(f"mount-{name}/mounted")
        problem = finish(world, job, whole).problem(0)
        (folder / "out").mkdir()
        with mounted(folder / "out", "size=64m") as skipped:
            problem = problem or skipped or first(finish(world, job, folder).problem(0),
                                                  unlike(job.result(folder), job.result(whole)))
        yield name, problem


def planted(world: World) -> Cases:
    """Links to another's file in the places of hidden files, and of files whose names are known beforehand."""
    for name in ("caption-shards", "score-shards", "caption"):
        for link in (*NAMES, "captions.jsonl.part"):
            folder = world.fresh(f"planted-{name}")
            place, victim = folder if name == "caption" else folder / "out", folder.parent / "victim"
            victim.write_text("another's")
            place.mkdir(exist_ok=True)
            (place / link).symlink_to(victim)
            ended = finish(world, JOBS[name], folder)
            yield f"{name}: {link}", first(ended.problem(),
                                           None if victim.read_text() == "another's" else "overwritten")


def hung(world: World) -> Cases:
    """Another run holds a shard and is stopped: who waits says so, and continues when it is ended."""
    folder = world.fresh("hung")

    def stop(argv: list[str]) -> None:
        Locks(folder / "out").make("00000.parquet", lambda part: os.kill(os.getpid(), signal.SIGSTOP), wait=False)

    (folder / "log").touch()
    with (folder / "log").open("w") as log:
        holder = process.start(stop, [], folder, log.fileno(), log.fileno())
        os.waitpid(holder, os.WUNTRACED)
        subprocess.Popen(["sh", "-c", f"sleep {HELD}; kill -9 {holder}"])
        shard = world.scenes / "train" / "00000.tar"  # alone: with others to do, nobody would wait
        ended = world.tool("caption", shard, "--length", 2, "--out", "out", cwd=folder, timeout=4 * process.TIMEOUT)
        process.end(holder, reap=True)
    said = f"which is being made by process {holder} on" in ended.err
    yield "stopped", first(ended.problem(0), None if said else f"does not say who holds it: {ended.last_line()[:200]}",
                           None if (folder / "out" / "00000.parquet").exists() else "the shard is missing")


PARTS = {"places: SIGTERM": terminated, "places: mount points": mount_points, "places: planted links": planted,
         "places: a run that hangs": hung}
