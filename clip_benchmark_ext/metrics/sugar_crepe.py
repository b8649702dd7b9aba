"""Average SugarCrepe's groups of subsets (Table 2), over cases as its authors do, and over subsets."""
import logging
import re
from collections.abc import Iterable

import numpy as np

from ..datasets.sugar_crepe import GROUPS


def group_averages(results: Iterable[dict]) -> dict[str, dict]:
    """Return the averages of one model's results by group, over subsets ("sugar_crepe/add, macro") and over cases.

    The latter are named "micro", and are left out for results without a number of cases.
    """
    subsets = {}
    for result in results:
        family, _, subset = result["dataset"].partition("/")
        if family == "sugar_crepe":
            if subset in subsets:
                raise ValueError(f"sugar_crepe/{subset} is there twice: give the results of one model and one scorer")
            subsets[subset] = result["metrics"]
    groups = {}
    for group, members in GROUPS.items():
        parts = [subsets[subset] for subset in members if subset in subsets]
        if len(parts) < len(members):
            if parts:
                logging.warning("sugar_crepe/%s is not averaged: no result of %s", group,
                                ", ".join(subset for subset in members if subset not in subsets))
            continue
        rows = [{key.removeprefix("text_acc") for key in part if key.startswith("text_acc")} for part in parts]
        if any(row != rows[0] for row in rows):
            raise ValueError(f"the subsets of sugar_crepe/{group} do not have the same scores: {', '.join(members)}")
        counts = {key: sum(part[key] for part in parts) for key in sorted(set.intersection(*map(set, parts)))
                  if re.fullmatch(
                      r"cases|duplicates|same_words|cases_left_out|cases_cut|\w+_differs|ties(?!_count_as)\w*", key)}
        weights = {"macro": None} | ({"micro": [part["cases"] for part in parts]} if "cases" in counts else {})
        for kind, weight in weights.items():
            groups[f"sugar_crepe/{group}, {kind}"] = {f"text_acc{suffix}": float(np.average(
                [part[f"text_acc{suffix}"] for part in parts], weights=weight)) for suffix in sorted(rows[0])} | counts
    return groups
