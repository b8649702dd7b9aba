"""Measure the encoder's gradient noise at every t, and propose the interval [t_min, t_max] that suits the data.

    python -m experiments.schedule_search --pretrained logs/RUN --train-data 'scenes/train/{00000..00007}.tar'

The paper chose [0.5, 1] by training on four intervals and probing each (Table 5), because the loss over (0, 1] was
"very unstable" for short captions. Here one short training over (0, 1] (MDC-ViT-Ti-8-t0.0-1.0, say) is followed by a
measurement without labels (gradient_noise.interval_scores). It finds only the position of the interval. You choose its
width by --min-width.

Dimensions: B images of a batch, L tokens of a caption.
"""
import argparse
import json
from collections.abc import Iterator

import numpy as np
import open_clip
import pandas as pd
from matplotlib.figure import Figure
from torch import Tensor

from open_clip_mdc.cli.arguments import SHARDS, add
from open_clip_mdc.cli.shared import natural, positive
from open_clip_mdc.data.files import new_file, write_json
from open_clip_mdc.data.images import batched, read_pairs
from open_clip_mdc.data.outputs import Default
from open_clip_mdc.data.shards import find_shards
from open_clip_mdc.errors import plural
from open_clip_mdc.integration import checkpoints, configs
from open_clip_mdc.integration.patches import register

from . import tool
from .gradient_noise import GROUPS, MIDDLES, Measurement, interval_scores, log_ratio_error, measure, moments, weights

PAPER = tuple(configs.intervals())  # Table 5


def check(args: argparse.Namespace) -> None:
    if not args.pretrained:
        raise ValueError("give --pretrained RUN, a network trained for some hundred steps")
    find_shards(args.train_data)
    if args.num_samples < GROUPS * args.batch_size:
        raise ValueError(f"--num-samples {args.num_samples} should be at least {GROUPS} times --batch-size "
                         f"{args.batch_size}")
    if not 0 <= args.min_width <= 1:
        raise ValueError(f"--min-width {args.min_width} should be from 0 to 1")


