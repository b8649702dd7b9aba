"""Try a captioner in your browser: caption an image step by step, fill in words, score sentences, map words.

    open_clip_mdc app --pretrained RUN
    open_clip_mdc app --blind-images photos/     # adds blind and debiased scores of sentences

The page is served to this machine only, unless you give --host. It needs no network, and answers only at the address
that it was started for (`OwnAddress`). Uploads are the only files that it opens, and are deleted after ten minutes. The
page is built on gradio (pip install 'open_clip_mdc[app]').
"""
import argparse
import os
import re
from collections.abc import Callable
from contextlib import suppress
from html import escape
from importlib.resources import files
from ipaddress import ip_address
from pathlib import Path
from socket import gethostname
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from PIL import Image

from ..data.images import open_image
from ..data.paths import find_images
from ..decoding.attention_maps import light, word_maps
from ..decoding.options import readable
from ..errors import need
from ..integration.pretrained import PretrainedCaptioner, describe_captions
from .page import CARDS, legend, printable, render_page
from .shared import load_captioner

UPLOAD_LIMIT = "20mb"
PIXELS = 64_000_000  # of an upload: a small file can have many, and each caller waits for the one before
KEPT = 600  # seconds that an upload is kept for
SENTENCES = 64  # the most that are scored at a time
CHARACTERS = 1000  # of a sentence. No caption of 77 tokens needs more
# gradio itself shows no focus of text and choices.
CSS = """#steps iframe {width: 100%; height: 23em; border: 0}
#photograph img, #where img {width: 100%; height: 100%; object-fit: contain; image-rendering: pixelated}
:focus-visible {outline: 2px solid var(--body-text-color) !important; outline-offset: 1px}"""
SIDE = 320  # pixels that a part needs to stand beside another; on a telephone they stand one below the other
FILL_IN = "a [MASK] on a [MASK] ."  # the full stop is a word that captioners expect at the end
SENTENCES_SHOWN = "people in front of a mountain .\npeople in front of a dog ."


class Demo(NamedTuple):
    """The captioner behind the page. Each method takes the path of an upload, and raises ValueError on bad input."""

    loaded: PretrainedCaptioner
    blind: torch.Tensor | None

    @torch.inference_mode()
    def caption(self, path: str | None, text: str | None = None) -> tuple[str, str, list[str], list[Image.Image]]:
        """Return the caption, its decoding steps as HTML, the words that were decoded, and an attention map for each.

        `text` is a caption with [MASK] to fill in.
        """
        if len(text or "") > CHARACTERS:
            raise ValueError(f"give at most {CHARACTERS} characters")
        image, model = self._read(path), self.loaded.model
        options = {"text": self.loaded.masked_text(text)} if text else {}
        with self.loaded.autocast():
            decoded = model.generate(image, return_trace=True, **readable(options, model.causal))  # a Mix unmasks
        row = describe_captions(decoded, self.loaded.tokenizer)[0]
        seen = self.loaded.pil_image(image[0])
        steps = render_page("Steps", {}, legend(), [CARDS.captioned_grid({**row, "image": ""})], [], "app.css.jinja")
        words = [token["token"].strip() for token in row["tokens"] if token["step"] is not None]
        maps = [highlight(seen, x.mean((0, 1)).view(model.tower.grid))
                for x in word_maps(model, image, decoded)[0].attention]
        frame = f'<iframe title="Steps of the caption" sandbox srcdoc="{escape(steps)}"></iframe>'
        return printable(row["caption"]) or "(no words)", frame, list(map(printable, words)), maps

    def score(self, path: str | None, sentences: str) -> list[list]:
        """Return a row [sentence, score in nats] for each line of `sentences`, the best first.

        With a null image, the row also has the blind (unconditional) and the debiased score.
        """
        lines = list(filter(None, map(str.strip, (sentences or "").splitlines())))
        if not 0 < len(lines) <= SENTENCES or max(map(len, lines)) > CHARACTERS:
            raise ValueError(f"give 1 to {SENTENCES} sentences of at most {CHARACTERS} characters, one per line")
        image = self._read(path)
        columns = [self.loaded.score(image, lines)[0]]
        if self.blind is not None:
            blind = self.loaded.score(image, lines, kind="blind", blind_images=self.blind)[0]
            columns += [blind, columns[0] - blind]
        rows = [[line, *(round(x.item(), 2) for x in scores)] for line, *scores in zip(lines, *columns, strict=True)]
        return sorted(rows, key=lambda row: -row[-1])

    def _read(self, path: str | None) -> torch.Tensor:
        if path is None:
            raise ValueError("drop an image first")
        image = open_image(Path(path), "the photograph", PIXELS)
        return self.loaded.preprocessed(image)[None].to(self.loaded.device)


