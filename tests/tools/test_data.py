"""Claims about the files that tools read and write: journals, shards, images.    pytest tests/tools/test_data.py"""
import gzip
import hashlib
import os
from threading import Timer

import numpy as np
import pytest
import torch
from PIL import Image
from webdataset.shardlists import expand_urls

from open_clip_mdc.data import cache, images, paths, weights
from open_clip_mdc.data import journal as data_journal
from open_clip_mdc.data.csv_pairs import open_table
from open_clip_mdc.data.files import new_file, parse_json
from open_clip_mdc.data.journal import Journal
from open_clip_mdc.data.shards import read_samples, tar_writer
from open_clip_mdc.data.text import read_text

KEY = {"model": "m", "length": 15}


def note(path, *rows, key=KEY):
    with Journal(path, key) as journal:
        for row in rows:
            journal.note(row)


def test_a_journal_resumes_after_every_byte_at_which_it_may_break_off(tmp_path):
    rows = [{"id": "a", "text": "é \u2028"}, {"id": "b", "text": ""}, {"id": 3}]
    path = tmp_path / "j"
    note(path, *rows)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    assert len(ends) == 4
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        with Journal(path, KEY) as journal:
            kept = sum(end <= size for end in ends[1:])
            assert [journal[row["id"]] for row in rows[:kept]] == rows[:kept] == list(journal.values())
            for row in rows[kept:]:
                assert row["id"] not in journal
                journal.note(row)
            assert list(journal.values()) == rows
        assert path.read_bytes() == whole


def test_a_journal_of_another_key_or_program_is_refused_and_one_without_rows_leaves_no_file(tmp_path):
    path = tmp_path / "j"
    note(path, {"id": "a"})
    assert not Journal(path, {**KEY, "length": 10}).read()
    for content, words in ((path.read_bytes(), "begun with another length"), (b"my notes\n", "not from this command"),
                           (b"[1]\n", "not from this command"), (b"\xff" * 99, "not from this command")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=words):
            note(path, {"id": "b"}, key={**KEY, "length": 10})
        assert path.read_bytes() == content
    path.unlink()
    note(path)
    assert not Journal(tmp_path / "nothing", KEY).read() and not list(tmp_path.iterdir())


def test_a_journal_has_one_writer_at_a_time(tmp_path, monkeypatch):
    """A second one waits some seconds, as workers of a run that was killed may hold the lock, and then says so."""
    path = tmp_path / "j"
    with Journal(path, KEY) as journal:
        journal.note({"id": "a"})
        timer = Timer(0.5, journal.note, [{"id": "b"}])
        timer.start()
        monkeypatch.setattr(data_journal, "SECONDS", 1)
        with pytest.raises(ValueError, match=f"another run is writing {path}: "), Journal(path, KEY):
            pass
        timer.join()
    assert list(Journal(path, KEY).read()) == ["a", "b"]
    held = data_journal.open_alone(path)
    Timer(0.5, held.close).start()
    monkeypatch.setattr(data_journal, "SECONDS", 5)
    note(path, {"id": "c"})
    assert list(Journal(path, KEY).read()) == ["a", "b", "c"]


def test_journals_of_today_are_read_and_continued_to_the_byte(tmp_path):
    (tmp_path / "j").write_bytes(b'{"model": "m", "length": 15}\n{"id": "a", "text": "\\u00e9"}\n{"id": "b')
    note(tmp_path / "j", {"id": 3, "p": 0.1})
    assert (tmp_path / "j").read_bytes() == (b'{"model": "m", "length": 15}\n{"id": "a", "text": "\\u00e9"}\n'
                                             b'{"id": 3, "p": 0.1}\n')