def batches(pairs: Iterator[tuple[Tensor, Tensor]], size: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield image [B, 3, height, width] and text [B, L]. Raises ValueError where the images end."""
    seen = 0
    for image, text in batched(pairs, size):
        seen += len(image)
        if len(image) == size:
            yield image.to(device), text
    raise ValueError(f"--train-data ends after {plural(seen, 'image')} and none is measured twice: lower --num-samples")


def per_t(measured: Measurement) -> pd.DataFrame:
    """Return a row per t.

    Columns: nats per masked token, signal-to-noise ratio of the gradient and, with the weight 1/t ("inverse_t") and
    without ("none"), mean and variance over images of the loss, |mean|^2 and covariance trace of its gradient.
    """
    noise, tokens = moments(measured), measured.mean_tokens
    table = {"t": MIDDLES, "token_nll": measured.nll.sum(1) / measured.masked.sum(1).clip(1),
             "gradient_snr": noise.products.diagonal() / noise.noise}
    for kind in ("inverse_t", "none"):
        weight = weights(kind) / tokens
        loss = weight[:, None] * measured.nll
        table |= {
            f"loss_{kind}": loss.mean(1), f"loss_variance_{kind}": loss.var(1, ddof=1),
            f"gradient_squared_mean_{kind}": weight ** 2 * noise.products.diagonal(),
            f"gradient_variance_{kind}": weight ** 2 * noise.noise,
        }
    return pd.DataFrame(table)


def search(measured: Measurement, min_width: float) -> pd.DataFrame:
    """Return `interval_scores` of the whole measurement, best progress first, with further columns:

        gain, gain_error     progress divided by that of (0, 1] with weight 1/t, and one standard error
        proposed             the best interval with weight 1/t and at least `min_width`
        tied                 the others of at least `min_width` within two standard errors of it
        best_of_any_width    the best interval with weight 1/t
    """
    scores = interval_scores(moments(measured))
    left_out = np.array([interval_scores(moments(measured, leave_out=g)).progress for g in range(GROUPS)])
    weighted, width = scores.weight == "inverse_t", scores.t_max - scores.t_min
    allowed = weighted & (width > min_width - 0.01)
    whole, best = (weighted & (width > 0.99)).idxmax(), scores.progress[allowed].idxmax()
    scores["gain"] = scores.progress / scores.progress[whole]
    error = log_ratio_error(left_out, whole)
    scores["gain_error"] = np.where(np.isinf(error), np.inf, scores.gain * error)
    scores["proposed"] = scores.index == best
    scores["best_of_any_width"] = scores.index == scores.progress[weighted].idxmax()
    distance = np.log(scores.progress[best]) - np.log(scores.progress.where(scores.progress > 0))
    scores["tied"] = allowed & ~scores.proposed & (distance < 2 * log_ratio_error(left_out, best))
    return scores.sort_values("progress", ascending=False, ignore_index=True)


def interval(row: pd.Series) -> str:
    return f"[{row.t_min:.1f}, {row.t_max:.1f}]"


def shown(scores: pd.DataFrame) -> pd.DataFrame:
    paper = [i for low, high in PAPER for i in scores.index[(scores.t_min == low) & (scores.t_max == high)]]
    rows = scores.loc[list(dict.fromkeys([scores.proposed.idxmax(), scores.best_of_any_width.idxmax(), *paper]))]
    return rows.sort_values(["weight", "proposed"], ascending=[True, False], kind="stable")


def report(table: pd.DataFrame, scores: pd.DataFrame, min_width: float) -> str:
    curves = pd.DataFrame({
        "t": table.t, "nats/token": table.token_nll, "loss": table.loss_inverse_t,
        "var loss": table.loss_variance_inverse_t, "(no 1/t)": table.loss_variance_none,
        "var gradient": table.gradient_variance_inverse_t, "(no 1/t) ": table.gradient_variance_none,
        "gradient snr": table.gradient_snr})
    rows = shown(scores)
    intervals = pd.DataFrame({
        "t in": [interval(row) for _, row in rows.iterrows()],
        "weight": rows.weight.map({"inverse_t": "1/t", "none": "1"}),
        "snr": rows.snr, "cosine": rows.cosine, "progress": rows.progress,
        "gain": [f"{row.gain:.2f} +- {row.gain_error:.2f}" for _, row in rows.iterrows()],
        "": ["<- proposed" if proposed else "" for proposed in rows.proposed]})
    best, any_width = (scores[scores[column]].iloc[0] for column in ("proposed", "best_of_any_width"))
    tied = ", ".join(interval(row) for _, row in scores[scores.tied].iterrows()) or "none"
    text = [frame.to_string(index=False, float_format="{:.3g}".format) for frame in (curves, intervals)]
    return f"""
Per image, at each t:
{text[0]}

Per image, with t uniform on an interval (gain: progress over that of [0.0, 1.0], +- one standard error):
{text[1]}

Proposed: t in {interval(best)}, {best.gain:.2f} times the progress per image of [0.0, 1.0].
Within two standard errors of it: {tied}.
Only its position was found. Its width is --min-width {min_width:g}, because the criterion favours narrow intervals.
Without this limit the best is {interval(any_width)}, {any_width.gain:.2f} +- {any_width.gain_error:.2f}.
This holds while noise limits a step, for batches below about {1 / best.snr:.0f} images at this stage of training."""


def draw(path: str, table: pd.DataFrame, scores: pd.DataFrame) -> None:
    figure = Figure(figsize=(10, 7), layout="constrained")
    axes = figure.subplots(2, 2)
    axes[0, 0].plot(table.t, table.token_nll, "o-", color="black", label="nats per masked token")
    axes[0, 0].plot(table.t, table.loss_inverse_t, "s--", label="loss, weight 1/t")
    axes[0, 0].set(title="Loss")
    for axis, column, title in ((axes[0, 1], "loss_variance", "Variance of an image's loss"),
                                (axes[1, 0], "gradient_variance", "Variance of an image's encoder gradient (trace)")):
        axis.plot(table.t, table[f"{column}_inverse_t"], "s--", label="weight 1/t")
        axis.plot(table.t, table[f"{column}_none"], "^:", label="no 1/t")
        axis.set(yscale="log", title=title)
    rows = shown(scores)
    for _, row in rows[rows.weight == "inverse_t"].iterrows():
        label = f"{interval(row)}: {row.gain:.2f} $\\pm$ {row.gain_error:.2f}" + (" (proposed)" if row.proposed else "")
        axes[1, 1].plot([row.t_min, row.t_max], [row.gain] * 2, linewidth=3, label=label)
    axes[1, 1].set(title="Progress per image, relative to [0, 1]", ylim=(0, 1.15 * rows.gain.max()))
    for axis in axes.flat:
        axis.set(xlabel="t", xlim=(0, 1))
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    with new_file(path) as partial:
        figure.savefig(partial, format="png", dpi=100)


def run(args: argparse.Namespace) -> None:
    register()
    check(args)
    device = checkpoints.default_device(args.device)
    model, transform, tokenizer = checkpoints.load(args.pretrained, args.model, device, captioner=True)
    if model.causal:
        raise ValueError(f"{args.pretrained} has no interval of t: not a masked diffusion captioner")
    num_batches = args.num_samples // (GROUPS * args.batch_size)
    pairs = read_pairs(find_shards(args.train_data), transform, tokenizer)
    measured = measure(model, batches(pairs, args.batch_size, device), num_batches, args.seed)
    table, scores = per_t(measured), search(measured, args.min_width)

    print(report(table, scores, args.min_width))
    name = checkpoints.find(args.pretrained, args.model).model_name
    best = scores[scores.proposed].iloc[0]
    proposed = configs.interval_name(name, round(best.t_min, 1), round(best.t_max, 1), open_clip.get_model_config)
    print(f"To train with it: open_clip_train --model {proposed}")
    settings = {key: value for key, value in vars(args).items() if key not in ("tool", "out", "plot")}
    content = {**settings, "num_samples": measured.nll.shape[1],
               "mean_tokens": measured.mean_tokens, "proposal": json.loads(best.to_json()),
               "best_of_any_width": json.loads(scores[scores.best_of_any_width].iloc[0].to_json()),
               "per_t": json.loads(table.to_json(orient="records", double_precision=10)),
               "intervals": json.loads(scores.to_json(orient="records", double_precision=10))}
    write_json(args.out, content, indent=1)
    draw(args.plot, table, scores)
    print(f"\nnumbers: {args.out}, figure: {args.plot}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    add(parser, "any model")
    parser.add_argument("--train-data", required=True, metavar="SHARDS", help=SHARDS)
    parser.add_argument("--batch-size", type=positive, default=32,
                        help="images per measured gradient (default: %(default)s)")
    parser.add_argument("--num-samples", type=positive, default=1536,
                        help="number of images to measure, each once (default: %(default)s)")
    parser.add_argument("--min-width", type=float, default=0.5,
                        help="minimum width of the proposed interval, needed because the criterion always prefers "
                             "narrow ones (default: %(default)s, the paper's width)")
    parser.add_argument("--seed", type=natural, default=0, help="random seed (default: %(default)s)")
    parser.add_argument("--out", default=Default("schedule.json"),
                        help="file to write with all numbers (default: %(default)s)")
    parser.add_argument("--plot", default=Default("schedule.png"),
                        help="figure to write, with curves over t and intervals (default: %(default)s)")


def main(argv: list[str] | None = None) -> None:
    tool.main("experiments.schedule_search", __doc__, add_flags, run, {"out": (".json",), "plot": (".png",)}, argv)


if __name__ == "__main__":
    main()
