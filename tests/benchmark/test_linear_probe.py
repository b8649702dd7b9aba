"""Claims about the linear probe: it agrees with clip_benchmark's."""
import json
import math
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from clip_benchmark.metrics import linear_probe as upstream
from safetensors.torch import load_file
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, random_split

from clip_benchmark_ext.flags import Flags
from clip_benchmark_ext.tasks import linear_probe
from clip_benchmark_ext.tasks.linear_probe import best_weight_decay

NUM_CLASSES, WIDTH = 8, 16


class Vectors(torch.nn.Module):
    """An encoder whose features are known: its images are the features."""

    def encode_image(self, image):
        return image.flatten(1)


def clusters(num_rows, seed, noise=0.8, num_classes=NUM_CLASSES):
    """Return rows around one point per class.

    The noise makes classes overlap, so that accuracies lie between 50 and 90 %.
    """
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(num_classes, WIDTH, generator=torch.Generator().manual_seed(99))
    targets = torch.arange(num_rows) % num_classes
    features = centres[targets] + noise * 2 * torch.randn(num_rows, WIDTH, generator=generator)
    return TensorDataset(features, targets)


def loader(dataset, num_workers=0):
    return DataLoader(dataset, batch_size=32, num_workers=num_workers)


TRAIN, VAL, TEST = clusters(310, 1), clusters(90, 2), clusters(170, 3)


class PosesAsCuda(str):
    def __eq__(self, other):
        return other == "cuda"

    __hash__ = str.__hash__


def run_upstream(monkeypatch, arguments, keywords):
    """Runs clip_benchmark's own code on the CPU: only what asks for a GPU is replaced."""
    autocast = torch.autocast
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Module, "cuda", lambda self, *args: self)
        patch.setattr(torch.Tensor, "cuda", lambda self, *args: self)
        patch.setattr(torch.cuda, "device_count", lambda: 0)
        patch.setattr(torch.nn, "DataParallel", lambda module, device_ids: module)
        patch.setattr(torch, "autocast", lambda device, enabled: autocast("cpu", enabled=enabled))
        patch.setattr(upstream, "accuracy", top_k_accuracy_by_hand)  # its own breaks from numpy 2.4 on
        return upstream.evaluate(*arguments, device=PosesAsCuda("cpu"), **keywords)


def top_k_accuracy_by_hand(logits, targets, topk):
    ranked = [row.argsort(descending=True, stable=True).tolist() for row in logits]
    return [sum(int(t) in r[:k] for t, r in zip(targets, ranked, strict=True)) / len(targets) for k in topk]


def evaluate(loaders, folder, **arguments):
    args = dict(batch_size=64, fewshot_lr=0.1, fewshot_epochs=3, device="cpu", amp=False, normalize=True, verbose=False,
                val_proportion=None, save_clf=None, model="", pretrained="", dataset="", feature_root=str(folder))
    job = SimpleNamespace(args=Namespace(**args | arguments), flags=Flags(feature="pooled"), model=Vectors(),
                          load_splits=lambda batches: loaders)
    return linear_probe.run(job, loaders["test"])


def both(monkeypatch, tmp_path, fewshot_k=-1, val=False, amp=False, num_workers=0, epochs=3, normalize=True,
         splits=(TRAIN, VAL, TEST), seed=0):
    """The results of upstream and of ours, from the same state of the random number generator."""
    results = []
    for name, function in (("upstream", run_upstream), ("ours", None)):
        train_set, val_set, test_set = splits
        torch.manual_seed(seed)
        loaders = {"train": loader(train_set, num_workers), "test": loader(test_set, num_workers)}
        val_loader = loader(val_set, num_workers) if val else None
        if function:
            arguments = [Vectors(), *loaders.values(), fewshot_k, 64, num_workers, 0.1, epochs, "model", seed,
                         str(tmp_path / name)]
            results.append(function(monkeypatch, arguments, dict(val_dataloader=val_loader, normalize=normalize,
                                                                 amp=amp, verbose=True)))
        else:
            results.append(evaluate(loaders | ({"val": val_loader} if val else {}), tmp_path / name,
                                    fewshot_k=fewshot_k, fewshot_epochs=epochs, seed=seed, amp=amp,
                                    normalize=normalize, verbose=True))
    return results


