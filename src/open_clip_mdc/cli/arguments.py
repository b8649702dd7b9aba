"""The flags of each tool, added to a parser by the function of the tool's name. Imports no torch: `--help` is quick."""
import argparse
import json
from pathlib import Path

from ..data.outputs import Default
from ..decoding.options import MIN_NULL_IMAGES, NULL_IMAGES
from ..errors import close_names, finite
from ..integration import decoding_flags as decoding
from .shared import add_engine, add_images, add_model, add_precision, flag, natural, positive

KARPATHY = ("coco", "flickr30k", "flickr8k")
FETCHED = tuple(json.loads((Path(__file__).parent / "fetch.json").read_text(encoding="utf-8")))
OPTIONS = [name for name in decoding.OPTIONS if name not in ("length", "num_beams", *decoding.OF_CLIP)]
KINDS = ("models", "objectives", "tasks", "datasets")  # of `list`
NEW_FOLDER = "folder to write, which must be new or empty"
PAGE = "HTML page to write with the images inside it, best for at most hundreds"
PATHS = "images, folders, webdataset shards or patterns"
SHARDS = "webdataset shards, such as 'DIR/{00000..00009}.tar'"


def objects(value: str) -> tuple[int | None, int]:
    fewest, _, most = value.rpartition("-")
    return int(fewest) if fewest else None, int(most)


def kind(value: str) -> str:
    if value not in KINDS:
        raise argparse.ArgumentTypeError(f"{value!r} is none of {', '.join(KINDS)}{close_names(value, KINDS)}")
    return value


def share(value: str) -> float:
    if not 0 < float(value) <= 1:
        raise argparse.ArgumentTypeError(f"{value} should be more than 0 and at most 1")
    return float(value)


def list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kinds", nargs="*", type=kind, metavar="KIND", default=KINDS,
                        help=f"kinds of names to list: {', '.join(KINDS[:-1])} or {KINDS[-1]} (default: all)")


def scenes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, help=NEW_FOLDER)
    parser.add_argument("--world", choices=("plain", "rich", "mentions"), default="plain",
                        help="kind of scenes: plain (a row of objects, one true caption), rich (1 to 4 objects of 10 "
                             "colours, 8 shapes and 3 sizes, several true captions) or mentions (plain, but with "
                             "colours that predict shapes) (default: %(default)s)")
    parser.add_argument("--size", type=positive, help="side of an image in pixels (default: 32)")
    parser.add_argument("--objects", type=objects, metavar="N|M-N",
                        help="number of objects per scene, 2 to 4 or a range such as 1-3 (default: 2, --world plain "
                             "only)")
    parser.add_argument("--sizes", action="store_true",
                        help='make objects "small" or "large", and say so in captions (--world plain only)')
    parser.add_argument("--without", metavar="'COLOUR SHAPE'",
                        help="leave this object out of training and validation, and write scenes with it for few-shot "
                             "training and for testing (--world plain only)")
    parser.add_argument("--redundancy", type=float, metavar="SHARE",
                        help="share of objects with the shape that belongs to their colour, where the others have any "
                             "shape (default: 0.9, --world mentions only)")
    parser.add_argument("--first", choices=("colour", "shape"),
                        help="what captions name first of an object (default: random, --world mentions only)")
    parser.add_argument("--noise", type=float, metavar="SHARE",
                        help="share of training captions that describe another scene or nothing (default: 0, --world "
                             "rich only)")
    parser.add_argument("--masks", action="store_true", help="also write masks/, with --num-probe scenes per split and "
                        "the shape at each pixel, for clip_benchmark eval --dataset masks")
    parser.add_argument("--num-train", type=positive, default=20000,
                        help="number of training scenes (default: %(default)s)")
    parser.add_argument("--num-val", type=natural, default=1000,
                        help="number of validation scenes (default: %(default)s)")
    parser.add_argument("--num-probe", type=natural, default=1600,
                        help="number of labelled scenes per split (default: %(default)s)")
    parser.add_argument("--num-pairs", type=natural, default=1000,
                        help="number of caption pairs per task (default: %(default)s)")
    parser.add_argument("--jobs", type=positive, default=1, help="number of processes (default: %(default)s)")
    parser.add_argument("--seed", type=natural, default=0,
                        help="random seed, which decides every byte that is written (default: %(default)s)")


