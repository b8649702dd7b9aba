"""The flags of each tool: a function named after it adds them to a parser. Imports no torch: `--help` is quick."""
import argparse
import os

from ..data.outputs import Default
from ..decoding import options as decoding
from ..errors import close_names, finite
from .shared import add_engine, add_images, add_model, flag, natural, positive

KARPATHY = ("coco", "flickr30k", "flickr8k")
FETCHED = ("coco", "flickr8k", "flickr30k", "cc3m", "cc12m", "recap", "sugar_crepe", "aro", "sugar_crepe_pp", "bivlc",
           "whatsup", "cola", "negbench", "colorswap", "nlvr", "mmvp_vlm", "cub")
OPTIONS = [name for name in decoding.OPTIONS if name not in ("length", "num_beams", *decoding.OF_CLIP)]
KINDS = ("models", "objectives", "tasks", "datasets")  # of `list`
QUESTION = "Which caption best depicts the image and is also coherent (no duplicate words or awkward phrasing)?"


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
                        help=f"{', '.join(KINDS[:-1])} or {KINDS[-1]} (default: all)")


def scenes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, help="folder to make; must not exist or be empty")
    parser.add_argument("--world", choices=("plain", "rich", "mentions"), default="plain",
                        help="plain: a row of objects and one true caption; rich: 1 to 4 objects of 10 colours, 8 "
                             "shapes and 3 sizes, and several true captions; mentions: plain, but a shape can be "
                             "guessed from the colour (default: %(default)s)")
    parser.add_argument("--size", type=positive, help="side of an image in pixels (default: 32)")
    parser.add_argument("--objects", type=objects, metavar="N|M-N",
                        help="objects per scene: 2 to 4, or a range such as 1-3 (default: 2)")
    parser.add_argument("--sizes", action="store_true", help='objects are "small" or "large", and captions say so')
    parser.add_argument("--without", metavar="'COLOUR SHAPE'", help="leave this object out of training and validation; "
                        "write scenes that have it, to test on and to learn it from few")
    parser.add_argument("--redundancy", type=float, metavar="SHARE",
                        help="share of the objects of --world mentions that have the shape of their colour; the others "
                             "have any (default: 0.9)")
    parser.add_argument("--first", choices=("colour", "shape"), help="what captions of --world mentions say first of "
                        "an object (default: a coin decides for each caption)")
    parser.add_argument("--noise", type=float, metavar="SHARE",
                        help="share of the rich world's training captions that are another scene's or say nothing")
    parser.add_argument("--masks", action="store_true", help="write masks/, too: --num-probe scenes per split and the "
                        "shape at each pixel, for clip_benchmark eval --dataset masks")
    parser.add_argument("--num-train", type=positive, default=20000, help="training scenes (default: %(default)s)")
    parser.add_argument("--num-val", type=natural, default=1000, help="validation scenes (default: %(default)s)")
    parser.add_argument("--num-probe", type=natural, default=1600,
                        help="labelled scenes per split (default: %(default)s)")
    parser.add_argument("--num-pairs", type=natural, default=1000, help="caption pairs per task (default: %(default)s)")
    parser.add_argument("--jobs", type=positive, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--seed", type=natural, default=0, help="same seed, same bytes (default: %(default)s)")


def prepare(parser: argparse.ArgumentParser) -> None:
    sources = parser.add_subparsers(dest="source", required=True)
    for source in KARPATHY:
        karpathy = sources.add_parser(source, help=f"{source} from its images and Karpathy's dataset_{source}.json")
        karpathy.add_argument("--images", required=True, help="folder of the images")
        karpathy.add_argument("--annotations", required=True, metavar="JSON", help=f"dataset_{source}.json")
        _add_output(karpathy)
    shards = sources.add_parser("shards", help="images with captions as you have them: shards, a folder with a .txt "
                                "or .json beside each image, metadata.csv or .jsonl, parquet tables, COCO's captions, "
                                "LLaVA's JSON, a CSV file")
    for split in ("train", "val", "test"):
        shards.add_argument(f"--{split}", metavar="DATA", help="a folder, a file, or a pattern such as "
                            "'DIR/{00000..00005}.tar' or 'DIR/train-*.parquet'")
    shards.add_argument("--images", metavar="DIR", help="folder of the images that a JSON or CSV file names (default: "
                        "its own)")
    _add_captions_key(shards)
    _add_output(shards)
    cub = sources.add_parser("cub", help="CUB-200-2011 with the ten captions of Reed et al. (2016)")
    cub.add_argument("--images", required=True, help="CUB_200_2011/images, a folder per class")
    cub.add_argument("--captions", required=True, help="text_c10, a folder per class")
    cub.add_argument("--split", required=True, choices=("reed", "official"),
                     help="reed: no class is in both, by --classes; official: the train_test_split.txt beside --images")
    cub.add_argument("--classes", nargs=2, metavar=("TRAIN", "TEST"),
                     help="lists of classes: trainvalclasses.txt testclasses.txt")
    _add_output(cub)
    folds = sources.add_parser("folds", help="k splits into training and test, each image tested once")
    folds.add_argument("--shards", required=True, help="such as 'DIR/{00000..00005}.tar', with captions in KEY.json")
    folds.add_argument("--k", type=positive, default=5, help="number of folds (default: %(default)s)")
    _add_captions_key(folds)
    _add_output(folds)
    recap = sources.add_parser("recap", help="recaptioned texts of Recap-DataComp, random subsets")
    recap.add_argument("--shards", required=True, help="shards of Recap-DataComp: 'DIR/{00000..99999}.tar'")
    recap.add_argument("--out", required=True, help="folder to write to, or to resume")
    recap.add_argument("--pairs", type=positive, required=True, help="at least so many, to the end of a shard")
    recap.add_argument("--seed", type=natural, default=0,
                       help="random seed of the order of shards (default: %(default)s)")
    add_engine(recap)


def fetch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", choices=FETCHED, help="data set")
    parser.add_argument("--out", required=True, help="folder to download to")
    parser.add_argument("--print", action="store_true", help="download nothing: addresses, sizes, licence, commands")


def _add_captions_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--captions-key", default="captions",
                        help="name of the captions in a JSON file, or as a column "
                        "(default: captions, or else caption, the lines of a .txt, or text)")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, help="folder to make; must not exist or be empty")
    parser.add_argument("--join", action="store_true",
                        help="train and validate on one long text per image, all its captions")
    parser.add_argument("--skip-broken", action="store_true",
                        help="leave out images that are missing, unreadable or without caption, and list them")


