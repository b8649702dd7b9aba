"""Take the pictures of README and of the pages: the packaged captioner, and the photographs that scikit-learn ships.

    python docs/screenshots.py        # with playwright, and Chromium where the system has it
"""
import shutil
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from playwright.sync_api import Page, sync_playwright
from sklearn import datasets

import open_clip_mdc
from open_clip_mdc import cli
from open_clip_mdc.cli import app
from open_clip_mdc.cli.page import ENVIRONMENT, LEGEND, last_step, thumbnail

ASSETS = Path(__file__).parent / "assets"
PHOTOS = Path(datasets.__file__).parent / "images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
STEP, LAST = 900, 4000  # milliseconds that a step and the whole caption are shown
# A photograph, and at its side the caption after one step. Words that are still masked are grey.
FRAME = ENVIRONMENT.from_string("""<style>{% include "page.css.jinja" %}
    body { display: flex; gap: 2rem; align-items: center; max-width: none; padding: 1.5rem; }
    body > div { width: 31rem; } body > img { width: 22rem; } p { margin: 0; line-height: 2.2; }
    span { padding: .25rem .6rem; margin-right: .1rem; border-radius: 6px; font-size: 1.5rem; white-space: nowrap; }
    .mask { color: transparent; } h1 { font-size: 1.2rem; color: var(--soft); }
    .legend { margin-top: 1rem; font-size: 1rem; } .legend i { height: 1em; }</style>
<img src="{{ image }}"><div><h1>Step {{ step + 1 }} of {{ last_step(tokens) + 1 }}</h1><p>
{%- for token in tokens %}
    {%- set kind = "mask" if token.step > step else "new " ~ word_classes(tokens)[loop.index0] %}
    {{- "" }}<span class="{{ kind }}">{{- token.token.strip() }}</span> {% endfor %}</p>
<ul class="legend">{% for label in labels %}<li><i class="p{{ loop.index0 }}"></i>{{ label }}{% endfor %}</ul></div>""")


def appearing(view: Page, photo: Path, tokens: list[dict]) -> None:
    """Write a moving picture of a caption whose words appear, the most probable one first."""
    frames = []
    for step in range(-1, last_step(tokens) + 1):
        view.set_content(FRAME.render(image=thumbnail(Image.open(photo)), tokens=tokens, step=step, labels=LEGEND))
        frames.append(Image.open(BytesIO(view.screenshot(full_page=True))).convert("RGB"))
    # The whole caption comes first, as that is what a viewer without motion shows.
    frames[-1].save(ASSETS / "appearing.webp", save_all=True, append_images=frames[:-1], loop=0, quality=80,
                    duration=[LAST, *[STEP] * (len(frames) - 1)])


def save(view: Page, name: str) -> None:
    """Write a page as a picture of at most 256 colours, a third of the bytes."""
    picture = Image.open(BytesIO(view.screenshot(full_page=True))).convert("RGB")
    picture.quantize(256).save(ASSETS / name, optimize=True)


def pages(view: Page, folder: Path) -> None:
    """Take the pages of `caption` and `attention`."""
    cli.main(["caption", str(PHOTOS), "--out", f"{folder}/auto.jsonl"])
    cli.main(["caption", str(PHOTOS), "--length", "8", "--out", f"{folder}/8.jsonl", "--html",
              f"{folder}/caption.html", "--compare", f"{folder}/auto.jsonl"])
    cli.main(["attention", str(PHOTOS), "--out", f"{folder}/attention.html"])
    for name in "caption", "attention":
        view.goto(f"file://{folder}/{name}.html")
        save(view, f"{name}.png")


def in_browser(view: Page, loaded) -> None:
    """Take the app, with its example, a word's map and scores."""
    page = app.build(app.Demo(loaded, None))
    view.set_viewport_size({"width": 1200, "height": 1250})  # what is out of sight may not be drawn
    view.set_default_timeout(300_000)
    view.goto(app.launch(page, server_name="127.0.0.1")[1])
    view.wait_for_selector("#words label")
    view.click("#rate")
    view.wait_for_function("document.querySelector('#scores').innerText.includes('dog')")
    view.click("#words label >> nth=-2")
    view.wait_for_selector("#where img")
    view.wait_for_timeout(8000)  # until the steps have appeared
    save(view, "app.png")
    page.close()


if __name__ == "__main__":
    with TemporaryDirectory() as folder, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=next(filter(None, map(shutil.which, BROWSERS)), None),
                                       args=["--no-sandbox"])
        loaded = open_clip_mdc.load("photo", device="cpu")
        appearing(browser.new_page(viewport={"width": 960, "height": 300}), PHOTOS / "china.jpg",
                  loaded.trace(PHOTOS / "china.jpg")[0]["tokens"])
        view = browser.new_page(viewport={"width": 1200, "height": 600})
        pages(view, Path(folder))
        in_browser(view, loaded)