@pytest.mark.parametrize("options", [
    dict(),
    dict(epochs=10, normalize=False),
    dict(amp=True),
    dict(fewshot_k=3),
    dict(num_workers=2, epochs=2, fewshot_k=5),
    dict(val=True),
    dict(val=True, fewshot_k=4),
    dict(splits=(clusters(60, 1, num_classes=5), VAL, clusters(50, 3, num_classes=5))),  # no top-5
], ids=lambda options: " ".join(options) or "default")
def test_results_equal_upstreams_to_the_last_digit(monkeypatch, tmp_path, options):
    theirs, ours = both(monkeypatch, tmp_path, **options)
    if "splits" in options:
        assert math.isnan(theirs.pop("lp_acc5")) and ours["lp_acc5"] is None
        assert ours["lp_acc5_missing"] == "there are only 5 classes"
    assert {name: ours[name] for name in theirs} == theirs
    assert 0.2 < ours["lp_acc1"] < 0.95
    json.dumps(ours, allow_nan=False)


def run(folder, fewshot_k=-1, seed=0, splits=(TRAIN, None, TEST), **keywords):
    torch.manual_seed(seed)
    train_loader, val_loader, test_loader = (loader(s) if isinstance(s, TensorDataset) else s for s in splits)
    loaders = {"train": train_loader, "val": val_loader, "test": test_loader}
    return evaluate({split: one for split, one in loaders.items() if one is not None}, folder, fewshot_k=fewshot_k,
                    seed=seed, **keywords)


def test_few_shots_do_not_depend_on_whether_the_features_were_there(monkeypatch, tmp_path):
    first, second = run(tmp_path, fewshot_k=2), run(tmp_path, fewshot_k=2)
    assert first == second
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
    arguments = [Vectors(), loader(train_set), loader(TEST), -1, 64, 0, 0.1, 3, "model", 0, str(tmp_path / "upstream")]
    theirs = run_upstream(monkeypatch, arguments, dict(val_dataloader=loader(val_set), amp=False))
    ours = run(tmp_path / "ours", val_proportion=0.3)
    assert {name: ours[name] for name in theirs} == theirs
    streams = (loader(Stream(TRAIN)), None, loader(Stream(TEST)))
    assert run(tmp_path / "streams", val_proportion=0.3, splits=streams) == ours
    # The whole training split was encoded once: another share, or none, finds it.
    monkeypatch.setattr(linear_probe, "extract_features", pytest.fail)
    assert run(tmp_path / "ours")["weight_decay"] == 0


def test_too_few_images_of_a_class_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"8 of 8 classes have fewer than 40 .*class 0 has 39.*--fewshot_k"):
        run(tmp_path, fewshot_k=40)


def test_classes_that_only_the_validation_set_has_are_learned(tmp_path):
    result = run(tmp_path, splits=(clusters(90, 1, 0.02, 6), clusters(400, 2, 0.02), clusters(80, 3, 0.02)))
    assert result["lp_acc1"] > 0.9  # the final training is on both


def test_the_search_finds_any_single_peak_with_at_most_15_trainings():
    candidates = [10 ** (-6 + 8 * i / 96) for i in range(97)]
    for peak in candidates:
        tried = []

        def accuracy(weight_decay, peak=peak, tried=tried):
            tried.append(weight_decay)
            return 1 / (1 + abs(math.log10(weight_decay / peak)))

        assert best_weight_decay(accuracy) == pytest.approx(peak)
        assert len(tried) == len(set(tried)) <= 15


def test_a_saved_probe_gives_the_accuracy_that_was_reported(tmp_path):
    path = tmp_path / "probes" / "mine.safetensors"
    result = run(tmp_path / "features", save_clf=str(path))
    probe = load_file(path)
    assert {name: tuple(t.shape) for name, t in probe.items()} == {"weight": (8, 16), "bias": (8,)}
    features, targets = TEST.tensors
    logits = torch.nn.functional.normalize(features, dim=-1) @ probe["weight"].T + probe["bias"]
    right = logits.argmax(dim=1) == targets
    assert right.float().mean().item() == pytest.approx(result["lp_acc1"])
    assert result["items"] == {"images": list(range(170)), "values": {"lp_acc1": right.int().tolist()}}
    assert [p.name for p in path.parent.iterdir()] == ["mine.safetensors"]


def test_classes_that_only_the_test_set_has_are_no_classes_of_the_probe(tmp_path):
    path = tmp_path / "probe.safetensors"
    result = run(tmp_path, splits=(clusters(90, 1, 0.02, 6), None, clusters(80, 3, 0.02)), save_clf=str(path))
    assert load_file(path)["weight"].shape == (6, WIDTH)
    assert result["lp_acc1"] == pytest.approx(0.75, abs=0.02)  # 6 of 8 classes are known
