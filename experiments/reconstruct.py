"""Show how well a trained captioner recovers masked captions, in a table on the terminal and a contact sheet.

    python -m experiments.reconstruct --pretrained logs/RUN --data 'scenes/val/00000.tar' --out sheet.png

The loss is the NELBO of validation.py, for the trained network and for the untrained one of --seed 0. A reconstruction
starts with every token masked, so that only the length is given, and reveals the most confident token at each step
(Eq. 6).

Dimensions: B images, L tokens.
"""
import argparse
import logging
from functools import partial

import open_clip
import torch
from matplotlib.figure import Figure

from open_clip_mdc.cli.arguments import SHARDS, add
from open_clip_mdc.cli.shared import load_captioner, positive
from open_clip_mdc.data.files import new_file
from open_clip_mdc.data.images import batched, read_pairs
from open_clip_mdc.data.outputs import Default
from open_clip_mdc.data.shards import find_shards
from open_clip_mdc.decoding.confidence import unmask_by_confidence
from open_clip_mdc.decoding.options import Unmasking
from open_clip_mdc.integration.runs import find
from open_clip_mdc.integration.validation import nelbo
from open_clip_mdc.models.captioner import Captioner
from open_clip_mdc.text.special_tokens import decode_captions, eot_id, mask_id, target_tokens, valid_tokens

from . import tool

BATCH = 64


@torch.inference_mode()
def reconstruct(model: Captioner, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Return captions [B, L] of images, given only the number of tokens. A causal model is not given it."""
    if model.causal:
        return model.generate(image)
    image_kv = model.text.project_image(model.encode_image_tokens(image))
    hidden = text.masked_fill(target_tokens(text, model.vocab_size), mask_id(model.vocab_size))
    valid = valid_tokens(text, model.vocab_size)
    found = unmask_by_confidence(partial(model.token_logits, image_kv), hidden, model.vocab_size, Unmasking(),
                                 valid=valid).text
    return found.masked_fill(~valid, eot_id(model.vocab_size))  # padding is not text, even if the model gives no EOT


def contact_sheet(images: list, captions: list[str], predictions: list[str], path: str) -> None:
    columns = 4
    rows = -(-len(images) // columns)
    figure = Figure(figsize=(3.4 * columns, 3.8 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    for axis, image, caption, prediction in zip(axes.flat, images, captions, predictions, strict=False):
        axis.imshow(image, interpolation="nearest")
        axis.set_title(f"caption: {caption}\nmodel: {prediction}", fontsize=8,
                       color="darkgreen" if prediction == caption else "firebrick")
    with new_file(path) as partial:
        figure.savefig(partial, format="png", dpi=100)


def run(args: argparse.Namespace) -> None:
    shards = find_shards(args.data)
    loaded = load_captioner(args)
    model, transform, tokenizer, device = loaded.model, loaded.transform, loaded.tokenizer, loaded.device
    name, _, model_args = find(args.pretrained, args.model)
    torch.manual_seed(0)
    logging.disable(logging.WARNING)  # OpenCLIP warns that the weights are random, as they should be
    untrained = open_clip.create_model(
        name, device=device, load_weights=False, **{k: v for k, v in model_args.items() if k.startswith("force")})
    logging.disable(logging.NOTSET)
    before, after = (nelbo(m, batched(read_pairs(shards, transform, tokenizer), BATCH), device)
                     for m in (untrained, model))

    image, text = next(batched(read_pairs(shards, transform, tokenizer), args.num_samples))
    predicted = reconstruct(model, image.to(device), text.to(device)).cpu()
    captions, predictions = (decode_captions(x, tokenizer) for x in (text, predicted))
    contact_sheet([loaded.pil_image(x) for x in image], captions, predictions, args.out)

    print(f"\n{name} on {before['num_samples']} held-out captions")
    print(f"{'loss (NELBO)':<24}{'untrained':>10}{'trained':>10}")
    for label, key in (("nats per token", "nelbo_per_token"), ("nats per caption", "nelbo_per_caption")):
        print(f"{label:<24}{before[key]:>10.3f}{after[key]:>10.3f}")
    print("\nReconstructed from the image and the number of tokens alone:"
          if not model.causal else "\nCaptioned from the image alone:")
    for i, (caption, prediction) in enumerate(zip(captions, predictions, strict=True), 1):
        print(f"{i}. {prediction}" + ("" if caption == prediction else f"   (true: {caption})"))
    print(f"\nContact sheet: {args.out}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    add(parser, "model", "device")
    parser.add_argument("--data", required=True, help=SHARDS)
    parser.add_argument("--num-samples", type=positive, default=8,
                        help="number of images to show (default: %(default)s)")
    parser.add_argument("--out", default=Default("reconstructions.png"),
                        help="contact sheet to write (default: %(default)s)")


def main(argv: list[str] | None = None) -> None:
    tool.main("experiments.reconstruct", __doc__, add_flags, run, {"out": (".png",)}, argv)


if __name__ == "__main__":
    main()
