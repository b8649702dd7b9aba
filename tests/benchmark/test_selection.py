"""Claims about the official metrics: rigged scores whose right answers were counted by hand."""
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from clip_benchmark_ext.datasets.readers import Case
from clip_benchmark_ext.metrics import selection_metrics as metrics_of_scores
from clip_benchmark_ext.metrics.selection_metrics import clip_benchmarks_metrics, symmetric_relations
from clip_benchmark_ext.metrics.sugar_crepe import group_averages
from clip_benchmark_ext.selection_datasets import find_row


def selection_metrics(name, scores, cases):
    return metrics_of_scores.selection_metrics(find_row(name).metric, scores, cases)[0]


RIGHT, TIE, WRONG = [2.0, 1.0], [1.0, 1.0], [1.0, 2.0]


def cases_of(groups, captions=2, images=1):
    """One case per group name, with so many captions, the first of which is right."""
    return [Case(f"row{i}", (Path("x.png"),) * images, tuple(f"text {j} of {i}" for j in range(captions)), group)
            for i, group in enumerate(groups)]


@pytest.mark.parametrize("name", ["sugar_crepe/swap_obj", "valse/existence"])
def test_pairs_are_right_only_if_the_right_caption_scores_strictly_higher(name):
    metrics = selection_metrics(name, {"plain": [RIGHT, TIE, WRONG, RIGHT, TIE]}, cases_of("ggggg"))
    assert metrics == {"cases": 5, "duplicates": 0, "same_words": 0, "full_stop_differs": 0, "capital_differs": 0,
                       "ties_count_as": "wrong", "text_acc": 0.4, "ties": 2, "tied_cases": "row1 row4"}


def test_equal_texts_tie_whatever_noise_the_scorer_added():
    cases = [Case("a", (Path("x.png"),), ("same", "same"), "g"), Case("b", (Path("x.png"),), ("one", "other"), "g")]
    for noise in (1e-6, -1e-6):
        metrics = selection_metrics("sugar_crepe/add_att", {"plain": [[1.0, 1.0 + noise], RIGHT]}, cases)
        assert metrics.items() >= {"text_acc": 0.5, "ties": 1, "duplicates": 1}.items()
        order = [Case("a", (Path("x.png"),), ("s", "t", "s", "t", "u"), "g")]
        metrics = selection_metrics("aro/coco_order", {"plain": [[2.0, 1.0, 2.0 + noise, 1.0, 0.0]]}, order)
        assert metrics.items() >= {"text_acc": 1, "text_acc_strict": 0, "duplicates": 1}.items()


def test_pairs_with_the_same_words_are_counted_marked_and_averaged_apart():
    """Whatever a bag of words can do, it cannot choose between these."""
    texts = [("A dog bites a man.", "a man bites a dog"), ("a dog", "a cat"), ("the man's dog", "the dog's man"),
             ("two dogs, one cat", "One cat, two dogs!"), ("a a b", "a b b"), ("a dog", "a dog")]
    cases = [Case(f"row{i}", (Path(f"{i}.png"),), pair, "g") for i, pair in enumerate(texts)]
    scores = {"plain": [RIGHT, WRONG, RIGHT, TIE, RIGHT, TIE], "blind": [TIE, RIGHT, WRONG, RIGHT, WRONG, TIE]}
    metrics, items = metrics_of_scores.selection_metrics(find_row("sugar_crepe/swap_obj").metric, scores, cases)
    assert metrics.items() >= {"same_words": 2, "duplicates": 1, "same_words_acc": 0.5, "same_words_acc_blind": 0.5
                               }.items()
    assert items["same_words"] == [True, False, False, True, False, False]


def test_pairs_that_their_surface_gives_away_are_counted_marked_and_left_out_of_another_accuracy():
    texts = [("a dog", "a cat. "), ("a dog.", "A cat."), (" A dog", "A big dog"), ("a dog.\n", "a cat")]
    cases = [Case(f"row{i}", (Path(f"{i}.png"),), pair, "g") for i, pair in enumerate(texts)]
    surfaces = {**metrics_of_scores.SURFACES, "length": lambda text: len(text.split())}
    scores = {"plain": [WRONG, RIGHT, TIE, WRONG], "blind": [RIGHT] * 4}
    metric = find_row("sugar_crepe/add_obj").metric
    metrics, items = metrics_of_scores.selection_metrics(metric, scores, cases, surfaces)
    assert [metrics[f"{name}_differs"] for name in surfaces] == [2, 1, 1]
    assert [metrics[f"same_{name}_acc"] for name in surfaces] == [1 / 2, 0, 1 / 3]
    assert [metrics[f"same_{name}_acc_blind"] for name in surfaces] == [1, 1, 1]
    assert items["full_stop_differs"] == [True, False, False, True]
    metrics, _ = metrics_of_scores.selection_metrics(metric, {"plain": [WRONG]}, cases[:1], surfaces)
    assert not any(name.startswith("same_full_stop") for name in metrics)  # no case is left


