"""Claims about the numbers of likelihood tasks: derived again from `model.logits`, token by token and mask by mask.

Everything runs under autocast, as users run it. There a network call with another batch shape differs in the last digit
of bfloat16, and likelihoods by some hundredths of a nat. So only cases with a larger margin are compared.
"""
from itertools import combinations
from unittest.mock import patch

import numpy as np
import pytest
import torch
from conftest import made_images, picture, write_json
from core.likelihoods import reveal
from models import evaluate, flags_of, labelled_webdataset, order_data
from torch.utils.data import DataLoader, TensorDataset

from clip_benchmark_ext.selection_datasets import build_dataset
from clip_benchmark_ext.tasks.selection import likelihood_scorer, null_image
from clip_benchmark_ext.tasks.zeroshot import likelihood_logits
from open_clip_mdc.integration.checkpoints import load
from open_clip_mdc.likelihood.log_likelihood import mean_image

pytestmark = pytest.mark.usefixtures("clip_benchmark")
TOLERANCE = 0.25  # nats
SCORERS = {  # flags, arguments of log_likelihood, alias of the model
    "heuristic": ([], dict(method="heuristic"), "mdc"),
    "monte_carlo": (["--scorer monte_carlo"], dict(method="monte_carlo", num_samples=1024), "mdc"),
    "autoregressive": ([], dict(method="autoregressive"), "arc"),
}


@pytest.fixture(scope="module")
def order(tmp_path_factory):
    return order_data(tmp_path_factory.mktemp("order"))


@torch.no_grad()
def log_probs(model, patches, text):
    """log p [n, V] at each position of a text without padding, given patch tokens [P, D]."""
    with patch.object(model, "encode_image_tokens", lambda image: patches[None]), torch.autocast("cpu"):
        return model.logits(None, text[None], torch.ones(1, len(text), dtype=torch.bool))[0].double().log_softmax(-1)


def score_by_hand(model, patches, text, method, interval=(0, 1), **_):
    """log p(text | patches), or its bound, one network call after the other."""
    positions = range(1, len(text))
    if method == "autoregressive":
        table = log_probs(model, patches, text)
        return sum(table[i - 1, text[i]].item() for i in positions)

    def masked(hidden):
        noisy = text.clone()
        noisy[list(hidden)] = model.vocab_size  # [MASK]
        return log_probs(model, patches, noisy)

    if method == "heuristic":
        return sum(own for _, own in reveal(text, model.vocab_size, lambda noisy: log_probs(model, patches, noisy)))
    by_count = []
    for count in range(1, len(text)):
        if interval[0] * len(positions) <= count <= interval[1] * len(positions):
            by_count.append(np.mean([
                np.mean([table[i, text[i]].item() for i in hidden])
                for hidden in combinations(positions, count) for table in [masked(hidden)]]))
    return len(positions) * np.mean(by_count)


def trim(text, vocab_size):
    return text[:text.tolist().index(vocab_size - 1) + 1]


def rows_by_hand(model, tokenizer, images, captions, options):
    """Plain and blind scores [N, C] of images [N, 3, H, W] and N lists of captions."""
    with torch.no_grad(), torch.autocast("cpu"):
        patches = model.encode_image_tokens(images)
    ids = [[trim(text, model.vocab_size) for text in tokenizer(texts)] for texts in captions]
    return {row: np.array([[score_by_hand(model, own, text, **options) for text in texts]
                           for own, texts in zip(seen, ids, strict=True)])
            for row, seen in (("plain", patches), ("blind", patches.mean(0, keepdim=True).expand_as(patches)))}


def check_accuracy(accuracy, scores, tolerance):
    """Check the share of cases whose first score is no lower than any other.

    Cases without a clear margin may count as either.
    """
    margin = scores[:, 0] - scores[:, 1:].max(1)
    certain, unclear = (margin > tolerance).sum(), (abs(margin) <= tolerance).sum()
    assert unclear <= len(scores) / 4, margin
    assert certain <= round(accuracy * len(scores)) <= certain + unclear, (accuracy, margin)


@pytest.mark.parametrize("name", SCORERS)
def test_plain_blind_and_debiased_accuracy_of_five_candidates_are_those_derived_by_hand(runs, order, name):
    flags, options, alias = SCORERS[name]
    metrics = evaluate(*flags_of(runs, "aro/coco_order", order, "--alpha 0.5 --batch_size 5", *flags,
                                 alias=alias))["metrics"]
    model, transform, tokenizer = load(str(runs / alias))
    dataset = build_dataset("aro/coco_order", order, transform)
    loader = DataLoader(dataset, batch_size=5, collate_fn=dataset.collate_fn)
    images, captions = zip(*dataset, strict=True)
    rows = rows_by_hand(model, tokenizer, torch.stack(images), captions, options)
    rows["debiased"] = rows["plain"] - 0.5 * rows["blind"]

    with torch.autocast("cpu"):
        score = likelihood_scorer(model, tokenizer, "cpu", null_image(model, loader, "cpu"), options, alpha=0.5)
        cases = [case for batch in loader for case in score(*batch)]
    for row, expected in rows.items():
        assert expected.shape == (len(dataset), 5)
        assert np.array([case[row] for case in cases]) == pytest.approx(expected, abs=TOLERANCE), row
        rivals = np.array([[text != texts[0] for text in texts] for texts in captions])  # an equal text ties: right
        check_accuracy(metrics[f"text_acc_{row}".removesuffix("_plain")],
                       np.where(rivals | (np.arange(5) == 0), expected, -np.inf), TOLERANCE)
    assert metrics["scorer"] == options["method"] and metrics["alpha"] == 0.5 and metrics["blind"] == "mean image"


