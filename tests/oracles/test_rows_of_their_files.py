"""Claims about resuming: each row is of the bytes that its image has now, whatever the clock and the folder say."""
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from conftest import complaint_of, json_lines, picture

from open_clip_mdc.bulk.units import check_source, source_of
from open_clip_mdc.cli import caption, search


@pytest.fixture
def photos(here):
    """Two folders with the same names and other pictures, and a link to the first."""
    for first, folder in ((0, "a"), (50, "b")):
        for number in range(12):
            picture(here / folder / f"{number:02d}.png", first + number, 64)
    Path("photos").symlink_to("a")


def command(folder: str = "photos", out: str = "x.jsonl") -> tuple:
    return ("caption", folder, "--length", 6, "--workers", 0, "--batch-size", 5, "--out", out)


def captions(folder: str, out: str = "whole.jsonl") -> list[str]:
    """Return what a run says of a folder's pictures. Without a journal of `out` it makes each caption."""
    assert complaint_of(*command(folder, out)) is None
    return [row["caption"] for row in json_lines(out)]


def interrupt(mark: bool = False) -> None:
    """Leave the journal of a run that was killed after seven images, by cutting that of a whole run."""
    with patch.object(caption, "write_rows", side_effect=ValueError("killed")):
        assert "killed" in complaint_of(*command())
    kept = json_lines("x.jsonl.part")[:8]
    for row in kept[1:] if mark else ():
        row["caption"] = "kept"
    Path("x.jsonl.part").write_text("".join(json.dumps(row) + "\n" for row in kept))


def resumed() -> list[str]:
    return captions("photos", "x.jsonl")


def relink():
    Path("photos").unlink()
    Path("photos").symlink_to("b")


def move():
    Path("photos").unlink()
    Path("b").rename("photos")


def swap_with_old_times():
    """As by rsync -a, and a clock that was wrong: no time tells."""
    shutil.copytree("b", "a", dirs_exist_ok=True)
    for path in Path("a").iterdir():
        os.utime(path, (0, 0))


@pytest.mark.parametrize("change", [relink, move, swap_with_old_times])
def test_a_row_of_another_picture_is_made_anew(photos, change):
    expected = captions("b")
    interrupt()
    change()
    os.utime("x.jsonl.part", (4e9, 4e9))  # the journal claims to be newer than all
    assert resumed() == expected


def restore():
    shutil.copytree("a", "c")  # other inodes and times
    relink()
    Path("b").rename("d")
    Path("c").rename("b")


def touch():
    for path in Path("a").iterdir():
        path.chmod(0o600)


@pytest.mark.parametrize("change", [restore, touch])
def test_a_row_of_the_same_bytes_is_kept(photos, change):
    expected = captions("a")
    interrupt(mark=True)
    change()
    assert resumed() == ["kept"] * 7 + expected[7:]


def test_the_journal_of_a_private_output_is_private(photos):
    Path("x.jsonl").touch(mode=0o600)
    interrupt()
    assert Path("x.jsonl.part").stat().st_mode & 0o777 == 0o600
    resumed()
    assert Path("x.jsonl").stat().st_mode & 0o777 == 0o600


def test_an_image_that_goes_while_it_is_read_ends_nothing(photos, monkeypatch):
    lines_of = caption.lines_of

    def gone(batch, *rest):
        for name in batch.new:
            Path(name).unlink()
        return lines_of(batch, *rest)

    expected = captions("b")
    move()
    monkeypatch.setattr(caption, "lines_of", gone)
    assert resumed() == expected


def test_a_shortlist_of_other_images_scores_what_it_lacks(photos, runs, monkeypatch):
    """The first photograph comes onto the list of the second sentence when the second photograph goes."""
    clip = SimpleNamespace(model=torch.nn.Linear(1, 1), transform=None)
    monkeypatch.setattr(search.clip_models, "load", lambda *_: clip)
    monkeypatch.setattr(search, "cosines", lambda args, clip, paths, *_: {
        str(path): [-abs(int(path.stem) - best) for best in (0, 0.6)] for path in paths})
    Path("s.txt").write_text("a red circle\na star")
    asked = ("search", "--pretrained", runs / "mdc", "photos", "@s.txt", "--clip", "ViT-B-32:x.pt", "--shortlist", 1,
             "--top", 1, "--workers", 0, "--batch-size", 2, "--out")
    with patch.object(search, "write_rows", side_effect=ValueError("killed")):
        assert "killed" in complaint_of(*asked, "x.jsonl")
    Path("photos/01.png").unlink()
    assert complaint_of(*asked, "x.jsonl") is complaint_of(*asked, "fresh.jsonl") is None
    assert Path("x.jsonl").read_text() == Path("fresh.jsonl").read_text()


def test_a_folder_whose_subfolder_has_another_name_is_another_unit(photos):
    Path("c").mkdir()
    Path("b").rename("c/b")
    source = source_of(Path("c"))
    Path("c/b").rename("c/d")
    with pytest.raises(ValueError, match="remove it, or choose another folder"):
        check_source(Path("c"), source, Path("c.parquet"))
