"""Claims about the features of probes and their cache."""
import copy
import os
import warnings
from argparse import Namespace
from pathlib import Path

import open_clip
import pytest
import torch
import torch.nn.functional as F
from clip_benchmark.datasets.builder import build_dataset
from conftest import SHARED, images, needs_data, run, seeded
from models import CLIP_CONFIG
from open_clip.model import CLIP
from safetensors.torch import save as serialised
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.transforms import Normalize

from clip_benchmark_ext.features import (
    Rows,
    cache_key,
    cached_features,
    describe_data,
    extract_features,
    feature_fn,
    feature_path,
    load_features,
    save_features,
)
from open_clip_mdc.data.fingerprint import fingerprint, hash_values
from open_clip_mdc.objectives.config import CaptionCfg


def tiny_clip(seed=0, quick_gelu=False, **vision):
    torch.manual_seed(seed)
    return CLIP(**CLIP_CONFIG | {"vision_cfg": CLIP_CONFIG["vision_cfg"] | vision}, quick_gelu=quick_gelu).eval()


def identity(x):
    return x


class Images(Dataset):
    """Random images with a torchvision-like `transform`."""

    def __init__(self, seed=0, num_images=10, transform=identity):
        self.images, self.transform = images(num_images, 48, seed), transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.transform(self.images[i]), i % 3


@pytest.fixture
def image():
    return images(3, 48, 7)


@torch.no_grad()
def test_cls_is_what_a_clip_without_projection_gives_and_leaves_the_model_alone(image):
    model = tiny_clip()
    bare = copy.deepcopy(model)
    bare.visual.proj = None
    before = fingerprint(model)
    features = feature_fn(model, "cls")(image)
    assert features.shape == (3, 32)
    assert torch.allclose(features, bare.encode_image(image), atol=1e-6)
    assert torch.allclose(features @ model.visual.proj, model.encode_image(image), atol=1e-6)
    assert fingerprint(model) == before


@torch.no_grad()
def test_gap_is_the_mean_of_the_normalised_patch_tokens(image):
    model = tiny_clip()
    visual = model.visual
    tokens = visual.ln_post(visual.transformer(visual._embeds(image)))  # class token first
    assert tokens.shape == (3, 10, 32)
    assert torch.allclose(feature_fn(model, "gap")(image), tokens[:, 1:].mean(dim=1), atol=1e-6)


@torch.no_grad()
def test_cls_and_gap_do_not_depend_on_how_the_tower_pools(image):
    model, averaging = tiny_clip(), tiny_clip(pool_type="avg", final_ln_after_pool=True)
    for kind in ("cls", "gap"):
        assert torch.equal(feature_fn(model, kind)(image), feature_fn(averaging, kind)(image))


@torch.no_grad()
def test_gap_of_a_captioner_is_the_mean_of_its_own_tokens(image):
    captioner = tiny_clip()
    captioner.encode_image_tokens = lambda image: image.flatten(2)  # what marks a captioner
    assert torch.equal(feature_fn(captioner, "gap")(image), image.flatten(2).mean(1))
    assert torch.equal(feature_fn(captioner, "pooled")(image), captioner.encode_image(image))
    assert torch.equal(feature_fn(captioner, "cls")(image), feature_fn(tiny_clip(), "cls")(image))


def test_fingerprint_follows_weights_and_settings_only():
    model = tiny_clip()
    expected = fingerprint(model)
    assert fingerprint(copy.deepcopy(model).train()) == expected
    changed = copy.deepcopy(model)
    changed.visual.class_embedding.data[-1] += 1e-6
    others = [changed, tiny_clip(seed=1), copy.deepcopy(model).bfloat16(),
              tiny_clip(quick_gelu=True), tiny_clip(head_width=8), tiny_clip(pool_type="avg")]  # the same weights
    others.append(copy.deepcopy(model))
    others[-1].visual.preprocess_cfg = {"mean": (0.5, 0.5, 0.5)}
    assert all(torch.equal(model.visual.proj, other.visual.proj) for other in others[3:])
    assert len({expected, *map(fingerprint, others)}) == 1 + len(others)
    assert fingerprint(torch.nn.Tanh()) != fingerprint(torch.nn.Sigmoid())  # no weights, no settings


def on_cpu(amp=False, folder=None):
    return Namespace(device="cpu", amp=amp, feature_root=folder, model="", pretrained="", dataset="")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_extracted_features_are_in_order_and_complete(num_workers):
    model, data = tiny_clip(), Images()
    loader = DataLoader(data, batch_size=4, num_workers=num_workers)
    features, targets = extract_features(model.encode_image, loader, on_cpu())
    assert torch.allclose(features, model.encode_image(data.images), atol=1e-6)
    assert not features.requires_grad
    assert targets.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]


