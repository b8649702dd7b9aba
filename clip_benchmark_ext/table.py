"""Result files of `clip_benchmark eval` as a Markdown table, SugarCrepe's group averages included.

    python -m clip_benchmark_ext.table results/*.json

`clip_benchmark build` makes a CSV of every number; this shows those that the paper's tables show.
"""
import json
import logging
import sys
from pathlib import Path

from .selection_metrics import sugar_crepe_groups

# column: the metrics that it shows, the first that a result has; a group's blind and debiased are over its cases
COLUMNS = {
    "probe": ("lp_acc1",), "top-1": ("acc1",), "top-5": ("acc5",), "accuracy": ("text_acc",),
    "macro": ("text_acc_macro",), "micro": ("text_acc_micro",), "blind": ("text_acc_blind", "text_acc_micro_blind"),
    "debiased": ("text_acc_debiased", "text_acc_micro_debiased"), "image": ("image_acc",), "both": ("acc",),
    "ties": ("ties",), "cases": ("cases",), "draws": ("mean_draws",),
    "length": ("caption_length",), "B@4": ("Bleu_4",), "METEOR": ("METEOR",), "CIDEr": ("CIDEr",),
    "ROUGE-L": ("ROUGE_L",), "SPICE": ("SPICE",), "CLIPScore": ("CLIPScore",), "RefCLIPScore": ("RefCLIPScore",),
    "mean length": ("mean_length",), "references": ("reference_mean_length",),  # in words
}
COUNTS = ("ties", "cases", "draws", "length")
LENGTHS = ("mean length", "references")


def read_results(paths: list[str]) -> list[dict]:
    """Contents of result files, and SugarCrepe's averages for each model and scorer that has all of a group's subsets.

    Raises:
        ValueError: a file that `clip_benchmark eval` did not write.
    """
    results = []
    for path in paths:
        try:
            result = json.loads(Path(path).read_text(encoding="utf-8"))
            results.append({k: result[k] for k in ("dataset", "model", "pretrained", "task", "metrics")})
        except (ValueError, KeyError, TypeError) as problem:
            raise ValueError(f"{path} is no result file of clip_benchmark eval: {problem!r}") from problem
    families: dict[tuple, list[dict]] = {}
    for result in results:
        if result["dataset"].startswith("sugar_crepe/"):
            scorer = (result["metrics"].get("scorer"), result["metrics"].get("mean_draws") is None)
            families.setdefault((result["model"], result["pretrained"], scorer), []).append(result)
    for members in families.values():
        for group, metrics in sugar_crepe_groups(members).items():
            metrics["scorer"] = members[0]["metrics"].get("scorer")
            results.append({**members[0], "dataset": group, "metrics": metrics})
    return results


def markdown(results: list[dict]) -> str:
    """One row per result; only columns that some row has. Accuracies and caption metrics times 100."""
    def value(result: dict, column: str):
        return next((result["metrics"][m] for m in COLUMNS[column] if result["metrics"].get(m) is not None), None)

    def cell(result: dict, column: str) -> str:
        number = value(result, column)
        if number is None or isinstance(number, str):  # --caption_length auto
            return number or ""
        return f"{number:.0f}" if column in COUNTS else f"{number if column in LENGTHS else 100 * number:.1f}"

    def row(result: dict) -> list[str]:
        path = Path(result["pretrained"])
        run = f" ({path.parent.parent.name})" if path.parent.name == "checkpoints" else ""
        return [result["dataset"], result["model"] + run, result["metrics"].get("scorer") or ""]

    columns = [c for c in COLUMNS if any(value(r, c) is not None for r in results)]
    head = ["data set", "model (run)", "scorer", *columns]
    rows = sorted(row(r) + [cell(r, c) for c in columns] for r in results)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def main() -> None:
    paths = sys.argv[1:]
    if not paths:
        sys.exit("usage: python -m clip_benchmark_ext.table RESULT.json ...")
    logging.disable(logging.WARNING)  # a group without all of its subsets has no row, which is plain to see
    try:
        print(markdown(read_results(paths)))
    except (ValueError, OSError) as problem:
        sys.exit(f"error: {problem}")


if __name__ == "__main__":
    main()
