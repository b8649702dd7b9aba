"""Full disks: one line, nothing half-written, and the right result once there is room."""
from pathlib import Path

import process
from jobs import JOBS, finish, first, result, unlike, words
from world import Cases, World

SIZES = (0, 5_000, 200_000)  # bytes, beyond which no file grows
RESUMED = (".part", ".log", "params.txt", "results.jsonl")  # what the next run continues from


def left_over(folder: Path, expected: dict) -> str | None:
    """A file that a failed command leaves and that is neither whole nor for the next run."""
    for name, value in result(folder).items():
        if value != expected.get(name) and not name.endswith(RESUMED):
            return f"left {name}, which is not whole"
    hidden = [path.name for path in folder.rglob(".*") if path.is_file()]
    return f"left the hidden {hidden[0]}" if hidden else None


def full(world: World) -> Cases:
    """Files that cannot grow: writing fails as it does on a full disk, wherever the command is by then."""
    for name, job in JOBS.items():
        if name == "experiments":
            continue
        # The limit binds shared memory too: a DataLoader whose worker cannot send a batch waits for ever.
        job = job._replace(argv=job.argv.replace("--workers 1", "--workers 0"))
        whole = world.fresh(f"disk-{name}/whole")
        if problem := finish(world, job, whole).problem(0):
            yield f"{name}: undisturbed", problem
            continue
        expected = result(whole)
        for size in SIZES:
            folder = world.fresh(f"disk-{name}/{size}")
            ended = process.run(job.main, *words(world, job), cwd=folder, prepare=process.limit_files(size))
            if ended.code == 0:  # none of its files is so large
                yield f"{name}: {size} bytes", unlike(result(folder), expected)
                continue
            yield f"{name}: {size} bytes", first(ended.problem(1), left_over(folder, expected))
            again = finish(world, job, folder)
            yield f"{name}: with room again, after {size} bytes", first(
                again.problem(0), unlike(result(folder), expected))


PARTS = {"disk: full": full}
