"""Take the pictures of pages that captioning.md shows, by the models of `make demo`.

    python docs/screenshots.py demo        # with playwright, and Chromium where the system has it
"""
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import sync_playwright

import open_clip_mdc
from open_clip_mdc import cli
from open_clip_mdc.cli import app

ASSETS = Path(__file__).parent / "assets"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main(demo: str) -> None:
    shard, photo = f"{demo}/scenes/val/00000.tar", f"{demo}/scenes/sugarcrepe/val2017/000000000001.png"
    images = [f"{demo}/scenes/sugarcrepe/val2017/{i:012}.png" for i in range(32)]
    with TemporaryDirectory() as folder, sync_playwright() as play:
        out = Path(folder)
        cli.main(["caption", "--pretrained", f"{demo}/arc", shard, "--limit", "3", "--out", f"{out}/arc.jsonl"])
        cli.main(["caption", "--pretrained", f"{demo}/mdc", shard, "--limit", "3", "--out", f"{out}/mdc.jsonl",
                  "--html", f"{out}/caption.html", "--compare", f"{out}/arc.jsonl"])
        cli.main(["attention", "--pretrained", f"{demo}/mdc", shard, "--limit", "2", "--out", f"{out}/attention.html"])
        loaded = open_clip_mdc.load(f"{demo}/mdc", device="cpu")
        page = app.build(app.Demo(loaded, loaded.mean_image(images)))
        address = app.launch(page, prevent_thread_lock=True, quiet=True, server_name="127.0.0.1")[1]
        browser = play.chromium.launch(executable_path=next(filter(None, map(shutil.which, BROWSERS)), None),
                                       args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": 1200, "height": 800})
        for name in "caption", "attention":
            view.goto(f"file://{out}/{name}.html")
            view.screenshot(path=ASSETS / f"{name}.png")
        view.goto(address)
        view.set_input_files("#photograph input[type=file]", photo)
        view.wait_for_selector("#photograph img")
        view.click("#ask")
        view.fill("#sentences textarea", "a red circle left of a blue square\na blue triangle up above a red square")
        view.click("#rate")
        view.wait_for_function("document.querySelector('#scores').innerText.includes('triangle')")
        view.click("#words label >> nth=1")
        view.wait_for_selector("#where img")
        view.screenshot(path=ASSETS / "app.png", full_page=True)
        page.close()


if __name__ == "__main__":
    main(sys.argv[1])
