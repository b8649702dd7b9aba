"""Claims about the outputs of commands: nothing is lost, left over, or written elsewhere."""
import multiprocessing
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import complaint_of, run, wait_for
from PIL import Image

from open_clip_mdc.bulk.locks import make_once
from open_clip_mdc.data.files import new_file, new_folder, open_own, write_json
from open_clip_mdc.data.journal import Journal
from open_clip_mdc.data.outputs import free_name, release

MODEL = "--pretrained no"
SCENES = "--num-train 16 --num-val 2 --num-probe 2 --num-pairs 2"


@contextmanager
def mounted(place: Path, *options: str):
    made = subprocess.run(["mount", *options, str(place)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_mount_point_is_filled(tmp_path):
    folder = tmp_path / "mount"
    folder.mkdir()
    with mounted(folder, "-t", "tmpfs", "tmpfs"):
        (folder / "lost+found").mkdir()
        assert complaint_of("scenes", "--out", folder, SCENES) is None
        assert {"lost+found", "train", "sugarcrepe"} < set(os.listdir(folder))
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    assert os.listdir(tmp_path) == ["mount"]


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_loaded(tmp_path):
    """No checkpoint is there: who looks for it first says so."""
    (tmp_path / "ro").mkdir()
    (tmp_path / "file").write_text("")
    with mounted(tmp_path / "ro", "-t", "tmpfs", "-o", "ro", "tmpfs"):
        for place, words in (("ro", "read-only file system"), ("file", "not a directory|is no folder|does not exist")):
            place = tmp_path / place
            for argv in (("caption", "x.png", MODEL, "--out", place / "c.jsonl"),
                         ("embed", "x", MODEL, "--out", place / "t"),
                         ("score", "--pairs x", MODEL, "--out", place / "t"), ("scenes", "--out", place / "s"),
                         ("export", MODEL, "--out", place / "e"), ("fetch", "flickr8k", "--out", place / "f"),
                         ("attention", "x.png", MODEL, "--out", place / "a.html"),
                         ("lengths", "x.tar", "--out", place / "l.png"),
                         ("vq", "import", "--from x --model y --out", place / "v.pt")):
                problem = complaint_of(*argv)
                assert problem and any(word in problem.lower() for word in words.split("|")), (argv, problem)
                assert str(place) in problem, problem


def test_two_commands_at_once_do_not_take_the_same_default_name(here):
    assert [free_name("c.jsonl") for _ in range(3)] == ["c.jsonl", "c-2.jsonl", "c-3.jsonl"]
    script = ("from open_clip_mdc.data.outputs import free_name, release\n"
              "print(free_name('c.jsonl'), free_name('d.jsonl'))\nrelease()")
    assert run(sys.executable, "-c", script).stdout == "c-4.jsonl d.jsonl\n"
    assert free_name("d.jsonl") == "d.jsonl" and {path.name for path in here.iterdir()} == {
        f".{name}.jsonl.lock" for name in ("c", "c-2", "c-3", "d")}
    release()
    assert free_name("c.jsonl") == "c.jsonl" and release() is None and not list(here.iterdir())


def test_a_stdout_that_is_closed_or_cannot_say_a_name_ends_no_command(here):
    Image.new("RGB", (32, 32)).save("a.png")
    Path("a.txt").write_text("a star")
    for name, closed, encoding in (("x", ">&-", "utf-8"), ("b\udcff", "", "utf-8"), ("\u96ea", "", "ascii")):
        command = ["sh", "-c", f'"$@" {closed}', "sh", sys.executable, "-m", "open_clip_mdc", "prepare", "shards",
                   "--train", ".", "--out", name]
        run(*command, PYTHONIOENCODING=encoding, PYTHONUTF8="0")
        assert (Path(name) / "train/00000.tar").exists()
        shutil.rmtree(name)


def test_nothing_is_replaced_that_nobody_named_nor_by_nothing(here, runs, capsys):
    for name, colour in (("a.png", "red"), ("b.png", "blue")):
        Image.new("RGB", (32, 32), colour).save(name)
    Path("bad.jpg").write_bytes(b"no image")
    caption = ("caption", "--pretrained", runs / "mdc", "--device cpu --workers 0")
    assert complaint_of(*caption, "a.png") is None
    first = Path("captions.jsonl").read_text()
    assert complaint_of(*caption, "b.png", "--seed 1") is None
    assert "captions.jsonl exists already: writing to captions-2.jsonl" in capsys.readouterr().err
    assert Path("captions.jsonl").read_text() == first != Path("captions-2.jsonl").read_text()
    assert complaint_of(*caption, "b.png", "--out captions-2.jsonl") is None
    assert "--out captions-2.jsonl exists already, and is replaced" in capsys.readouterr().err
    problem = complaint_of(*caption, "bad.jpg", "--out captions.jsonl")
    assert "no image can be read, so nothing is written" in problem and "bad.jpg" in problem and "--out" not in problem
    Path("y.jsonl.part").write_text("my own notes\n")
    assert "y.jsonl.part is damaged or not from this command" in complaint_of(*caption, "a.png", "--out y.jsonl")
    assert Path("captions.jsonl").read_text() == first and Path("y.jsonl.part").read_text() == "my own notes\n"


def test_no_planted_link_is_written_through(tmp_path):
    victim, out = tmp_path / "victim", tmp_path / "out"
    victim.write_text("mine")
    out.mkdir()
    (tmp_path / "middle").symlink_to(victim)
    for name in (".00000.parquet.part", "00000_stats.json", ".00000.parquet.0123456789ab", "l.jsonl.part", ".lock"):
        (out / name).symlink_to(tmp_path / "middle")
    (out / "dangling.parquet").symlink_to(tmp_path / "nothing")
    for name in ("00000.parquet", "dangling.parquet"):
        assert make_once(out / name, lambda part: part.write_text("made"), wait=False)
        assert (out / name).read_text() == "made" and not (out / name).is_symlink()
    write_json(out / "00000_stats.json", {}, follow=False)
    for make in (lambda: Journal(out / "l.jsonl.part", {"a": 1}).__enter__(), lambda: open_own(out / ".lock", "ab")):
        with pytest.raises(ValueError, match="link|not from this command"):
            make()
    (out / ".x.lock").symlink_to(victim)
    with pytest.raises(ValueError, match="lock is a link"):
        make_once(out / "x", Path.touch, wait=False)
    assert victim.read_text() == "mine" and not (tmp_path / "nothing").exists()


def test_a_file_keeps_the_mode_of_what_it_replaces_and_a_new_one_has_the_masks(tmp_path):
    def mode(name):
        return stat.S_IMODE((tmp_path / name).stat().st_mode)
    old = os.umask(0o027)
    try:
        for name, wanted in (("secret", 0o600), ("shared", 0o664), ("fixed", 0o444), ("new", 0o640)):
            if name != "new":
                (tmp_path / name).write_text("old")
                (tmp_path / name).chmod(wanted)
            with new_file(tmp_path / name) as partial:
                assert stat.S_IMODE(partial.stat().st_mode) == wanted | 0o600
                partial.unlink()  # some libraries put a file of their own in its place
                partial.write_text("new")
                partial.chmod(0o600)
            assert mode(name) == wanted and (tmp_path / name).read_text() == "new"
    finally:
        os.umask(old)


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_terminated_command_leaves_nothing_and_a_killed_ones_rest_hinders_nobody(tmp_path, jobs):
    out = tmp_path / "out"
    for there in (False, True):
        if there:
            out.mkdir()
        for end in (multiprocessing.Process.terminate, multiprocessing.Process.kill):
            process = multiprocessing.get_context("fork").Process(
                target=complaint_of, args=("scenes", "--out", out, "--jobs", jobs, "--num-train 200000"))
            process.start()
            wait_for(lambda: list(tmp_path.glob("**/.out.*/train/.*")))
            end(process)
            process.join(1200)
            assert len(list(tmp_path.glob("**/.out.*"))) == (end is multiprocessing.Process.kill)
        with pytest.raises(ValueError, match="not an empty folder"), new_folder(out), new_folder(out) as partial:
            (partial / "whole").touch()
        assert (out / "whole").exists()
        shutil.rmtree(out)
        for left in tmp_path.glob(".out.*"):
            shutil.rmtree(left, ignore_errors=True)


def test_every_command_ends_in_order_when_terminated():
    code = """if True:
        import os, signal, sys
        {start}
        handler = signal.getsignal(signal.SIGTERM)
        assert handler != signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGTERM)"""
    for start in ("from open_clip_mdc.cli import main\n        try: main(['attention', 'no.png', '--out', 'l.png'])\n"
                  "        except SystemExit: pass",
                  "from open_clip_mdc.train import main\n        try: main(['--model', 'no'])\n"
                  "        except SystemExit: pass",
                  "from clip_benchmark_ext.cli import main\n        try: main(['eval', '--model', 'no'])\n"
                  "        except SystemExit: pass"):
        assert run("python", "-c", code.format(start=start), fork=True, check=False).returncode == 143, start


def hang(folder: Path) -> None:
    def write(part: Path) -> None:
        part.write_text("half")
        os.kill(os.getpid(), signal.SIGSTOP)
        part.write_text("whole")
    make_once(folder / "x", write, wait=False)


def test_who_waits_for_what_hangs_says_so_and_makes_it_once_that_has_ended(tmp_path, capsys):
    holder = multiprocessing.get_context("fork").Process(target=hang, args=(tmp_path,))
    holder.start()
    wait_for(lambda: [path for path in tmp_path.glob(".x.*") if path.read_text()])
    assert not make_once(tmp_path / "x", Path.touch, wait=False)
    threading.Timer(0.5, holder.kill).start()
    assert make_once(tmp_path / "x", lambda part: part.write_text("whole"), wait=True)
    assert capsys.readouterr().err.count(f"waiting for {tmp_path / 'x'}, which another process is making") == 1
    holder.join()
    assert (tmp_path / "x").read_text() == "whole" and sorted(os.listdir(tmp_path)) == ["x"]


@pytest.mark.parametrize("writer, inner", [(new_file, ""), (new_folder, "/train/0.tar")])
def test_an_error_while_writing_names_the_output_as_the_user_did(tmp_path, writer, inner):
    out = tmp_path / "q.pt"
    with pytest.raises(OSError) as error, writer(out) as partial:
        raise OSError(28, "No space left on device", f"{partial}{inner}")
    assert error.value.filename == f"{out}{inner}" and error.value.errno == 28 and not list(tmp_path.iterdir())


def test_a_default_name_that_is_read_makes_way(here, capsys):
    Path("a").mkdir()
    Path("captions.jsonl").write_text("mine")
    complaint_of("caption", MODEL, "a", "--compare captions.jsonl --html c.html")
    assert "captions.jsonl exists already: writing to captions-2.jsonl" in capsys.readouterr().err
    assert Path("captions.jsonl").read_text() == "mine"


def test_a_report_is_as_private_as_its_output(tmp_path):
    out = tmp_path / "x.jsonl"
    out.touch(mode=0o600)
    write_json(tmp_path / "x.json", {}, like=out)
    assert (tmp_path / "x.json").stat().st_mode & 0o777 == 0o600