def lengths(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shards", nargs="+", metavar="SHARDS", help="one data set each: 'DIR/{00000..00009}.tar'")
    parser.add_argument("--names", nargs="+", help="names of the data sets (default: their folders)")
    parser.add_argument("--out", default=Default("lengths.png"), help="histogram to write (default: %(default)s)")
    parser.add_argument("--tokenizer", default="ViT-B-32", metavar="MODEL",
                        help="count with this model's tokenizer (default: %(default)s, CLIP's BPE)")


def _add_decoding(parser: argparse.ArgumentParser):
    parser.add_argument("paths", nargs="+", metavar="PATHS", help="images, folders, webdataset shards, patterns")
    add_model(parser, default="photo")
    group = parser.add_argument_group("decoding")
    decoding.add_flags(group, ["length"], flag)
    group.add_argument("--text", help="caption to fill in, e.g. 'a [MASK] dog on a [MASK]', a token each")
    return group


def caption(parser: argparse.ArgumentParser) -> None:
    group = _add_decoding(parser)
    decoding.add_flags(group, OPTIONS, flag)
    group.add_argument("--seed", type=natural, default=0, help="random seed for sampling (default: %(default)s)")
    decoding.add_flags(parser.add_argument_group("help from a CLIP model"), decoding.OF_CLIP, flag)
    group = parser.add_argument_group("output")
    group.add_argument("--out", default=Default("captions.jsonl"),
                       help="a file of all captions: NAME.jsonl, .csv or .parquet, or .json in COCO's results format "
                            "(image_id from the KEY.json beside an image or the digits of its name); or a folder (no "
                            "suffix), which gets a parquet table for each shard, by --engine (default: %(default)s)")
    group.add_argument("--html", help="page to write, one file with the images in it; for hundreds, not millions")
    group.add_argument("--compare", metavar="JSONL", help="captions of the same images by another command, to stand "
                       "beside these on the page")
    _add_limit(add_images(parser))
    add_engine(parser)
    parser.set_defaults(**decoding.DEFAULTS)


def _add_limit(group) -> None:
    group.add_argument("--limit", type=positive, help="only the first so many images")


def attention(parser: argparse.ArgumentParser) -> None:
    _add_decoding(parser)
    _add_limit(parser)
    parser.add_argument("--out", default=Default("attention.html"), help="page to write (default: %(default)s)")


def app(parser: argparse.ArgumentParser) -> None:
    add_model(parser, default="photo")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"),
                        help="compute precision (default: bf16 on cuda, else fp32)")
    parser.add_argument("--blind-images", nargs="+", metavar="PATHS",
                        help=f"images to average into the null image, at least {decoding.MIN_NULL_IMAGES}: sentences "
                             "get blind and debiased scores too")
    parser.add_argument("--host", default="127.0.0.1",
                        help="address to serve at, 0.0.0.0 for your network, too (default: %(default)s, this machine)")
    parser.add_argument("--port", type=positive, default=7860, help="port to serve at (default: %(default)s)")


