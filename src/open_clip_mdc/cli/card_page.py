"""Write the table and the page of `open_clip_mdc card` from its result files."""
import argparse
import json
from itertools import islice
from pathlib import Path

from clip_benchmark_ext.datasets.pairs import KINDS

from ..data.images import sample_image
from ..data.markdown import markdown_table
from ..data.shards import read_samples
from ..errors import plural
from .locked_training import shards_of
from .page import CARDS, shown, thumbnail, write_page

ROWS = {"encoder": "the encoder", "random": "random weights", "pixels": "pixels"}
HEAD = ("", *ROWS.values(), "blind", "floor", "cases")
PROBES = {"knn10_acc1": "10-NN", "knn20_acc1": "20-NN", "linear_acc1": "linear probe",
          "attentive_acc1": "attentive probe", "miou": "mIoU"}
SHOWN = 50  # photographs on the page


def row_of(label: str, found: dict[str, dict], metric: str, blind: str = "", floor: float | None = None,
           cases: int | None = None) -> dict:
    """Return a measure of each row, in percent. `found` has the metrics of a result by row."""
    def percent(value: float | None) -> float | None:
        return None if value is None else round(100 * value, 1)

    return {"measure": label, **{row: percent(found.get(row, {}).get(metric)) for row in ROWS},
            "blind": percent(found.get("encoder", {}).get(blind)), "floor": percent(floor), "cases": cases}


def metrics_of(file: Path) -> dict:
    return json.loads(file.read_bytes())["metrics"]


def measures(results: Path) -> list[dict]:
    """Return the rows of the table from all result files. Those without a number are left out."""
    def read(name: str) -> dict[str, dict]:
        files = {row: results / row / f"{name}.json" for row in ROWS}
        return {row: metrics_of(file) for row, file in files.items() if file.exists()}

    captions, cloze = read("data-captioning"), read("data-cloze")
    rows = [row_of("captions, CIDEr", captions, "CIDEr", cases=captions["encoder"]["images"])]
    of_kinds = [name for name in cloze["encoder"] if name.startswith("majority_acc_")]
    for way, metric in (("filled in", "cloze_acc"), ("chosen", "choice_acc")):
        for majority in of_kinds:
            kind = majority.removeprefix("majority_acc_")
            rows.append(row_of(f"{way}, {kind}", cloze, f"{metric}_{kind}", f"{metric}_{kind}_blind",
                               cloze["encoder"][majority], cloze["encoder"][f"questions_{kind}"]))
    for kind in KINDS:
        if found := read(f"sugar_crepe_{kind}-image_caption_selection"):
            rows.append(row_of(f"pairs, {kind}, debiased", found, "text_acc_debiased", "text_acc_blind", 0.5,
                               found["encoder"]["cases"]))
    found = read("gallery-zeroshot_retrieval")
    images = found["encoder"]["images"]
    for way, suffix in (("image", ""), ("text", "_debiased")):
        rows.append(row_of(f"{way} retrieval, R@1", found, f"{way}_retrieval_recall@1{suffix}", floor=1 / images,
                           cases=images))
    for file in sorted(results.glob("probes/*/*.json")):
        rows += probes(file.parent.name, metrics_of(file))
    return [row for row in rows if row["encoder"] is not None]


def probes(name: str, own: dict) -> list[dict]:
    """Return the rows of a probe, whose result has both floors in itself."""
    parts = {"encoder": "", "random": "untrained/", "pixels": "pixels/"}
    found = {row: {metric.removeprefix(part): value for metric, value in own.items() if metric.startswith(part)}
             for row, part in parts.items()}
    return [row_of(f"{name}, {label}", found, metric, cases=own["images"]) for metric, label in PROBES.items()]


def write_card(args: argparse.Namespace, out: Path, counts: dict, rows: list[dict]) -> str:
    """Write OUT/index.html, and return the table as Markdown."""
    page = out / "index.html"
    table = [["" if value is None else str(value) for value in row.values()] for row in rows]  # in the order of HEAD
    facts = {"Encoder": shown(args.encoder, page), "Decoder": args.model, "Trained on": plural(
        counts["train"], "photograph"), "Tested on": plural(counts["test"], "photograph"), "Seeds": "1"}
    said = {label: json.loads((out / "results" / row / "captions" / "data-captioning.json").read_bytes())["captions"]
            for row, label in ROWS.items()}
    cards = []
    for sample in islice((sample for shard in shards_of(out, "test") for sample in read_samples(shard)), SHOWN):
        key, image = sample["__key__"], thumbnail(sample_image(sample))
        cards.append(CARDS.said(image, {label: own[key] for label, own in said.items()}))
    write_page(page, "What this image encoder knows", facts, CARDS.measures(HEAD, table), cards, [])
    return markdown_table(HEAD, table)
