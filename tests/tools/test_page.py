"""Claims about the page of `open_clip_mdc caption`, in a real browser where there is one."""
import re
import shutil
import subprocess
from math import log
from pathlib import Path

import numpy as np
import pytest
from caption_files import NAMES, PATHS, Page, lines, run, scene, seven_images
from conftest import BROWSER, needs_browser
from http_server import Handler, serving
from matplotlib.colors import to_hex, to_rgb

from open_clip_mdc.cli import page as report

HOSTILE = '</h2><script>document.title = "hacked"</script><img src=x onerror="document.title=1"> & \u202egnp.exe\x00'
SHOWN = '</h2><script>document.title = "hacked"</script><img src=x onerror="document.title=1"> & \\u202egnp.exe\\x00'


def row(words: list[tuple], caption=None, image="a.png") -> dict:
    """A line from (token, step, probability)."""
    return {"image": image, "caption": "".join(w for w, *_ in words).strip() if caption is None else caption,
            "tokens": [{"token": w, "step": s, "log_prob": None if p is None else log(p)} for w, s, p in words]}


def write(path, *rows, skipped=()) -> Path:
    thumbnails = [report.thumbnail(scene(i).resize((200, 150)) if i else scene(i)) for i in range(len(rows))]
    cards = [report.card(*pair) for pair in zip(rows, thumbnails, strict=True)]
    report.write_page(path, f"Captions by {HOSTILE}", {"Checkpoint": HOSTILE}, report.legend(), cards, list(skipped))
    return path


EXAMPLE = [("a ", None, None), ("skate", 2, 0.04), ("boarder ", 1, 0.9), ("jumps ", 0, 0.3), ("<end>", 3, 0.996)]


def test_a_grid_shows_what_stood_after_every_step(tmp_path):
    """The grid is drawn by hand. # is a hidden token, capitals are new."""
    rows = Page(write(tmp_path / "page.html", row(EXAMPLE)).read_text()).cells
    drawn = [[("#" if "mask" in names else text.upper() if "new" in names else text) for names, text in cells]
             for cells in rows]
    assert drawn == [
        ["0", "a", "#", "#", "#", "#"],
        ["1", "a", "#", "#", "JUMPS", "#"],
        ["2", "a", "#", "BOARDER", "jumps", "#"],
        ["3", "a", "SKATE", "boarder", "jumps", "#"],
        ["4", "a", "skate", "boarder", "jumps", "<END>"],
        ["%", "", "4", "90", "30", "100"]]
    colours = [[name for name in names if re.fullmatch(r"p\d|given", name)] for names, _ in rows[4][1:]]
    assert colours == [["given"], ["p0"], ["p5"], ["p2"], ["p5"]]
    joined = [("open" in names, "continued" in names) for names, _ in rows[0][1:]]
    assert joined == [(False, False), (True, False), (False, True), (False, False), (False, False)]


def test_the_grid_is_told_in_words_too(tmp_path):
    tags = Page(write(tmp_path / "page.html", row(EXAMPLE), row([("a ", None, None)])).read_text()).tags
    assert [attributes["aria-label"] for _, attributes in tags if "aria-label" in attributes] == [
        "step 1: jumps, 30 %; step 2: boarder, 90 %; step 3: skate, 4 %; step 4: <end>, 100 %", "nothing was revealed"]


@pytest.mark.parametrize("probability, written, colour", [
    (0.0, "<1", "p0"), (0.0999, "10", "p0"), (0.1001, "10", "p1"), (0.5001, "50", "p3"), (1.0, "100", "p5")])
def test_a_probability_has_a_number_and_a_colour(probability, written, colour):
    log_prob = log(probability) if probability else -1e4
    assert report.percent(log_prob) == written
    assert report.word_classes([{"token": "a ", "step": 0, "log_prob": log_prob}]) == [colour]


