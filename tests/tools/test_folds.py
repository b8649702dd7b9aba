"""Claims about `open_clip_mdc prepare folds`."""
import json
import random
from pathlib import Path

from clip_benchmark.datasets.builder import build_dataset
from open_clip_train.data import get_dataset_size
from shard_files import make_image, members, texts, tool, write_tar

from open_clip_mdc.cli import prepare
from open_clip_mdc.data.shards import CAPTION_SEPARATOR


def sharded(folder: Path, images: list[int], per_shard: int) -> str:
    for number in range(0, len(images), per_shard):
        content = {}
        for i in images[number:number + per_shard]:
            about = {"filename": f"{i}.jpg", "captions": texts(i % 8)}
            content |= {f"k{i}.json": json.dumps(about).encode(), f"k{i}.jpg": make_image(i % 12)}
        write_tar(folder / f"{number // per_shard:05d}.tar", content)
    return f"{folder}/{{00000..{(len(images) - 1) // per_shard:05d}}}.tar"


def names_in(folder: Path) -> list[str]:
    return [json.loads(data)["filename"] for tar in sorted(folder.glob("*.tar"))
            for name, data in members(tar).items() if name.endswith(".json")]


def test_folds_are_a_partition_that_does_not_depend_on_the_shards(tmp_path, capsys):
    tool("folds", "--shards", sharded(tmp_path / "a", list(range(40)), 40), "--k", 3, "--out", tmp_path / "folds")
    printed = capsys.readouterr().out.splitlines()
    again = random.Random(0).sample(range(40), 40)
    tool("folds", "--shards", sharded(tmp_path / "b", again, 7), "--k", 3, "--out", tmp_path / "again")
    everything = sorted(f"{i}.jpg" for i in range(40))
    tests = []
    for fold in range(3):
        train, test = (names_in(tmp_path / "folds" / f"fold{fold}" / split) for split in ("train", "test"))
        assert sorted(train + test) == everything and len(test) > 5
        assert set(names_in(tmp_path / "again" / f"fold{fold}" / "test")) == set(test)
        pattern = printed[fold].split("'")[1]
        assert get_dataset_size(pattern)[0] == len(train)
        tests += test
    assert sorted(tests) == everything
    assert prepare.fold_of("7.jpg", 3) == next(f for f in range(3) if "7.jpg" in names_in(
        tmp_path / "folds" / f"fold{f}" / "test"))


def test_a_fold_is_read_by_clip_benchmark_and_has_all_captions_in_training(tmp_path, monkeypatch):
    tool("folds", "--shards", sharded(tmp_path / "a", list(range(12)), 12), "--k", 2, "--out", tmp_path / "folds")
    (tmp_path / "folds").rename(tmp_path / "moved")  # links stay true
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    dataset = build_dataset("wds/fold1", str(tmp_path / "moved" / "fold1"), lambda image: image.size, "test",
                            task="captioning")
    assert sorted(len([line for line in captions if line]) for _, captions in dataset) == [5] * len(
        names_in(tmp_path / "moved" / "fold1" / "test"))
    trained = [data.decode() for tar in (tmp_path / "moved" / "fold1" / "train").glob("*.tar")
               for name, data in members(tar).items() if name.endswith(".txt")]
    assert all(len(text.split(CAPTION_SEPARATOR)) == 5 for text in trained) and trained
