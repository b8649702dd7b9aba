"""Full disks and read-only folders: one line, nothing half-written, and the right result once there is room."""
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kill import JOBS, Job, finish
from process import TIMEOUT, limit_files
from world import SKIPPED, Cases, World, check_json, first, tree, unlike

SIZES = (0, 5_000, 200_000)  # bytes, beyond which no file grows
RESUMED = (".part", ".log", ".claims", "params.txt")  # may be there after a failure: what the next run continues from


def without_workers(job: Job) -> Job:
    """A limit on files binds shared memory too: a DataLoader whose worker cannot send a batch waits for ever."""
    def argv(world: World) -> list:
        given = job.argv(world)
        return [0 if before == "--workers" else part for before, part in zip([None, *given], given, strict=False)]
    return job._replace(argv=argv)


ALONE = {name: without_workers(job) for name, job in JOBS.items() if name != "experiments"}


def left_over(job: Job, folder: Path, expected: dict) -> str | None:
    """A file that a failed command leaves and that is neither whole nor for the next run."""
    if (folder / "out").exists() or job.result(folder):
        for name, value in job.result(folder).items():
            if value != expected.get(name) and not name.endswith((*RESUMED, "results.jsonl")):
                return f"left {name}, which is not whole"
    hidden = [path.name for path in folder.rglob(".*") if path.is_file() and path.name != ".claims"]
    return f"left the hidden {hidden[0]}" if hidden else None


def attempt(world: World, job: Job, folder: Path, **options):
    return world.call(job.main, *job.argv(world), cwd=folder, timeout=TIMEOUT, **options)


def full(world: World) -> Cases:
    """Files that cannot grow: writing fails as it does on a full disk, wherever the command is by then."""
    for name, job in ALONE.items():
        whole = world.fresh(f"disk-{name}/whole")
        ended = finish(world, job, whole)
        if problem := ended.problem(0):
            yield f"{name}: undisturbed", problem
            continue
        expected = job.result(whole)
        for size in SIZES:
            folder = world.fresh(f"disk-{name}/{size}")
            ended = attempt(world, job, folder, prepare=limit_files(size))
            if ended.code == 0:  # none of its files is so large
                yield f"{name}: {size} bytes", unlike(job.result(folder), expected)
                continue
            yield f"{name}: {size} bytes", first(ended.problem(1), left_over(job, folder, expected))
            again = finish(world, job, folder)
            yield f"{name}: with room again, after {size} bytes", first(
                again.problem(0), unlike(job.result(folder), expected), check_json(folder))


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[str | None]:
    """Mount a file system of its own in a folder. Yields the reason if that is impossible."""
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True)
    try:
        yield f"{SKIPPED}no file system can be mounted here: {made.stderr.strip()}" if made.returncode else None
    finally:
        if not made.returncode:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def really_full(world: World) -> Cases:
    """A file system of 300 kB, where the machine lets one be mounted."""
    for name, job in ALONE.items():
        folder = world.fresh(f"disk-{name}/small")
        with mounted(folder, "size=300k") as problem:
            if not problem:
                expected = job.result(world.folder / "cases" / f"disk-{name}" / "whole")
                ended = attempt(world, job, folder)
                wrong = unlike(job.result(folder), expected) if ended.code == 0 else left_over(job, folder, expected)
                problem = first(ended.problem(), wrong)
            yield name, problem


def read_only(world: World) -> Cases:
    """A file system that cannot be written, and a target below a file."""
    for name, job in ALONE.items():
        folder = world.fresh(f"read-only-{name}")
        with mounted(folder, "ro") as problem:
            yield name, problem or attempt(world, job, folder).problem(1)
        if job.result is tree:
            continue
        (folder / "out").write_text("a file")
        ended = attempt(world, job, folder)
        yield f"{name}: the target is below a file", first(
            ended.problem(1), None if (folder / "out").read_text() == "a file" else "overwritten")


PARTS = {"disk: full": full, "disk: a small file system": really_full, "disk: read-only": read_only}