def export(parser: argparse.ArgumentParser) -> None:
    add_model(parser, device=False)
    parser.add_argument("--out", required=True, help="folder to make; must not exist or be empty")
    parser.add_argument("--to", nargs="+", choices=("open_clip", "timm", "transformers", "torch"),
                        help="destinations (default: all that the model fits)")
    parser.add_argument("--results", nargs="+", default=[], metavar="RESULT.json",
                        help="files of clip_benchmark eval, for the model card")
    parser.add_argument("--half", action="store_true", help="write the weights of open_clip in 16 bit")
    parser.add_argument("--about", metavar="FILE", help="Markdown for the model card: data, licence, limits")
    parser.add_argument("--push", metavar="ORG/NAME", help="upload the folder to the Hugging Face hub, too")


def embed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="PATHS", help="webdataset shards, folders of images, patterns")
    add_model(parser)
    add_images(parser, blind=False)
    add_engine(parser)
    parser.add_argument("--kind", "--feature", dest="feature", choices=("gap", "cls", "patches"), default="gap",
                        help="mean of the patch tokens, class token, or all patch tokens (default: %(default)s)")
    parser.add_argument("--layer", type=int, default=-1, metavar="N",
                        help="after which block of the image tower, from 0, or from the end as -1 (default: "
                             "%(default)s, whose patch tokens the decoder reads)")
    parser.add_argument("--out", required=True, help="folder, which gets a parquet table for each shard")


def score(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_images(parser)
    add_engine(parser)
    parser.add_argument("--images", nargs="+", help="images, folders or patterns; each with each of --captions")
    parser.add_argument("--captions", help="text file, one caption a line")
    parser.add_argument("--pairs", nargs="+", metavar="PATHS",
                        help="instead: shards, or CSV files with the columns image,caption; each image with its own")
    parser.add_argument("--out", default=Default("scores.csv"),
                        help="a .csv or .jsonl file; of --pairs a folder (no suffix), which gets a parquet table for "
                             "each shard, by --engine (default: %(default)s)")
    parser.add_argument("--alpha", type=finite, default=1.0,
                        help="debiased = score - alpha * blind (default: %(default)s)")
    parser.add_argument("--plain", action="store_true",
                        help="the score alone, without blind and debiased, which need a mean image")
    parser.add_argument("--top", type=share, help="share of --pairs to keep, by debiased score, e.g. 0.3")
    parser.add_argument("--out-shards", metavar="FOLDER", help="shards of what --top keeps")


def search(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="PATHS", help="images, folders, webdataset shards, patterns")
    parser.add_argument("sentence", metavar="SENTENCE", help="what you search for, or @FILE with a sentence a line")
    add_model(parser, default="photo")
    parser.add_argument("--top", type=positive, default=10, metavar="K", help="images of each sentence to show and "
                        "write (default: %(default)s)")
    parser.add_argument("--clip", metavar="MODEL:FILE", help="an OpenCLIP model that makes the shortlist: its name and "
                        "weights, or local-dir:DIR")
    parser.add_argument("--shortlist", type=positive, metavar="K",
                        help="with --clip: score only the K images of each sentence with the highest cosine")
    parser.add_argument("--out", default=Default("search.jsonl"),
                        help="file of what is found, NAME.jsonl or .csv (default: %(default)s)")
    parser.add_argument("--html", help="page to write, one file with the images in it")
    add_images(parser)
    parser.set_defaults(plain=False)


def judge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--captions", required=True, nargs="+", metavar="NAME=FILE",
                        help='a system and its captions: JSON with {"captions": {id: caption}}, or the caption '
                             "tool's .jsonl (id: the file's name without folder and ending, or the shard's key)")
    parser.add_argument("--images", required=True,
                        help="folder of images named by id, or webdataset shards 'DIR/{0..9}.tar' with ids as keys "
                             "or as numbers of their samples (0, 1, ...)")
    parser.add_argument("--out", default="judge.jsonl", help="answers, one a line (default: %(default)s)")
    parser.add_argument("--url", default=os.environ.get("OPENAI_BASE_URL"),
                        help="endpoint up to /v1 (default: $OPENAI_BASE_URL; its key: $OPENAI_API_KEY)")
    parser.add_argument("--model", default=os.environ.get("OPENAI_MODEL"),
                        help="name of the judge at the endpoint (default: $OPENAI_MODEL)")
    parser.add_argument("--question", default=QUESTION, help="question to the judge (default: the paper's)")
    parser.add_argument("--seed", type=natural, default=0,
                        help="random seed of the captions' order (default: %(default)s)")
    parser.add_argument("--workers", type=positive, default=4, help="requests at a time (default: %(default)s)")


