"""Numbers of the paper (arXiv 2510.26799), to print beside ours. Its text has none for Figures 4 and 5.

They are in paper.csv by table and row. The rows of Table 1 are captions, network and method, and its numbers are the
accuracy of linear probes in %, in the order of PROBES. Tables 4 and 5 are on ImageNet.
"""
import csv
from pathlib import Path

PROBES = ("ImageNet", "Food101", "CIFAR-10", "CIFAR-100", "Pets")
SELECTIONS = ("ARO relation", "ARO attribute", "COCO order", "Flickr30k order",
              "SugarCrepe add", "SugarCrepe replace", "SugarCrepe swap")
CAPTION_METRICS = ("B@4", "METEOR", "CIDEr", "SPICE", "ROUGE-L", "LLM")  # the last is the judge's selection rate

TABLES: dict[str, dict[str, tuple[float, ...]]] = {}
with Path(__file__).with_name("paper.csv").open(newline="", encoding="utf-8") as file:
    for line in csv.DictReader(file):
        TABLES.setdefault(line["table"], {})[line["row"]] = tuple(map(float, line["numbers"].split()))


def probes(captions: str, network: str, method: str) -> dict[str, float]:
    """Return the accuracy of each probe of Table 1, in %."""
    return dict(zip(PROBES, TABLES["table1"][f"{captions}, {network}, {method}"], strict=True))