def test_features_that_are_not_finite_and_empty_data_are_refused():
    def broken(image):
        return image.flatten(1) / 0

    with pytest.raises(ValueError, match="NaN or infinity as features: try --no_amp"):
        extract_features(broken, DataLoader(Images()), on_cpu(amp=True))
    with pytest.raises(ValueError, match="empty"):
        extract_features(broken, [], on_cpu())


def fetch(folder, model, data=None, batch_size=4, split="train", kind="pooled", normalize=False, amp=False):
    """Features through the cache, and how often the encoder ran."""
    loader = DataLoader(data or Images(), batch_size)
    calls, function = [], feature_fn(model, kind)

    def encode(image):
        calls.append(len(image))
        return F.normalize(function(image), dim=-1) if normalize else function(image)

    args = on_cpu(amp, folder)
    key = cache_key(fingerprint(model), loader, split, kind, normalize, args)
    features, targets = cached_features(args, key, lambda: extract_features(encode, loader, args))
    return features, targets, len(calls)


@pytest.mark.parametrize("amp", [False, True])
def test_a_second_run_reads_the_same_features_without_the_encoder(tmp_path, amp):
    features, targets, calls = fetch(tmp_path, tiny_clip(), amp=amp)
    again, targets_again, calls_again = fetch(tmp_path, tiny_clip(), batch_size=5, amp=amp)
    assert (calls, calls_again) == (3, 0)
    assert again.dtype == features.dtype == (torch.bfloat16 if amp else torch.float32)
    assert torch.equal(features, again) and torch.equal(targets, targets_again)
    assert len(list(tmp_path.iterdir())) == 1


def test_whatever_changes_the_features_misses_the_cache(tmp_path):
    fetch(tmp_path, tiny_clip())
    changes = [
        dict(model=tiny_clip(quick_gelu=True)),
        dict(data=Images(transform=Normalize(0.0, 2.0))),
        dict(data=Images(seed=1)),
        dict(data=Images(num_images=11)),
        dict(data=Subset(Images(), [0, *range(1, 8), 9])),
        dict(data=Subset(Images(), [0, 2, 1, *range(3, 8), 9])),
        dict(split="val"),
        dict(kind="cls"),
        dict(kind="gap"),
        dict(normalize=True),
        dict(amp=True),
    ]
    for change in changes:
        for calls in (3, 0):
            assert fetch(tmp_path, **{"model": tiny_clip()} | change)[2] == calls, change
    assert len(list(tmp_path.iterdir())) == 1 + len(changes)