def prepare(parser: argparse.ArgumentParser) -> None:
    sources = parser.add_subparsers(dest="source", required=True)
    karpathy = sources.add_parser(KARPATHY[0], aliases=KARPATHY[1:], help="prepare one of these from its images and "
                                  "Karpathy's annotations")
    karpathy.add_argument("--images", required=True, help="folder of the images")
    karpathy.add_argument("--annotations", required=True, metavar="JSON", help="Karpathy's dataset_NAME.json")
    add_output(karpathy)
    shards = sources.add_parser("shards", help="prepare your own images and captions: webdataset shards, a folder with "
                                "a .txt or .json beside each image, metadata.csv or metadata.jsonl, Parquet tables, "
                                "COCO's captions, JSON rows or a CSV file")
    for split, what in (("train", "training"), ("val", "validation"), ("test", "test")):
        shards.add_argument(f"--{split}", metavar="DATA", help=f"{what} data: a folder, a file, or a pattern such as "
                            "'DIR/{00000..00005}.tar' or 'DIR/train-*.parquet'")
    _add_image_folders(shards)
    _add_captions_key(shards)
    add_output(shards)
    folds = sources.add_parser("folds", help="split shards into k folds, so that each image is tested once")
    folds.add_argument("--shards", required=True, help=SHARDS)
    folds.add_argument("--k", type=positive, default=5, help="number of folds (default: %(default)s)")
    _add_captions_key(folds)
    add_output(folds)


def finetune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", metavar="DATA", help="your photographs with captions: a folder, a table, COCO's JSON, "
                        "or any other data that `prepare shards` takes")
    add_model(parser, device=False, default="photo")
    parser.add_argument("--pretrained-image", metavar="SOURCE",
                        help="start from an image encoder alone, as in open_clip_train, with a new decoder of --model")
    _add_image_folders(parser)
    parser.add_argument("--val", default="0.2", metavar="SHARE|DATA",
                        help="share of the photographs to validate on, or other data for it (default: %(default)s)")
    parser.add_argument("--epochs", type=positive, default=10,
                        help="most epochs at each learning rate (default: %(default)s)")
    parser.add_argument("--out", required=True, help="folder to write, a run for --pretrained of every tool")
    parser.set_defaults(device=None)


def fetch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", choices=FETCHED, help="data set to download")
    parser.add_argument("--out", required=True, help="folder to download to")
    parser.add_argument("--print", action="store_true",
                        help="only print addresses, sizes, licence and the commands to run afterwards")


def _add_image_folders(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--images", action="append", metavar="DIR", help="folder of the images that a JSON or CSV file "
                        "names. Give it once for each folder (default: the folder of that file)")


def _add_captions_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--captions-key", default="captions",
                        help="JSON key or table column of the captions (default: captions, else caption, else the "
                             "lines of a .txt file, else text)")


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, help=NEW_FOLDER)
    parser.add_argument("--join", action="store_true",
                        help="join all captions of a training or validation image into one long text")
    parser.add_argument("--skip-broken", action="store_true",
                        help="leave out images that are missing, unreadable or without a caption, and list them")


def _add_decoding(parser: argparse.ArgumentParser):
    parser.add_argument("paths", nargs="+", metavar="PATHS", help=PATHS)
    add_model(parser, default="photo")
    group = parser.add_argument_group("decoding")
    decoding.add_flags(group, ["length"], flag)
    group.add_argument("--text", help="masked diffusion: caption to fill in, with a [MASK] for each unknown token, "
                       "such as 'a [MASK] dog on a [MASK]'")
    return group


