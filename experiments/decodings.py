"""Compare ways of decoding by their number of steps and the quality of captions, on the same held-out images.

    python -m experiments.decodings --mdc build/demo/mdc --arc build/demo/arc --data build/demo/scenes/val/00000.tar \\
        --length 9 --out build/decodings/scenes

Writes OUT.json (the captions), OUT.md and OUT.png. If it is interrupted, run the same command again to resume. Errors
are standard errors over images. The error of a difference is that of the paired difference from MDC with one token a
step. A step is a pass of the decoder. All passes count: those of every length that `auto` tries, and of every draw of a
consensus.

Dimensions: B images, P patches, D width.
"""
import json
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from scipy.stats import sem

from clip_benchmark_ext.metrics import hallucination, repeats
from clip_benchmark_ext.metrics.caption_metrics import score_captions
from open_clip_mdc.data.captions import captioned
from open_clip_mdc.data.files import write_json
from open_clip_mdc.data.images import sample_image
from open_clip_mdc.data.markdown import markdown_table
from open_clip_mdc.data.shards import read_samples
from open_clip_mdc.decoding.sampling import Sampling
from open_clip_mdc.integration import checkpoints
from open_clip_mdc.text.special_tokens import decode_captions

from .problems import in_one_line, make_parser

BATCH, DRAWS, TEMPERATURE = 20, 10, 0.5
COLUMNS = {"CIDEr": "CIDEr", "repeats a word, %": "repeating_captions", "exact, %": "exact_match"}
BASE = "MDC, 1 token a step"
CONSENSUS = dict(temperature=TEMPERATURE, samples=DRAWS, select="consensus")
LENGTHS = dict(length="top", samples=8, select="consensus")


def ways(objective: str, length: int) -> dict[str, dict]:
    """Return the options of `generate` for each way of decoding, and the temperature of sampling."""
    if objective == "ARC":
        return {"ARC, greedy": dict(num_beams=1), "ARC, beam of 6": {}, f"ARC, consensus of {DRAWS} draws": CONSENSUS}
    return {BASE: dict(length=length),
            **{f"MDC, {k} tokens a step": dict(length=length, tokens_per_step=k) for k in (2, 3, 4)},
            "MDC, all at once": dict(length=length, tokens_per_step=length),
            **{f"MDC, ancestral, {n} x as many steps": dict(length=length, sampler="ancestral", steps=n * length)
               for n in (1, 4)},
            "MDC, length auto": dict(length="auto"),
            "MDC, consensus of 8 lengths": LENGTHS,
            "MDC, consensus of 8 lengths, 3 tokens a step": LENGTHS | dict(tokens_per_step=3),
            f"MDC, consensus of {DRAWS} draws": dict(length="top", **CONSENSUS)}


def read(shard: str, transform, limit: int | None) -> tuple[list[torch.Tensor], list[list[str]]]:
    """Return the images of a shard, [3, H, W] each, and their captions."""
    samples = list(islice(captioned(read_samples(shard)), limit))
    if not samples:
        raise ValueError(f"{shard} has no image with a KEY.txt")
    return [transform(sample_image(sample)) for sample, _ in samples], [
        "\n".join(captions).strip().splitlines() for _, captions in samples]


@torch.inference_mode()
def say(model, tokenizer, image_embs: torch.Tensor, options: dict) -> tuple[list[str], float]:
    """Return captions for patch tokens [B, P, D], and the mean number of decoder passes a caption."""
    options, said, passes, rows = dict(options), [], 0, 0
    temperature, draws = options.pop("temperature", 0.0), options.get("samples", 1)

    def see(_, args: tuple) -> None:
        nonlocal rows
        rows = len(args[0].valid)  # "auto" decodes several lengths together

    def count(*_) -> None:
        nonlocal passes
        passes += rows

    hooks = model.text.register_forward_pre_hook(see), model.text.output.register_forward_hook(count)
    for number, batch in enumerate(image_embs.split(BATCH)):
        rows = draws * len(batch)  # of a causal model, which calls no `forward`
        generator = torch.Generator().manual_seed(number)
        said += decode_captions(model.generate(batch, sampling=Sampling(temperature, generator=generator), **options),
                                tokenizer)
    for hook in hooks:
        hook.remove()
    return said, passes / len(said)


