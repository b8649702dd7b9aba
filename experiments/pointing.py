"""Play the pointing game on rendered scenes: does a word attend to its object when it is decoded?

    python -m experiments.pointing --scenes 'build/demo/scenes/val/00000.tar' \\
        --runs MDC=build/demo/mdc ARC=build/demo/arc untrained=build/demo/untrained

Every model reads the scene's own caption, so that all models are compared on the same words. MDC takes them in the
order of its confidence (that of the heuristic likelihood), an autoregressive model from left to right. The words are
colours and shapes. A word points at the patch that gets most of its cross-attention at the step that reveals it
(`attention_maps.word_maps`, the mean over heads). It is a hit if that patch belongs to the word's object: the patch's
centre lies in the object's box, or the box's centre lies in the patch.

    all layers, layer N   hits by the mean attention of all layers, and by that of each
    chance                the share of patches that belong to the object
    the middle            hits of a model that always points at the middle of the image
    any object            hits on any object, by all layers. A model that finds objects, but not the right one, has this
                          share divided by the number of objects

An interval is 1.96 standard errors over images.

Dimensions: B images, L positions, K layers, H heads, P patches.
"""
import math
import re
from collections.abc import Iterator
from io import BytesIO
from itertools import islice

import torch
from torch import Tensor

import open_clip_mdc
from open_clip_mdc.data.images import batched, decode_image
from open_clip_mdc.data.markdown import markdown_table
from open_clip_mdc.data.shards import find_shards, image_member, read_metadata, read_samples
from open_clip_mdc.decoding.attention_maps import word_maps
from open_clip_mdc.decoding.sampling import Decoded
from open_clip_mdc.integration.pretrained import PretrainedCaptioner
from open_clip_mdc.text.special_tokens import target_tokens

from .problems import in_one_line, make_parser

BATCH = 64
WORDS = ("colour", "shape")
Words = list[tuple[str, list[float]]]  # of an image, each with its kind and its hits


def read_scenes(pattern: str, limit: int | None) -> list[dict]:
    """Return image, caption and objects of each sample. Raises ValueError if a KEY.json names no objects."""
    samples = islice((sample for shard in find_shards(pattern) for sample in read_samples(shard)), limit)
    scenes = []
    for sample in samples:
        objects = read_metadata(sample).get("objects")
        if not image_member(sample) or "txt" not in sample or not objects:
            raise ValueError(f"{sample['__url__']}, sample {sample['__key__']} is no rendered scene: no objects in its "
                             "KEY.json. Make some by open_clip_mdc scenes")
        scenes.append({"image": sample[image_member(sample)], "caption": sample["txt"].decode(), "objects": objects})
    return scenes


def own_patches(item: dict, shape: tuple[int, int]) -> Tensor:
    """Return which patches belong to an object, bool [P]. Its centre and radius are shares of the image's side."""
    def along(centre: float, count: int) -> tuple[Tensor, Tensor]:
        middles = (torch.arange(count) + 0.5) / count
        return (middles - centre).abs() <= item["radius"], (middles - centre).abs() <= 0.5 / count + 1e-9

    (row_in, row_has), (column_in, column_has) = along(item["y"], shape[0]), along(item["x"], shape[1])
    return ((row_in[:, None] & column_in) | (row_has[:, None] & column_has)).flatten()


def middle(shape: tuple[int, int]) -> Tensor:
    """Return the share of hits on each patch if one always points at the image's middle, [P]."""
    patches = own_patches({"x": 0.5, "y": 0.5, "radius": 0}, shape).double()
    return patches / patches.sum()


def words_of(caption: str, item: dict, tokenizer) -> Iterator[tuple[str, list[int]]]:
    """Yield the colour and the shape of an object that a caption names, each with the positions of its tokens."""
    if found := re.search(rf"\b{re.escape(item['colour'])} {re.escape(item['shape'])}\b", caption):
        start = 1 + len(tokenizer.encode(caption[:found.start()]))
        for kind in WORDS:
            count = len(tokenizer.encode(item[kind]))
            yield kind, list(range(start, start + count))
            start += count


