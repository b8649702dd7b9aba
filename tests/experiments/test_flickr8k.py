"""Claims about experiments/flickr8k.py: the pairs and the vocabulary of SCALE=flickr8k."""
import gzip
import hashlib
import json
import random

import pytest
from conftest import REPO, SHARED, needs_data, refused, saved
from open_clip.tokenizer import SimpleTokenizer
from PIL import Image

from clip_benchmark_ext.datasets import pairs
from experiments import flickr8k
from open_clip_mdc.data.shards import read_samples, tar_writer

PAIRS_SHA256 = "abd1bee79e642a443e0b9239310391eaf34d1b4108a962a9dfb80816794e2da1"  # of the five files, in order


def test_shards_that_are_missing_are_named_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["flickr8k", "pairs", "--shards", str(tmp_path / "0.tar"), "--out", "x"])
    with pytest.raises(SystemExit, match="^error: .*0.tar: no such shard"):
        flickr8k.main()


def test_captions_are_made_false_by_rule():
    made = pairs.negatives("a man in a red shirt jumps over a dog near a blue car .", "a man and a dog",
                              random.Random(0))
    assert made["swap_obj"] == "a shirt in a red man jumps over a dog near a blue car ."
    assert "swap_att" not in made  # "near" stands between the colours: such captions may stay true
    assert made["replace_rel"] == "a man in a red shirt jumps under a dog near a blue car ."
    words = "a man in a red shirt jumps over a dog near a blue car .".split()
    for kind, vocabulary in (("replace_obj", pairs.NOUNS), ("replace_att", pairs.COLOURS)):
        changed = [(a, b) for a, b in zip(words, made[kind].split(), strict=True) if a != b]
        assert len(changed) == 1 and set(changed[0]) <= set(vocabulary) and changed[0][1] not in ("man", "dog")
    assert pairs.swap("a black dog by a white one", pairs.COLOURS) == "a white dog by a black one"
    assert pairs.swap("a black and white dog", pairs.COLOURS) is None
    assert pairs.negatives("two people talk", "", random.Random(0)) == {}
    assert pairs.replace("a red car", ["red", "blue"], "red and blue", random.Random(0)) is None  # all are named


def test_pairs_of_rendered_images_are_sugar_crepe_files(tmp_path):
    from clip_benchmark_ext.selection_datasets import build_dataset
    texts = ["a black dog runs over a white car", "a girl behind a red table", "nothing of note"]
    with tar_writer(tmp_path / "0.tar") as tar:
        for i, text in enumerate(texts):
            image = saved(Image.new("RGB", (8, 8), (80 * i, 0, 0)), "JPEG")
            tar.write({"__key__": f"../{i}", "jpg": image, "json": json.dumps({"captions": [text] * 5})})
    flickr8k.write_pairs([str(tmp_path / "0.tar")], tmp_path / "pairs")
    dataset = build_dataset("sugar_crepe/swap_att", tmp_path / "pairs")
    assert [case.captions for case in dataset.cases] == [
        ("a black dog runs over a white car", "a white dog runs over a black car")]
    assert dataset[0][0].getpixel((0, 0)) == (0, 0, 0)
    assert sorted(path.name for path in (tmp_path / "pairs/val2017").iterdir()) == [
        "000000000000.jpg", "000000000001.jpg"]
    assert {path.name for path in tmp_path.iterdir()} == {"0.tar", "pairs"}
    assert "0.tar" in refused(ValueError, pairs.captions_in, {"__url__": "0.tar", "__key__": "a", "json": b"{}"})


def test_the_first_photographs_are_a_shard_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(flickr8k, "FEW", 3)
    for shard in range(2):
        with tar_writer(tmp_path / f"{shard}.tar") as tar:
            for i in range(2):
                tar.write({"__key__": f"{shard}{i}", "jpg": bytes([shard, i]), "txt": f"caption {shard}{i}"})
    flickr8k.write_first([str(tmp_path / f"{shard}.tar") for shard in range(2)], tmp_path / "few")
    assert [(sample["__key__"], sample["jpg"], sample["txt"])
            for sample in read_samples(tmp_path / "few/00000.tar")] == [
        ("00", b"\0\0", b"caption 00"), ("01", b"\0\1", b"caption 01"), ("10", b"\1\0", b"caption 10")]


@needs_data("flickr8k/test/00000.tar")
def test_the_pairs_of_flickr8k_are_the_ones_that_results_were_measured_on(tmp_path):
    flickr8k.write_pairs([str(SHARED / "flickr8k/test/00000.tar")], tmp_path / "pairs")
    content = b"".join(path.read_bytes() for path in sorted((tmp_path / "pairs").glob("*.json")))
    assert hashlib.sha256(content).hexdigest() == PAIRS_SHA256


@needs_data("flickr8k/train/00005.tar")
def test_the_committed_vocabulary_is_the_one_this_code_makes(tmp_path):
    flickr8k.write_bpe(sorted(map(str, (SHARED / "flickr8k/train").glob("*.tar"))), tmp_path / "bpe.gz")
    committed = (REPO / "model_configs/flickr8k_bpe.txt.gz").read_bytes()
    assert gzip.decompress((tmp_path / "bpe.gz").read_bytes()) == gzip.decompress(committed)
    assert SimpleTokenizer(bpe_path=str(tmp_path / "bpe.gz")).vocab_size == 4508
