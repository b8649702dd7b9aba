"""Measure how much the image tells of a word, by the place of the word: first or second of its object.

    python -m experiments.mentions --pretrained RUN/checkpoints/epoch_1.pt --data val/00000.tar --name r90 --out results

Each held-out scene of `open_clip_mdc scenes --world mentions` is captioned in both orders ("a red circle", "a circle
red"). So the same words of the same images stand at both places.
Only the words of the last object are measured. At the first object a causal model cannot know yet which of the two
orders the caption has. Two words are then right, which makes the first one harder for a reason that has nothing to do
with the image. Tokens are predicted as in training: by the objective's own corruption, each with its weight in the
loss, whose mean is 1 at every token. Then they are predicted from all words to the left (contexts.py). For each mention
of a word:

    loss        -log p(token | image), in nats
    gap         the loss with the mean image instead of the image, minus the loss: what the image tells of the token
    gain        -log p(token | visible words), minus the loss. This p is exact, as the world has 1,024 captions of known
                probabilities. A model guesses worse than that from the mean image, which it never saw
    gradient    norm of the loss's gradient at the patch tokens: how strongly the token trains the encoder

Dimensions: B captions, L positions, K mentions (first, second), P patches, D width, N all captions of the world, W
tokens of a noised row, which has two streams in block diffusion.
"""
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from clip_benchmark_ext import results
from open_clip_mdc.data.files import sha256
from open_clip_mdc.data.images import sample_image
from open_clip_mdc.data.shards import read_metadata, read_samples
from open_clip_mdc.decoding.options import NULL_IMAGES
from open_clip_mdc.integration import checkpoints
from open_clip_mdc.likelihood.log_likelihood import mean_image
from open_clip_mdc.models.captioner import Captioner
from open_clip_mdc.scenes.mentions import COLOURS, SHAPES, law
from open_clip_mdc.text.packing import NoisedCaptions, pack, sees

from .contexts import left_context
from .problems import in_one_line, make_parser
from .tables.contexts import DRAWS, MEASURES, PLACES, REDUNDANCIES

BATCH = 100  # scenes
DIGITS = 6  # significant digits of the values that are kept of each image


def mention_positions(text: Tensor, words: Tensor) -> Tensor:
    """Return the positions of these words (ids [W]) in the captions [B, L]: long [B, K].

    Raises ValueError if the captions have different numbers of them.
    """
    said = torch.isin(text, words)
    counts = said.sum(1)
    if counts.min() != counts.max() or counts.min() % 2:
        raise ValueError(f"captions mention {int(counts.min())} to {int(counts.max())} colours and shapes: give "
                         "--data of `open_clip_mdc scenes --world mentions`")
    return said.nonzero()[:, 1].view(len(text), -1)


def visible_tokens(noised: NoisedCaptions, text: Tensor, mentions: Tensor) -> Tensor:
    """Return which tokens of the caption a model reads when it predicts each mention, bool [B, K, L].

    Args:
        text, mentions: as in `measure`.
    """
    place = torch.arange(text.shape[1])
    if noised.sight is None:
        # A causal model sees the tokens before a mention, any other model those that are not hidden.
        causal = torch.as_tensor(noised.causal).expand(len(text))[:, None, None]
        return torch.where(causal, place < mentions[:, :, None], (noised.text == text)[:, None])
    # Two streams: the place of a mention in the row, [B, K], is the first one at its position, in the noisy stream.
    asked = (noised.position[:, None] == mentions[:, :, None]).int().argmax(2)
    seen = sees(noised.sight).gather(1, asked[:, :, None].expand(-1, -1, noised.text.shape[1]))  # [B, K, W]
    read = seen & (noised.valid & (noised.text == noised.tokens))[:, None]
    # A token is visible if it is read in either stream.
    return torch.zeros(*mentions.shape, text.shape[1], dtype=torch.int64).scatter_add(
        2, noised.position[:, None].expand_as(read), read.long()).bool()


def best_guess(noised: NoisedCaptions, text: Tensor, mentions: Tensor, captions: Tensor, p: Tensor) -> Tensor:
    """Return the exact -log p(token | visible tokens) of each mention in this world, float64 [B, K].

    Args:
        text, mentions: as in `measure`.
        captions: all captions of the world, long [N, L]. `p` are their probabilities, float64 [N].
    """
    equal = text[:, None] == captions  # [B, N, L]
    columns = []
    for position, visible in zip(mentions.unbind(1), visible_tokens(noised, text, mentions).unbind(1), strict=True):
        possible = (equal | ~visible[:, None]).all(2)  # [B, N]
        right = equal.gather(2, position[:, None, None].expand(-1, len(captions), 1))[..., 0]
        columns.append((possible.double() @ p).log() - ((possible & right).double() @ p).log())
    return torch.stack(columns, 1)


def as_trained(model: Captioner, text: Tensor, draws: int, generator: torch.Generator) -> list[NoisedCaptions]:
    """Return corruptions of captions [B, L] as in training, stratified: each draw has an interval of u of its own."""
    return [model.corrupt(text, (draw + 1 - torch.rand(len(text), generator=generator, dtype=torch.float64)) / draws,
                          generator) for draw in range(draws)]


def predicted_places(noised: NoisedCaptions) -> tuple[Tensor, Tensor]:
    """Return the rows of the predicted tokens, and their positions in the captions, long [M] each."""
    row, place = noised.loss_mask.nonzero(as_tuple=True)
    return row, place if noised.position is None else noised.position[row, place]