def caption(parser: argparse.ArgumentParser) -> None:
    group = _add_decoding(parser)
    decoding.add_flags(group, OPTIONS, flag)
    group.add_argument("--seed", type=natural, default=0, help="random seed for sampling (default: %(default)s)")
    group.add_argument("--compile", action="store_true", help="caption faster on cuda after about a minute: compile "
                       "the image encoder, and run steps of masked diffusion as CUDA graphs")
    decoding.add_flags(parser.add_argument_group("help from a CLIP model"), decoding.OF_CLIP, flag)
    group = parser.add_argument_group("output")
    group.add_argument("--out", default=Default("captions.jsonl"),
                       help="file of all captions (.jsonl, .csv, .parquet, or .json in COCO's results format), or a "
                            "folder (no suffix) for one Parquet table per shard (default: %(default)s)")
    group.add_argument("--html", help=PAGE)
    group.add_argument("--compare", metavar="JSONL", help="file of this command with other captions of the same "
                       "images, to show beside these on the page of --html")
    _add_limit(add_images(parser, f"the first {NULL_IMAGES} of the images given"))
    add_engine(parser)
    parser.set_defaults(**decoding.DEFAULTS)


def _add_limit(group) -> None:
    group.add_argument("--limit", type=positive, metavar="N", help="read only the first N images")


def attention(parser: argparse.ArgumentParser) -> None:
    _add_decoding(parser)
    _add_limit(parser)
    parser.add_argument("--out", default=Default("attention.html"), help=f"{PAGE} (default: %(default)s)")


def app(parser: argparse.ArgumentParser) -> None:
    add_model(parser, default="photo")
    add_precision(parser)
    parser.add_argument("--blind-images", nargs="+", metavar="PATHS",
                        help=f"images to average into the null image of unconditional scores, at least "
                             f"{MIN_NULL_IMAGES} (default: no unconditional scores)")
    parser.add_argument("--host", default="127.0.0.1",
                        help="address to serve at, and the only one that is answered beside localhost. 0.0.0.0 serves "
                             "all of your network, under every numeric address and this machine's name (default: "
                             "%(default)s, this machine only)")
    parser.add_argument("--port", type=positive, default=7860,
                        help="port to serve at. A tunnel has to keep it (default: %(default)s)")


def export(parser: argparse.ArgumentParser) -> None:
    add_model(parser, device=False)
    parser.add_argument("--out", required=True, help=NEW_FOLDER)
    parser.add_argument("--to", nargs="+", choices=("open_clip", "timm", "transformers", "torch"),
                        help="formats to write (default: all that can hold this model)")
    parser.add_argument("--results", nargs="+", default=[], metavar="RESULT.json",
                        help="result files of clip_benchmark eval to list in the model card")
    parser.add_argument("--half", action="store_true", help="write the weights of format open_clip in 16 bit")
    parser.add_argument("--about", metavar="FILE",
                        help="Markdown file to add to the model card, on data, licence and limits")
    parser.add_argument("--push", metavar="ORG/NAME", help="also upload the folder to this Hugging Face hub repository")


def embed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="PATHS", help="folders of images, webdataset shards or patterns")
    add_model(parser, default="photo")
    add_images(parser)
    add_engine(parser)
    parser.add_argument("--kind", "--feature", dest="feature", choices=("gap", "cls", "patches"), default="gap",
                        help="feature to write: mean of the patch tokens, class token, or all patch tokens (default: "
                             "%(default)s)")
    parser.add_argument("--layer", type=int, default=-1, metavar="N",
                        help="block of the image tower whose output to write, counted from 0, or from the end if "
                             "negative (default: %(default)s, whose patch tokens the decoder reads)")
    parser.add_argument("--out", required=True, help="folder (no suffix) for one Parquet table per shard")