def reconstruct(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--data", required=True, help="webdataset shards with images and captions")
    parser.add_argument("--num-samples", type=positive, default=8, help="images shown (default: %(default)s)")
    parser.add_argument("--out", default=Default("reconstructions.png"),
                        help="contact sheet to write (default: %(default)s)")


def vq(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    fit = actions.add_parser("fit", help="train one on images, some minutes for small ones")
    fit.add_argument("--train-data", required=True, metavar="SHARDS", help="webdatasets: 'DIR/{00000..00009}.tar'")
    fit.add_argument("--steps", type=positive, default=1000, help="training steps (default: %(default)s)")
    fit.add_argument("--batch-size", type=positive, default=32, help="images of a training step (default: %(default)s)")
    fit.add_argument("--lr", type=finite, default=2e-3, help="the highest learning rate (default: %(default)s)")
    fit.add_argument("--workers", type=natural, default=1,
                     help="image-loading worker processes, 0 loads in this one (default: %(default)s)")
    fit.add_argument("--seed", type=natural, default=0, help="random seed (default: %(default)s)")
    fit.add_argument("--device", help="device to run on (default: cuda if available, otherwise cpu)")
    taming = actions.add_parser("import", help="take over a VQGAN of taming-transformers, Euclidean or Gumbel")
    taming.add_argument("--from", required=True, dest="source", metavar="FILE", help="checkpoint of the VQGAN")
    taming.add_argument("--used", metavar="FILE",
                        help="the class of each code, 0 for those that no image uses, which are dropped: a tensor, as "
                             "VQ-Diffusion's taming_vqvae_2887.pt")
    for action in (fit, taming):
        action.add_argument("--model", required=True, help="the model that is to read the codes: MCD-VQ-...")
        action.add_argument("--out", required=True, help="file to write, for --pretrained of open_clip_train")


def schedule_search(parser: argparse.ArgumentParser) -> None:
    add_model(parser, required=False)
    parser.add_argument("--train-data", required=True, help="webdataset shards: 'DIR/{00000..00009}.tar'")
    parser.add_argument("--steps", type=natural, default=300, help="steps of the short training (default: %(default)s)")
    parser.add_argument("--batch-size", type=positive, default=32,
                        help="images of a training step, and of each gradient measured (default: %(default)s)")
    parser.add_argument("--lr", type=finite, default=1e-3,
                        help="learning rate of the short training (default: %(default)s)")
    parser.add_argument("--num-samples", type=positive, default=1536,
                        help="images measured, each once (default: %(default)s)")
    parser.add_argument("--min-width", type=float, default=0.5,
                        help="minimum width of the proposed interval, which you choose: the criterion always prefers "
                             "narrow intervals (default: %(default)s, the paper's width)")
    parser.add_argument("--seed", type=natural, default=0, help="random seed (default: %(default)s)")
    parser.add_argument("--out", default=Default("schedule.json"), help="every number (default: %(default)s)")
    parser.add_argument("--plot", default=Default("schedule.png"),
                        help="curves over t and intervals (default: %(default)s)")
