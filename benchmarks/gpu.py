"""Everything about speed that waits for a GPU, MDC and OpenCLIP's CLIP on the same card.

    make bench-gpu                                                      all parts, each in at most 10 minutes
    python -m benchmarks.gpu --parts steps --sizes ViT-L-14             one of them
    python -m benchmarks.gpu --device cpu --small                       seconds on a CPU: does it all run?

Rows are added to gpu.json as they are measured, and GPU.md is written anew beside the predictions of `roofline.py`. A
part that runs out of time says so. Nothing here changes the card's settings.
"""
import argparse
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch

from . import gpu_kernels, gpu_models
from .gpu_kernels import Bench
from .gpu_report import FOLDER, read_json, write_report

PARTS = {
    "ceilings": gpu_kernels.ceilings, "copies": gpu_kernels.copies, "losses": gpu_kernels.losses,
    "attentions": gpu_kernels.attentions, "syncs": gpu_models.syncs, "decoding": gpu_models.decoding,
    "scoring": gpu_models.scoring, "steps": gpu_models.steps,
}
IDENTITY = ("model", "size", "batch", "mode", "what", "tokens", "precision", "tokens a step")


def identity(row: dict) -> tuple:
    """Which case a row is about."""
    return tuple(row.get(key) for key in IDENTITY)


def machine(device: str) -> dict[str, str]:
    chip = torch.cuda.get_device_name() if device == "cuda" else "a CPU, small sizes: a trial of the script, no result"
    return {"chip": chip, "torch": torch.__version__, "open_clip": version("open_clip_torch")}


def measure(part: str, bench: Bench, seconds: float, known: list[dict], save) -> None:
    """Runs a part until its time is over; each row takes the place of an older one of the same case.

    Args:
        known: the part's rows, changed in place.
        save: called after each row.
    """
    start = time.monotonic()
    rows = PARTS[part](bench)
    while time.monotonic() - start < seconds:
        row = next(rows, None)
        if row is None:
            return
        known[:] = [old for old in known if identity(old) != identity(row)] + [row]
        save()
        print(part, {key: value for key, value in row.items() if key != "kernels"}, flush=True)
    print(f"{part}: stopped after {seconds:.0f} s; run it again with fewer --sizes or --batches for the rest")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="(default: %(default)s)")
    parser.add_argument("--sizes", default="ViT-B-16", help="models of steps; the first one's elsewhere")
    parser.add_argument("--batches", default="128,1024", help="of steps (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=480, help="after which a part takes no new row up")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="tiny model and sizes")
    parser.add_argument("--out", type=Path, help="folder of gpu.json and GPU.md (benchmarks; a CPU: none)")
    args = parser.parse_args()
    unknown = set(args.parts.split(",")) - set(PARTS)
    if unknown:
        sys.exit(f"error: --parts {','.join(sorted(unknown))}: no such part; there are {', '.join(PARTS)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: no CUDA device; --device cpu --small tries the script")
    bench = Bench(args.device, args.small, ("ViT-Ti-8",), (4,)) if args.small else Bench(
        args.device, args.small, tuple(args.sizes.split(",")), tuple(map(int, args.batches.split(","))))
    here = machine(args.device)
    out = args.out or (FOLDER if args.device == "cuda" else None)
    measured = read_json(out / "gpu.json") if out else {}
    if {key: measured.get(key) for key in here} != here:
        measured = dict(here, parts={})
    measured["date"] = str(date.today())
    for part in args.parts.split(","):
        known = measured["parts"].setdefault(part, [])
        measure(part, bench, args.seconds, known, lambda: out and write_report(out, measured))


if __name__ == "__main__":
    main()
