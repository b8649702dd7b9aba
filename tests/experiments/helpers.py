"""Helpers for tests of experiments/: printed commands, and results written by hand."""
import json
import shlex
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from experiments import commands
from experiments import run as runner


def dry_run(*flags: str) -> list[list[str]]:
    with redirect_stdout(StringIO()) as output:
        runner.main([*flags, "--dry-run"])
    return [shlex.split(line) for line in output.getvalue().splitlines()]


def flags_of(command: list[str]) -> dict[str, str]:
    return dict(zip(command, command[1:], strict=False))


def place(folder: Path) -> commands.Place:
    return commands.Place(folder, folder, "", 0)


def write_result(folder: Path, kind: str, name: str, dataset: str, epoch: int = 1, **metrics) -> Path:
    path = folder / "results" / kind / f"{dataset.replace('/', '_')}-{name}-{epoch}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"dataset": dataset, "model": "m", "task": "t", "metrics": metrics,
                                "pretrained": f"out/runs/{name}/checkpoints/epoch_{epoch}.pt"}))
    return path
