"""Make the vocabulary, the pairs of right and wrong captions and the few photographs of SCALE=flickr8k and few.

    python -m experiments.flickr8k bpe --shards 'flickr8k/train/{00000..00005}.tar' --out flickr8k_bpe.txt.gz
    python -m experiments.flickr8k pairs --shards flickr8k/test/00000.tar --out pairs
    python -m experiments.flickr8k first --shards flickr8k/train/00000.tar --out few
    python -m experiments.flickr8k sentences --shards flickr8k/test/00000.tar --out sentences
    python -m experiments.flickr8k grey --shards flickr8k/train/00000.tar --out blind

`pairs` are those of clip_benchmark_ext/datasets/pairs.py.

`sentences` joins each caption of a photograph with the next one, so that each stands first once and second once. `grey`
does so, too, and puts one grey image in the place of every photograph.
"""
import json
from collections import Counter
from functools import partial
from itertools import chain, islice
from pathlib import Path

from open_clip.tokenizer import SimpleTokenizer
from PIL import Image

from clip_benchmark_ext.datasets import pairs
from open_clip_mdc.data.files import new_folder
from open_clip_mdc.data.images import encode_png
from open_clip_mdc.data.shards import find_shards, image_member, image_suffix, read_samples, tar_writer
from open_clip_mdc.text import vocabulary as bpe

from .problems import in_one_line, make_parser

MIN_COUNT = 5  # rarer words are split into pieces
FEW = 500  # photographs
GREY = (124, 116, 104)  # ImageNet's mean, which an encoder of it takes for nothing


def write_pairs(shards: list[str], out: Path) -> None:
    print(f"{out}: " + ", ".join(f"{kind} {count}" for kind, count in pairs.write_pairs(shards, out).items()))


def write_first(shards: list[str], out: Path) -> None:
    with new_folder(out) as folder, tar_writer(folder / "00000.tar") as writer:
        for sample in islice(chain.from_iterable(map(read_samples, shards)), FEW):
            writer.write({name: value for name, value in sample.items() if name != "__url__"})


def grey_image() -> bytes:
    return encode_png(Image.new("RGB", (224, 224), GREY))


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
                    for k, pair in enumerate(sentence_pairs(pairs.captions_in(sample))):
                        writer.write({"__key__": f"{sample['__key__']}-{k}", image_suffix(image): image,
                                      "txt": " ".join(pair), "json": json.dumps({"sentences": pair})})


def write_bpe(shards: list[str], out: Path) -> None:
    tokenizer = SimpleTokenizer()
    counts = Counter(word for shard in shards for sample in read_samples(shard)
                     for caption in pairs.captions_in(sample)
                     for word in tokenizer.pat.findall(tokenizer.clean_fn(caption)))
    size = bpe.write(out, sorted(word for word, count in counts.items() if count >= MIN_COUNT))
    print(f"{out}: a vocabulary of {size}")


@in_one_line()
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("what", choices=["bpe", "pairs", "first", "sentences", "grey"])
    parser.add_argument("--shards", required=True)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    {"bpe": write_bpe, "pairs": write_pairs, "first": write_first, "sentences": write_sentences,
     "grey": partial(write_sentences, grey=True)}[args.what](find_shards(args.shards), args.out)


if __name__ == "__main__":
    main()