def test_cached_tensors_keep_their_names_and_bytes(tmp_path):
    """Users have files of these names. They would be computed again."""
    assert cache.name_of({"split": "test", "model": "é"}) == cache.name_of({"model": "é", "split": "test"})
    assert cache.name_of({"split": "test", "model": "é"}) == "a7a8c50a36a711addcef6e08"
    assert cache.name_of("tower Compose() fp32", 32) == "6b1626c4b116944b586c06669d5ac0a0"
    weights.save_tensors(tmp_path / "x.safetensors", {"b": torch.arange(3), "a": torch.ones(2, dtype=torch.float16)})
    content = (tmp_path / "x.safetensors").read_bytes()
    assert hashlib.sha256(content).hexdigest()[:16] == "397542acedd14bea"
    assert cache.read_tensors(tmp_path / "x.safetensors")["b"].tolist() == [0, 1, 2]
    (tmp_path / "x.safetensors").write_bytes(content[:-1])
    with pytest.raises(ValueError, match="x.safetensors is damaged .*: remove it"):
        cache.read_tensors(tmp_path / "x.safetensors")


def test_a_new_file_replaces_what_a_link_leads_to_and_nothing_that_is_no_file(tmp_path):
    """A link or /dev/null was replaced itself."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/there").write_text("old")
    os.mkfifo(tmp_path / "fifo")
    for name, target in (("link", "folder/there"), ("chain", "link"), ("dangling", "folder/new"), ("pipe", "fifo")):
        (tmp_path / name).symlink_to(target)
    for name, target in (("link", "there"), ("chain", "there"), ("dangling", "new")):
        with new_file(tmp_path / name) as partial:
            partial.write_text(name)
        assert (tmp_path / name).is_symlink() and (tmp_path / "folder" / target).read_text() == name
    for name in ("fifo", "pipe"):
        with pytest.raises(ValueError, match="is a pipe, a device"), new_file(tmp_path / name):
            pass
        assert (tmp_path / name).is_fifo()
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["chain", "dangling", "fifo", "folder", "link", "new", "pipe",
                                                           "there"]


def test_only_the_members_that_are_asked_for_are_read(tmp_path):
    with tar_writer(tmp_path / "0.tar") as writer:
        writer.write({"__key__": "a", "jpg": b"x", "TXT": b"one"})
        writer.write({"__key__": "b", "txt": b"two", "json": b"{}"})
    always = {"__key__", "__url__", "txt"}
    assert [*map(set, read_samples(str(tmp_path / "0.tar"), suffixes=("txt",)))] == [always, always]
    assert [*map(set, read_samples(str(tmp_path / "0.tar")))] == [always | {"jpg"}, always | {"json"}]


@pytest.mark.parametrize("mode, kind", [("I;16", "<u2"), ("I;16B", ">u2"), ("I", "<i4")])
def test_grey_of_sixteen_bits_is_known_by_its_mode_and_format(mode, kind):
    """Older Pillow opens such a PNG as I. Of other images of that mode nothing says what is white."""
    grey = np.arange(2 ** 16).reshape(256, 256)
    image = Image.frombytes(mode, grey.shape, grey.astype(kind).tobytes())
    if mode == "I":
        with pytest.raises(ValueError, match="mode I .* save the image with 8 bits"):
            images.eight_bits(image)
        image.format = "PNG"
    assert np.array_equal(np.asarray(images.eight_bits(image).convert("L")), grey >> 8)


@pytest.mark.parametrize("pattern", ["a.tar", "{000..002}.tar", "a::b/{x,y}.tar", "${HERE}/{0..1}.tar", "$HOME/a"])
def test_patterns_of_images_mean_what_they_mean_in_training(pattern, monkeypatch):
    monkeypatch.setenv("WDS_HERE", "there")
    assert paths.expand(pattern) == expand_urls(pattern)


def test_a_shard_that_was_cut_anywhere_is_no_whole_one(tmp_path):
    """Between two members too, where tarfile sees an end."""
    path = tmp_path / "0.tar"
    with tar_writer(path) as writer:
        for key in "abc":
            writer.write({"__key__": key, "jpg": b"x" * 700, "txt": b"one"})
    whole = path.read_bytes()
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512
    for size in range(0, end + 1, 256):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="not a complete tar file"):
            list(read_samples(str(path)))
    for name in (b"b.jpg", b"c.txt"):
        path.write_bytes(whole.replace(name, b"x.jpg"))  # a header of another checksum
        with pytest.raises(ValueError, match="not a complete tar file"):
            list(read_samples(str(path)))
    for content in (whole, whole[:end + 1024], gzip.compress(whole)):
        path.write_bytes(content)
        assert [sample["__key__"] for sample in read_samples(str(path))] == list("abc")


def test_a_batch_of_which_some_are_known_is_read_as_a_whole(tmp_path):
    """Random draws for an image depend on its batch. So a batch that is half noted must not become two."""
    for name in "abcdef":
        Image.new("RGB", (4, 4)).save(tmp_path / f"{name}.png")
    (tmp_path / "g.png").write_bytes(b"no image")
    files = sorted(tmp_path.iterdir())
    known = frozenset(map(str, files[:5]))
    batches = list(images.Images(files, lambda image: torch.zeros(3, 4, 4), 2, known=known).loader(0))
    assert [batch.new for batch in batches] == [[], [], [str(files[4]), str(files[5])], []]
    assert [len(batch.names) for batch in batches] == [2, 2, 2, 0] and len(batches[3].problems) == 1


def test_json_of_others_is_refused_whatever_it_is():
    for text in ("{", "[" * 100_000, b"\xff\xfe", "1" * 5000, ""):
        with pytest.raises(ValueError):
            parse_json(text)
    assert parse_json(b'{"a": [1]}') == {"a": [1]}


def test_a_changed_bit_in_a_table_is_noticed(tmp_path):
    """Parquet itself reads it as another number."""
    tables = pytest.importorskip("open_clip_mdc.bulk.tables")
    import pyarrow
    path = tmp_path / "t.parquet"
    with tables.write_table(path, pyarrow.schema([("score", pyarrow.float32())])) as table:
        table.add({"score": torch.arange(1000.0).numpy()})
    assert tables.read_rows(path, ["score"])["score"].to_pylist() == list(range(1000))
    whole = path.read_bytes()
    path.write_bytes(whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:])
    with pytest.raises(ValueError, match="t.parquet is damaged: remove it"):
        tables.read_rows(path, ["score"])


def test_linked_folders_are_followed_once_and_loops_are_cut(tmp_path):
    """Links to folders were left out without a word."""
    for name in ("own/a.jpg", "own/deep/b.jpg", "../disk/c.jpg"):
        (tmp_path / "D" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "D" / name).write_bytes(b"")
    (tmp_path / "beside.jpg").write_bytes(b"")
    for name, target in (("more", "../disk"), ("again", "../disk"), ("own/self", "."), ("own/up", "../.."),
                         ("a", "own"), ("gone.jpg", "nowhere")):
        (tmp_path / "D" / name).symlink_to(target)
    (tmp_path / "disk/back").symlink_to("../D")
    found = [str(path.relative_to(tmp_path / "D")) for path in paths.find_images([str(tmp_path / "D")])]
    assert found == ["again/c.jpg", "gone.jpg", "own/a.jpg", "own/deep/b.jpg"]
    (tmp_path / "links").mkdir()
    (tmp_path / "links/only").symlink_to("../disk")
    linked = paths.find_images([str(tmp_path / "links")])
    assert {path.name for path in linked} == {"a.jpg", "b.jpg", "c.jpg", "gone.jpg"}


@pytest.mark.parametrize("read", [read_text, open_table, weights.check, lambda path: paths.find_images([str(path)]),
                                  lambda path: list(read_samples(str(path))), images.decode_image],
                         ids=["text", "table", "weights", "image", "shard", "photograph"])
def test_a_pipe_or_a_device_is_refused_before_it_is_opened(read, tmp_path):
    """A command waited for ever for who would write into the pipe."""
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "zero.jpg").symlink_to("/dev/zero")
    for name in ("pipe.jpg", "zero.jpg"):
        with pytest.raises(ValueError, match=f"{name} is a pipe, a device or a socket: give a file"):
            read(tmp_path / name)


def test_the_pipe_of_a_shell_is_read():
    reading, writing = os.pipe()
    os.write(writing, b"a dog\n")
    os.close(writing)
    assert read_text(f"/dev/fd/{reading}") == "a dog\n"
    os.close(reading)
