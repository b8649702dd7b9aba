"""Claims about the linear probe: it agrees with clip_benchmark's."""
import json
import math
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from clip_benchmark.metrics import linear_probe as upstream
from conftest import seeded
from safetensors.torch import load_file
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, random_split

from clip_benchmark_ext.flags import Flags
from clip_benchmark_ext.tasks import linear_probe
from clip_benchmark_ext.tasks.linear_probe import best_weight_decay

WIDTH = 16


class Vectors(torch.nn.Module):
    """An encoder whose features are known: its images are the features."""

    def encode_image(self, image):
        return image.flatten(1)


def clusters(num_rows, seed, noise=0.8, num_classes=8):
    """Return rows around one point per class.

    The noise makes classes overlap, so that accuracies lie between 50 and 90 %.
    """
    centres = torch.randn(num_classes, WIDTH, generator=seeded(99))
    targets = torch.arange(num_rows) % num_classes
    return TensorDataset(centres[targets] + noise * 2 * torch.randn(num_rows, WIDTH, generator=seeded(seed)), targets)


TRAIN, VAL, TEST = clusters(310, 1), clusters(90, 2), clusters(170, 3)


def loaders(train, test, val=None, num_workers=0):
    """The loaders of the splits that there are."""
    return {split: DataLoader(data, 32, num_workers=num_workers)
            for split, data in (("train", train), ("test", test), ("val", val)) if data}


class PosesAsCuda(str):
    def __eq__(self, other):
        return other == "cuda"

    __hash__ = str.__hash__


def run_upstream(folder, fewshot_k=-1, epochs=3, amp=False, normalize=True, num_workers=0, splits=(TRAIN, TEST)):
    """Runs clip_benchmark's own code on the CPU: only what asks for a GPU is replaced."""
    autocast, given = torch.autocast, loaders(*splits, num_workers=num_workers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "cuda", lambda self, *args: self)
        patch.setattr(torch.Tensor, "cuda", lambda self, *args: self)
        patch.setattr(torch.cuda, "device_count", lambda: 0)
        patch.setattr(torch.nn, "DataParallel", lambda module, device_ids: module)
        patch.setattr(torch, "autocast", lambda device, enabled: autocast("cpu", enabled=enabled))
        patch.setattr(upstream, "accuracy", top_k_accuracy_by_hand)  # its own breaks from numpy 2.4 on
        return upstream.evaluate(
            Vectors(), given["train"], given["test"], fewshot_k, 64, num_workers, 0.1, epochs, "model", 0,
            str(folder / "upstream"), PosesAsCuda("cpu"), given.get("val"), normalize=normalize, amp=amp)


def top_k_accuracy_by_hand(logits, targets, topk):
    ranked = [row.argsort(descending=True, stable=True).tolist() for row in logits]
    return [sum(int(t) in r[:k] for t, r in zip(targets, ranked, strict=True)) / len(targets) for k in topk]


def run(folder, fewshot_k=-1, epochs=3, num_workers=0, splits=(TRAIN, TEST), seed=0, **keywords):
    args = dict(batch_size=64, fewshot_lr=0.1, fewshot_epochs=epochs, fewshot_k=fewshot_k, seed=seed, device="cpu",
                amp=False, normalize=True, verbose=False, val_proportion=None, save_clf=None, model="", pretrained="",
                dataset="", feature_root=str(folder))
    given = loaders(*splits, num_workers=num_workers)
    torch.manual_seed(seed)
    return linear_probe.run(SimpleNamespace(
        args=Namespace(**args | keywords), flags=Flags(feature="pooled"), model=Vectors(),
        load_splits=lambda batches: given), given["test"])


