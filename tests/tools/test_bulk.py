"""Claims about bulk jobs over shards: tables, the engine, locks."""
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import (
    complaint_of,
    contents,
    json_lines,
    killed_when,
    picture,
    png,
    run_folder,
    run_tool,
    times,
    wait_for,
)
from PIL import Image

from open_clip_mdc.data.shards import tar_writer
from open_clip_mdc.integration.pretrained import load

pq = pytest.importorskip("pyarrow.parquet")
from open_clip_mdc.bulk.tables import read_about  # noqa: E402


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A run of a model that is not trained but has opinions, and four shards of five images."""
    folder = tmp_path_factory.mktemp("bulk")
    run_folder(folder / "run", "MDC-ViT-Ti-8")
    for shard in range(4):
        with tar_writer(folder / f"{shard:03d}.tar") as writer:
            for i in range(5):
                writer.write({"__key__": f"key{i}", "png": png(10 * shard + i), "txt": "words"})
    return folder


def run(tool: str, place: Path, *argv) -> str | None:
    """The tool's complaint, None if it has none."""
    return complaint_of(tool, "--pretrained", place / "run", "--device cpu --workers 0", *argv)


def shards(place: Path, last: int = 3) -> str:
    return f"{place}/{{000..{last:03d}}}.tar"


# ---- tables


def test_a_table_has_the_captions_that_the_jsonl_file_has(place, tmp_path, capsys):
    assert run("caption", place, shards(place, 1), "--out", tmp_path / "c", "--length 4 --batch-size 5") is None
    assert "10 rows of 10 images" in capsys.readouterr().out
    for flags in ((), ("--temperature 1.0",)):
        folder = tmp_path / f"drawn{len(flags)}"
        assert run("caption", place, shards(place, 1), "--out", folder, "--length 4", *flags) is None
        if not flags:
            assert contents(folder) == contents(tmp_path / "c")
    assert run("caption", place, shards(place, 1), "--out", tmp_path / "c.jsonl", "--length 4 --batch-size 5") is None
    lines = json_lines(tmp_path / "c.jsonl")
    rows = [(shard, row) for shard in ("000", "001") for row in pq.read_table(
        tmp_path / f"c/{shard}.parquet").to_pylist()]
    for line, (shard, row) in zip(lines, rows, strict=True):
        assert line["image"] == f"{place}/{shard}.tar::{row['key']}" and line["caption"] == row["caption"]
        for a, b in zip(line["tokens"], row["tokens"], strict=True):
            assert (a["token"], a["step"]) == (b["token"], b["step"])
            assert a["log_prob"] == pytest.approx(b["log_prob"], abs=1e-5)


@pytest.mark.parametrize("kind, layer", [("gap", ()), ("cls", ()), ("patches", ()), ("cls", ("--layer", 0))])
def test_features_are_those_of_the_python_api_and_a_layers_go_into_a_folder_of_their_own(place, tmp_path, kind, layer):
    argv = (shards(place, 0), "--out", tmp_path / "f", "--feature", kind)
    assert run("embed", place, *argv, *layer, "--batch-size 2") is None
    table = pq.read_table(tmp_path / "f/000.parquet")
    found = torch.from_numpy(table["feature"].combine_chunks().to_numpy_ndarray().copy())
    assert table["key"].to_pylist() == [f"key{i}" for i in range(5)] and found.dtype == torch.float32
    model, images = load(place / "run", device="cpu"), [Image.open(io.BytesIO(png(i))) for i in range(5)]
    torch.testing.assert_close(found, model.features(images, kind, *layer[1:]), rtol=1e-4, atol=1e-5)
    if layer:
        assert (found - model.features(images, kind)).abs().max() > 0.1
        same_layer = ("--kind", kind, "--layer", -model.model.tower.num_layers)
        assert run("embed", place, *argv[:-2], *same_layer) is None
        assert "was made with layer 0, not None" in run("embed", place, *argv)


