"""Claims about shards for fine-tuning, and about how they train."""
import itertools
import json
import random
import tarfile
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest
import torch
from clip_benchmark.datasets.builder import build_dataset
from conftest import members, png, read_json, write_json, write_tar
from open_clip_train.data import get_dataset_size
from scipy.stats import chisquare
from shard_files import ENDINGS, make_image, samples, texts, tool
from training import pipeline

from open_clip_mdc.cli import prepare
from open_clip_mdc.cli.prepare_layouts import Sample
from open_clip_mdc.data.captions import CAPTION_SEPARATOR
from open_clip_mdc.integration import data as hooks

KARPATHY = ["train"] * 5 + ["restval"] * 3 + ["val"] * 2 + ["test"] * 2


@pytest.fixture
def coco(tmp_path) -> Path:
    """COCO's folders and Karpathy's json for twelve images: the eighth is a PNG, captions hold odd white space."""
    images = []
    for i, split in enumerate(KARPATHY):
        folder, name = ("train2014" if split == "train" else "val2014"), f"COCO_{i:012d}.jpg"
        path = tmp_path / "coco" / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_image(i, "png" if i == 7 else "jpeg"))
        raw = [f" {text}\n" for text in texts(i)]
        raw[1] = raw[1].replace(" a ", "a\n\x1e ")
        images.append({"filepath": folder, "filename": name, "split": split, "cocoid": i, "imgid": i,
                       "sentences": [{"raw": text, "tokens": text.split(), "sentid": 0, "imgid": i} for text in raw]})
    write_json(tmp_path / "dataset_coco.json", {"images": images, "dataset": "coco"})
    return tmp_path


@pytest.fixture
def prepared(coco) -> Path:
    tool("coco", "--images", coco / "coco", "--annotations", coco / "dataset_coco.json", "--out", coco / "out")
    return coco / "out"


def test_every_image_is_there_byte_for_byte_with_all_its_captions_and_restval_is_trained_on(prepared):
    assert sorted(p.name for p in prepared.iterdir()) == ["dataset_type.txt", "test", "train", "val"]
    for folder, indices in (("train", range(8)), ("val", (8, 9))):
        content = samples(prepared / folder / "00000.tar")
        assert list(content) == [f"{place:08d}" for place in range(len(indices))]
        for sample, i in zip(content.values(), indices, strict=True):
            assert json.loads(sample.pop("json")) == {"filename": f"COCO_{i:012d}.jpg", "captions": texts(i)}
            image = {"png": make_image(i, "png")} if i == 7 else {"jpg": make_image(i, "jpeg")}
            assert sample == image | {"txt": CAPTION_SEPARATOR.join(texts(i)).encode()}


def test_the_printed_patterns_are_shards_whose_size_openclip_finds(coco, capsys, monkeypatch):
    monkeypatch.setattr(prepare, "SHARD_SIZE", 3)
    tool("coco", "--images", coco / "coco", "--annotations", coco / "dataset_coco.json", "--out", coco / "out")
    flags = dict(x.split(": ")[1].split(" ", 1) for x in capsys.readouterr().out.splitlines() if "-data" in x)
    assert get_dataset_size(flags["--train-data"].strip("'")) == (8, 3)
    assert get_dataset_size(flags["--val-data"].strip("'")) == (2, 1)


def test_clip_benchmark_reads_the_test_set_with_five_references(prepared, monkeypatch):
    monkeypatch.setattr(prepare, "SHARD_SIZE", 1)
    source = prepared / "test/0.tar"
    tool("shards", "--test", source, "--out", prepared.parent / "again")  # two shards of one image
    for root in (prepared, prepared.parent / "again"):
        found = list(build_dataset("wds/coco", root=str(root), transform=lambda image: image.size, split="test",
                                   task="captioning"))
        assert found == [((40 + i, 40), texts(i)) for i in (10, 11)]


