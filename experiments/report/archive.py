"""Pack an experiment into one small file: results down to single images, losses, commands, environments.

    python -m experiments.report.archive pack build/rich experiments/results/rich.tar.xz
    python -m experiments.report.archive unpack experiments/results/rich.tar.xz build/rich
    python -m experiments.report.archive compare experiments/results/rich.tar.xz build/rich

collect.py makes tables and verdicts from an archive, to the digit and without a model. Figures 3 and 6 are the
exception, as they show data and captions. An archive that is unpacked into a folder of its name can be continued:
run.py trains and evaluates what has no result yet. `compare` takes two experiments, each a folder or an archive, and
names the results that differ in any digit.
"""
import io
import lzma
import os
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from ..problems import in_one_line, make_parser
from .results import TRAIN_LOG_LINE, read_results

FOLDERS = ("results", "runs")
RESULTS = ("results/*/*.json", "results/*/table.md", "results/*/items/*.json", "results/judge/*.jsonl",
           "runs/*/command.txt", "runs/*/environment.txt", "runs/*/checkpoints/results.jsonl", "runs/*/out.log")


def read(path: Path) -> bytes:
    if path.name != "out.log":
        return path.read_bytes()
    # A training's log is reduced to the losses that results.py reads.
    lines = TRAIN_LOG_LINE.findall(path.read_text(encoding="utf-8", errors="replace"))
    return "".join("Train Epoch: {} [{}/ ({}%)] Caption_loss: {} (\n".format(*line) for line in lines).encode()


def pack(out: Path, archive: Path) -> int:
    """Write the archive, whole or not at all, and return its number of files. The same files give the same bytes."""
    from open_clip_mdc.data.files import new_file
    found = {path.relative_to(out).as_posix(): path for path in sorted(
        path for pattern in RESULTS for path in out.glob(pattern))}
    if not any(name.startswith("results/") for name in found):
        raise ValueError(f"{out} holds no results/: give the --out of an experiment")
    archive.parent.mkdir(parents=True, exist_ok=True)
    with new_file(archive) as partial, tarfile.open(partial, "w:xz", preset=9) as tar:
        for name, path in found.items():
            info, content = tarfile.TarInfo(name), read(path)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return len(found)


def unpack(archive: Path, out: Path) -> int:
    """Put all files of an archive into `out`, or none, and return their number. The folder may hold data already."""
    for folder in FOLDERS:
        if (out / folder).exists():
            raise ValueError(f"{out / folder} exists already: give another folder")
    from open_clip_mdc.data.paths import inside
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent) as whole:  # so that a damaged archive leaves nothing in `out`
        try:
            with tarfile.open(archive, "r:xz") as tar:
                # Not by `extractall`, which has no filter in the first releases of Python 3.10 and 3.11.
                for number, member in enumerate(tar, 1):
                    if not member.isfile():
                        raise tarfile.TarError(f"{member.name} is no file")
                    path = inside(Path(whole), member.name, archive, number)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(tar.extractfile(member).read())
        except (tarfile.TarError, lzma.LZMAError, EOFError, ValueError) as problem:
            raise ValueError(f"{archive} is not an archive of results: {problem}") from problem
        if not (Path(whole) / "results").exists():
            raise ValueError(f"{archive} is not an archive of results: it has no results/")
        out.mkdir(exist_ok=True)
        for folder in filter(Path.exists, (Path(whole) / name for name in FOLDERS)):
            os.replace(folder, out / folder.name)
    return number


def metrics(experiment: Path) -> dict[tuple, dict]:
    if experiment.is_file():
        with TemporaryDirectory() as folder:
            unpack(experiment, Path(folder))
            return metrics(Path(folder))
    return {(*key, seed): result.metrics for key, by_seed in read_results(experiment).items()
            for seed, result in by_seed.items()}


def compare(first: Path, second: Path) -> str:
    ours, theirs = metrics(first), metrics(second)
    both = [key for key in ours if key in theirs]
    if not both:
        raise ValueError(f"{first} and {second} have no result in common")
    lines = []
    for key in both:
        pairs = [(name, ours[key].get(name), theirs[key].get(name)) for name in sorted({*ours[key], *theirs[key]})]
        if unlike := [f"{name} {a} and {b}" for name, a, b in pairs if str(a) != str(b)]:
            lines.append(f"{' '.join(map(str, key))}: {', '.join(unlike)}")
    return "\n".join([*lines, f"{len(both) - len(lines)} of {len(both)} results in both are equal to the digit "
                      f"({len(ours)} in {first}, {len(theirs)} in {second})"])


@in_one_line()
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("command", choices=("pack", "unpack", "compare"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    if args.command == "compare":
        print(compare(args.source, args.target))
    else:
        convert = pack if args.command == "pack" else unpack
        print(f"{args.target}: {convert(args.source, args.target)} files")


if __name__ == "__main__":
    main()
