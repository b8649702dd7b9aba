"""Measure how time and memory of whole commands grow with the number of images.

    OMP_WAIT_POLICY=PASSIVE python -m benchmarks.growth --pretrained demo/mdc                   10 minutes, 2 cores

Each command runs once at each size, in a process of its own. The start costs the same at each size. So a command that
grows no faster than its images takes at most twice the time for twice the images.
"""
import argparse
import sys
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

from open_clip_mdc.data.markdown import markdown_table
from open_clip_mdc.data.shards import read_samples

from .bulk import caption, command_cost, interrupted
from .report import machine, section_parser, write_report

SIZES = (1000, 2000, 4000, 8000)
FEW = 8  # retrieval has an eighth of the images, each with a caption, as it compares each with each
TOOL = ("-m", "open_clip_mdc")


def scenes(folder: Path, images: int, probe: int = 1) -> Path:
    """Render scenes, and return the shard that holds them."""
    command_cost(*TOOL, "scenes", "--out", folder, "--num-train", 1, "--num-val", images, "--num-probe", probe,
                 "--num-pairs", 1)
    return folder / "val" / "00000.tar"


def touched(args: argparse.Namespace, data: Path, shard: Path, images: int) -> Path:
    """Write the images as files, caption them all, stop before the end of the run, and touch each of them."""
    files = data / "files"
    files.mkdir()
    for sample in read_samples(str(shard)):
        (files / f"{sample['__key__']}.png").write_bytes(sample["png"])
    interrupted(args, data, (files, shard), images)
    for file in files.iterdir():
        file.touch()
    return files


def commands(args: argparse.Namespace, data: Path, images: int) -> dict[str, tuple[object, ...]]:
    """Make the data of a size, and return the commands on them by the name of their row."""
    shard, few = scenes(data / "scenes", images, images), scenes(data / "few", images // FEW)
    command_cost(*TOOL, "prepare", "shards", "--train", shard, "--out", data / "shards")
    command_cost(*TOOL, "prepare", "shards", "--captions-key", "caption", "--test", few, "--out", data / "pairs")
    files = touched(args, data, shard, images)
    evaluate = ("-m", "clip_benchmark_ext.cli", "eval", "--model", "MDC-ViT-Ti-8", "--pretrained", args.pretrained,
                "--no_amp", "--num_workers", 0, "--quiet", "--feature_root", data / "features",
                "--output", data / "{task}.json")
    shards = (*TOOL, *caption(args, data / "shards" / "train"))
    retrieval = (*evaluate, "--dataset", "wds/pairs", "--dataset_root", data / "pairs", "--task", "zeroshot_retrieval")
    return {
        "caption shards": (*shards, "--out", data / "tables"),
        "resume, all done, all files touched": (*TOOL, *caption(args, files, "--out", data / "captions.jsonl")),
        "search": (*TOOL, "search", files, "a red circle", "--pretrained", args.pretrained, "--out",
                   data / "found.csv"),
        "linear probe": (*evaluate, "--dataset", "wds/probe", "--dataset_root", data / "scenes" / "probe", "--task",
                         "linear_probe"),
        "retrieval of an eighth, shortlist of 10": (*retrieval, "--shortlist", 10),
        # It takes 6 minutes of 1,000 images.
        **({"retrieval of an eighth, all scores": retrieval} if images <= SIZES[1] else {})}


def report(args: argparse.Namespace) -> str:
    before, found = machine(), defaultdict(list)
    for images in SIZES:
        with TemporaryDirectory() as folder:
            for name, command in commands(args, Path(folder), images).items():
                found[name].append(command_cost(*command))
                print(f"{images} images, {name}: {found[name][-1].wall:.1f} s", file=sys.stderr)
    header = [f"{images:,}" for images in SIZES]
    absent = {name: [""] * (len(SIZES) - len(row)) for name, row in found.items()}
    seconds = [(name, *(f"{cost.wall:.1f}" for cost in row), *absent[name], f"{row[-1].wall / row[-2].wall:.2f}")
               for name, row in found.items()]
    memory = [(name, *(f"{cost.peak:.0f}" for cost in row), *absent[name]) for name, row in found.items()]
    return "\n\n".join([
        before, "MDC-ViT-Ti-8 on scenes of 32 px. Retrieval has as many captions as images, so that its pairs grow by "
        "four where the images double.",
        markdown_table(("seconds for this many images", *header, "last / one before"), seconds),
        markdown_table(("peak memory, MiB", *header), memory)])


def main() -> None:
    parser = section_parser(__doc__)
    parser.add_argument("--pretrained", required=True, help="run folder of a captioner of scenes")
    write_report("Growth", report, parser.parse_args())


if __name__ == "__main__":
    main()
