"""Claims about `open_clip_mdc finetune`: what it writes, from which data, and that a killed run ends as a whole one."""
import json
import re
import shutil
from html import escape
from pathlib import Path

import pytest
import torch
from conftest import SHARED, complaint_of, json_lines, killed_when, needs_data, run, run_tool, write_json
from training import equal, holds, state_of, tower

import open_clip_mdc
from open_clip_mdc import cli, unregister
from open_clip_mdc.cli import finetune
from open_clip_mdc.cli.page import printable
from open_clip_mdc.data.shards import read_samples

FLAGS = "--val 0.25 --epochs 2"


@pytest.fixture(scope="module")
def photos(scenes, tmp_path_factory) -> Path:
    """20 scenes with two captions each, as a folder with a bad image, as a table and as COCO's JSON."""
    folder = tmp_path_factory.mktemp("finetune")
    (folder / "photos").mkdir()
    rows = list(read_samples(str(scenes / "train/00000.tar")))[:20]
    content, table = {"images": [], "annotations": []}, ["filepath,title"]
    for number, row in enumerate(rows):
        name, captions = f"{number}.png", [row["txt"].decode().strip(), f"scene number {number}"]
        (folder / "photos" / name).write_bytes(row["png"])
        (folder / f"photos/{number}.txt").write_text("\n".join(captions))
        table += [f"{folder}/photos/{name},{caption}" for caption in captions]
        content["images"].append({"id": number, "file_name": name})
        content["annotations"] += [{"image_id": number, "caption": caption} for caption in captions]
    (folder / "photos.csv").write_text("\n".join(table))
    write_json(folder / "photos.json", content)
    (folder / "photos/bad.png").write_bytes(b"no image")
    (folder / "photos/bad.txt").write_text("a scene")
    return folder


@pytest.fixture(scope="module")
def whole(photos, runs) -> Path:
    """Return what the command writes if nobody disturbs it, from a captioner that has learnt nothing yet."""
    run_tool(["finetune", photos / "photos", "--pretrained", runs / "mdc", FLAGS, "--out", photos / "whole"])
    unregister()
    return photos / "whole"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    [path] = folder.glob("checkpoints/*.pt")
    return state_of(path)


def pairs(out: Path, split: str) -> set[tuple]:
    return {(sample["png"], tuple(json.loads(sample["json"])["captions"]))
            for shard in (out / "data" / split).glob("*.tar") for sample in read_samples(str(shard))}


def test_it_writes_a_run_of_the_best_epoch_whose_encoder_is_that_of_the_start(whole, runs):
    begun, ended = weights(runs / "mdc"), weights(whole)
    changed = {name.partition(".")[0] for name in ended if not torch.equal(ended[name], begun[name])}
    assert changed == {"text", "length_head"}
    key, data, *rates = json_lines(whole / "finetune.jsonl")
    assert (data["train"], data["val"], data["captions"]) == (15, 5, 30) and key["val"] == "0.25"
    best = min(rates, key=lambda row: row["nelbo"])
    results = json_lines(whole / "checkpoints/results.jsonl")
    nelbo = [row["nelbo_per_token"] for row in results]
    assert [row["id"] for row in rates] == list(finetune.RATES) and min(nelbo) == best["nelbo"]
    assert results[0]["num_samples"] == 10  # both captions of each
    assert [path.name for path in whole.glob("checkpoints/*.pt")] == [f"epoch_{best['epoch']}.pt"]
    assert f"lr: {float(best['id'])}\n" in (whole / "params.txt").read_text()
    assert sorted(path.name for path in whole.iterdir()) == [
        "checkpoints", "data", "finetune.jsonl", "index.html", "out.log", "params.txt"]
    assert (whole / "data/left_out.txt").read_text().startswith("'bad.png'")


def test_the_page_has_the_captions_of_both_and_the_nelbo_that_training_found(whole, runs, photos):
    page = (whole / "index.html").read_text()
    best = re.search(r"(\d\.\d{3}) after</dd>", page)[1]
    results = json_lines(whole / "checkpoints/results.jsonl")
    assert best == f"{min(row['nelbo_per_token'] for row in results):.3f}"
    assert float(re.search(r"(\d+\.\d{3}) before", page)[1]) > float(best) + 1
    val = [sample["png"] for sample in read_samples(str(whole / "data/val/00000.tar"))]
    names = {(photos / f"photos/{number}.png").read_bytes(): number for number in range(20)}
    files = [photos / f"photos/{names[image]}.png" for image in val]
    for start in (runs / "mdc", whole):
        for caption in open_clip_mdc.load(start).caption(files):
            assert f'<h2 dir="auto">{escape(printable(caption)) or "(no words)"}</h2>' in page
    assert page.count("<article class=pair>") == 5