def measure(said: list[str], references: list[list[str]]) -> dict[str, np.ndarray]:
    """Return the metrics of COLUMNS for each image. All but CIDEr are percent."""
    captions, truth = dict(enumerate(said)), dict(enumerate(references))
    cider = score_captions(captions, truth, ["CIDEr"]).of_images.get("CIDEr", [0.0] * len(said))  # 0 for one image
    found = {**hallucination.metrics(captions, truth)[1], **repeats.metrics(captions)[1], "CIDEr": cider}
    return {column: np.array(found[name]) * (1 if name == "CIDEr" else 100) for column, name in COLUMNS.items()}


def with_error(values: np.ndarray, column: str) -> str:
    digits = 3 if column == "CIDEr" else 1
    error = f" ± {sem(values):.{digits}f}" if len(values) > 1 else ""
    return f"{values.mean():.{digits}f}{error}"


def report(said: dict[str, dict], references: list[list[str]], out: Path) -> str:
    from matplotlib.figure import Figure
    values = {way: measure(row["captions"], references) for way, row in said.items()}
    rows = [[way, f"{said[way]['steps']:.1f}", *(with_error(each[column], column) for column in COLUMNS),
             with_error(each["CIDEr"] - values[BASE]["CIDEr"], "CIDEr")] for way, each in values.items()]
    shown = [column for column in COLUMNS if any(each[column].any() for each in values.values())]
    figure = Figure(figsize=(3.5 + 3 * len(shown), 3.4), layout="constrained")
    for axes, column in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        axes.set(xlabel="steps a caption", ylabel=column, xscale="log")
        for number, (way, each) in enumerate(values.items()):
            x = each[column]
            axes.errorbar(said[way]["steps"], x.mean(), sem(x), marker="os"[way[0] == "A"], color=f"C{number % 10}",
                          fillstyle=("full", "none")[number > 9], capsize=2, label=way)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right", frameon=False, fontsize=7)
    figure.savefig(f"{out}.png", dpi=100)
    return markdown_table(["", "steps", *COLUMNS, "CIDEr, from " + BASE], rows)


@in_one_line()
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--mdc", required=True, help="run folder or checkpoint of an MDC captioner")
    parser.add_argument("--arc", required=True, help="run folder or checkpoint of an ARC captioner")
    parser.add_argument("--data", required=True, help="shard of held-out images with KEY.txt, one caption per line")
    parser.add_argument("--length", type=int, required=True,
                        help="tokens of MDC's captions, where their number is fixed")
    parser.add_argument("--limit", type=int, help="take the first N images")
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    file, about = Path(f"{args.out}.json"), {name: str(value) for name, value in vars(args).items()}
    said = json.loads(file.read_text()) if file.exists() else {"about": about}
    if said.pop("about") != about:
        raise ValueError(f"{file} was made with other arguments. Remove it, or give another --out")
    for objective, pretrained in (("MDC", args.mdc), ("ARC", args.arc)):
        model, transform, tokenizer = checkpoints.load(pretrained, captioner=True)
        images, references = read(args.data, transform, args.limit)
        with torch.inference_mode():
            embs = torch.cat([model.encode_image_tokens(x) for x in torch.stack(images).split(BATCH)])
        model.encode_image_tokens = lambda image_embs: image_embs  # encoded above, once for all ways
        for way, options in ways(objective, args.length).items():
            if way not in said:
                captions, steps = say(model, tokenizer, embs, options)
                said[way] = {"steps": steps, "captions": captions}
                write_json(file, {"about": about, **said})
    table = report(said, references, args.out)
    Path(f"{args.out}.md").write_text(f"{table}\n\n{len(references)} images.\n", encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
