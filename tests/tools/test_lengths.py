"""Claims about the caption-length table and figure."""
import numpy as np
import pytest
from conftest import write_tar
from matplotlib.axes import Axes
from open_clip.tokenizer import SimpleTokenizer
from PIL import Image

from experiments import lengths
from open_clip_mdc.data.shards import find_shards


@pytest.fixture
def shards(tmp_path):
    """Captions of 1, 3 and 100 words that are one token each, among members that are none."""
    write_tar(tmp_path / "0.tar", {"a.jpg": b"no image" * 999, "a.txt": b"dog", "a.json": b"{}", "a.alt.txt": b"a b"})
    write_tar(tmp_path / "1.tar", {"x/b.TXT": b"a red dog", "x/c.txt": b"dog " * 100, "__meta__/d.txt": b"no"})
    return tmp_path


def run(*argv):
    lengths.main(list(map(str, argv)))


def test_the_table_is_the_one_worked_out_by_hand(shards):
    counts = lengths.caption_lengths(find_shards(f"{shards}/{{0..1}}.tar"), SimpleTokenizer())
    assert counts.tolist() == [3, 5, 102]  # words + SOT + EOT, nothing cut at 77
    row = lengths.length_table(["hand"], [counts]).loc["hand"].to_dict()
    assert row == pytest.approx({
        "captions": 3, "mean": 110 / 3, "p5": 3.2, "p25": 4, "p50": 5, "p75": 53.5, "p95": 92.3, "p99": 100.06,
        "max": 102, "> 77 (%)": 100 / 3})


def test_sets_are_joined_by_colons_and_kept_apart_by_spaces(shards, capsys):
    joined, other = f"{shards}/0.tar::{shards}/1.tar", f"file:{shards}/1.tar"
    run(joined, other, "--names", "joined", "other", "--out", shards / "l.png")
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert printed[1] == ["joined", "3", "36.7", "3.2", "4.0", "5.0", "53.5", "92.3", "100.1", "102", "33.3"]
    assert printed[2][:3] == ["other", "2", "53.5"]


def test_the_figure_is_a_png_with_both_sets_and_nothing_half_written_stays(shards):
    run(f"{shards}/{{0..1}}.tar", f"{shards}/0.tar", "--out", shards / "lengths.png")
    with Image.open(shards / "lengths.png") as image:
        assert image.format == "PNG"
        colours = {colour[:3] for count, colour in image.convert("RGB").getcolors(1 << 24) if count > 500}
    assert len(colours) >= 3  # paper, and an area for each set
    assert sorted(path.name for path in shards.iterdir()) == ["0.tar", "1.tar", "lengths.png"]


def test_histogram_areas_are_shares_of_captions(tmp_path, monkeypatch):
    drawn, hist = [], Axes.hist
    monkeypatch.setattr(Axes, "hist", lambda *args, **kwargs: drawn.append(hist(*args, **kwargs)))
    rng = np.random.default_rng(0)
    short, long = rng.integers(5, 30, 5000), rng.integers(5, 900, 5000)
    lengths.draw_histogram(tmp_path / "l.png", ["short", "long"], [short, long])
    for (heights, edges, _), values in zip(drawn, (short, long), strict=True):
        assert (heights * np.diff(edges)).sum() == pytest.approx(100, abs=0.2)  # the longest 0.1 % are cut off
        assert heights[0] == pytest.approx(100 * (values < edges[1]).mean() / np.diff(edges)[0])


def test_the_tokenizer_is_that_of_the_named_model(shards, capsys):
    run(f"{shards}/0.tar", "--tokenizer", "MDC-ViT-Ti-8", "--out", shards / "l.png")
    assert capsys.readouterr().out.splitlines()[1].split()[1:3] == ["1", "4.0"]  # "do", "g": no word of the scenes