def measure(model: Captioner, image_embs: Tensor, null_image: Tensor, text: Tensor, mentions: Tensor,
            corruptions: list[NoisedCaptions], world: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return the means of weight, and of weight times each measure, over corruptions of each mention.

    Args:
        image_embs: patch tokens, [B, P, D].
        null_image: patch tokens of the mean image, [P, D].
        text: captions, long [B, L], on the CPU.
        mentions: positions in the captions, long [B, K].
        world: `captions` and `p` of `best_guess`.

    Returns:
        float64 [B, K] for each name of MEASURES, and for "weight".
    """
    image_embs = image_embs.detach().requires_grad_()
    sums = {name: torch.zeros(mentions.shape, dtype=torch.float64) for name in (*MEASURES, "weight")}
    for noised in corruptions:
        captions = pack(text, noised, model.vocab_size).to(image_embs.device)
        predicted = predicted_places(noised)

        def by_mention(values: Tensor, predicted: tuple = predicted) -> Tensor:
            return values.new_zeros(text.shape).index_put(predicted, values).gather(1, mentions)

        losses = by_mention(model.token_nll(image_embs, captions).cpu())
        with torch.no_grad():
            without = by_mention(model.token_nll(null_image.expand_as(image_embs), captions).cpu())
        weight = by_mention(noised.weight[noised.loss_mask]).double()
        norms = torch.stack([torch.autograd.grad(losses[:, k].sum(), image_embs, retain_graph=True)[0].flatten(1)
                             .norm(dim=1).cpu() for k in range(mentions.shape[1])], 1)
        losses = losses.detach()
        values = {"loss": losses, "gap": without - losses, "gradient": norms, "weight": 1.0,
                  "gain": best_guess(noised, text, mentions, *world) - losses}
        for name, value in values.items():
            sums[name] += weight * value / len(corruptions)
    return sums


def read_scenes(shard: str, transform) -> Iterator[tuple[str, Tensor, list[str]]]:
    for sample in read_samples(shard):
        captions = read_metadata(sample).get("captions")
        if not isinstance(captions, list) or len(captions) != 2:
            raise ValueError(f"{shard}, sample {sample['__key__']} has no captions in two orders: give --data of "
                             "`open_clip_mdc scenes --world mentions`")
        yield sample["__key__"], transform(sample_image(sample)), captions


def by_image(model: Captioner, transform, tokenizer, shard: str, redundancy: float, draws: int) -> dict[str, list]:
    """Return the keys of the scenes ("images"), and the mean over both orders of each scene.

    The means have the names "MEASURE_PLACE" and "weight_PLACE" in the context as trained. Those of "left_MEASURE_PLACE"
    are in a context with all words to the left (`contexts.left_context`).
    """
    words = torch.tensor([tokenizer.encode(word)[0] for word in (*COLOURS, *SHAPES)])
    possible, p = zip(*law(redundancy), strict=True)
    world = tokenizer(list(possible)), torch.tensor(p, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    scenes = list(read_scenes(shard, transform))
    null_image = mean_image(model, [torch.stack([image for _, image, _ in scenes[:NULL_IMAGES]])])
    found: dict[str, list] = {"images": [key for key, _, _ in scenes]}
    rest = iter(scenes)
    while batch := list(islice(rest, BATCH)):
        with torch.no_grad():
            embs = model.encode_image_tokens(torch.stack([image for _, image, _ in batch])).repeat_interleave(2, 0)
        text = tokenizer([caption for _, _, captions in batch for caption in captions])
        mentions = mention_positions(text, words)[:, -len(PLACES):]
        of_context = {"": as_trained(model, text, draws, generator),
                      "left_": [left_context(model, text, mention) for mention in mentions.unbind(1)]}
        for context, corruptions in of_context.items():
            sums = measure(model, embs, null_image, text, mentions, corruptions, world)
            for name, values in sums.items():
                add(found, context + name, values.view(len(batch), -1, len(PLACES)).mean(1))  # over orders
    return found


def add(found: dict[str, list], name: str, values: Tensor) -> None:
    """Add the values of images at both places, [B, 2], as NAME_first and NAME_second."""
    for place, value in zip(PLACES, values.unbind(1), strict=True):
        found.setdefault(f"{name}_{place}", []).extend(value.tolist())


def keep(path: Path, about: dict, found: dict[str, list]) -> None:
    """Write the values of single images and their weighted means, and print the latter. `found` is of `by_image`."""
    measured = {name: of_images for name, of_images in found.items() if name != "images"}  # by [left_]MEASURE_PLACE
    weights = {name: f"{'left_' * name.startswith('left_')}weight_{name.rpartition('_')[2]}" for name in measured}
    metrics = {name: float(np.sum(of_images) / np.sum(found[weights[name]])) for name, of_images in measured.items()
               if name != weights[name]}
    values = {name: [float(f"{x:.{DIGITS}g}") for x in of_images] for name, of_images in measured.items()}
    results.write_items(path, {"images": found["images"], "values": values})
    results.write(path, about, metrics)
    print(path, json.dumps(metrics))


@in_one_line()
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--pretrained", nargs="+", required=True, help="checkpoints of captioners")
    parser.add_argument("--data", required=True, help="shard of held-out scenes")
    parser.add_argument("--name", required=True, choices=REDUNDANCIES, help="redundancy of the data")
    parser.add_argument("--out", required=True, type=Path, help="folder of the results")
    args = parser.parse_args()
    for pretrained in args.pretrained:
        path = args.out / f"{args.name}-{pretrained.replace('/', '_')}.json"
        about = {"dataset": args.name, "pretrained": pretrained, "task": "contexts", "settings": {
            "measures": list(MEASURES), "of": "the last object", "draws": DRAWS, "data_sha256": sha256(args.data),
            "weights_sha256": sha256(pretrained)}}
        if results.is_there(path, about):
            continue
        keep(path, about, by_image(*checkpoints.load(pretrained, captioner=True), args.data, REDUNDANCIES[args.name],
                                   DRAWS))


if __name__ == "__main__":
    main()
