"""The official metrics of the compositionality data sets, from scores alone: no model, no pictures.

Place in the paper: every column of the compositionality table. The caller scores each case's candidates and hands over

    scores = {"plain": [...], "blind": [...], "debiased": [...]}       # any rows, one array per case, dataset order
    metrics = selection_metrics(dataset.name, scores, dataset.cases)   # {"text_acc": ..., "text_acc_blind": ...}

An array is [C], the score of each candidate (the right one first), or for Winoground [I, C] = [2, 2], the score of
image i with caption c. Higher is better. Row "plain" has no suffix in the metrics' names, any other row has its own.
"blind" are the scores without the image, "debiased" those of `debiased_score`.

Per row the metrics are (SUFFIX as above):

    text_accSUFFIX      the official number of the data set:
                          SugarCrepe, VALSE   share of cases whose right caption scores strictly higher
                          ARO VG-Relation     mean over relations, but for the 157 that the official notebook leaves out
                          ARO VG-Attribution  mean over ordered pairs of attributes with at least 25 cases
                          ARO *-Order         share of cases whose right caption is no worse than any other
                          Winoground          share of cases whose two images both prefer their own caption
    text_acc_macroSUFFIX, text_acc_microSUFFIX    ARO VG-*: mean over groups (= text_acc), mean over their cases
    text_acc_strictSUFFIX                         ARO *-Order: ties counted as wrong
    image_accSUFFIX, accSUFFIX                    Winoground's image and group score
    tiesSUFFIX          cases that a tie decides: no wrong candidate scores higher, and one scores exactly as high
    tied_casesSUFFIX    the keys of the first ten of them
    image_tiesSUFFIX    the same for Winoground's image score (all of them in a blind row: it cannot tell images apart)

and for all rows together `cases`, `duplicates` (cases in which a wrong candidate is the same text as the right one:
they can only tie), `ties_count_as`, and for ARO VG-* `groups` and `cases_in_groups`, those the official mean keeps.

Equal texts within a case get equal scores here, whatever noise the scorer added: an estimator must not win by chance.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from .datasets import SUGAR_CREPE_SUBSETS, Case

TIES_NAMED = 10
MIN_PAIR_CASES = 25  # VG-Attribution: pairs of attributes with fewer cases are left out, as officially
SUGAR_CREPE_GROUPS = {
    group: tuple(subset for subset in SUGAR_CREPE_SUBSETS if subset.startswith(group))
    for group in ("add", "replace", "swap")
}


def debiased_score(conditional: np.ndarray, blind: np.ndarray, alpha: float = 1.0) -> np.ndarray:
    """log p(c|i) - alpha * log p(c): what the image adds to the caption's likelihood. alpha = 1 is the PMI.

    Args:
        conditional: log p(c|i), [C] or [I, C].
        blind: log p(c), of the same shape or [C].
    """
    return np.asarray(conditional, dtype=np.float64) - alpha * np.asarray(blind, dtype=np.float64)


def symmetric_relations() -> frozenset[str]:
    """The 157 relations that ARO's notebook leaves out of the VG-Relation average, where it calls them `symmetric`.

    Source: github.com/mertyg/vision-language-models-are-bows, notebooks/"Replicate ARO! VG-Relation, VG-Attribution".
    """
    path = Path(__file__).with_name("aro_symmetric_relations.json")
    return frozenset(json.loads(path.read_text(encoding="utf-8")))


def selection_metrics(dataset_name: str, scores: Mapping[str, Sequence], cases: Sequence[Case]) -> dict:
    """The metrics of one data set; names and rules are at the head of this file.

    Args:
        dataset_name: as in datasets.py.
        scores: per row ("plain", "blind", "debiased", ...) one array [C] or [I, C] per case, in the order of `cases`.
        cases: the cases scored.

    Returns:
        Numbers and texts only, ready for clip_benchmark's result file.

    Raises:
        ValueError: a row has another number of cases, an array another shape, or a score is NaN.
    """
    order = dataset_name.endswith("_order")
    metrics: dict = {
        "cases": len(cases),
        "duplicates": sum(case.captions[0] in case.captions[1:] for case in cases),
        "ties_count_as": "right" if order else "wrong",
    }
    for row, values in scores.items():
        suffix = "" if row == "plain" else f"_{row}"
        arrays = _checked(values, cases, row)
        text = np.array([_outcome(array) for array in arrays], dtype=int)
        if dataset_name.startswith("aro/vg_"):
            metrics |= _group_metrics(dataset_name, text == 1, cases, suffix)
        elif order:
            metrics |= {f"text_acc{suffix}": _mean(text >= 0), f"text_acc_strict{suffix}": _mean(text == 1)}
        else:
            metrics[f"text_acc{suffix}"] = _mean(text == 1)
        if dataset_name == "winoground":
            image = np.array([_outcome(array.T) for array in arrays], dtype=int)
            metrics |= {f"image_acc{suffix}": _mean(image == 1), f"acc{suffix}": _mean((text == 1) & (image == 1)),
                        f"image_ties{suffix}": int((image == 0).sum())}
        tied = [case.key for case, outcome in zip(cases, text, strict=True) if outcome == 0]
        metrics |= {f"ties{suffix}": len(tied), f"tied_cases{suffix}": " ".join(tied[:TIES_NAMED])}
    return metrics


def group_accuracies(correct: Sequence[bool], cases: Sequence[Case]) -> dict[str, tuple[float, int]]:
    """Accuracy and number of cases of every `case.group`, e.g. of every relation of VG-Relation."""
    groups = defaultdict(list)
    for case, is_correct in zip(cases, correct, strict=True):
        groups[case.group].append(bool(is_correct))
    return {group: (_mean(values), len(values)) for group, values in sorted(groups.items())}


def sugar_crepe_groups(results: Iterable[dict]) -> dict[str, dict]:
    """SugarCrepe's averages add, replace and swap from the subsets' result files.

    Args:
        results: contents of clip_benchmark's result files of one model and scorer, each with "dataset" (such as
            "sugar_crepe/add_att") and "metrics" (of `selection_metrics`). Other data sets are passed over.

    Returns:
        {"sugar_crepe/add": {"text_acc_macro": mean over subsets, "text_acc_micro": mean over cases, the same with the
        suffixes of other rows, "cases": ..., "ties": ...}, ...}, complete groups only. SugarCrepe's paper averages
        over cases (issue 3 of its repository); where a paper does not say, give both. Results that do not say how many
        cases they have, which upstream's command writes, have no mean over cases.

    Raises:
        ValueError: a subset comes twice, or the subsets of a group do not have the same rows of scores.
    """
    subsets = {}
    for result in results:
        family, _, subset = result["dataset"].partition("/")
        if family == "sugar_crepe" and subset in SUGAR_CREPE_SUBSETS:
            if subset in subsets:
                raise ValueError(f"sugar_crepe/{subset} is there twice; give the results of one model and one scorer")
            subsets[subset] = result["metrics"]
    groups = {}
    for group, members in SUGAR_CREPE_GROUPS.items():
        parts = [subsets[subset] for subset in members if subset in subsets]
        if len(parts) < len(members):
            if parts:
                missing = ", ".join(subset for subset in members if subset not in subsets)
                logging.warning("sugar_crepe/%s is not averaged: no result of %s", group, missing)
            continue
        rows = [{key.removeprefix("text_acc") for key in part if key.startswith("text_acc")} for part in parts]
        if any(row != rows[0] for row in rows):
            raise ValueError(f"the subsets of sugar_crepe/{group} were not scored alike: {', '.join(members)}")
        counts = [part.get("cases") for part in parts]
        groups[f"sugar_crepe/{group}"] = average = {}
        for suffix in sorted(rows[0]):
            accuracies = [part[f"text_acc{suffix}"] for part in parts]
            average[f"text_acc_macro{suffix}"] = float(np.mean(accuracies))
            if None not in counts:
                average[f"text_acc_micro{suffix}"] = float(np.average(accuracies, weights=counts))
        for key in sorted(set.intersection(*map(set, parts))):
            if key in ("cases", "duplicates", "cases_left_out") or key.startswith("ties") and key != "ties_count_as":
                average[key] = sum(part[key] for part in parts)
    return groups


def _group_metrics(dataset_name: str, correct: np.ndarray, cases: Sequence[Case], suffix: str) -> dict:
    """Mean over the groups that the official metric keeps, and over their cases."""
    groups = group_accuracies(correct, cases)
    if dataset_name == "aro/vg_relation":
        left_out = symmetric_relations()
        kept = [values for relation, values in groups.items() if relation not in left_out]
    else:
        kept = [(accuracy, count) for accuracy, count in groups.values() if count >= MIN_PAIR_CASES]
    if not kept:
        logging.warning("%s: the official average keeps none of these %d cases, so text_acc is NaN",
                        dataset_name, len(cases))
    accuracies, counts = [accuracy for accuracy, _ in kept], [count for _, count in kept]
    macro, micro = _mean(accuracies), float(np.average(accuracies, weights=counts)) if kept else float("nan")
    return {f"text_acc{suffix}": macro, f"text_acc_macro{suffix}": macro, f"text_acc_micro{suffix}": micro,
            "groups": len(kept), "cases_in_groups": sum(counts)}


def _outcome(array: np.ndarray) -> int:
    """1: the right caption scores above all others, 0: a tie at the top decides, -1: another scores higher.

    `array` [C] has the right one first; in [I, C] it is caption i for image i, and the worst outcome of the I counts.
    """
    outcomes = []
    for right, scores in enumerate(np.atleast_2d(array)):
        best_wrong = np.delete(scores, right).max()
        outcomes.append(int(scores[right] > best_wrong) - int(scores[right] < best_wrong))
    return min(outcomes)


def _checked(values: Sequence, cases: Sequence[Case], row: str) -> list[np.ndarray]:
    """Scores as float64 arrays of the right shape, equal for equal texts."""
    if len(values) != len(cases):
        raise ValueError(f"{len(values)} {row} scores for {len(cases)} cases")
    arrays = []
    for value, case in zip(values, cases, strict=True):
        array = np.asarray(value, dtype=np.float64)
        count = len(case.captions)
        shape = (count,) if len(case.images) == 1 else (len(case.images), count)
        if array.shape != shape:
            raise ValueError(f"case {case.key}: {row} scores of shape {array.shape}, not {shape}")
        if np.isnan(array).any():
            raise ValueError(f"case {case.key}: a {row} score is NaN")
        arrays.append(array[..., [case.captions.index(caption) for caption in case.captions]])
    return arrays


def _mean(values: Sequence) -> float:
    """Mean as a Python float; NaN of nothing."""
    return float(np.mean(values)) if len(values) else float("nan")
