"""Average SugarCrepe's groups of subsets (Table 2), over cases as its authors do, and over subsets."""
import logging
from collections.abc import Iterable

import numpy as np

from ..datasets.sugar_crepe import GROUPS


def group_averages(results: Iterable[dict]) -> dict[str, dict]:
    """Return SugarCrepe's macro (over subsets) and micro (over cases) averages of one model's results, by group."""
    subsets = {}
    for result in results:
        family, _, subset = result["dataset"].partition("/")
        if family == "sugar_crepe" and any(subset in members for members in GROUPS.values()):
            if subset in subsets:
                raise ValueError(f"sugar_crepe/{subset} is there twice: give the results of one model and one scorer")
            subsets[subset] = result["metrics"]
    groups = {}
    for group, members in GROUPS.items():
        parts = [subsets[subset] for subset in members if subset in subsets]
        if len(parts) < len(members):
            if parts:
                missing = ", ".join(subset for subset in members if subset not in subsets)
                logging.warning("sugar_crepe/%s is not averaged: no result of %s", group, missing)
            continue
        rows = [{key.removeprefix("text_acc") for key in part if key.startswith("text_acc")} for part in parts]
        if any(row != rows[0] for row in rows):
            raise ValueError(f"the subsets of sugar_crepe/{group} do not have the same scores: {', '.join(members)}")
        counts = [part.get("cases") for part in parts]
        groups[f"sugar_crepe/{group}"] = average = {}
        for suffix in sorted(rows[0]):
            accuracies = [part[f"text_acc{suffix}"] for part in parts]
            average[f"text_acc_macro{suffix}"] = float(np.mean(accuracies))
            if None not in counts:
                average[f"text_acc_micro{suffix}"] = float(np.average(accuracies, weights=counts))
        for key in sorted(set.intersection(*map(set, parts))):
            if key in ("cases", "duplicates", "same_words", "cases_left_out", "cases_cut") or \
                    key.endswith("_differs") or key.startswith("ties") and key != "ties_count_as":
                average[key] = sum(part[key] for part in parts)
    return groups
