"""Claims about resuming: each row is of the bytes that its image has now, whatever the clock and the folder say.

    pytest tests/oracles/test_rows_of_their_files.py
"""
import json
import os
import shutil
from pathlib import Path

import pytest
from conftest import complaint_of, make_image

NUMBER = 12


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Two folders with the same names and other pictures, and a link to the first."""
    monkeypatch.chdir(tmp_path)
    for first, folder in ((0, "a"), (50, "b")):
        Path(folder).mkdir()
        for number in range(NUMBER):
            make_image(first + number, 64).save(f"{folder}/{number:02d}.png")
    Path("photos").symlink_to("a")


def command(out: str = "x.jsonl") -> tuple:
    return ("caption", "photos", "--length", 6, "--workers", 0, "--batch-size", 5, "--out", out)


def captions(folder: str) -> list[str]:
    """What a run without a journal says of a folder's pictures."""
    assert complaint_of("caption", folder, *command(f"whole-{folder}.jsonl")[2:]) is None
    return [json.loads(line)["caption"] for line in Path(f"whole-{folder}.jsonl").read_text().splitlines()]


def interrupt(mark: bool = False) -> None:
    """Leave the journal of a run that was killed after seven images, by cutting that of a whole run."""
    from open_clip_mdc.cli import caption
    kept, write_rows = [], caption.write_rows

    def killed(*_):
        kept.extend(Path("x.jsonl.part").read_text().splitlines(keepends=True)[:8])
        raise ValueError("killed")

    caption.write_rows = killed
    try:
        assert "killed" in complaint_of(*command())
    finally:
        caption.write_rows = write_rows
    if mark:
        kept = kept[:1] + [json.dumps({**json.loads(line), "caption": "kept"}) + "\n" for line in kept[1:]]
    Path("x.jsonl.part").write_text("".join(kept))


def resumed() -> list[str]:
    assert complaint_of(*command()) is None
    return [json.loads(line)["caption"] for line in Path("x.jsonl").read_text().splitlines()]


def relink():
    Path("photos").unlink()
    Path("photos").symlink_to("b")


def move():
    Path("photos").unlink()
    Path("b").rename("photos")


def swap_with_old_times():
    """As by rsync -a, and a clock that was wrong: no time tells."""
    for number in range(NUMBER):
        shutil.copy2(f"b/{number:02d}.png", f"a/{number:02d}.png")
        os.utime(f"a/{number:02d}.png", (0, 0))


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
    for number in range(NUMBER):
        os.chmod(f"a/{number:02d}.png", 0o600)


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
