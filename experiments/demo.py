"""Print captions of held-out scenes, and what `make demo` has shown, in six lines.

    python -m experiments.demo --demo demo --scenes 20000 --epochs 2
"""
import json
from pathlib import Path

from open_clip_mdc.data.shards import read_samples

from .problems import make_parser

SAID = """
Trained: MDC and its autoregressive twin ARC, 1.6 million parameters each, on {scenes} scenes (epochs: {epochs}).
Features: a linear probe of MDC's encoder gets {mdc} % of 16 classes right. Before training it got {untrained} %.
Captions: MDC tells exchanged colours in {seen} %, without seeing the image in {blind} %, and ARC with it in {arc} %.
Only MDC fills in: {bin} caption IMAGE --pretrained {demo}/mdc --text 'a [MASK] circle left of a [MASK] [MASK]'
Open: {demo}/captions.html, where the words of a caption appear step by step.
Next: {bin} app captions your photographs in the browser. README.md says how to fine-tune and train."""


def percent(results: Path, name: str, metric: str) -> str:
    return f"{100 * json.loads((results / f'{name}.json').read_text())['metrics'][metric]:.1f}"


def print_captions(demo: Path) -> None:
    """Print each caption that MDC wrote, beside the true one where they differ."""
    print("\nCaptions of held-out scenes:")
    rows = list(map(json.loads, (demo / "captions.jsonl").read_text(encoding="utf-8").splitlines()))
    shard = rows[0]["image"].partition("::")[0]
    captions = {f"{shard}::{sample['__key__']}": sample["txt"].decode() for sample in read_samples(shard)}
    for row in rows:
        true = captions[row["image"]]
        print(row["caption"] + ("" if row["caption"] == true else f"   (true: {true})"))


def main() -> None:
    parser = make_parser(__doc__)
    for flag in ("--demo", "--scenes", "--epochs"):
        parser.add_argument(flag, required=True)
    args = parser.parse_args()
    results = Path(args.demo) / "results"
    print_captions(Path(args.demo))
    swapped = "sugar_crepe_swap_att"
    print(SAID.format(
        **vars(args), bin=".venv/bin/open_clip_mdc", mdc=percent(results, "probe-mdc", "lp_acc1"),
        untrained=percent(results, "probe-untrained", "lp_acc1"),
        seen=percent(results, f"{swapped}-heuristic", "text_acc"),
        blind=percent(results, f"{swapped}-heuristic", "text_acc_blind"),
        arc=percent(results, f"{swapped}-autoregressive", "text_acc")))


if __name__ == "__main__":
    main()