def test_orders_count_a_tie_for_the_right_caption_as_right_and_report_the_strict_number_too():
    scores = [[5, 4, 3, 2, 1], [5, 5, 3, 2, 1], [4, 5, 3, 2, 1], [4, 4, 5, 2, 1], [1, 1, 1, 1, 1]]
    metrics = selection_metrics("aro/flickr30k_order", {"plain": scores}, cases_of(["coco_order"] * 5, 5))
    assert metrics.items() >= {
        "text_acc": np.mean([np.argmax(row) == 0 for row in scores]),  # Precision@1 of the official code
        "text_acc_strict": 0.2, "ties": 2, "tied_cases": "row1 row4", "ties_count_as": "right"}.items()


def test_vg_relation_averages_over_relations_without_the_excluded_ones():
    # "on" 3 of 4, "behind" 0 of 1, and "near", which is excluded, 0 of 2
    groups = ["on"] * 4 + ["behind", "near", "near"]
    metrics = selection_metrics("aro/vg_relation", {"plain": [RIGHT, RIGHT, RIGHT, TIE, WRONG, WRONG, TIE]},
                                cases_of(groups))
    assert len(symmetric_relations()) == 157
    assert "near" in symmetric_relations() and not {"on", "behind"} & symmetric_relations()
    assert metrics.items() >= {"text_acc": (3 / 4 + 0) / 2, "text_acc_macro": (3 / 4 + 0) / 2, "text_acc_micro": 3 / 5,
                               "cases": 7, "groups": 2, "cases_in_groups": 5, "ties": 2}.items()


def test_vg_attribution_averages_over_ordered_pairs_with_at_least_25_cases():
    # white_round has 25 rows with 20 right, round_white 24 rows (too few, another pair), red_big 50 rows, all right
    groups = ["white_round"] * 25 + ["round_white"] * 24 + ["red_big"] * 50
    scores = [RIGHT] * 20 + [WRONG] * 4 + [TIE] + [WRONG] * 24 + [RIGHT] * 50
    metrics = selection_metrics("aro/vg_attribution", {"plain": scores}, cases_of(groups))
    assert metrics.items() >= {"text_acc": (20 / 25 + 1) / 2, "text_acc_micro": 70 / 75, "cases": 99, "groups": 2,
                               "cases_in_groups": 75}.items()


def test_an_official_average_over_nothing_is_missing_and_says_why(caplog):
    metrics = selection_metrics("aro/vg_attribution", {"plain": [RIGHT], "blind": [TIE]}, cases_of(["red_big"]))
    assert metrics["text_acc"] is metrics["text_acc_micro"] is metrics["text_acc_blind"] is None
    assert metrics["groups"] == 0 and "keeps none of these 1 cases" in metrics["text_acc_missing"]
    assert "keeps none of these 1 cases" in caplog.text


def test_clip_benchmarks_own_numbers_are_over_all_cases_and_give_the_first_of_a_tie():
    """On the same scores upstream's own code gives the same."""
    generator = np.random.default_rng(0)
    for shape in ((2,), (5,), (2, 2)):
        scores = [np.round(generator.normal(size=shape), 1 if i % 2 else 0) for i in range(60)]
        theirs = upstream_accuracies([np.atleast_2d(array) for array in scores])
        ours = clip_benchmarks_metrics(scores)
        assert ours == {f"clip_benchmark_{name}": pytest.approx(theirs[name], abs=1e-7)
                        for name in (("text_acc",) if len(shape) == 1 else ("text_acc", "image_acc", "acc"))}
        assert 0 < ours["clip_benchmark_text_acc"] < 1


def upstream_accuracies(scores):
    """clip_benchmark's evaluation of a model whose similarities are these: image i is row i, caption c the unit c."""
    from clip_benchmark.metrics import image_caption_selection

    class Table(torch.nn.Module):
        def encode_image(self, images):
            # Upstream makes rows length 1: a common further entry keeps their order.
            rows = torch.nn.functional.pad(images.flatten(1), (0, 1))
            rows[:, -1] = (100 - rows.square().sum(1)).sqrt()
            return rows

        def encode_text(self, tokens):
            return torch.nn.functional.one_hot(tokens, count + 1).float()

    count = scores[0].shape[1]
    batches = [(torch.tensor(array, dtype=torch.float32)[None, :, None, None], [list(map(str, range(count)))])
               for array in scores]
    return image_caption_selection.evaluate(Table(), batches, lambda texts: torch.tensor(list(map(int, texts))), "cpu",
                                            amp=False)