class OwnAddress:
    """Refuses requests for another address than `host`, as a foreign page can point its own name to this machine.

    At 0.0.0.0 and ::, every numeric address and the name of this machine are its own. The port has to be its own, and
    the request's Origin, if there is one, its own address.
    """

    def __init__(self, app: Callable, host: str):
        self.app, self.numeric = app, host.strip("[]") in ("0.0.0.0", "::")
        self.names = {"localhost", "127.0.0.1", "[::1]", (gethostname() if self.numeric else host).lower()}

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        from starlette.responses import PlainTextResponse
        refusal = PlainTextResponse("this page answers only at its own address and port", 400)
        own = scope["type"] not in ("http", "websocket") or self.is_own(scope)
        await (self.app if own else refusal)(scope, receive, send)

    def is_own(self, scope: dict) -> bool:
        """Return whether the request has one Host header, which names this page, and no other page as its Origin."""
        hosts, origins = ([value.decode("latin-1").lower() for name, value in scope["headers"] if name == wanted]
                          for wanted in (b"host", b"origin"))
        parts = re.fullmatch(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(?::([0-9]{1,5}))?", hosts[0]) if len(hosts) == 1 else None
        if parts is None or int(parts[2] or 80) != scope["server"][1]:
            return False
        if any(origin.partition("://")[2] != hosts[0] for origin in origins):
            return False
        return parts[1] in self.names or self.numeric and is_numeric(parts[1])


def is_numeric(name: str) -> bool:
    try:
        return bool(ip_address(name.strip("[]")))
    except ValueError:
        return False


def uploaded(path: str, folder: str) -> str:
    """Return the real path of an upload below `folder`. Raises ValueError for others, in the same words for all."""
    with suppress(OSError, ValueError):  # no system has such a path
        real = Path(os.path.realpath(path))
        if real.is_relative_to(os.path.realpath(folder)) and real.is_file():
            return str(real)
    raise ValueError("this is no upload, or it was deleted: drop the image again")


def highlight(image: Image.Image, weights: torch.Tensor) -> Image.Image:
    """Return the image darkened by a word's attention [rows, columns]: the patch with the most stays clear."""
    mask = Image.fromarray((255 * light(weights)).round().byte().cpu().numpy())
    return Image.composite(image, Image.new("RGB", image.size), mask.resize(image.size, Image.Resampling.NEAREST))


def example() -> Path:
    """Return the photograph that the page begins with, one that scikit-learn ships."""
    return Path(str(files("sklearn.datasets.images") / "china.jpg"))


def build(demo: Demo):
    """Return the page, a gradio.Blocks. It begins with the caption of `example`."""
    import gradio as gr

    def told(function):  # tell of a ValueError on the page, which otherwise stays as it is
        def call(path, *values):
            try:
                return function(path and uploaded(path, image.GRADIO_CACHE), *values)
            except ValueError as problem:
                gr.Warning(printable(str(problem)))
                return gr.skip()
        return call

    def show(caption, steps, words, maps):
        return caption, steps, gr.Radio(list(zip(words, range(len(words)), strict=True)), value=None), maps, None

    def say(path, text=None):
        return show(*demo.caption(path, text))

    def show_map(word, maps):
        if maps:
            return maps[word]
        gr.Warning("the maps were deleted after ten minutes: caption the photograph again")

    alone = {"concurrency_id": "model", "concurrency_limit": 1}  # word_maps hooks the model: one caption at a time
    header = ["sentence", "log p(c|i)", "log p(c)", "debiased"][:2 if demo.blind is None else 4]
    with gr.Blocks(title="open_clip_mdc", analytics_enabled=False, delete_cache=(KEPT / 10, KEPT)) as page:
        gr.Markdown("# open_clip_mdc\nDrop a photograph, and its caption appears word by word.")
        with gr.Row():
            with gr.Column(scale=2, min_width=SIDE):
                image = gr.Image(type="filepath", sources=["upload", "clipboard"], label="Photograph",
                                 elem_id="photograph", height=280, format="png")
                # gradio would open every format that Pillow can, and whatever path a request names without its "meta"
                image.preprocess = lambda upload: upload.path if upload else None
                ask = gr.Button("Caption", variant="primary", elem_id="ask")
            with gr.Column(scale=3, min_width=SIDE):
                caption = gr.Textbox(label="Caption", elem_id="caption", interactive=False)
                steps = gr.HTML(label="Steps", elem_id="steps")
        if not demo.loaded.model.causal:
            with gr.Row():
                text = gr.Textbox(label="Fill in the [MASK]s", value=FILL_IN, elem_id="text", scale=4)
                fill = gr.Button("Fill in", elem_id="fill")
        with gr.Row():
            words = gr.Radio([], label="Where does this word come from?", elem_id="words", min_width=SIDE)
            where = gr.Image(label="Cross-attention at the step that revealed it", interactive=False, elem_id="where",
                             height=320, format="png", min_width=SIDE, buttons=["fullscreen"])
        with gr.Row():
            with gr.Column(scale=1):
                sentences = gr.Textbox(label="Sentences, one per line", lines=3, elem_id="sentences",
                                       value=SENTENCES_SHOWN)
                rate = gr.Button("Score", elem_id="rate")
            with gr.Column(scale=2):
                scores = gr.Dataframe(headers=header, label="Scores in nats", elem_id="scores", interactive=False,
                                      wrap=True, column_widths=["31%", "21%", "21%", "27%"] if header[2:] else
                                      ["60%", "40%"])
        maps = gr.State([], time_to_live=KEPT)
        outputs, first = [caption, steps, words, maps, where], demo.caption(str(example()))
        page.load(lambda: (Image.open(example()), *show(*first)), None, [image, *outputs], api_name=False)
        image.upload(told(say), image, outputs, api_name=False, **alone)
        ask.click(told(say), image, outputs, api_name="caption", **alone)
        if not demo.loaded.model.causal:
            fill.click(told(say), [image, text], outputs, api_name="fill", **alone)
        rate.click(told(demo.score), [image, sentences], scores, api_name="score", **alone)
        words.input(show_map, [words, maps], where, api_name=False)
    return page


def launch(page, server_name: str, **options):
    """Serve a page of `build`, without contacting any other address. `options` are those of gradio's launch."""
    import gradio as gr
    from starlette.middleware import Middleware
    theme = gr.themes.Base().set(button_primary_background_fill="*primary_600",  # its own is too light for white text
                                 button_primary_background_fill_hover="*primary_700")
    return page.launch(share=False, max_file_size=UPLOAD_LIMIT, ssr_mode=False, theme=theme, footer_links=[], css=CSS,
                       app_kwargs={"middleware": [Middleware(OwnAddress, server_name)]}, server_name=server_name,
                       prevent_thread_lock=True, quiet=True, **options)  # it would offer a public link


def run(args: argparse.Namespace) -> None:
    """Serve the page until it is interrupted."""
    need("gradio", "app", "the app")
    with TemporaryDirectory(prefix="open_clip_mdc_app_") as folder:
        os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_TEMP_DIR": folder, "HF_HUB_OFFLINE": "1"}
        loaded = load_captioner(args)
        loaded.model.check_attention()
        blind = loaded.mean_image(find_images(args.blind_images)) if args.blind_images else None
        page = build(Demo(loaded, blind))
        address = launch(page, server_name=args.host, server_port=args.port)[1]
        print(f"Open {address} in your browser. Ctrl+C ends it.", flush=True)
        page.block_thread()