@pytest.mark.parametrize("options", [
    dict(),
    dict(epochs=10, normalize=False),
    dict(amp=True),
    dict(fewshot_k=3),
    dict(num_workers=2, epochs=2, fewshot_k=5),
    dict(splits=(TRAIN, TEST, VAL)),
    dict(splits=(TRAIN, TEST, VAL), fewshot_k=4),
    dict(splits=(clusters(60, 1, num_classes=5), clusters(50, 3, num_classes=5))),  # no top-5
], ids=lambda options: " ".join(options) or "default")
def test_results_equal_upstreams_to_the_last_digit(tmp_path, options):
    torch.manual_seed(0)
    theirs, ours = run_upstream(tmp_path, **options), run(tmp_path, **options)
    if math.isnan(theirs["lp_acc5"]):
        del theirs["lp_acc5"]
        assert ours["lp_acc5"] is None and ours["lp_acc5_missing"] == "there are only 5 classes"
    assert {name: ours[name] for name in theirs} == theirs
    assert 0.2 < ours["lp_acc1"] < 0.95
    json.dumps(ours, allow_nan=False)


def test_few_shots_do_not_depend_on_whether_the_features_were_there(monkeypatch, tmp_path):
    first = run(tmp_path, fewshot_k=2)
    assert first["lp_acc1"] != run(tmp_path, fewshot_k=2, seed=1)["lp_acc1"]  # it does depend on the draw
    monkeypatch.setattr(linear_probe, "extract_features", pytest.fail)
    assert run(tmp_path, fewshot_k=2) == first


class Stream(IterableDataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return iter(self.dataset)


def test_a_validation_share_is_the_one_upstream_takes_also_from_a_stream(monkeypatch, tmp_path):
    torch.manual_seed(0)
    train_set, val_set = random_split(TRAIN, [1 - 0.3, 0.3])  # as upstream's command line does, before evaluate
    theirs = run_upstream(tmp_path, splits=(train_set, TEST, val_set))
    ours = run(tmp_path / "ours", val_proportion=0.3)
    assert {name: ours[name] for name in theirs} == theirs
    assert run(tmp_path / "streams", val_proportion=0.3, splits=(Stream(TRAIN), Stream(TEST))) == ours
    # The whole training split was encoded once: another share, or none, finds it.
    monkeypatch.setattr(linear_probe, "extract_features", pytest.fail)
    assert run(tmp_path / "ours")["weight_decay"] == 0


def test_too_few_images_of_a_class_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"8 of 8 classes have fewer than 40 .*class 0 has 39.*--fewshot_k"):
        run(tmp_path, fewshot_k=40)


def test_classes_that_only_the_validation_set_has_are_learned(tmp_path):
    result = run(tmp_path, splits=(clusters(90, 1, 0.02, 6), clusters(80, 3, 0.02), clusters(400, 2, 0.02)))
    assert result["lp_acc1"] > 0.9  # the final training is on both


def test_the_search_finds_any_single_peak_with_at_most_15_trainings():
    for peak in np.logspace(-6, 2, 97):
        tried = []

        def accuracy(weight_decay, peak=peak, tried=tried):
            tried.append(weight_decay)
            return 1 / (1 + abs(math.log10(weight_decay / peak)))

        assert best_weight_decay(accuracy) == pytest.approx(peak)
        assert len(tried) == len(set(tried)) <= 15


def test_a_saved_probe_gives_the_accuracy_that_was_reported(tmp_path):
    path = tmp_path / "probes/mine.safetensors"
    result = run(tmp_path, save_clf=str(path))
    probe = load_file(path)
    assert {name: tuple(t.shape) for name, t in probe.items()} == {"weight": (8, 16), "bias": (8,)}
    features, targets = TEST.tensors
    logits = torch.nn.functional.normalize(features, dim=-1) @ probe["weight"].T + probe["bias"]
    right = logits.argmax(dim=1).eq(targets).int().tolist()
    assert sum(right) / 170 == pytest.approx(result["lp_acc1"])
    assert result["items"] == {"images": list(range(170)), "values": {"lp_acc1": right}}
    assert [p.name for p in path.parent.iterdir()] == ["mine.safetensors"]


def test_classes_that_only_the_test_set_has_are_no_classes_of_the_probe(tmp_path):
    path = tmp_path / "probe.safetensors"
    result = run(tmp_path, splits=(clusters(90, 1, 0.02, 6), clusters(80, 3, 0.02)), save_clf=str(path))
    assert load_file(path)["weight"].shape == (6, WIDTH)
    assert result["lp_acc1"] == pytest.approx(0.75, abs=0.02)  # 6 of 8 classes are known
