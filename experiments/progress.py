"""Run commands in parallel. Their output goes to files, and the terminal shows how far they are.

    python -m experiments.progress --logs demo/logs 'mdc=open_clip_train --epochs 2 ...' 'arc=open_clip_train ...'

Standard output of a command goes to LOGS/LABEL.out, its messages go to LOGS/LABEL.log. The progress of a training is
read from there.
"""
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from .problems import in_one_line, make_parser

EPOCH = re.compile(rb"Train Epoch: (\d+) \[.*?\((\d+)%\)\]")  # OpenCLIP's line
TAIL = 10_000  # bytes at the end of a log that are read
SECONDS = 2  # between two readings of the logs
QUIET_SECONDS = float(os.environ.get("PROGRESS_SECONDS", 30))  # between two lines of progress in a file


class Step(NamedTuple):
    label: str
    command: list[str]
    recipe: str = ""  # content of a training's command.txt
    folder: Path | None = None


def fraction(step: Step, logs: Path) -> float | None:
    log = logs / f"{step.label}.log"
    if "--epochs" not in step.command or not log.exists():
        return None
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        lines = EPOCH.findall(file.read())
    if not lines:
        return None
    epoch, percent = map(int, lines[-1])
    return (epoch + percent / 100) / int(step.command[step.command.index("--epochs") + 1])


@contextmanager
def alone(logs: Path) -> Iterator[int]:
    """Wait until no step of an earlier call runs here. Yields the descriptor of a lock that every step inherits."""
    logs.mkdir(parents=True, exist_ok=True)
    from open_clip_mdc.data.files import open_locked
    file = open_locked(logs / ".lock")
    if not file:
        print(f"waiting for the steps of another call, which write to {logs}/", file=sys.stderr)
        file = open_locked(logs / ".lock", wait=True)
    with file:
        yield file.fileno()


def write(path: Path, text: str) -> None:
    from open_clip_mdc.data.files import new_file  # imported here, as `make -n` runs where nothing is installed
    with new_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def describe(step: Step, threads: str) -> None:
    """Write a training's command.txt. On the CPU also write environment.txt, with a line for each machine it ran on."""
    from open_clip_mdc.environment import environment
    step.folder.mkdir(parents=True, exist_ok=True)
    write(step.folder / "command.txt", step.recipe)
    if "cpu" not in step.command:  # reading a GPU's name would take memory on it, and its last digits do not repeat
        return
    path = step.folder / "environment.txt"
    known = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    write(path, "\n".join(dict.fromkeys([*known, environment(threads)])) + "\n")


def run_step(step: Step, logs: Path, threads: int, lock: int, under_way: list[subprocess.Popen]) -> None:
    log = logs / f"{step.label}.log"
    variables = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    if step.folder:
        describe(step, variables["OMP_NUM_THREADS"])
    with log.open("w") as messages, log.with_suffix(".out").open("w") as output:
        with subprocess.Popen(step.command, stdout=output, stderr=messages, env=variables, pass_fds=(lock,)) as process:
            under_way.append(process)
            code = process.wait()
            under_way.remove(process)
    if code:
        lines = log.read_text(errors="replace").splitlines() or [""]
        raise ChildProcessError(f"{step.label} failed (exit status {code}), see {log}: {lines[-1]}")


def watch(title: str, going: dict[Future, Step], logs: Path) -> None:
    """Show how far the steps are until all are done. Raises the error of the first that failed."""
    from tqdm import tqdm
    steps = len(going)
    with tqdm(total=steps, desc=f"{title} (logs: {logs}/)", miniters=0,
              mininterval=0.1 if sys.stderr.isatty() else QUIET_SECONDS,
              bar_format="{desc} {percentage:3.0f} % |{bar:20}| {elapsed} gone, {remaining} to go{postfix}") as bar:
        while going:
            done, _ = wait(going, SECONDS, FIRST_COMPLETED)
            for future in done:
                going.pop(future)
                future.result()
            known = {step.label: part for step in going.values() if (part := fraction(step, logs)) is not None}
            bar.n = steps - len(going) + sum(known.values())
            bar.set_postfix_str(", ".join(f"{label} {part:.0%}" for label, part in known.items()), refresh=False)
            bar.update(0) if going else bar.refresh()


def run_steps(title: str, steps: list[Step], logs: Path, jobs: int) -> None:
    from open_clip_mdc.data.files import end_when_terminated
    end_when_terminated()
    under_way: list[subprocess.Popen] = []
    threads = max(1, (os.cpu_count() or 1) // jobs)  # also of a single step: the last bits of weights depend on it
    pool = ThreadPoolExecutor(jobs)
    with alone(logs) as lock:
        for step in steps:  # progress must not be read from an old log
            (logs / f"{step.label}.log").unlink(missing_ok=True)
        try:
            going = {pool.submit(run_step, step, logs, threads, lock, under_way): step for step in steps}
            try:
                watch(title, going, logs)
            except Exception:  # one step failed: those that run may finish, and no other starts
                pool.shutdown(cancel_futures=True)
                raise
        except SystemExit:  # SIGTERM, which may arrive while other steps run
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(under_way):
                process.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


@in_one_line()
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("commands", nargs="*", metavar="LABEL=COMMAND")
    parser.add_argument("--logs", required=True, type=Path)
    args = parser.parse_args()
    pairs = [command.partition("=")[::2] for command in args.commands]
    steps = [Step(label, shlex.split(command)) for label, command in pairs]
    if not all(step.command for step in steps):
        parser.error(f"{' '.join(args.commands)}: give each as LABEL=COMMAND")
    if steps:
        run_steps("training", steps, args.logs, os.cpu_count() or 1)


if __name__ == "__main__":
    main()