def test_flickr_has_no_subfolders(tmp_path, capsys):
    (tmp_path / "7.jpg").write_bytes(make_image(0))
    rows = {"dataset": "flickr8k", "images": [{"filename": "7.jpg", "split": "test", "sentences": [{"raw": "a dog"}]}]}
    write_json(tmp_path / "f.json", rows)
    tool("flickr8k", "--images", tmp_path, "--annotations", tmp_path / "f.json", "--out", tmp_path / "out")
    assert members(tmp_path / "out/test/0.tar")["00000000.txt"] == b"a dog"
    assert capsys.readouterr().out.startswith("1 image: --dataset wds/out") and not (tmp_path / "out/train").exists()


def test_images_that_cannot_be_used_stop_it_or_are_left_out_and_listed(coco, capsys):
    flags = ("coco", "--images", coco / "coco", "--annotations", coco / "dataset_coco.json", "--out", coco / "out")
    broken = coco / "coco/train2014/COCO_000000000001.jpg"
    broken.write_bytes(broken.read_bytes()[:300])
    (coco / "coco/train2014/COCO_000000000002.jpg").write_text("<html>404</html>")
    with pytest.raises(SystemExit, match="2 images cannot be used.*--skip-broken"):
        tool(*flags)
    assert "COCO_000000000001.jpg" in capsys.readouterr().err
    (coco / "coco/val2014/COCO_000000000011.jpg").unlink()
    with pytest.raises(SystemExit, match="1 of 12 images are missing.*COCO_000000000011.jpg"):
        tool(*flags)
    assert sorted(p.name for p in coco.iterdir()) == ["coco", "dataset_coco.json"]  # nothing half-written
    tool(*flags, "--skip-broken")
    assert read_json(coco / "out/train/sizes.json") == {"00000.tar": 6}
    listed = (coco / "out/left_out.txt").read_text().splitlines()
    assert [row.split("'")[1] for row in listed] == [f"COCO_{i:012d}.jpg" for i in (1, 2, 11)]


def test_joined_captions_are_one_text_and_references_stay_apart(prepared):
    joined = prepared.parent / "joined"
    tool("shards", "--train", prepared / "train/00000.tar", "--val", prepared / "val/00000.tar", "--test",
         prepared / "test/0.tar", "--out", joined, "--join")
    assert members(joined / "train/00000.tar")["00000002.txt"].decode() == " ".join(texts(2))
    val = [text.decode() for name, text in members(joined / "val/00000.tar").items() if name.endswith(".txt")]
    assert val == [" ".join(texts(i)) for i in (8, 9)]
    assert members(joined / "test/0.tar") == members(prepared / "test/0.tar")


# How several captions train


def tokenize(is_train: bool):
    """Return what the hook makes of a tokenizer that returns its text."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("read_alike", "seed_webdataset", "need_batches"):
            patch.setattr(hooks, name, lambda *args: None)
        hook = hooks.get_wds_dataset(lambda args, preprocess, is_train, epoch, floor, tokenizer: Namespace(
            dataloader=Namespace(pipeline=[Namespace(num_workers=2)]), tokenizer=tokenizer))
        args = Namespace(seed=0, rank=0, device="cpu", train_data="0.tar")
        return hook(args, None, is_train, tokenizer=lambda text: text).tokenizer


def test_training_draws_each_caption_equally_often_and_validation_takes_the_first():
    random.seed(0)
    text = CAPTION_SEPARATOR.join(texts(0))
    drawn = Counter(tokenize(True)(text) for _ in range(5000))
    assert set(drawn) == set(texts(0)) and chisquare(list(drawn.values())).pvalue > 1e-3
    assert {tokenize(False)(text) for _ in range(100)} == {texts(0)[0]}


def test_an_ordinary_text_passes_as_it_is_and_draws_nothing():
    state = random.getstate()
    for text in ("a dog", "", "two lines\nof an alt text\r\n", "a; b | c\ttab"):
        assert tokenize(True)(text) == tokenize(False)(text) == text
    assert random.getstate() == state


def draws(shards: Path, seed: int, rank: int = 0, epochs: int = 2) -> list[list[int]]:
    """Which of the five captions each sample of an epoch got, through OpenCLIP's pipeline in a worker process."""
    torch.manual_seed(seed + rank)  # as upstream's main
    info = pipeline(shards, lambda image: 0, True, lambda text: [
        next(j for j, ending in enumerate(ENDINGS) if text.endswith(ending))],
        train_num_samples=8, seed=seed, rank=rank, workers=1, batch_size=8)
    found = []
    for epoch in range(epochs):
        info.set_epoch(epoch)
        found += [text.tolist() for _, text in info.dataloader]
    return found


