"""Result files of `clip_benchmark eval` as a Markdown table, SugarCrepe's group averages included.

    python -m clip_benchmark_ext.table results/*.json

`clip_benchmark build` makes a CSV of every number; this shows those that the paper's tables show.
"""
import json
import sys
from pathlib import Path

from .selection import sugar_crepe_groups

# metric: column
SHOWN = {
    "lp_acc1": "probe", "acc1": "top-1", "acc5": "top-5", "text_acc": "accuracy", "text_acc_macro": "macro",
    "text_acc_micro": "micro", "text_acc_blind": "blind", "text_acc_debiased": "debiased",
    "text_acc_micro_blind": "micro blind", "text_acc_micro_debiased": "micro debiased", "image_acc": "image",
    "acc": "both", "ties": "ties", "cases": "cases", "mean_draws": "draws",
}


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
    """One row per result; only columns that some row has."""
    columns = [metric for metric in SHOWN if any(metric in r["metrics"] for r in results)]
    lines = ["| data set | model | scorer | " + " | ".join(SHOWN[c] for c in columns) + " |",
             "|---" * (len(columns) + 3) + "|"]

    def cell(value) -> str:
        if value is None:
            return ""
        return f"{100 * value:.1f}" if isinstance(value, float) and value <= 1 else f"{value:.0f}"

    for result in sorted(results, key=lambda r: (r["dataset"], r["model"], str(r["metrics"].get("scorer")))):
        cells = [cell(result["metrics"].get(c)) for c in columns]
        lines.append(f"| {result['dataset']} | {result['model']} | {result['metrics'].get('scorer') or ''} | "
                     + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    paths = sys.argv[1:]
    if not paths:
        sys.exit("usage: python -m clip_benchmark_ext.table RESULT.json ...")
    try:
        print(markdown(read_results(paths)))
    except (ValueError, OSError) as problem:
        sys.exit(f"error: {problem}")


if __name__ == "__main__":
    main()