def test_broken_images_are_counted_and_a_shard_that_breaks_off_is_named_and_not_written(place, tmp_path, capsys):
    with tar_writer(tmp_path / "some.tar") as writer:
        for i, content in enumerate([png(0), b"no image", png(1), b"", png(2)]):
            writer.write({"__key__": f"k{i}", "png": content})
    whole = (place / "000.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[:len(whole) // 2])
    argv = (tmp_path / "cut.tar", tmp_path / "some.tar", "--out", tmp_path / "f")
    for _ in range(2):
        complaint = run("embed", place, *argv)
        assert complaint.startswith("error: 1 of 2 shards cannot be used, all else is written:\n")
        assert "cut.tar: not a complete tar file" in complaint and complaint.count("\n") == 1
        assert [p.name for p in sorted((tmp_path / "f").iterdir())] == ["some.parquet"]
    assert "3 rows of 3 images, 2 broken" in capsys.readouterr().out
    assert pq.read_table(tmp_path / "f/some.parquet")["key"].to_pylist() == ["k0", "k2", "k4"]
    (tmp_path / "cut.tar").write_bytes(whole)
    for _ in range(2):  # what was skipped is named by the run that finds all done, too
        complaint = run("embed", place, *argv)
        assert complaint.startswith("error: 2 skipped, all else is written:\n  cannot read the image ")
        assert [f"some.tar::k{i}: it is no JPEG" in complaint for i in range(5)] == [False, True, False, True, False]
        assert (tmp_path / "f/cut.parquet").exists()


def test_what_is_there_is_not_made_again_and_other_settings_are_refused(place, tmp_path):
    argv = (shards(place), "--out", tmp_path / "f")
    assert run("embed", place, *argv) is None
    whole = contents(tmp_path / "f")
    kept = times((tmp_path / "f").glob("00[0-2]*"))
    (tmp_path / "f/003.parquet").unlink()
    assert run("embed", place, *argv, "--jobs 2") is None
    assert contents(tmp_path / "f") == whole and times(kept) == kept
    for _ in range(2):  # with nothing to do, and with something
        complaint = run("embed", place, *argv, "--feature cls")
        assert "was made with feature gap, not cls" in complaint and "another --out" in complaint
        (tmp_path / "f/003.parquet").unlink(missing_ok=True)
    complaint = run("caption", place, *argv)
    assert "was made with" in complaint and "\n" not in complaint
    assert read_about(tmp_path / "f/000.parquet")["stats"] == {"images": 5, "rows": 5, "broken": 0}


# ---- the engine and locks, with a function that needs no model

TOY = '''
import os, signal, sys, time
from pathlib import Path
from open_clip_mdc.bulk.engine import make_each
out, log, seconds, jobs = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
def make(number):
    def function(shard, part):
        with open(log, "a") as file:
            file.write(f"{shard}\\n")
        for i in range(20):
            with part.open("a" if i else "w") as file:
                file.write(f"{shard} {i}\\n")
            time.sleep(seconds / 20)
            while i == 9 and os.path.exists("pause"):  # until the test lets it continue
                time.sleep(0.01)
    return function
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs lack
    work = [(shard, out / f"{shard}.txt") for shard in range(8)]
    found = list(make_each(make, work, jobs))
    assert sorted(found) == [target for _, target in work], found
'''


def toy(folder: Path, seconds: float = 0.1, jobs: int = 1) -> subprocess.Popen:
    script = folder / "toy.py"
    script.write_text(TOY)
    return subprocess.Popen([sys.executable, str(script), str(folder / "out"), str(folder / "log"), str(seconds),
                             str(jobs)], stderr=subprocess.PIPE, text=True, cwd=folder, start_new_session=True)


def ended(*processes) -> None:
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors


def made(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((folder / "out").glob("*.txt"))}


WHOLE = {f"{shard}.txt": "".join(f"{shard} {i}\n" for i in range(20)) for shard in range(8)}


@pytest.mark.parametrize("jobs", [1, 2])
def test_two_runs_on_one_folder_share_the_work(tmp_path, jobs):
    ended(*[toy(tmp_path, jobs=jobs) for _ in range(2)])
    assert made(tmp_path) == WHOLE
    assert sorted((tmp_path / "log").read_text().split()) == [str(i) for i in range(8)]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [*WHOLE]


def test_whatever_is_killed_is_made_anew_by_who_waits_or_by_the_next_run(tmp_path):
    (tmp_path / "pause").touch()
    first, second = toy(tmp_path), toy(tmp_path)
    log = tmp_path / "log"
    wait_for(lambda: log.exists() and len(log.read_text().splitlines()) == 2)  # each has begun one, and waits in it
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    (tmp_path / "pause").unlink()
    ended(second)
    assert made(tmp_path) == WHOLE
    begun = log.read_text().split()
    assert len(begun) == 9 and set(begun) == set("01234567")  # only what was broken off was begun twice
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [*WHOLE]


@pytest.mark.parametrize(("send", "end"), [(os.kill, signal.SIGKILL), (os.killpg, signal.SIGINT)])  # Ctrl-C is for all
def test_workers_end_with_the_run_that_started_them(tmp_path, send, end):
    (tmp_path / "pause").touch()
    run = toy(tmp_path, jobs=2)
    wait_for(lambda: len(list((tmp_path / "out").glob(f".*.txt.{12 * '?'}"))) == 2)
    send(run.pid, end)
    run.wait(60)
    wait_for(lambda: not any(map(holders, (tmp_path / "out").glob(".*.lock"))))
    begun = (tmp_path / "log").read_text()
    (tmp_path / "pause").unlink()
    time.sleep(0.7)
    assert (tmp_path / "log").read_text() == begun and not made(tmp_path)
    ended(toy(tmp_path, 0.02, jobs=2))
    assert made(tmp_path) == WHOLE


def holders(path: Path) -> list[str]:
    """Processes that hold a lock in a file."""
    inode = f":{path.stat().st_ino} "
    return [line for line in Path("/proc/locks").read_text().splitlines() if inode in line]


def test_a_killed_caption_run_resumes_with_each_row_once_and_equal_tables(place, tmp_path):
    whole = tmp_path / "whole"
    argv = ["caption", "--pretrained", place / "run", "--device cpu --workers 1", shards(place),
            "--length 4 --temperature 1"]
    run_tool([*argv, "--out", whole])
    out = tmp_path / "killed"
    killed_when(lambda: list(out.glob("*.parquet")), "-m", "open_clip_mdc", *argv, "--out", out)
    assert len(list(out.glob("*.parquet"))) < 5
    run_tool([*argv, "--out", out])
    assert contents(out) == contents(whole)
    keys = [key for path in sorted(out.glob("*.parquet")) for key in pq.read_table(path)["key"].to_pylist()]
    assert keys == [f"key{i}" for _ in range(4) for i in range(5)]


def test_a_folder_of_images_is_a_unit_of_16_bit_features_and_a_name_that_is_no_utf_8_a_key_and_a_cell(place, tmp_path):
    for i, name in enumerate((*range(32), "in/a", "\udcff")):
        picture(tmp_path / f"photos/{name}.png", i)
    assert run("embed", place, tmp_path / "photos", "--out", tmp_path / "f", "--precision bf16") is None
    table = pq.read_table(tmp_path / "f/photos.parquet")
    assert table["key"].to_pylist()[31:] == ["9.png", "in/a.png", "\\udcff.png"]
    assert str(table.schema.field("feature").type.value_type) == "halffloat"
    (tmp_path / "c.txt").write_text("a star\n")
    assert run("score", place, "--images", tmp_path / "photos", "--captions", tmp_path / "c.txt", "--out",
               tmp_path / "s.csv") is None
    assert "/\\udcff.png,a star," in (tmp_path / "s.csv").read_text(encoding="utf-8")