def test_draws_repeat_under_a_seed_and_differ_between_epochs_ranks_and_seeds(prepared):
    shards = prepared / "train/00000.tar"
    first, second = draws(shards, 0)
    assert draws(shards, 0) == [first, second]
    others = [draws(shards, 0, rank=1)[0], draws(shards, 5)[0]]
    assert len({tuple(x) for x in (first, second, *others)}) == 4


def test_hostile_members_leave_no_trace_outside(tmp_path):
    """Names that climb out, links, deeply nested json, half a character: only samples with our own keys come out."""
    good = json.dumps({"re_caption": "fine", "captions": ["fine"], "filename": "\x1b[31m/etc/passwd"}).encode()
    path = tmp_path / "in/0.tar"
    write_tar(path, {"../../evil.jpg": make_image(0), "../../evil.json": good, "/abs/x.jpg": make_image(1),
                     "/abs/x.json": b"[" * 100_000, "y.jpg": make_image(2), "y.json": b"\xff\xfe",
                     "h.jpg": make_image(3), "h.json": b'{"re_caption": "\\udfff", "captions": ["\\udfff"]}'})
    with tarfile.open(path, "a") as tar:
        link = tarfile.TarInfo("z.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    before = set(tmp_path.rglob("*"))
    tool("recap", "--shards", path, "--pairs", 1, "--out", tmp_path / "recap")
    tool("shards", "--train", path, "--out", tmp_path / "shards", "--skip-broken")
    for shard, key in (("recap/00000.tar", "00000000000"), ("shards/train/00000.tar", "00000000")):
        assert set(members(tmp_path / shard)) == {f"{key}.{suffix}" for suffix in ("jpg", "json", "txt")}
    made = set(tmp_path.rglob("*")) - before
    assert all(p.relative_to(tmp_path).parts[0] in ("recap", "shards") for p in made)
    assert "\x1b" not in (tmp_path / "shards/left_out.txt").read_text()


def test_a_table_of_that_very_name_is_read_and_its_own_column_says_where_images_are(here):
    Path("i").mkdir()
    Path("i/a.png").write_bytes(png(0))
    Path("t1.csv").write_text("image,caption\ni/a.png,wrong\n")
    Path("t[1].csv").write_text("image,caption,original_file_name\ni/a.png,right,x\n")
    tool("shards", "--train", "t[1].csv", "--out", "out")
    assert members(here / "out/train/00000.tar")["00000000.txt"] == b"right"


def test_captions_are_found_where_img2dataset_and_clip_benchmark_write_them(tmp_path):
    for name, text, content in (
            ("json", b"a red square", {"0.json": b'{"caption": "a red\\nsquare"}', "0.txt": b"x"}),
            ("lines", b"a red square\x1ea star", {"0.txt": b"a red square\n\n a star \n"})):
        write_tar(tmp_path / f"{name}.tar", {"0.jpg": make_image(0), **content})
        tool("shards", "--train", tmp_path / f"{name}.tar", "--out", tmp_path / name)
        assert members(tmp_path / name / "train/00000.tar")["00000000.txt"] == text


def test_many_broken_images_end_the_work_before_all_are_read(capsys):
    endless = (Sample(f"{number}.png", b"" if number else png(0), ["a dog"]) for number in itertools.count())
    with pytest.raises(ValueError, match="20 images cannot be used"):
        list(prepare.usable(endless, [], skip=False))
    assert capsys.readouterr().err.count("no image") == 20
