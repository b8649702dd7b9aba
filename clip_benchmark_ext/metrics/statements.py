"""Compute the metrics of single statements that are true or false for an image (NLVR), from scores alone.

    text_acc_debiased   the official number: share of statements judged right, where a score above 0 means true (the
                        image makes the statement more probable). Other rows have no threshold
    auc, auc_blind, auc_debiased    area under the ROC curve: the chance that a true statement outscores a false one
    consistency_debiased    share of sentences that are judged right for all of their images
    majority            accuracy of always giving the more frequent answer
"""
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from sklearn.metrics import roc_auc_score

from ..datasets.readers import Case
from .selection_metrics import suffix_of


def statement_metrics(scores: Mapping[str, Sequence], cases: Sequence[Case]) -> tuple[dict, dict]:
    """Return the metrics (listed at the head of this file) and items. `scores` have an array [1] per case, by row."""
    true = np.array([case.right for case in cases], dtype=bool)
    metrics = {"cases": len(cases), "majority": float(max(true.mean(), 1 - true.mean()))}
    items = {"images": [case.images[0].name for case in cases], "values": {}, "weights": {}}
    for row, values in scores.items():
        score = np.array([np.asarray(value, dtype=np.float64).item() for value in values])
        if 0 < true.mean() < 1:
            metrics[f"auc{suffix_of(row)}"] = float(roc_auc_score(true, score))
        if row == "debiased":
            right = (score > 0) == true
            of_sentences = pd.Series(right).groupby(pd.Series([case.group for case in cases])).all()
            metrics |= {"text_acc_debiased": float(right.mean()), "consistency_debiased": float(of_sentences.mean())}
            items["values"]["text_acc_debiased"] = right.astype(int).tolist()
    return metrics, items