def test_winoground_text_image_and_group_score_are_strict():
    # scores[image, caption]; text is right if each image prefers its own caption, image if each caption its own image
    cases = {
        "both": [[2, 1], [1, 2]],
        "text only": [[2, 1], [3, 4]],  # image 1 beats image 0 for caption 0
        "image only": [[1, 2], [0, 3]],  # image 0 prefers caption 1
        "neither": [[1, 2], [2, 1]],
        "text tie": [[2, 2], [1, 3]],  # image 0 cannot decide, but both captions find their image
        "image tie": [[2, 1], [2, 3]],  # caption 0 cannot decide
    }
    metrics = selection_metrics("winoground", {"plain": list(cases.values())}, cases_of(["Object"] * 6, images=2))
    assert metrics.items() >= {"text_acc": 3 / 6, "image_acc": 3 / 6, "acc": 1 / 6, "ties": 1, "tied_cases": "row4",
                               "image_ties": 1, "cases": 6}.items()


@pytest.mark.parametrize("scores, message", [
    ([RIGHT], "1 plain scores for 2 cases"),
    ([RIGHT, [1.0]], r"case row1: plain scores of shape \(1,\), not \(2,\)"),
    ([RIGHT, [[1.0, 2.0]]], r"case row1: plain scores of shape \(1, 2\)"),
    ([[math.nan, 0.0], RIGHT], "case row0: a plain score is NaN"),
])
def test_scores_that_do_not_fit_the_cases_are_refused(scores, message):
    with pytest.raises(ValueError, match=message):
        selection_metrics("sugar_crepe/swap_obj", {"plain": scores}, cases_of("gg"))


def test_impossible_captions_are_compared_without_nan():
    infinite = -math.inf
    metrics = selection_metrics("sugar_crepe/swap_obj", {"plain": [[-1.0, infinite], [infinite, infinite]]},
                                cases_of("gg"))
    assert metrics["text_acc"] == 0.5 and metrics["ties"] == 1


# ---- averages over SugarCrepe's subsets ---------------------------------------------------------------------------


def result(subset, right, wrong, tie=0, **extra):
    """A result file as clip_benchmark writes it, of a subset with these outcomes."""
    plain = [RIGHT] * right + [WRONG] * wrong + [TIE] * tie
    metrics = selection_metrics(f"sugar_crepe/{subset}", {"plain": plain, "blind": [WRONG] * len(plain)},
                                cases_of([subset] * len(plain)))
    return {"dataset": f"sugar_crepe/{subset}", "metrics": {**metrics, **extra}}


def test_group_averages_are_over_subsets_and_over_cases():
    groups = group_averages([
        result("add_att", 3, 1, cases_left_out=5), result("add_obj", 5, 11, 4, cases_left_out=7),
        result("replace_att", 1, 1), result("replace_obj", 2, 0), result("replace_rel", 0, 4),
        result("swap_att", 1, 0), result("swap_obj", 1, 3), {"dataset": "aro/coco_order", "metrics": {"text_acc": 0}}])
    assert list(groups) == [f"sugar_crepe/{group}, {kind}" for group in ("add", "replace", "swap")
                            for kind in ("macro", "micro")]
    counts = {"text_acc_blind": 0, "cases": 24, "ties": 4, "ties_blind": 0, "duplicates": 0, "cases_left_out": 12}
    for kind, expected in (("macro", (3 / 4 + 5 / 20) / 2), ("micro", pytest.approx(8 / 24))):
        assert groups[f"sugar_crepe/add, {kind}"].items() >= {"text_acc": expected, **counts}.items()
    assert groups["sugar_crepe/replace, macro"]["text_acc"] == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert groups["sugar_crepe/replace, micro"]["text_acc"] == pytest.approx(3 / 8)
    assert groups["sugar_crepe/swap, micro"]["text_acc"] == pytest.approx(2 / 5)


def test_incomplete_groups_are_not_averaged_and_that_is_told(caplog):
    assert list(group_averages([result("swap_att", 1, 1), result("swap_obj", 1, 1), result("add_att", 1, 1)])) == [
        "sugar_crepe/swap, macro", "sugar_crepe/swap, micro"]
    assert "sugar_crepe/add is not averaged: no result of add_obj" in caplog.text
    assert "replace" not in caplog.text


def test_results_of_two_models_or_of_unlike_scorings_are_not_mixed():
    with pytest.raises(ValueError, match="swap_att is there twice"):
        group_averages([result("swap_att", 1, 1), result("swap_att", 2, 0)])
    unlike = result("swap_obj", 1, 1)
    del unlike["metrics"]["text_acc_blind"]
    with pytest.raises(ValueError, match="do not have the same scores"):
        group_averages([result("swap_att", 1, 1), unlike])
