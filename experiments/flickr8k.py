"""Make the vocabulary, the pairs of right and wrong captions and the few photographs of SCALE=flickr8k and few.

    python -m experiments.flickr8k bpe --shards 'flickr8k/train/{00000..00005}.tar' --out flickr8k_bpe.txt.gz
    python -m experiments.flickr8k pairs --shards flickr8k/test/00000.tar --out pairs
    python -m experiments.flickr8k first --shards flickr8k/train/00000.tar --out few
    python -m experiments.flickr8k sentences --shards flickr8k/test/00000.tar --out sentences
    python -m experiments.flickr8k grey --shards flickr8k/train/00000.tar --out blind

A pair is a test caption and a copy that a rule makes false: two nouns or colours are swapped, or a noun, a colour or a
preposition is replaced. The format is SugarCrepe's. But SugarCrepe's wrong captions are written with more care, so do
not compare these scores with SugarCrepe's.

`sentences` joins each caption of a photograph with the next one, so that each stands first once and second once. `grey`
does so, too, and puts one grey image in the place of every photograph.
"""
import argparse
import io
import json
import random
import re
from collections import Counter
from functools import partial
from itertools import chain, islice
from pathlib import Path

from open_clip.tokenizer import SimpleTokenizer
from PIL import Image

from clip_benchmark_ext.metrics import hallucination
from open_clip_mdc.data.files import new_folder
from open_clip_mdc.data.shards import find_shards, image_member, image_suffix, read_metadata, read_samples, tar_writer
from open_clip_mdc.text import vocabulary as bpe

MIN_COUNT = 5  # rarer words are split into pieces
SEED = 0
FEW = 500  # photographs
GREY = (124, 116, 104)  # ImageNet's mean, which an encoder of it takes for nothing
PAIRS = 200  # of each kind, and at most one of a kind from each image
NOUNS = hallucination.NOUNS
COLOURS = [colour for colour in hallucination.COLOURS if colour != "orange"]  # as when results were measured
CONTEXT_WORDS = {"and", "with", "near", "beside", "next"}  # a swap across one of these leaves the caption true
RELATIONS = {"in front of": "behind", "behind": "in front of", "over": "under", "under": "over", "up": "down",
             "down": "up", "into": "out of", "out of": "into", "on top of": "beneath", "inside": "outside",
             "outside": "inside", "above": "below", "below": "above", "toward": "away from", "towards": "away from",
             "off": "onto", "onto": "off"}


def swap(caption: str, words: list[str]) -> str | None:
    """Swap the first two different words of this list. Return None if the caption could still be true."""
    text = caption.split()
    places = [i for i, word in enumerate(text) if word in words]
    for i, j in zip(places, places[1:], strict=False):
        if text[i] != text[j] and not CONTEXT_WORDS & set(text[i:j]):
            text[i], text[j] = text[j], text[i]
            return " ".join(text)
    return None


def replace(caption: str, words: list[str], described: str, rng: random.Random) -> str | None:
    text = caption.split()
    places = [i for i, word in enumerate(text) if word in words]
    if not places:
        return None
    text[rng.choice(places)] = rng.choice([word for word in words if word not in described])
    return " ".join(text)


def replace_relation(caption: str) -> str | None:
    pattern = r"\b(" + "|".join(sorted(RELATIONS, key=len, reverse=True)) + r")\b"
    false = re.sub(pattern, lambda match: RELATIONS[match[1]], caption, count=1)
    return false if false != caption else None


def negatives(caption: str, described: str, rng: random.Random) -> dict[str, str]:
    made = {
        "swap_obj": swap(caption, NOUNS), "swap_att": swap(caption, COLOURS),
        "replace_obj": replace(caption, NOUNS, described, rng),
        "replace_att": replace(caption, COLOURS, described, rng),
        "replace_rel": replace_relation(caption),
    }
    return {kind: false for kind, false in made.items() if false}


def write_pairs(shards: list[str], out: Path) -> None:
    rows: dict[str, dict] = {}
    with new_folder(out) as folder:
        (folder / "val2017").mkdir()
        for number, sample in enumerate(s for shard in shards for s in read_samples(shard)):
            captions = [" ".join(c.lower().split()) for c in read_metadata(sample)["captions"]]
            rng = random.Random(f"{SEED}/{number}")
            image = sample[image_member(sample)]
            filename = f"{number:012d}.{image_suffix(image)}"
            wanted = {}
            for caption in rng.sample(captions, len(captions)):
                for kind, false in negatives(caption, " ".join(captions), rng).items():
                    if len(rows.get(kind, ())) < PAIRS:
                        wanted.setdefault(kind, dict(filename=filename, caption=caption, negative_caption=false))
            for kind, row in wanted.items():
                rows.setdefault(kind, {})[str(number)] = row
            if wanted:
                (folder / "val2017" / filename).write_bytes(image)
        for kind, pairs in rows.items():
            (folder / f"{kind}.json").write_text(json.dumps(pairs, indent=1), encoding="utf-8")
    print(f"{out}: " + ", ".join(f"{kind} {len(pairs)}" for kind, pairs in sorted(rows.items())))


def write_first(shards: list[str], out: Path) -> None:
    with new_folder(out) as folder, tar_writer(folder / "00000.tar") as writer:
        for sample in islice(chain.from_iterable(map(read_samples, shards)), FEW):
            writer.write({name: value for name, value in sample.items() if name != "__url__"})


def grey_image() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (224, 224), GREY).save(file, "png")
    return file.getvalue()


def sentence_pairs(captions: list[str]) -> list[tuple[str, str]]:
    """Return each caption with the next one, and the last with the first. All end with a full stop of its own."""
    ended = [" ".join(caption.removesuffix(".").split()) + " ." for caption in captions]
    return list(zip(ended, ended[1:] + ended[:1], strict=True))


def write_sentences(shards: list[str], out: Path, grey: bool = False) -> None:
    with new_folder(out) as folder:
        for number, shard in enumerate(shards):
            with tar_writer(folder / f"{number:05d}.tar") as writer:
                for sample in read_samples(shard):
                    image = grey_image() if grey else sample[image_member(sample)]
                    for k, pair in enumerate(sentence_pairs(read_metadata(sample)["captions"])):
                        writer.write({"__key__": f"{sample['__key__']}-{k}", image_suffix(image): image,
                                      "txt": " ".join(pair), "json": json.dumps({"sentences": pair})})


def write_bpe(shards: list[str], out: Path) -> None:
    tokenizer, counts = SimpleTokenizer(), Counter()
    for shard in shards:
        for sample in read_samples(shard):
            for caption in read_metadata(sample)["captions"]:
                counts.update(tokenizer.pat.findall(tokenizer.clean_fn(caption)))
    size = bpe.write(out, sorted(word for word, count in counts.items() if count >= MIN_COUNT))
    print(f"{out}: a vocabulary of {size}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["bpe", "pairs", "first", "sentences", "grey"])
    parser.add_argument("--shards", required=True)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    {"bpe": write_bpe, "pairs": write_pairs, "first": write_first, "sentences": write_sentences,
     "grey": partial(write_sentences, grey=True)}[args.what](find_shards(args.shards), args.out)


if __name__ == "__main__":
    main()
