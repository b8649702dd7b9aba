"""Measure what bulk captioning costs beyond the model itself: decoding images and resuming.

    OMP_WAIT_POLICY=PASSIVE python -m benchmarks.bulk --scenes demo/scenes --pretrained demo/mdc      5 minutes, 2 cores

It takes the smallest model and the smallest images, as the rest is a smaller share of a larger model's time. Compare
wall time on a quiet machine only. CPU time includes child processes and is meaningful beside other work, too.
"""
import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, TemporaryFile
from typing import NamedTuple

from open_clip_mdc import cli as tools
from open_clip_mdc.bulk import units as bulk
from open_clip_mdc.cli import caption as caption_tool
from open_clip_mdc.data.images import Images, read_images
from open_clip_mdc.data.markdown import markdown_table

from .report import machine, section_parser, write_report
from .turns import Work, take_turns

LENGTH = "8"
BATCH = 40  # a divisor of 1,000: no batch waits for the last image, which never comes


class Cost(NamedTuple):
    wall: float  # seconds
    cpu: float
    peak: float = 0.0  # resident memory of a command, MiB


def own_cost(function: Work) -> Cost:
    start, before = time.perf_counter(), sum(os.times()[:4])
    function()
    return Cost(time.perf_counter() - start, sum(os.times()[:4]) - before)


def command_cost(*command: object) -> Cost:
    """Run a Python command, and return its cost with that of its child processes. Raises ChildProcessError."""
    with TemporaryFile() as said:
        start = time.perf_counter()
        run = subprocess.Popen([sys.executable, *map(str, command)], stdout=said, stderr=said)
        _, status, usage = os.wait4(run.pid, 0)
        run.returncode = os.waitstatus_to_exitcode(status)  # Popen has not waited itself
        if run.returncode:
            said.seek(0)
            raise ChildProcessError(said.read().decode()[-2000:].strip().removeprefix("error: "))
        return Cost(time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def medians(sides: Mapping[str, Callable[[], Cost]], rounds: int, warm_up: int = 0) -> dict[str, Cost]:
    found = take_turns(sides, rounds, warm_up, measure=lambda side: side())
    return {name: Cost(*map(median, zip(*costs, strict=True))) for name, costs in found.items()}


def caption(args: argparse.Namespace, *flags: object) -> list[str]:
    return ["caption", "--pretrained", args.pretrained, "--device", "cpu", "--length", LENGTH, *map(str, flags)]


def beside_the_model(args: argparse.Namespace, out: Path) -> dict[str, Cost]:
    """Compare captioning a shard with generating from its tensors alone, by the same batches in one process."""
    parsed = tools.parse(caption(args, args.scenes / "val" / "00000.tar", "--out", out / "tables"))
    (unit,) = bulk.find_units(parsed.paths)
    shard = caption_tool.worker(parsed, [unit], 0)
    loaded = caption_tool.load_captioner(parsed)
    batches = [loaded.from_bytes(batch.image) for batch in Images([unit], loaded.to_bytes, parsed.batch_size).loader(0)]
    sides = {"model": lambda: [loaded.model.generate(x, length=int(LENGTH), return_trace=True) for x in batches],
             "shard": lambda: shard(unit, out / "00000.parquet")}
    return medians({name: partial(own_cost, side) for name, side in sides.items()}, args.rounds, warm_up=1)


def interrupted(args: argparse.Namespace, out: Path, paths: Iterable[Path], images: int) -> bytes:
    """Return the journal of OUT/captions.jsonl after this many images of a run that was stopped before its end."""
    journal, wanted = out / "captions.jsonl.part", 1 + images  # the first line has the settings
    run = subprocess.Popen([sys.executable, "-m", "open_clip_mdc", *caption(
        args, *paths, "--out", out / "captions.jsonl", "--batch-size", BATCH, "--workers", 1)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    while not (journal.exists() and journal.read_bytes().count(b"\n") >= wanted):
        if run.poll() is not None:
            raise ChildProcessError("the run that was to be interrupted ended by itself")
        time.sleep(0.1)
    run.send_signal(signal.SIGINT)
    run.wait()
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:wanted]))
    return journal.read_bytes()


def resuming(args: argparse.Namespace, out: Path) -> dict[str, Cost]:
    shard, last = args.scenes / "val" / "00000.tar", out / "last.png"
    saved = interrupted(args, out, (shard, args.scenes / "train" / "00000.tar"), sum(1 for _ in read_images([shard])))
    shutil.copy(next((args.scenes / "sugarcrepe" / "images").glob("*.png")), last)
    lines = out / "captions.jsonl"

    def resumed() -> Cost:
        Path(f"{lines}.part").write_bytes(saved)
        return command_cost("-m", "open_clip_mdc", *caption(args, shard, last, "--out", lines, "--batch-size", BATCH))

    load = f"import open_clip_mdc; open_clip_mdc.load({args.pretrained!r}, device='cpu')"
    return medians({
        "load": lambda: command_cost("-c", load),
        "one": lambda: command_cost("-m", "open_clip_mdc", *caption(args, last, "--out", out / "one.jsonl")),
        "resumed": resumed,
    }, args.rounds)


def verdict(found: float, most: float) -> str:
    return f"{found:.2f} of at most {most:.2f}, {'met' if found <= most else 'missed'}"


def report(args: argparse.Namespace) -> str:
    before = machine()
    with TemporaryDirectory() as folder:
        costs = beside_the_model(args, Path(folder)) | resuming(args, Path(folder))
    wall = {name: cost.wall for name, cost in costs.items()}
    names = {"model": "generate from 1,000 tensors in memory", "shard": "caption the shard of these images to a table",
             "load": "start a process, import, load the model", "one": "`caption` of one image",
             "resumed": "`caption` of that image after 1,000 finished ones"}
    aims = ["images are decoded while the model computes (wall time of the shard over that of the model): "
            f"{verdict(wall['shard'] / wall['model'], 1.1)}, CPU {costs['shard'].cpu / costs['model'].cpu:.2f}",
            "finished images cost no more than loading the model (time to skip them over time to load): "
            f"{verdict((wall['resumed'] - wall['one']) / wall['load'], 1.0)}"]
    return "\n\n".join([
        before, f"MDC-ViT-Ti-8, {LENGTH} tokens, on scenes of 32 px, medians of {args.rounds} rounds. CPU time "
        "includes child processes.",
        markdown_table(("", "wall, s", "CPU, s"), [
            (names[name], f"{cost.wall:.2f}", f"{cost.cpu:.2f}") for name, cost in costs.items()]),
        "Aims:\n\n" + "\n".join(f"- {aim}" for aim in aims)])


def main() -> None:
    parser = section_parser(__doc__, "rounds")
    parser.set_defaults(rounds=3)
    parser.add_argument("--scenes", type=Path, required=True, help="folder of `open_clip_mdc scenes`")
    parser.add_argument("--pretrained", required=True, help="run folder of a captioner trained on them")
    write_report("Bulk", report, parser.parse_args())


if __name__ == "__main__":
    main()
