"""Claims about results: they depend on the content of the data files, and not on the number of workers."""
import os
import shutil
from pathlib import Path

import models
import pytest
from conftest import members, picture, read_json, write_json, write_tar
from models import captioned_webdataset, flags_of, labelled_webdataset, order_data, save_clip, skipped
from safetensors.torch import load_file

pytestmark = pytest.mark.usefixtures("clip_benchmark", "no_java")
WORKERS = (0, 1, 3)


def evaluate(*flags) -> dict:
    """All that a result says, but when it was made."""
    result = models.evaluate(*flags, "--batch_size 4")
    assert result.pop("made")
    return result


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    return labelled_webdataset(tmp_path_factory.mktemp("labelled"), ["red", "blue", "green"], ["a {c}"], shards=3)


def captioned(root: Path) -> Path:
    return captioned_webdataset(root, *({str(i): (i, f"a red square {i}\nsomething {i}") for i in rows}
                                        for rows in (range(5), range(5, 7), range(7, 10))))


@pytest.mark.parametrize("task", [
    "linear_probe --fewshot_epochs 2", "linear_probe --fewshot_k 2",
    "linear_probe --train_split test --val_proportion 0.3 --fewshot_epochs 1",
    "zeroshot_classification --scorer monte_carlo --num_samples 4"])
def test_workers_change_no_number_of_classes(runs, labelled, tmp_path, task):
    results = []
    for workers in WORKERS:
        results.append(evaluate(*flags_of(runs, "wds/x", labelled, f"--task {task} --num_workers {workers}",
                                          "--feature_root", tmp_path / str(workers))))
        results[-1]["kept"] = {path.name: load_file(path)["features"].tolist() for path in
                               tmp_path.glob(f"{workers}/*")}
    assert results[0] == results[1] == results[2]


def test_workers_change_no_caption_that_is_drawn_and_no_recall(runs, tmp_path):
    root = captioned(tmp_path / "data")
    name, weights = save_clip(tmp_path)
    found = []
    for workers in WORKERS:
        shutil.rmtree("captions", ignore_errors=True)
        common = flags_of(runs, "wds/x", root, "--num_workers", workers)
        result = evaluate(*common, "--task captioning --temperature 1 --samples 2 --guidance_scale 2")
        saved = read_json("captions/result.json")
        found.append((result["metrics"], saved["captions"], saved["samples"], saved["key"], evaluate(
            *common, "--model", name, "--pretrained", weights, "--task zeroshot_retrieval")["metrics"]))
    assert list(found[0][1]) == [str(i) for i in range(10)]
    assert found[0] == found[1] == found[2]


# ---- what the files hold


def with_old_times(change, *paths: Path) -> None:
    """As rsync, cp -p and the layers of a container leave files: other content, modified at the same time."""
    times = [path.stat().st_mtime_ns for path in paths]
    change(*paths)
    for path, mtime in zip(paths, times, strict=True):
        os.utime(path, ns=(mtime, mtime))


def swap(*paths: Path) -> None:
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, reversed(contents), strict=True):
        path.write_bytes(content)


def rotate_labels(path: Path) -> None:
    write_tar(path, {name: b"%d" % ((int(data) + 1) % 3) if name.endswith(".cls") else data
                     for name, data in members(path).items()})


def swap_captions(path: Path) -> None:
    rows = read_json(path)
    rows["0"]["caption"], rows["0"]["negative_caption"] = rows["0"]["negative_caption"], rows["0"]["caption"]
    write_json(path, rows)


def sugar_crepe(root: Path) -> Path:
    for i in range(4):
        picture(root / f"val2017/{i}.bmp", i)
    write_json(root / "swap_att.json", {str(i): {
        "filename": f"{i}.bmp", "caption": f"a red dog {i}", "negative_caption": f"a dog red {i}"} for i in range(4)})
    return root


def class_folders(root: Path) -> Path:
    for split in ("train", "val"):
        for i in range(6):
            picture(root / split / f"n{i % 2}" / f"{i}.bmp", i)
    return root


PROBE = ("wds/x", "--task linear_probe")
KINDS = {  # data, flags, and changes of some of its files
    "sugar_crepe": (sugar_crepe, ("sugar_crepe/swap_att",), [
        (swap_captions, "swap_att.json"), (swap, "val2017/0.bmp", "val2017/1.bmp")]),
    "aro": (lambda root: order_data(root, images=3), ("aro/coco_order",), [
        (lambda path: picture(path, 9), "val2014/0.png")]),
    "labels": (lambda root: labelled_webdataset(root, ["red", "blue", "green"], ["a {c}"], 9), PROBE, [
        (rotate_labels, "test/0.tar"), (rotate_labels, "train/0.tar")]),
    "class names": (lambda root: labelled_webdataset(root, ["red", "dog"], ["a {c}", "b {c}"], 6), PROBE[:1], [
        (lambda path: path.write_text("dog\nred"), "classnames.txt"),
        (lambda path: path.write_text("a {c}\nc {c}"), "zeroshot_classification_templates.txt")]),
    "captions": (captioned, ("wds/x", "--task captioning"), [
        (lambda path: path.write_bytes(path.read_bytes().replace(b"red", b"big")), "test/1.tar")]),
    "folders": (class_folders, ("imagenet1k-unverified", *PROBE[1:]), [
        (swap, "val/n0/0.bmp", "val/n1/1.bmp"), (swap, "train/n0/2.bmp", "train/n0/4.bmp")]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_is_made_again_when_a_file_holds_something_else(runs, tmp_path, caplog, kind):
    make, flags, changes = KINDS[kind]
    root = make(tmp_path / "data")
    command = flags_of(runs, flags[0], root, *flags[1:], "--batch_size 4")
    evaluate(*command)
    for path in root.rglob("*.*"):
        os.utime(path, (1, 1))
    assert skipped(*command)
    for change, *names in changes:
        paths = [root / name for name in names]
        before = [path.read_bytes() for path in paths]
        with_old_times(change, *paths)
        assert not skipped(*command) and "other data_sha256" in caplog.text
        for path, content in zip(paths, before, strict=True):
            path.write_bytes(content)
        assert skipped(*command)


def test_a_result_that_does_not_say_of_which_data_it_is_is_made_again_once(runs, tmp_path, caplog):
    command = flags_of(runs, "sugar_crepe/swap_att", sugar_crepe(tmp_path / "data"), "--batch_size 4")
    first = evaluate(*command)
    old = read_json("result.json")
    del old["settings"]["data_sha256"]
    write_json("result.json", old)
    assert not skipped(*command)
    assert evaluate(*command) == first and skipped(*command) and caplog.text.count("other data_sha256") == 1
