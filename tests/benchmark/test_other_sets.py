"""Claims about clip_benchmark's own data sets and own class folders."""
import inspect
import re
import shutil
from functools import partial
from itertools import product
from pathlib import Path

import models
import pytest
import timm
from clip_benchmark.datasets import builder
from conftest import picture, refused, write_json
from models import built
from safetensors.torch import save_file

from clip_benchmark_ext import foreign_datasets

pytestmark = pytest.mark.usefixtures("clip_benchmark")


def evaluate(runs: Path, *flags) -> dict | str:
    """The result, but for when it was made, or the complaint."""
    try:
        return models.evaluate(*models.flags_of(runs, *flags)) | {"made": None}
    except SystemExit as end:
        return str(end)


def test_the_list_of_names_is_that_of_clip_benchmarks_builder():
    source = inspect.getsource(builder.build_dataset)
    for pattern, names in (("""dataset_name == ["'](.+?)["']""", {*foreign_datasets.FOREIGN, "winoground"}),
                           (r'startswith\("(\w+/)"\)', {*foreign_datasets.PREFIXES})):
        assert {*re.findall(pattern, source)} == names


ARGS = {"annotation_file": None, "language": "en", "custom_template_file": None, "custom_classname_file": None}
FOREIGN = [*foreign_datasets.FOREIGN, "vtab/cifar10", "vtab/diabetic_retinopathy", "vtab/resisc45", "tfds/mnist"]


@pytest.mark.parametrize("root", ["there", "absent"])
def test_nothing_is_fetched_or_written_for_any_of_clip_benchmarks_sets(root, tmp_path):
    """Run by its own builders, which begin by wget, gdown, kaggle, requests or torchvision."""
    (tmp_path / "there").mkdir()
    args = {**ARGS, "task": "zeroshot_classification", "wds_cache_dir": None}
    for name in FOREIGN:
        try:
            args["language"] = "eng_Latn" if name.endswith("200") else "en"
            foreign_datasets.build(name, str(tmp_path / root), None, "test", **args)
            found = "built"
        except (ValueError, OSError) as problem:
            found = str(problem)
        words = "built" if name == "dummy" else "nothing is downloaded"
        assert words in found or "needs the package" in found or name == "imagenet-w", (name, found)
        assert sorted(path.name for path in tmp_path.rglob("*")) == ["there"], name
    said = refused(FileNotFoundError, foreign_datasets.build, "mscoco_captions", str(tmp_path), None, "test", **args)
    assert "ROOT/val2014/*.jpg" in said and "--annotation_file" in said


def test_a_whole_set_is_read_and_programs_start_again_afterwards(tmp_path):
    picture(tmp_path / "coco/val2014/1.jpg", 0)
    write_json(tmp_path / "captions.json", {
        "images": [{"id": 1, "file_name": "1.jpg"}], "annotations": [{"id": 1, "image_id": 1, "caption": "a star"}]})
    dataset = built("mscoco_captions", "coco", "captioning", lambda image: image.size, annotation_file="captions.json")
    assert list(dataset) == [((40, 40), ["a star"])]
    (tmp_path / "coco/new").mkdir()


# ---- own class folders

CLASSES = ("big_cat", "dog", "owl")


@pytest.fixture
def photos(tmp_path) -> Path:
    for number, (split, name) in enumerate(product(("train", "val"), CLASSES)):
        folder = tmp_path / "photos" / split / name
        for i in range(4):
            picture(folder / f"{i}.jpg", 10 * number + i)
        (folder / "notes.txt").write_text("no image")
    return tmp_path / "photos"


PROBE = "--task linear_probe --fewshot_epochs 2 --fewshot_lr 0.1 --fewshot_k -1"


def test_class_folders_are_probed_and_classified(photos, runs):
    for split in ("train", "val"):
        (photos / split / "dog/0.jpg").rename(photos / split / "dog/0.JFIF")
        (photos / split / "owl/._0.jpg").write_bytes(b"of macOS")
        (photos / split / ".thumbnails").mkdir()
    probed = evaluate(runs, "folder", photos, PROBE)
    assert probed["dataset"] == "folder" and 0 <= probed["metrics"]["lp_acc1"] <= 1
    write_json(photos / "names.json", {"folder": ["star", "square", "circle"]})
    write_json("templates.json", {"folder": ["a {c}"]})
    results = [evaluate(runs, name, photos, "--dump_classnames --custom_template_file templates.json", *more)
               for name, more in (("folder", ()), ("imagefolder", ("--custom_classname_file", photos / "names.json")))]
    assert [result["classnames"] for result in results] == [["big cat", "dog", "owl"], ["star", "square", "circle"]]
    assert all(result["metrics"]["acc1"] * 12 % 1 == pytest.approx(0) for result in results)  # of 12 images of val
    for old, name in (("val", "validation"), ("validation", "valid"), ("valid", "val")):  # as others call it
        (photos / old).rename(photos / name)
        again = evaluate(runs, "folder", photos, PROBE)
        assert again["metrics"]["lp_acc1"] == probed["metrics"]["lp_acc1"]
        assert "is both the validation" in evaluate(runs, "folder", photos, PROBE, "--val_split val")
    assert "no captions to compare with" in (said := evaluate(runs, "folder", photos, "--task captioning"))
    assert "open_clip_mdc prepare shards --test DIR --out DIR-wds" in said
    for flags, words in ((("nowhere",), "no folder test in nowhere"), ((photos, "--split tset"), "no folder tset")):
        complaint = evaluate(runs, "folder", *flags)
        assert words in complaint and "DIR/train/CLASS" in complaint and "\n" not in complaint