def test_the_blind_image_is_of_the_first_256_whatever_the_batch_size(runs):
    model, *_ = load(str(runs / "mdc"))
    images = torch.randn(300, 3, 32, 32, generator=torch.manual_seed(0))
    found = [null_image(model, DataLoader(TensorDataset(images), size), "cpu") for size in (64, 100, 300)]
    assert torch.equal(found[0], mean_image(model, images[:256].split(64)))
    for other in found[1:]:
        assert torch.allclose(other, found[0], atol=1e-5, rtol=0)  # what 44 images more or fewer change is 1e-2
    pairs = images[:256].view(128, 2, 3, 32, 32)  # Winoground's
    assert torch.allclose(null_image(model, DataLoader(TensorDataset(pairs), 100), "cpu"), found[0], atol=1e-5, rtol=0)


def test_the_blind_image_of_classes_is_drawn_from_all_images_as_sets_are_sorted(runs):
    model, _, tokenizer = load(str(runs / "mdc"))
    images = torch.rand(2, 3, 32, 32, generator=torch.manual_seed(0)).repeat_interleave(300, 0)  # two classes
    loader = DataLoader(TensorDataset(images, torch.arange(2).repeat_interleave(300)), 50)
    found, _ = likelihood_logits(model, loader, tokenizer, [["a star"], ["a circle"]], "cpu", {"method": "parallel"},
                                 1.0)
    text = tokenizer(["a star", "a circle"])[None]
    both, first = (model.log_likelihood(None, text, "parallel", blind=mean_image(model, [x]))[0]
                   for x in (images[::300], images[:256]))
    assert (found["blind"][0] - both).abs().max() < 0.2 * (first - both).abs().max() > 0


@pytest.mark.parametrize("name", SCORERS)
def test_zero_shot_takes_the_class_of_the_highest_mean_over_templates_plain_blind_and_debiased(runs, tmp_path, name):
    flags, options, alias = SCORERS[name]
    classes = ["red", "green star", "blue square", "yellow", "circle", "red triangle"]
    templates = ["a {c}", "{c} of a star"]
    root = labelled_webdataset(tmp_path / "wds", classes, templates, per_split=6)
    metrics = evaluate(*flags_of(runs, "wds/tiny", root, "--batch_size 4 --alpha 0.5", *flags, alias=alias))["metrics"]
    model, transform, tokenizer = load(str(runs / alias))
    images, targets = made_images(transform, 6), torch.arange(6)
    captions = [[template.format(c=c) for template in templates] for c in classes]
    with torch.no_grad(), torch.autocast("cpu"):
        patches = model.encode_image_tokens(images)
        found, labels = likelihood_logits(model, DataLoader(TensorDataset(images, targets), 4), tokenizer, captions,
                                          "cpu", options, alpha=0.5)
    ids = [[trim(text, model.vocab_size) for text in tokenizer(texts)] for texts in captions]
    *plain, blind = [[np.mean([score_by_hand(model, own, text, **options) for text in texts]) for texts in ids]
                     for own in (*patches, patches.mean(0))]
    rows = {"plain": np.array(plain), "blind": np.tile(blind, (6, 1))}
    rows["debiased"] = rows["plain"] - 0.5 * rows["blind"]
    assert torch.equal(labels, targets) and found.keys() == rows.keys()
    for row, expected in rows.items():
        assert found[row].numpy() == pytest.approx(expected, abs=TOLERANCE), row
        rank = (found[row] > found[row].gather(1, targets[:, None])).sum(1).numpy()  # how many classes are ahead
        for k in (1, 5):
            assert metrics[f"acc{k}_{row}".removesuffix("_plain")] == pytest.approx((rank < k).mean())
    # Without the image all images get one class, which one of the six has.
    assert metrics["acc1_blind"] == pytest.approx(1 / 6) == metrics["mean_per_class_recall_blind"]
    assert (metrics["scorer"], metrics["alpha"], metrics["blind"]) == (options["method"], 0.5, "mean image")


def test_captions_that_are_cut_are_counted_where_a_data_set_has_them_and_refused_as_classes(runs, tmp_path, caplog):
    """Cut, these two are equal, and the case is a tie. SugarCrepe has one that the scenes' vocabulary cuts."""
    long = "red " * 90
    for i in range(2):
        picture(tmp_path / f"images/{i}.png", i)
    write_json(tmp_path / "examples.jsonl", {
        "id": 7, "image_0": "0", "image_1": "1", "caption_0": f"{long}star", "caption_1": f"{long}circle"})
    metrics = evaluate(*flags_of(runs, "winoground", tmp_path))["metrics"]
    assert (metrics["cases_cut"], metrics["cases"], metrics["text_acc"]) == (1, 1, 0)
    assert "1 of 1 cases have a caption that is cut at 77 tokens, such as 7" in caplog.text
    root = labelled_webdataset(tmp_path / "wds", ["star", "circle"], ["a {c}", long + "{c}"])
    with pytest.raises(SystemExit, match=r"caption 2 has 93 tokens .*: shorten it \('red red"):
        evaluate(*flags_of(runs, "wds/tiny", root))


def test_the_bound_is_the_default_of_mask_and_replace_with_a_blind_and_a_debiased_row(runs, order):
    metrics = evaluate(*flags_of(runs, "aro/coco_order", order, "--num_samples 20 --batch_size 5",
                                 alias="mcd"))["metrics"]
    assert metrics["scorer"] == "bound" and metrics["num_samples"] == metrics["mean_draws"] == 20
    assert all(0 <= metrics[f"text_acc{row}"] <= 1 for row in ("", "_blind", "_debiased"))
