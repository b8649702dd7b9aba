"""Measure speed and memory on a GPU, for MDC and OpenCLIP's CLIP on the same card.

    make bench-gpu                                                      all parts, each in at most 10 minutes
    python -m benchmarks.gpu --parts steps --sizes ViT-L-14             one part
    python -m benchmarks.gpu --device cpu --small                       tries all parts on a CPU, in seconds

Rows are added to gpu.json as they are measured, and the section "Measured" of GPU.md is rewritten from them. A part
that runs out of time says so. No setting of the card is changed.
"""
import argparse
import json
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch

from open_clip_mdc.data.files import write_json
from open_clip_mdc.data.markdown import markdown_table

from . import gpu_parts
from .gpu_parts import Bench
from .report import write_section

FOLDER = Path(__file__).parent
SECONDS = 480  # after which a part begins no new row
PARTS = {name: getattr(gpu_parts, name) for name in ("ceilings", "syncs", "decoding", "scoring", "steps")}
IDENTITY = ("model", "size", "batch", "mode", "what", "tokens", "precision", "tokens a step")
HEAD = """# Speed and memory on a GPU

`make bench-gpu` measures all of this on your card, each part within 10 minutes, and rewrites the section "Measured".
"""
STEPS = ("Training steps are forward, backward and AdamW, amp_bf16, with captions of Flickr8k's lengths (14.1 tokens "
         "with SOT and EOT). GB is the peak, weights and optimizer included. Share is that of the TFLOP/s of one large "
         "bfloat16 product on the same card. CLIP reads 77 tokens whatever the caption.")


def show(value: object) -> str | None:
    if not isinstance(value, float):
        return value
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(rows: list[dict]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, list)))
    return markdown_table(columns, [[show(row.get(column)) for column in columns] for row in rows])


def goals(parts: dict[str, list[dict]]) -> str:
    def find(part: str, value: str, **case: object) -> float:
        rows = (row for row in parts.get(part, ()) if all(row.get(key) == wanted for key, wanted in case.items()))
        return next(rows, {}).get(value, float("nan"))

    def step(value: str, size: str, model: str = "MDC") -> float:
        return find("steps", value, model=model, size=size, batch=1024, mode="compiled")

    b16, b32 = (step("samples/s", size) / step("samples/s", size, "CLIP") for size in ("ViT-B-16", "ViT-B-32"))
    rows = []
    for goal, least, found in (
            ("B/16, batch 1,024, compiled: share of 790 TFLOP/s", 0.4, step("TFLOP/s", "ViT-B-16") / 790),
            ("B/16, the same: samples/s over CLIP's", 1.0, b16),
            ("B/32, the same: samples/s over CLIP's", 1.2, b32),
            ("captioning, B/16, batch 256, 15 tokens, bfloat16: images/s", 3000.0,
             find("decoding", "images/s", batch=256, precision="bfloat16", tokens=15, mode="eager",
                  **{"tokens a step": 1}))):
        measured = (None, None) if found != found else (show(found), "met" if found >= least else "missed")
        rows.append((goal, f"at least {show(least)}", *measured))
    return markdown_table(("goal", "", "measured", ""), rows)


def report(results: dict) -> str:
    parts = results.get("parts", {})
    text = [f"Measured on {results['chip']}, torch {results['torch']}, open_clip {results['open_clip']}, "
            f"{results['date']}." if parts else "**No GPU has run any of this yet.**", "### Goals", goals(parts), STEPS]
    for part, rows in parts.items():
        text += [f"### Measured: {part}", table(rows)]
    for row in parts.get("steps", ()):
        if row.get("kernels"):
            text += [f"### The ten heaviest kernels: {row['model']} {row['size']}, batch {row['batch']}, {row['mode']}",
                     f"All kernels: {show(row['kernel ms'])} ms",
                     markdown_table(("kernel", "ms", "calls"), row["kernels"])]
    return "\n\n".join(text)


def write_report(folder: Path, results: dict) -> None:
    write_json(folder / "gpu.json", results, indent=1)
    write_section("Measured", report(results), folder / "GPU.md", HEAD)


def identity(row: dict) -> tuple:
    return tuple(row.get(key) for key in IDENTITY)


def machine(device: str) -> dict[str, str]:
    chip = torch.cuda.get_device_name() if device == "cuda" else "a CPU, small sizes: a trial of the script, no result"
    return {"chip": chip, "torch": torch.__version__, "open_clip": version("open_clip_torch")}


def measure(part: str, bench: Bench, known: list[dict], save) -> None:
    """Run a part until its time is over. Each new row replaces the older one of its case in `known`."""
    start = time.monotonic()
    rows = PARTS[part](bench)
    while time.monotonic() - start < SECONDS:
        row = next(rows, None)
        if row is None:
            return
        known[:] = [old for old in known if identity(old) != identity(row)] + [row]
        save()
        print(part, {key: value for key, value in row.items() if key != "kernels"}, flush=True)
    print(f"{part}: stopped after {SECONDS} s. Run it again with fewer --sizes or --batches for the rest")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to measure (default: %(default)s)")
    parser.add_argument("--sizes", default="ViT-B-16", help="models of the part steps. Other parts take the first one")
    parser.add_argument("--batches", default="128,1024", help="batch sizes of the part steps (default: %(default)s)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="use a tiny model and small sizes")
    parser.add_argument("--out", type=Path, help="folder of gpu.json and GPU.md (default: benchmarks, none on a CPU)")
    args = parser.parse_args()
    if unknown := set(args.parts.split(",")) - set(PARTS):
        sys.exit(f"error: --parts {','.join(sorted(unknown))}: no such part. There are {', '.join(PARTS)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: no CUDA device. --device cpu --small tries the script")
    sizes, batches = ("ViT-Ti-8", "4") if args.small else (args.sizes, args.batches)
    bench = Bench(args.device, args.small, tuple(sizes.split(",")), tuple(map(int, batches.split(","))))
    here = machine(args.device)
    out = args.out or (FOLDER if args.device == "cuda" else None)
    old = out / "gpu.json" if out else None
    measured = json.loads(old.read_text()) if old and old.exists() else {}
    if {key: measured.get(key) for key in here} != here:
        measured = dict(here, parts={})
    measured["date"] = str(date.today())
    for part in args.parts.split(","):
        known = measured["parts"].setdefault(part, [])
        measure(part, bench, known, lambda: out and write_report(out, measured))


if __name__ == "__main__":
    main()
