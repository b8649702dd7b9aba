"""Show where in the image each word of a caption comes from, on one self-contained page.

    open_clip_mdc attention --pretrained RUN photos/ --out page.html
    open_clip_mdc attention --pretrained RUN cat.jpg --text 'a [MASK] cat on a [MASK]'

Each word has a map of the decoder's cross-attention over the image at the step that revealed it, averaged over layers
and heads. A second image shows the patch features as colours: their first three principal components over all images of
the page.
"""
import argparse

import numpy as np
import torch
from PIL import Image

from ..data.images import Images, data_url, encode_png
from ..data.paths import ANY_IMAGES, find_images
from ..decoding.attention_maps import light, principal_components, word_maps
from ..decoding.options import readable
from ..errors import complain, complain_of_none, plural
from ..integration.pretrained import describe_captions
from .page import CARDS, shown, shown_lines, shown_model, thumbnail, write_page
from .shared import check_length, load_captioner

BATCH = 8
COLOUR_RANGE = 2.0  # colours span this many standard deviations of a principal component, on each side


def png(pixels: np.ndarray) -> str:
    # [H, W, 2] is grey and alpha, [H, W, 3] is RGB.
    return data_url(encode_png(Image.fromarray(pixels)), "image/png")


def overlay(weights: torch.Tensor) -> str:
    # Black dims patches with little attention [rows, columns]. The patch with the most stays clear.
    alpha = 1 - light(weights)
    pixels = np.zeros((*alpha.shape, 2), np.uint8)
    pixels[..., 1] = (255 * alpha).round().byte().cpu().numpy()
    return png(pixels)


def card(name: str, row: dict, image: str, colours: str, overlays: list[str]) -> str:
    overlays = iter(overlays)  # one for each token that was not given
    maps = [(token, None if token["step"] is None else next(overlays)) for token in row["tokens"]]
    return CARDS.maps(name, row["caption"], image, colours, maps)


def run(args: argparse.Namespace) -> None:
    check_length(args)
    paths = find_images(args.paths, ANY_IMAGES)
    loaded = load_captioner(args)
    model, options = loaded.model, {}
    model.check_attention()
    if args.text is not None:
        options["text"] = loaded.masked_text(args.text, args.length)
    elif args.length:
        options["length"] = args.length
    names, rows, images, overlays, tokens, skipped = [], [], [], [], [], []
    shape = model.tower.grid
    for batch in Images(paths, loaded.transform, BATCH).loader(workers=0):
        skipped += batch.problems
        if not batch.new:
            continue
        image = batch.image.to(loaded.device)
        decoded = model.generate(image, return_trace=True, **readable(options, model.causal))  # a Mix unmasks
        names += batch.new
        rows += describe_captions(decoded, loaded.tokenizer)
        images += [thumbnail(loaded.pil_image(x)) for x in batch.image]
        overlays += [[overlay(x.mean((0, 1)).view(shape)) for x in maps.attention]
                  for maps in word_maps(model, image, decoded)]
        tokens.append(loaded.encode_image_tokens(image))
    complain_of_none(names, skipped)
    components = principal_components(torch.cat(tokens)) / (2 * COLOUR_RANGE) + 0.5
    colours = [png((255 * x.view(*shape, 3).clamp(0, 1)).round().byte().cpu().numpy()) for x in components]
    cards = list(map(card, [shown(name, args.out) for name in names], rows, images, colours, overlays))
    write_page(args.out, f"Where the words come from: {shown_model(args, args.out)}",
               {"Checkpoint": shown(args.pretrained, args.out), "Images": str(len(names))},
               CARDS.maps_explanation(), cards, shown_lines(skipped, paths, args.out), "attention.css.jinja")
    print(f"{plural(len(names), 'image')}: {args.out}")
    complain(skipped)