@pytest.mark.parametrize("name", ["folder", "imagenet1k-unverified"])
def test_splits_of_other_classes_are_refused(photos, runs, name):
    """Their labels are the folders' places in the alphabet."""
    shutil.rmtree(photos / "val/dog")
    complaint = evaluate(runs, name, photos, PROBE)
    assert "test and train have different classes" in complaint and "'dog' is only in train" in complaint
    picture(photos / "val/dogs/0.png", 0)
    assert "different classes" in evaluate(runs, name, photos, PROBE)


@pytest.mark.parametrize("name, empty", [("folder", True), ("imagenet1k-unverified", False)])
def test_folders_that_are_added_as_the_message_says_are_read(photos, runs, name, empty, capsys, caplog):
    shutil.rmtree(photos / "val/dog")
    flags = (name, photos, PROBE)
    said = evaluate(runs, *flags)
    assert ("if need be empty" in said) is empty and ("with an image each" in said) is not empty
    (photos / "val/dog").mkdir()
    if not empty:
        picture(photos / "val/dog/0.png", 0)
    result = evaluate(runs, *flags)
    assert 0 <= result["metrics"]["lp_acc1"] <= 1
    assert ("val has no image of dog" in caplog.text) is empty
    if empty:  # the labels 0, 1 and 2 are these
        assert result["classnames"] == ["big cat", "dog", "owl"] and "  big cat  " in capsys.readouterr().out


def test_a_folder_with_train_alone_is_split_once_with_the_seed(photos, runs, caplog):
    shutil.rmtree(photos / "val")
    for name in CLASSES:
        for i in range(4, 10):
            picture(photos / "train" / name / f"{i}.jpg", 50 + 10 * CLASSES.index(name) + i)
    flags = ("folder", photos)
    results = [evaluate(runs, *flags, PROBE, "--seed", seed) for seed in (0, 0, 1)]
    assert [message for message in caplog.messages if "is split" in message] == [
        f"{photos / 'train'} is split, as there is no folder test: 24 images train and 6 test, drawn with --seed {seed}"
        for seed in (0, 1)]
    rows = results[0]["of_classes"]
    assert [(row["class"], row["images"]) for row in rows] == [("big cat", 2), ("dog", 2), ("owl", 2)]
    assert results[0] == results[1] and results[0]["settings"]["data_sha256"] != results[2]["settings"]["data_sha256"]
    build = partial(foreign_datasets.build, "folder", str(photos), None, **ARGS)
    assert sorted(build("train", seed=0).samples + build("test", seed=0).samples) == build("train").samples
    assert "no folder val in" in evaluate(runs, *flags, PROBE, "--val_split val")
    assert len(evaluate(runs, *flags, "--split train --scorer parallel")["of_classes"]) == 3
    for path in (photos / "train/owl").glob("[1-9].jpg"):
        path.unlink()
    assert "is too small to be both train and test" in evaluate(runs, *flags, PROBE)


def test_encoders_of_timm_and_own_ones_meet_in_both_probes(photos, runs, tmp_path, capsys):
    weights = tmp_path / "weights.safetensors"
    save_file(timm.create_model("test_vit", num_classes=7).state_dict(), weights)
    for task, name in (("linear_probe", "lp_acc1"), ("probe", "linear_acc1")):
        result = evaluate(runs, "folder", photos, "--no_amp --image_size 32", PROBE, "--task", task,
                          "--model timm-test_vit --pretrained", weights)
        assert [row["class"] for row in result["of_classes"]] == ["big cat", "dog", "owl"]
        assert "big cat" in capsys.readouterr().out
        assert result["metrics"]["feature"] == "cls" and 0 <= result["metrics"][name] <= 1
    assert {"knn10", "linear", "attentive"} <= result["of_classes"][0].keys()
    complaint = evaluate(runs, "folder", photos, PROBE, "--image_size 32")
    assert "--image_size is only for probes of --model timm-NAME" in complaint