def test_the_page_is_one_file_without_script_and_shows_hostile_text_as_text(tmp_path):
    page = Page(write(tmp_path / "page.html", row([(HOSTILE, 0, 0.5)], image=HOSTILE), row(EXAMPLE),
                      skipped=[report.printable(HOSTILE)]).read_text())
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "iframe", "object", "embed", "base", "form"})
    assert [source[:22] for source in page.sources] == ["data:image/png;base64,", "data:image/jpeg;base64"]
    assert {name for _, attributes in page.tags for name in attributes}.isdisjoint(
        {"href", "srcset", "style", "onerror", "onload", "onclick", "action", "background"})
    assert not re.search(r"url\(|@import|expression", "".join(page.texts["style"]))
    shown = SHOWN.strip()
    for tag in ("title", "h1", "h2", "p", "td", "dd", "li"):
        assert any(shown in text for text in page.texts[tag]), tag


def test_colours_of_words_are_readable_in_light_and_dark():
    """Contrast of 4.5 and more, WCAG's, of the text on every colour."""
    def luminance(colour):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        return np.dot(linear, (0.2126, 0.7152, 0.0722))

    style = report.ENVIRONMENT.get_template("page.css.jinja").render()
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w+)", block)) for block in style.split("@media")[:2])
    text_on = dict(re.findall(r"\.(p\d) {[^}]*--on: var\(--([\w-]+)\)", style))
    assert len(text_on) == 6
    trails = re.findall(r"--trail: (\d+)%", style)
    for colours, trail in zip((light, dark), map(int, trails), strict=True):
        for name in text_on:  # words that stand since an earlier step
            both = to_rgb(colours[name]), to_rgb(colours["page"])
            colours[f"old {name}"] = to_hex(np.average(both, 0, (trail, 100 - trail)))
        for text, ground in [*((colour, name) for name, colour in text_on.items()),
                             *(("soft", f"old {name}") for name in text_on), ("ink", "page"), ("soft", "page")]:
            bright, dim = sorted((luminance(colours[text]), luminance(colours[ground])), reverse=True)
            assert (bright + 0.05) / (dim + 0.05) >= 4.5, (text, ground)


# ---- the page in a browser -----------------------------------------------------------------------------------------

def browse(path, *flags) -> str:
    """The document as the browser holds it after the page's scripts, had it any, have run."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
               f"--user-data-dir={path.parent / 'profile'}", *flags, path.absolute().as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=1200, check=True).stdout


@needs_browser
def test_the_browser_shows_every_card_and_runs_and_fetches_nothing(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(seven_images(tmp_path))
    asked = []

    class Listener(Handler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

    with serving(Listener) as server:
        bait = f'<img src="{server.url}/bait.png">'
        Path("bait.html").write_text(bait + "<script>document.title = 'hacked'</script>")
        assert "<title>hacked</title>" in browse(Path("bait.html"), "--dump-dom") and "/bait.png" in asked
        asked.clear()

        shutil.copy("x1.png", "<b>&amp;.png")
        run("--pretrained", runs / "mdc", *PATHS, "<b>&amp;.png", "--html", "page.html")
        seen = Page(browse(Path("page.html"), "--dump-dom"))
        rows = lines()
        assert seen.texts["h2"] == [report.printable(r["caption"]) for r in rows] and len(rows) == 8
        assert seen.texts["p"][-8:] == [*NAMES, "<b>&amp;.png"]
        assert all(source.startswith("data:image/") for source in seen.sources)

        write(Path("hostile.html"), row([(HOSTILE + bait, 0, 0.5)], image=HOSTILE + bait))
        shown = Page(browse(Path("hostile.html"), "--dump-dom"))
        assert (SHOWN + bait).strip() in "".join(shown.texts["h2"]) and "".join(shown.texts["title"]) != "hacked"
        assert not any(tag in ("script", "b") for tag, _ in seen.tags + shown.tags)
        assert len(shown.sources) == 1
    assert not asked
