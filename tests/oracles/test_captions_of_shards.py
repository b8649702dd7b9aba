"""Claims about texts in shards that are no captions, and samples whose files are apart.

What is right is known from how each tar is written here.
"""
from types import SimpleNamespace

import pytest
from conftest import png
from strategies import tar

from experiments import lengths
from open_clip_mdc.cli import prepare_layouts
from open_clip_mdc.data import captions, images
from open_clip_mdc.data.shards import read_samples

PNG = png(0, 8)
TEXTS = {"a": b"a dog", "b": b"", "c": b" \n\t", "d": b"a caf\xe9", "e": "\ufeffa caf\u00e9".encode(),
         "f": "a caf\u00e9".encode("utf-16"), "g": b"\x1e one \x1e\x1e", "h": b"\xef\xbb\xbf"}
RIGHT = {"a": ["a dog"], "e": ["a caf\u00e9"], "f": ["a caf\u00e9"], "g": [" one "]}
SIX = [f"{i:04d}" for i in range(6)]


def write(path, names, texts=None):
    def content(name):
        stem, _, suffix = name.rpartition("/")[2].partition(".")
        return PNG if suffix == "png" else (texts or {}).get(stem, f"picture {stem}".encode())
    path.write_bytes(tar([(name, content(name)) for name in names]))
    return str(path)


@pytest.fixture
def odd(tmp_path):
    return write(tmp_path / "odd.tar", [f"{key}.{kind}" for key in TEXTS for kind in ("png", "txt")], TEXTS)


def test_every_reader_leaves_out_the_same_texts_and_names_the_first(odd, caplog):
    texts = [text for own in RIGHT.values() for text in own]
    seen = {sample["__key__"]: own for sample, own in captions.captioned(read_samples(odd))}
    assert seen == RIGHT and f"Left out 4 of the samples, in 1 of the shards, as they have no image or no caption. " \
        f"The first is {odd}, sample b (png, txt), whose .txt is empty." in caplog.text
    assert [pair["text"] for pair in images.image_pairs(read_samples(odd))] == texts
    assert [text for _, text in images.read_pairs([odd], lambda x: x, lambda text: [text])] == texts
    caplog.clear()
    assert lengths.caption_lengths([odd], SimpleNamespace(encode=str)).tolist() == [len(text) + 2 for text in texts]
    assert "Left out 4" in caplog.text
    caplog.clear()
    tools = {source.name.rpartition(":")[2]: source.text for source in images.read_images([images.Path(odd)])}
    assert {key: own for key, text in tools.items() if (own := captions.split_captions(text or ""))} == RIGHT
    assert f"1 of the .txt in {odd} are no caption. The first is {odd}, sample d, line 1 is no UTF-8" in caplog.text
    (prepared,) = (found for found in prepare_layouts.read_shards([odd], "captions") if found.name == "d.png")
    assert prepared.captions is None and "sample d, line 1 is no UTF-8 text (byte 0xe9)" in prepared.seen


def of_six(*forms: str) -> list[str]:
    return [form.format(i) for form in forms for i in SIX]


PAIRS = ["0.png", "0.txt", "1.png", "1.txt"]
APART = {
    "all images, then all texts": of_six("{}.png", "{}.txt"),
    "a folder of each": of_six("images/{}.png", "texts/{}.txt"),
    "the last texts at the end": [*PAIRS, "2.png", "3.png", "2.txt", "3.txt"],
    "JSON at the end": of_six("{}.png", "{}.json"),
}
TOGETHER = {
    "sorted": sorted(of_six("./{}.png", "./{}.txt")),
    "the same names in two folders": sorted(of_six("x/{}.png", "x/{}.txt", "y/{}.png", "y/{}.txt")),
    "a name that comes back whole": [*PAIRS, *PAIRS[:2]],
    "images alone": of_six("{}.png"),
    "hidden files of macOS": [*PAIRS, "._0.txt", "._1.png"],
}


@pytest.mark.parametrize("layout", [*APART, *TOGETHER])
def test_a_look_at_the_names_tells_files_that_are_apart(layout, tmp_path):
    shard = write(tmp_path / "x.tar", (APART | TOGETHER)[layout])
    found = captions.find_apart(shard)
    assert (found is not None) == (layout in APART)
    if found:
        assert "is elsewhere in the tar than" in found and "tar --sort=name" in found and found.startswith(shard)


@pytest.mark.parametrize("layout", list(APART)[:3])
def test_lengths_the_tools_and_prepare_say_that_files_are_apart(layout, tmp_path, capsys):
    shard = write(tmp_path / "x.tar", APART[layout])
    lengths.main([shard, "--out", str(tmp_path / "l.png")])
    assert "tar --sort=name" in capsys.readouterr().err
    assert "tar --sort=name" in str(list(images.read_images([tmp_path / "x.tar"]))[-1].source)
    assert any("tar --sort=name" in sample.seen for sample in prepare_layouts.read_shards([shard], "captions"))