def score(parser: argparse.ArgumentParser) -> None:
    add_model(parser, default="photo")
    add_images(parser, f"all --images, or the first {NULL_IMAGES} images of --pairs")
    add_engine(parser)
    parser.add_argument("--images", nargs="+", metavar="PATHS",
                        help="images, folders or patterns, scored with every one of --captions")
    parser.add_argument("--captions", metavar="FILE", help="text file with one caption per line")
    parser.add_argument("--pairs", nargs="+", metavar="PATHS",
                        help="webdataset shards, or CSV files with the columns image,caption, whose images are scored "
                             "with their own captions (instead of --images and --captions)")
    parser.add_argument("--out", default=Default("scores.csv"),
                        help="CSV or JSONL file of all scores, or for --pairs a folder (no suffix) for one Parquet "
                             "table per shard (default: %(default)s)")
    parser.add_argument("--alpha", type=finite, default=1.0,
                        help="weight of the unconditional score: debiased = score - alpha * blind (default: "
                             "%(default)s)")
    parser.add_argument("--plain", action="store_true",
                        help="write the score alone, without the blind and debiased ones, which need a null image")
    parser.add_argument("--top", type=share, metavar="SHARE",
                        help="share of the captions of --pairs to keep, by debiased score, such as 0.3")
    parser.add_argument("--out-shards", metavar="FOLDER", help="folder of the shards to write with what --top keeps")


def search(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="PATHS", help=PATHS)
    parser.add_argument("sentence", metavar="SENTENCE",
                        help="sentence to search for, or @FILE for a text file with one sentence per line")
    add_model(parser, default="photo")
    parser.add_argument("--top", type=positive, default=10, metavar="K",
                        help="number of images per sentence to show and write (default: %(default)s)")
    parser.add_argument("--clip", metavar="MODEL:FILE",
                        help="OpenCLIP model that makes the shortlist, by name and weights, or local-dir:DIR")
    parser.add_argument("--shortlist", type=positive, metavar="K",
                        help="score only the K images per sentence that one pass of a masked diffusion captioner, or "
                             "--clip, finds best")
    parser.add_argument("--out", default=Default("search.jsonl"),
                        help="JSONL or CSV file of the images found (default: %(default)s)")
    parser.add_argument("--html", help=PAGE)
    add_images(parser, f"the first {NULL_IMAGES} of the images given")
    parser.set_defaults(plain=False)


def vq(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    fit = actions.add_parser("fit", help="train a VQ-VAE on your images, which takes minutes for small ones")
    fit.add_argument("--train-data", required=True, metavar="SHARDS", help=SHARDS)
    fit.add_argument("--steps", type=positive, default=1000, help="number of training steps (default: %(default)s)")
    fit.add_argument("--batch-size", type=positive, default=32, help="images per batch (default: %(default)s)")
    fit.add_argument("--lr", type=finite, default=2e-3, help="peak learning rate (default: %(default)s)")
    fit.add_argument("--workers", type=natural, default=1,
                     help="number of image-loading worker processes, or 0 to load in the main process (default: "
                          "%(default)s)")
    fit.add_argument("--seed", type=natural, default=0, help="random seed (default: %(default)s)")
    fit.add_argument("--device", help="device to run on (default: cuda if available, otherwise cpu)")
    taming = actions.add_parser("import", help="convert a VQGAN of taming-transformers, Euclidean or Gumbel")
    taming.add_argument("--from", required=True, dest="source", metavar="FILE", help="checkpoint file of the VQGAN")
    taming.add_argument("--used", metavar="FILE",
                        help="tensor file that numbers the codes to keep from 1 and has 0 for the others, such as "
                             "VQ-Diffusion's taming_vqvae_2887.pt (default: keep all)")
    for action in (fit, taming):
        action.add_argument("--model", required=True,
                            help="name of the model that will read the codes, such as MCD-VQ-ViT-Ti-8")
        action.add_argument("--out", required=True, help="file to write, for --pretrained of open_clip_train")
