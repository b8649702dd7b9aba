"""Claims about CUB-200 with ten captions an image, on six rendered images."""
import json
from pathlib import Path

import pytest
from conftest import run_tool
from PIL import Image
from shard_files import samples

from open_clip_mdc.data.captions import CAPTION_SEPARATOR

# Class folders of the images and of the captions. The first two have three images each.
CLASSES = {"001.Black_footed_Albatross": "001.Black_Footed_Albatross", "002.Laysan_Albatross": "002.Laysan_Albatross",
           "100.Brown_Pelican": "100.Brown-Pelican"}
NAMES = [("001.Black_footed_Albatross", "Albatross_1"), ("001.Black_footed_Albatross", "Albatross_2"),
         ("002.Laysan_Albatross", "Laysan_1"), ("002.Laysan_Albatross", "Laysan_2"),
         ("100.Brown_Pelican", "Pelican_1"), ("100.Brown_Pelican", "Pelican_2")]


def caption(name: str, i: int) -> str:
    return f"this bird {name.lower()} has {i} {'brün' if (name, i) == ('Pelican_1', 3) else 'brown'} feathers."


@pytest.fixture
def cub(tmp_path) -> Path:
    """CUB_200_2011 and text_c10: odd case and white space, Latin-1 in one file, line ends of two kinds."""
    root = tmp_path / "CUB_200_2011"
    for number, (folder, name) in enumerate(NAMES, 1):
        image = root / "images" / folder / f"{name}.jpg"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((24 + number, 24), 60).convert("RGB").save(image)
        lines = [f"  {caption(name, i)} ".replace("this", "This") for i in range(10)]
        text = tmp_path / "text_c10" / CLASSES[folder] / f"{name}.txt"
        text.parent.mkdir(parents=True, exist_ok=True)
        ends = "\r\n" if name == "Laysan_1" else "\n"
        text.write_bytes((ends.join(lines) + ends).encode("latin-1"))
        text.with_suffix(".h5").write_bytes(b"features")
    (root / "images.txt").write_text("".join(f"{i} {f}/{n}.jpg\n" for i, (f, n) in enumerate(NAMES, 1)))
    (root / "train_test_split.txt").write_text("1 1\n2 0\n3 1\n4 0\n5 1\n6 0\n")
    (tmp_path / "trainval.txt").write_text("001.Black_footed_Albatross\n002.Laysan_Albatross\n")
    (tmp_path / "test.txt").write_text("100.Brown_Pelican\n")
    return tmp_path


def prepare(cub: Path, *flags) -> Path:
    run_tool(["prepare", "cub", "--images", cub / "CUB_200_2011/images", "--captions", cub / "text_c10", "--out",
              cub / "out", *flags])
    return cub / "out"


def reed(cub: Path) -> tuple:
    return "--split", "reed", "--classes", cub / "trainval.txt", cub / "test.txt"


def texts(path: Path, separator: str) -> dict[str, list[str]]:
    """{image's name: captions} of a shard."""
    return {Path(json.loads(sample["json"])["filename"]).stem: sample["txt"].decode().split(separator)
            for sample in samples(path).values()}


@pytest.mark.parametrize("split", ["reed", "official"])
def test_each_image_gets_its_ten_captions_although_folders_are_spelt_otherwise(cub, split, capsys):
    out = prepare(cub, *(reed(cub) if split == "reed" else ("--split", "official")))
    train = texts(out / "train/00000.tar", CAPTION_SEPARATOR)
    test = texts(out / "test/0.tar", "\n")
    chosen = {"reed": (0, 1, 2, 3), "official": (0, 2, 4)}[split]
    assert train.keys() == {NAMES[i][1] for i in chosen} and len(train) + len(test) == len(NAMES)
    assert train | test == {name: [caption(name, i) for i in range(10)] for _, name in NAMES}
    assert f"{split} split: {len(train)} images to train on, {len(test)} to test on" in capsys.readouterr().out


def test_missing_captions_images_and_lines_are_named_and_left_out_when_asked(cub, capsys):
    folder = cub / "text_c10/001.Black_Footed_Albatross"
    (folder / "Albatross_1.txt").unlink()
    nine = folder / "Albatross_2.txt"
    nine.write_text("".join(nine.read_text().splitlines(keepends=True)[:9]))
    (cub / "CUB_200_2011/images/100.Brown_Pelican/Pelican_2.jpg").unlink()
    with pytest.raises(SystemExit, match="3 images cannot be used.*--skip-broken"):
        prepare(cub, *reed(cub))
    said = capsys.readouterr().err
    for line in (f"'001/Albatross_1': no .txt in {cub / 'text_c10'}",
                 f"'001/Albatross_2': 9 captions, not 10, in {nine}",
                 f"'100/Pelican_2': no .jpg in {cub / 'CUB_200_2011' / 'images'}"):
        assert line in said
    assert not (cub / "out").exists()
    out = prepare(cub, *reed(cub), "--skip-broken")
    assert len((out / "left_out.txt").read_text().splitlines()) == 3
    assert texts(out / "test/0.tar", "\n").keys() == {"Pelican_1"}
