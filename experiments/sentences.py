"""Measure what a photograph tells of a sentence that stands first or second in its caption.

    python -m experiments.sentences --pretrained RUN/checkpoints/epoch_2.pt --blind BLIND/checkpoints/epoch_1.pt \\
        --data sentences/00000.tar --out results

`python -m experiments.flickr8k sentences` makes the data: people's captions of a photograph, joined in pairs, so that
each sentence stands at both places. Tokens are predicted as in training, with the objective's own corruption and
weights. Per word of a sentence, without full stops and EOT:

    loss    -log p(token | photograph), in nats
    blind   the loss of a blind twin, which was trained further on the same captions with one grey image. It has learnt
            log p(token | visible words), which nobody knows of people's captions
    gain    blind minus loss

With "left_" before their names, these are measured again with all words to the left visible and none to the right. That
is the control: a twin that uses the other words loses less there on a sentence that is said second.

Dimensions: B captions, L positions, P patches.
"""
from io import BytesIO
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from clip_benchmark_ext import results
from open_clip_mdc.data.files import sha256
from open_clip_mdc.data.images import decode_image, sample_image
from open_clip_mdc.data.shards import read_metadata, read_samples
from open_clip_mdc.integration import checkpoints
from open_clip_mdc.models.captioner import Captioner
from open_clip_mdc.text.packing import NoisedCaptions, pack

from .contexts import left_context
from .flickr8k import grey_image
from .mentions import add, as_trained, keep, predicted_places
from .problems import in_one_line, make_parser
from .tables.contexts import DRAWS, PLACES

PHOTOGRAPHS = 20  # in a batch
SENTENCES = 5  # of a photograph, and as many pairs
MEASURES = ("loss", "blind", "gain")
LEFT = 2  # words of each sentence that are asked for, from the left


def words_of(pairs: list[list[str]], tokenizer, length: int) -> Tensor:
    """Return which tokens are words of the first and of the second sentence, bool [B, 2, L]."""
    found = torch.zeros(len(pairs), 2, length, dtype=torch.bool)
    for row, pair in zip(found, pairs, strict=True):
        begin = 1  # after SOT
        for place, sentence in zip(row, pair, strict=True):
            count = len(tokenizer.encode(sentence))
            place[begin:begin + count - 1] = True  # without the full stop
            begin += count
    return found


def measure(model: Captioner, blind: Captioner, image_embs: Tensor, grey: Tensor, text: Tensor, words: Tensor,
            corruptions: list[NoisedCaptions]) -> dict[str, Tensor]:
    """Return the sums of weight, and of weight times each measure, over the words of both sentences: float64 [B, 2].

    Args:
        image_embs: patch tokens, [B, P, D]. `grey` are those of the grey image, [P, D].
        text: captions, long [B, L]. `words` is of `words_of`.
    """
    sums = {name: torch.zeros(len(text), 2, dtype=torch.float64) for name in (*MEASURES, "weight")}
    for noised in corruptions:
        captions = pack(text, noised, model.vocab_size)
        losses = model.token_nll(image_embs, captions)
        without = blind.token_nll(grey.expand_as(image_embs), captions)
        values = {"loss": losses, "blind": without, "gain": without - losses, "weight": torch.ones_like(losses)}
        for name, value in values.items():
            by_place = torch.zeros(text.shape, dtype=torch.float64)
            by_place[predicted_places(noised)] = (captions.predicted.weight * value).double()
            sums[name] += (words * by_place[:, None]).sum(2) / len(corruptions)
    return sums


def from_the_left(model: Captioner, text: Tensor, words: Tensor, generator: torch.Generator) -> list[NoisedCaptions]:
    """Return `left_context` of LEFT words of each sentence, drawn at random. `words` is of `words_of`."""
    return [left_context(model, text, asked) for of_place in words.unbind(1)
            for asked in of_place.float().multinomial(LEFT, replacement=True, generator=generator).unbind(1)]


@torch.no_grad()
def by_photograph(model: Captioner, blind: Captioner, transform, tokenizer, shard: str, draws: int,
                  ) -> dict[str, list]:
    """Return the keys of photographs ("images"), and the sums over their pairs, "MEASURE_PLACE" and "weight_PLACE".

    For all but an autoregressive model, which reads nothing else, "left_" before the names is the second context.
    """
    generator = torch.Generator().manual_seed(0)
    (grey,) = blind.encode_image_tokens(transform(decode_image(BytesIO(grey_image())))[None])
    found: dict[str, list] = {"images": []}
    samples = read_samples(shard)
    while batch := list(islice(samples, PHOTOGRAPHS * SENTENCES)):
        firsts = batch[::SENTENCES]  # a photograph is read once for its pairs
        embs = model.encode_image_tokens(torch.stack([transform(sample_image(sample)) for sample in firsts]))
        pairs = [read_metadata(sample)["sentences"] for sample in batch]
        text = tokenizer([" ".join(pair) for pair in pairs])
        words = words_of(pairs, tokenizer, text.shape[1])
        of_context = {"": as_trained(model, text, draws, generator)}
        if not model.causal:
            of_context["left_"] = from_the_left(model, text, words, generator)
        found["images"] += [sample["__key__"].rpartition("-")[0] for sample in firsts]
        for context, corruptions in of_context.items():
            sums = measure(model, blind, embs.repeat_interleave(SENTENCES, 0), grey, text, words, corruptions)
            for name, values in sums.items():
                add(found, context + name, values.view(len(firsts), SENTENCES, len(PLACES)).sum(1))
    return found


@in_one_line()
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--pretrained", nargs="+", required=True, help="checkpoints of captioners")
    parser.add_argument("--blind", nargs="+", required=True, help="their blind twins, in the same order")
    parser.add_argument("--data", required=True, help="shard of held-out pairs of sentences")
    parser.add_argument("--out", required=True, type=Path, help="folder of the results")
    args = parser.parse_args()
    for pretrained, twin in zip(args.pretrained, args.blind, strict=True):
        path = args.out / f"sentences-{twin.replace('/', '_')}.json"
        about = {"dataset": "sentences", "pretrained": twin, "task": "sentences", "settings": {
            "measures": list(MEASURES), "draws": DRAWS, "left": LEFT,
            "data_sha256": sha256(args.data), "weights_sha256": sha256(pretrained),
            "blind_sha256": sha256(twin)}}
        if results.is_there(path, about):
            continue
        model, transform, tokenizer = checkpoints.load(pretrained, captioner=True)
        blind, _, _ = checkpoints.load(twin, captioner=True)
        keep(path, about, by_photograph(model, blind, transform, tokenizer, args.data, 1 if model.causal else DRAWS))


if __name__ == "__main__":
    main()
