"""Inputs for tests of `open_clip_mdc caption`, its command, and readers of its output."""
from html.parser import HTMLParser
from pathlib import Path

from conftest import complaint_of, json_lines, make_image, saved, words, write_tar
from PIL import Image

PATHS = ("deep", "x?.png", "holiday[1].png", "{5..6}.tar")
NAMES = ("deep/a.png", "deep/er/b.JPG", "x1.png", "x2.png", "holiday[1].png", "5.tar::in/key5", "6.tar::in/key6")


def scene(number: int) -> Image.Image:
    """Noise or a plain colour, the same at every call."""
    return make_image(number, 36, 40) if number % 2 else \
        Image.new("RGB", (32, 48), (20 * number, 255 - 20 * number, 90))


def seven_images(folder: Path) -> Path:
    """Two in a folder, two that a pattern finds, one by name, two in shards: PATHS in this folder."""
    (folder / "deep/er").mkdir(parents=True)
    for number, name in enumerate(("deep/a.png", "deep/er/b.JPG", "x1.png", "x2.png", "holiday[1].png")):
        scene(number).save(folder / name, "png")
    for number in (5, 6):
        write_tar(folder / f"{number}.tar", {f"in/key{number}.txt": b"words",
                                             f"in/key{number}.png": saved(scene(number))})
    return folder


def folder(tmp_path, monkeypatch) -> Path:
    """Seven images in the working directory: a fixture."""
    monkeypatch.chdir(tmp_path)
    return seven_images(tmp_path)


def run(*argv) -> str | None:
    """The tool's complaint, None if it has none."""
    out = () if "--out" in words(*argv) else ("--out", "captions.jsonl")  # the same again: the default would be another
    return complaint_of("caption", *argv, *out, "--device cpu")


def lines(path="captions.jsonl") -> list[dict]:
    return json_lines(path)


def column(name: str, path="captions.jsonl") -> list:
    """One value of each line."""
    return [row[name] for row in lines(path)]


class Page(HTMLParser):
    """Read a page as a browser would, by other code than the one under test."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.sources, self.texts, self.cells, self.inside = [], [], {}, [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside.append(tag)
        if tag == "img":
            self.sources.append(dict(attributes)["src"])
        elif tag == "tr":
            self.cells.append([])
        elif tag in ("td", "th"):
            self.cells[-1].append([dict(attributes).get("class", "").split(), ""])

    def handle_endtag(self, tag):
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data):
        last = self.inside[-1] if self.inside else None
        if last in ("td", "th"):
            self.cells[-1][-1][1] += data
        self.texts.setdefault(last, []).append(data)