PEAK = """
import re, sys, torch
from argparse import Namespace
from pathlib import Path
from torch.utils.data import DataLoader
from clip_benchmark_ext import features

def peak(bytes, start=None):
    if start is None:
        Path("/proc/self/clear_refs").write_text("5")  # the highest is the current one
    name = "VmRSS" if start is None else "VmHWM"
    number = 1024 * int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
    return number if start is None else (number - start) / bytes

rows, key = [(torch.full((2 ** 16,), float(i)), i) for i in range(4)], {"split": "test"}
loader, size = DataLoader(rows * 256, batch_size=4), 2 ** 28
args = Namespace(device="cpu", amp=False, feature_root=sys.argv[1])
features.extract_features(torch.abs, [next(iter(loader))], args)
path, start = features.feature_path(sys.argv[1], key), peak(size)
features.save_features(path, key, *features.extract_features(torch.abs, loader, args))
print(peak(size, start))
start = peak(size)
found, targets = features.load_features(path, key)
print(peak(size, start))
assert targets.tolist() == found[:, -1].tolist() == [0, 1, 2, 3] * 256
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no Linux")
def test_extracting_writing_and_reading_features_takes_no_more_memory_than_the_features(tmp_path):
    assert max(map(float, run("python", "-c", PEAK, str(tmp_path)).stdout.split())) <= 1.2
    assert len(list(tmp_path.iterdir())) == 1


def test_features_kept_by_earlier_versions_are_read(tmp_path):
    """They wrote safetensors with this metadata in one piece."""
    key, x, targets = {"split": "test"}, torch.randn(5, 3).bfloat16(), torch.arange(5)
    path = Path(feature_path(str(tmp_path), key))
    path.write_bytes(serialised({"features": x, "targets": targets}, {
        "key": '{"split": "test"}', "checksum": hash_values(x, targets), "note": "a model"}))
    features, found = load_features(str(path), key)
    assert torch.equal(features, x) and torch.equal(found, targets)


def test_rows_of_parts_are_those_of_the_parts_behind_each_other():
    a, b = torch.randn(9, 3, generator=seeded(0)).split((5, 4))
    first, second, third = torch.tensor([4, 0, 2]), torch.tensor([3, 1]), torch.tensor([1, 1, 0])
    rows = Rows((a, first), (Rows((b, second)), third))
    whole = torch.cat((a[first], b[second][third]))
    assert len(rows) == 6 and rows.shape == whole.shape
    for places in (torch.tensor([5, 0, 3, 0]), torch.arange(6), torch.tensor([2])):
        assert torch.equal(rows[places], whole[places])


@pytest.mark.parametrize("damage", [lambda data: data[:-10], lambda data: data[:-1] + bytes([data[-1] ^ 1])],
                         ids=["cut short", "one bit"])
def test_a_damaged_file_is_extracted_again_with_a_warning(tmp_path, damage):
    features, _, _ = fetch(tmp_path, tiny_clip())
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(UserWarning, match="damaged.*extracting these features again"):
        again, _, calls = fetch(tmp_path, tiny_clip())
    assert calls == 3 and torch.equal(features, again)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fetch(tmp_path, tiny_clip())[2] == 0


def test_a_file_under_a_wrong_name_is_not_believed(tmp_path):
    fetch(tmp_path, tiny_clip(seed=1))
    key = cache_key(fingerprint(tiny_clip()), DataLoader(Images()), "train", "pooled", False, on_cpu())
    next(tmp_path.iterdir()).rename(feature_path(str(tmp_path), key))
    with pytest.warns(UserWarning, match="features of another model or data set"):
        assert fetch(tmp_path, tiny_clip())[2] == 3


class Constants(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.width, self.cfg = 3, {"pool": "avg", "sizes": [1, 2]}
        self.register_buffer("weight", torch.arange(6.0).view(2, 3))


class Photos(Dataset):
    """Everything that a data set may hold."""

    def __init__(self, root):
        self.root, self.transform, self.samples = str(root), identity, [("a.txt", 0), (str(root / "b.txt"), 1)]
        self.facts, self.names = {"n": 2, "share": 0.5, "none": None}, {"dog", "cat"}
        self.pixels, self.raw = torch.arange(4), b"bytes"
        self.again = self.samples

    def __len__(self):
        return 2

    def __getitem__(self, i):
        return torch.tensor([i, i + 1]), i


def test_names_of_files_are_those_of_earlier_versions(tmp_path):
    """People have caches and results under these."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    about = describe_data(DataLoader(Photos(tmp_path)))
    key = {"model": fingerprint(Constants()), "split": "test", "data": about}
    assert key["model"].startswith("1a69d7aed4af8ae8")
    assert about["content"].startswith("8d40322ae92cbee6")
    assert about["sample"].startswith("0f5940c1ecc47f0e")
    assert feature_path("", key) == "test-be3eaa81bdd8b2485b6e684b.safetensors"
    captioner = Constants()
    captioner.caption_cfg = CaptionCfg()
    assert fingerprint(captioner).startswith("cfd79aa8e596c13f")
    captioner.caption_cfg = CaptionCfg("block-diffusion", block_sizes=(4,))
    other = fingerprint(captioner)
    captioner.caption_cfg = CaptionCfg("block-diffusion", block_sizes=(8,))
    assert fingerprint(captioner) != other


def test_a_disk_without_room_is_an_error_that_names_the_file(tmp_path):
    script = """
import resource, sys, torch
from open_clip_mdc.data.weights import save_tensors
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    save_tensors(sys.argv[1], {"features": torch.zeros(1000)}, {})
except OSError as problem:
    assert problem.filename == sys.argv[1] and problem.strerror.startswith("cannot be written: "), problem
else:
    raise SystemExit("it was written")
"""
    run("python", "-c", script, str(tmp_path / "f.safetensors"))
    assert not list(tmp_path.iterdir())


def test_a_finished_file_is_not_swept_away_by_another_that_begins_to_write_it(tmp_path, monkeypatch):
    """As two processes of `--distributed` do, between the first one's writing and its naming."""
    path, key, replace = str(tmp_path / "x.safetensors"), {"split": "x"}, os.replace

    def begin_another(*names):
        monkeypatch.setattr(os, "replace", replace)
        save_features(path, key, torch.ones(2), torch.ones(2))
        replace(*names)

    monkeypatch.setattr(os, "replace", begin_another)
    save_features(path, key, torch.zeros(2), torch.ones(2))
    assert load_features(path, key)[0].tolist() == [0, 0] and os.listdir(tmp_path) == ["x.safetensors"]


@needs_data("probe/cifar10/train/0.tar")
def test_webdatasets_differ_by_split_and_transform_but_not_by_batch_size():
    def about(split="train", size=32, batch_size=8):
        transform = open_clip.image_transform(size, is_train=False)
        stream = build_dataset("wds/cifar10", root=str(SHARED / "probe/cifar10"), transform=transform, split=split)
        return describe_data(DataLoader(stream.batched(batch_size), batch_size=None))

    assert about() == about(batch_size=16)
    assert "Resize(size=32" in str(about()["transform"]) and "cifar10/train/0.tar" in str(about()["source"])
    plain, test, large = about(), about(split="test"), about(size=40)
    assert len({plain["sample"], test["sample"], large["sample"]}) == 3
    assert plain["source"] != test["source"] and plain["transform"] != large["transform"]