@torch.inference_mode()
def spoken(loaded: PretrainedCaptioner, image: Tensor, text: Tensor) -> Decoded:
    """Return captions, long [B, L], as if the model had decoded them, with the step that revealed each token."""
    order = loaded.model.log_likelihood(image, text, return_details=True).order
    said = target_tokens(text, loaded.model.vocab_size)
    step = torch.arange(text.shape[1]) - 1 if order is None else order.cpu()
    return Decoded(text, torch.where(said, step, -1), torch.zeros(text.shape))


def hits(loaded: PretrainedCaptioner, scenes: list[dict]) -> list[Words]:
    """Return the words of each image. Their hits are: chance, the middle, any object, layers."""
    shape, tokenizer, results = loaded.model.tower.grid, loaded.tokenizer, []
    pairs = ((loaded.transform(decode_image(BytesIO(scene["image"]))), tokenizer(scene["caption"])[0])
             for scene in scenes)
    for image, text in batched(pairs, BATCH):
        image = image.to(loaded.device)
        for maps in word_maps(loaded.model, image, spoken(loaded, image, text)):
            scene, found = scenes[len(results)], []
            attention = dict(zip(maps.position.tolist(), maps.attention.mean(2).cpu(), strict=True))  # of each [K, P]
            patches = torch.stack([own_patches(item, shape) for item in scene["objects"]]).double()  # of each object
            some = patches.amax(0)
            for item, own in zip(scene["objects"], patches, strict=True):
                for kind, places in words_of(scene["caption"], item, tokenizer):
                    layers = torch.stack([attention[place] for place in places]).mean(0)
                    pointed = torch.cat((layers.mean(0, keepdim=True), layers)).argmax(1)
                    found.append((kind, [own.mean().item(), float(own @ middle(shape)), some[pointed[0]].item(),
                                         *own[pointed].tolist()]))
            results.append(found)
    return results


def share(of_images: list[list[float]]) -> tuple[float, float]:
    """Return the mean over all words and 1.96 standard errors of it. Words of one image are not independent."""
    words = sum(map(len, of_images))
    mean = sum(map(sum, of_images)) / words
    influence = [sum(own) / words - mean * len(own) / words for own in of_images]
    count = len(of_images)
    return mean, 1.96 * math.sqrt(sum(x * x for x in influence) * count / max(count - 1, 1))


def rows(name: str, results: list[Words]) -> Iterator[list]:
    for kinds in (WORDS, *((kind,) for kind in WORDS)):
        words = [[numbers for kind, numbers in own if kind in kinds] for own in results]
        cells = [share([[numbers[place] for numbers in own] for own in words])
                 for place in range(len(next(own for own in words if own)[0]))]
        yield [name, " and ".join(kinds), sum(map(len, words)),
               *(f"{100 * mean:.1f} ± {100 * error:.1f}" for mean, error in cells)]


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--scenes", required=True, metavar="SHARDS", help="val/00000.tar of open_clip_mdc scenes, say")
    parser.add_argument("--runs", required=True, nargs="+", metavar="NAME=RUN", help="captioners to compare")
    parser.add_argument("--limit", type=int, metavar="N", help="take the first N scenes")
    args = parser.parse_args(argv)
    scenes, table = read_scenes(args.scenes, args.limit), []
    for run in args.runs:
        name, _, place = run.partition("=")
        results = hits(open_clip_mdc.load(place, device="cpu", precision="fp32"), scenes)
        if not any(results):
            raise ValueError(f"no caption of {args.scenes} names an object as 'COLOUR SHAPE'")
        table += rows(name, results)
    header = ["model", "words", "number", "chance", "the middle", "any object", "all layers"]
    width = max(map(len, table))
    header += [f"layer {layer}" for layer in range(1, width - len(header) + 1)]
    print(markdown_table(header, [row + [None] * (width - len(row)) for row in table]))


if __name__ == "__main__":
    main()
