"""Helpers for tests of experiments/: printed commands, and results written by hand."""
import shlex
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from conftest import write_json

from experiments import commands
from experiments import run as runner
from experiments.report import collect
from experiments.tables import scales
from experiments.tables.cells import Run


def dry_run(scale: str, folder: Path, *tables: str, data: str = ".", seeds: str = "0", gpus: int | None = None
            ) -> list[list[str]]:
    given = () if gpus is None else ("--gpus", str(gpus))
    with redirect_stdout(StringIO()) as output:
        runner.main(["--scale", scale, "--data", str(folder / data), "--out", str(folder / "out"), "--tables", *tables,
                     "--seeds", *seeds, *given, "--dry-run"])
    return [shlex.split(line) for line in output.getvalue().splitlines()]


def flags_of(command: list[str]) -> dict[str, str]:
    return dict(zip(command, command[1:], strict=False))


def place(folder: Path) -> commands.Place:
    return commands.Place(folder, folder, "", 0)


def page_of(folder: Path, table: str, scale: scales.Scale = scales.SCENES) -> str:
    """A table that `collect` makes of the results in a folder."""
    return collect.collect(scale, place(folder), [table])[table]


def leave_recipe(folder: Path, scale: scales.Scale, run: Run, seed: int = 0) -> Path:
    """Make the folder of a run as if it had been trained so."""
    of_run = commands.folder(run, seed, place(folder))
    of_run.mkdir(parents=True)
    (of_run / "command.txt").write_text(commands.recipe(scale, run, seed))
    return of_run


def write_items(path: Path, images: list, values: dict[str, list], **more) -> None:
    """Write a result's values of single images where its reader looks for them."""
    write_json(path.parent / "items" / path.name, {"images": images, "values": values, **more})


def write_result(folder: Path, kind: str, name: str, dataset: str, epoch: int = 1, **metrics) -> Path:
    path = folder / "results" / kind / f"{dataset.replace('/', '_')}-{name}-{epoch}.json"
    write_json(path, {"dataset": dataset, "model": "m", "task": "t", "metrics": metrics,
                      "pretrained": f"out/runs/{name}/checkpoints/epoch_{epoch}.pt"})
    return path