def test_a_killed_run_ends_with_the_weights_of_the_whole_one(whole, photos, runs):
    out = photos / "killed"
    argv = ["finetune", photos / "photos", "--pretrained", runs / "mdc", FLAGS, "--out", out]
    moment = out / "trials/3e-4/checkpoints/results.jsonl"  # before its checkpoint
    killed_when(moment.exists, "-m", "open_clip_mdc", *argv)
    assert moment.exists() and not (out / "index.html").exists()
    assert "begun with another val, epochs: give another --out" in complaint_of(*argv, "--val 0.5 --epochs 1")
    run_tool(argv)
    unregister()
    assert (out / "finetune.jsonl").read_bytes() == (whole / "finetune.jsonl").read_bytes()
    assert equal(weights(out), weights(whole))
    assert (out / "index.html").read_text() == (whole / "index.html").read_text()


def test_a_folder_a_table_and_coco_give_the_same_pairs_and_no_photograph_is_on_both_sides(whole, photos):
    for number, data in enumerate(("photos.csv", "photos.json")):
        images = ["--images", str(photos / "photos")] * data.endswith("json")
        args = cli.parse(["finetune", str(photos / data), *images, "--out", "x"])
        args.images = args.images or []
        out = photos / f"form{number}"
        assert finetune.write_data(args, out) == {"train": 16, "val": 4, "captions": 32}
        assert pairs(out, "train") | pairs(out, "val") == pairs(whole, "train") | pairs(whole, "val")
        assert not {image for image, _ in pairs(out, "train")} & {image for image, _ in pairs(out, "val")}
        assert len(pairs(out, "captions")) == 8


def test_an_encoder_alone_gets_a_new_decoder_and_val_may_be_other_data(photos, runs):
    out = photos / "encoder"
    run("python", "-m", "open_clip_mdc", "finetune", photos / "photos.csv",
        "--model ARC-small-ViT-Ti-8 --pretrained-image", runs / "mdc", "--val", photos / "photos", "--epochs 1 --out",
        out, fork=True)
    assert holds(weights(out), tower(weights(runs / "mdc")))
    assert len(pairs(out, "train")) == len(pairs(out, "val")) == 20
    page = (out / "index.html").read_text()
    assert " before<" not in page and "class=pair" not in page and page.count("<article>") == 20


def test_nothing_is_left_where_it_refuses(photos, runs, tmp_path):
    few = tmp_path / "few"
    few.mkdir()
    for number in range(10):
        for suffix in ("png", "txt"):
            shutil.copy(photos / f"photos/{number}.{suffix}", few)
    (few / "3.png").write_bytes(b"")
    argv = ("finetune", few, "--pretrained", runs / "mdc", "--out", tmp_path / "out")
    assert "few: 9 photographs with captions: give 10 or more ('3.png': no image)" in complaint_of(*argv)
    assert not (tmp_path / "out").exists()


@needs_data("flickr8k_224/test")
def test_the_packaged_captioner_learns_the_words_of_photographs(tmp_path):
    (tmp_path / "photos").mkdir()
    for sample, _ in zip(read_samples(str(SHARED / "flickr8k_224/test/00000.tar")), range(10), strict=False):
        (tmp_path / f"photos/{sample['__key__']}.jpg").write_bytes(sample["jpg"])
        (tmp_path / f"photos/{sample['__key__']}.txt").write_text("eine Katze auf einem Dach\n")
    run_tool(["finetune", tmp_path / "photos", "--epochs 1 --out", tmp_path / "mine"])
    unregister()
    page = (tmp_path / "mine/index.html").read_text()
    before, after = (float(re.search(rf"(\d+\.\d{{3}}) {when}", page)[1]) for when in ("before", "after"))
    assert after < before - 1 and "none, as it weighs words" in page  # CIDEr, as all captions are one
