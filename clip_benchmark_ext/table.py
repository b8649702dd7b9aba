"""Print result files of `clip_benchmark eval` as a Markdown table, with SugarCrepe's group averages.

    python -m clip_benchmark_ext.table results/*.json

A group of SugarCrepe has two rows: "macro", the mean over its subsets, and "micro", the mean over its cases, which is
SugarCrepe's own. Probes have a row for each feature, including the untrained network and pixels.
"""
import argparse
import json
import logging
from collections import defaultdict
from pathlib import Path

from open_clip_mdc.data.files import parse_json
from open_clip_mdc.data.markdown import markdown_table
from open_clip_mdc.errors import Refusal

from .metrics.sugar_crepe import group_averages

COLUMNS = {  # column: the metric that it shows
    "probe": "lp_acc1", "top-1": "acc1", "top-1 blind": "acc1_blind", "top-1 debiased": "acc1_debiased",
    "top-5": "acc5", "top-5 blind": "acc5_blind", "top-5 debiased": "acc5_debiased",
    **{f"{way} R@{k}{row}": f"{way}_retrieval_recall@{k}{row.replace(' ', '_')}"
       for way in ("image", "text") for k in (1, 5, 10) for row in ("", " blind", " debiased", " clip")},
    **dict(pair.split(": ") for pair in (
        "accuracy: text_acc, macro: text_acc_macro, micro: text_acc_micro, blind: text_acc_blind, "
        "debiased: text_acc_debiased, image: image_acc, both: acc, ties: ties, cases: cases, draws: mean_draws, "
        "shortlist: shortlist, length: caption_length, B@4: Bleu_4, METEOR: METEOR, CIDEr: CIDEr, ROUGE-L: ROUGE_L, "
        "SPICE: SPICE, CLIPScore: CLIPScore").split(", ")),
    **{f"{way}{row}": f"{way}_acc{row.replace(' ', '_')}" for way in ("cloze", "choice") for row in ("", " blind")},
    "majority": "majority_acc", **{f"{k}-NN": f"knn{k}_acc1" for k in (10, 20, 100, 200)}, "linear": "linear_acc1",
    "linear, macro": "linear_macro", "attentive": "attentive_acc1", "attentive, macro": "attentive_macro",
    "mIoU": "miou", "pixel accuracy": "pixel_acc", "RefCLIPScore": "RefCLIPScore",
    "mean length": "mean_length", "references": "reference_mean_length",  # numbers of words
}
OF_THE_SUBSET = {"dataset_root": None, "data_sha256": None}  # settings that may differ between subsets of a group
COUNTS = "ties cases draws shortlist length".split()
LENGTHS = ("mean length", "references")


def checked(name: str, value: object) -> object:
    name = name.rpartition("/")[2]
    kinds = {"scorer": (str,), "caption_length": (int, float, str)}.get(name, (int, float))
    if (name in ("scorer", *COLUMNS.values()) or name.startswith("text_acc")) and type(value) not in kinds:
        raise TypeError(f"{name} is {value!r}")
    return value


def read_results(paths: list[str]) -> list[dict]:
    """Return the results of files, and SugarCrepe's averages of complete groups by model and settings."""
    results = []
    for path in paths:
        try:
            result = parse_json(Path(path).read_bytes())
            metrics = {name: checked(name, value) for name, value in result["metrics"].items()
                       if value is not None and not name.endswith("_missing")}
            results += feature_rows({**{k: "" + result[k] for k in ("dataset", "model", "pretrained", "task")},
                            "metrics": metrics, "settings": result.get("settings", {}) | OF_THE_SUBSET})
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise ValueError(f"{path} is not a result file of clip_benchmark eval: {problem!r}") from problem
    families = defaultdict(list)
    for result in results:
        if result["dataset"].startswith("sugar_crepe/"):
            settings = json.dumps([result["metrics"].get("scorer"), result["settings"]], sort_keys=True)
            families[result["model"], result["pretrained"], settings].append(result)
    for members in families.values():
        scorer = members[0]["metrics"].get("scorer")
        results += [{**members[0], "dataset": name, "metrics": {**metrics, "scorer": scorer}}
                    for name, metrics in group_averages(members).items()]
    return results


def feature_rows(result: dict) -> list[dict]:
    """Return one result per feature or group of images, by FEATURE/METRIC. What no column shows is no row."""
    rows = defaultdict(dict)
    for name, value in result["metrics"].items():
        feature, _, metric = name.rpartition("/")
        rows[feature][metric] = value
    rows = {name: own for name, own in rows.items() if not name or not own.keys().isdisjoint(COLUMNS.values())}
    if len(rows) < 2:
        return [result]
    whole = "all" if result["task"] == "captioning" else "encoder"
    return [{**result, "metrics": metrics, "feature": feature.replace("_", " ") or whole, "order": number}
            for number, (feature, metrics) in enumerate(rows.items())]


def markdown(results: list[dict]) -> str:
    """Return a Markdown table with a row per result, and columns that some row has.

    Accuracies and caption metrics are times 100.
    """
    def cell(result: dict, column: str) -> str | None:
        number = result["metrics"].get(COLUMNS[column])
        if number is None or isinstance(number, str):  # --caption_length auto
            return number
        error = result["metrics"].get(f"{COLUMNS[column].removesuffix('_acc1')}_se")
        if error is not None:
            return f"{100 * number:.1f} ± {100 * error:.1f}"
        return f"{number:.0f}" if column in COUNTS else f"{number if column in LENGTHS else 100 * number:.1f}"

    def name(result: dict) -> list[str]:
        path = Path(result["pretrained"])
        run = f" ({path.parent.parent.name})" if path.parent.name == "checkpoints" else ""
        return [result["dataset"], result["model"] + run, result["metrics"].get("scorer") or ""]

    columns = [c for c in COLUMNS if any(r["metrics"].get(COLUMNS[c]) is not None for r in results)]
    features = ["features"] if any("feature" in r for r in results) else []
    rows = sorted(results, key=lambda r: (name(r), r.get("order", 0)))
    return markdown_table(["data set", "model (run)", "scorer", *features, *columns],
                          [name(r) + [r.get("feature")] * len(features) + [cell(r, c) for c in columns] for r in rows])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m clip_benchmark_ext.table", description=__doc__.split("\n")[0])
    parser.add_argument("results", nargs="+", metavar="RESULT.json", help="result files of clip_benchmark eval")
    logging.disable(logging.WARNING)  # the table itself shows that an incomplete group has no row
    try:
        print(markdown(read_results(parser.parse_args().results)))
    except (ValueError, OSError) as problem:
        raise Refusal(str(problem)) from None


if __name__ == "__main__":
    main()
