"""Outputs of commands: which suffixes they have, and a trial of each place before anything is loaded."""
import argparse
import os
import sys
from itertools import count
from pathlib import Path

from .files import is_written_to, try_output

FOLDER = ()  # has no suffix of a file
PAGE = (".html", ".htm")
# Command (and action): the suffixes of what its flags name.
OUTPUTS = {
    "caption": {"out": (".jsonl", ".csv", ".parquet", ".json"), "html": PAGE},
    "score": {"out": (".csv", ".jsonl"), "out_shards": FOLDER},
    "search": {"out": (".jsonl", ".csv"), "html": PAGE},
    "embed": {"out": FOLDER},
    "scenes": {"out": FOLDER},
    "fetch": {"out": FOLDER},
    "prepare": {"out": FOLDER},
    "export": {"out": FOLDER},
    "attention": {"out": PAGE},
    "judge": {"out": (".jsonl",)},
    "reconstruct": {"out": (".png",)},
    "lengths": {"out": (".png",)},
    "vq": {"out": (".pt", ".pth")},
    "schedule-search": {"out": (".json",), "plot": (".png",)},
    "app": {},
    "list": {},
}
# A folder may be called run-v1.5, but not this.
OF_FILES = {suffix for flags in OUTPUTS.values() for suffixes in flags.values() for suffix in suffixes} | {
    f".{suffix}" for suffix in (
        "arrow avif bin bmp ckpt csv feather gif gz h5 hdf5 jpeg jpg jsonl log md msgpack npy npz onnx parquet pdf "
        "pickle pkl safetensors sqlite svg tar tgz tif tiff tsv txt webp xlsx yaml yml zip").split()}
OR_TABLES = ("caption", "score")  # which write tables of shards into a folder, too
MAKE_PARENTS = ("scenes", "fetch", "prepare", "export")


class Default(str):
    """The name of an output that nobody chose: what is there is not replaced."""


def is_folder(out: str) -> bool:
    """Return whether --out means a folder of tables, one for each shard, rather than one file: it has no suffix."""
    return Path(out).is_dir() or not Path(out).suffix


def check_suffix(flag: str, value: str, suffixes: tuple[str, ...], tables: bool = False) -> None:
    """Raise ValueError for a name with none of the `suffixes` (no suffix: of a folder). `tables`: or a folder."""
    path = Path(value)
    if is_written_to(path) or tables and is_folder(value):
        return
    if not suffixes:
        if path.suffix.lower() in OF_FILES and not path.is_dir():
            raise ValueError(f"{flag} {value} is to be a folder, and {path.suffix} is the suffix of a file: "
                             f"give another name")
    elif path.suffix.lower() not in suffixes:
        folder = ", or be a folder (no suffix) for the tables of shards" if tables else ""
        raise ValueError(f"{flag} {value} should end in {' or '.join(suffixes)}{folder}")


def beside(path: str) -> str:
    """Return the first of NAME-2, NAME-3, ... that is not there."""
    stem, suffix = os.path.splitext(path)
    return next(name for number in count(2) if not os.path.lexists(name := f"{stem}-{number}{suffix}"))


def ready(args: argparse.Namespace) -> None:
    """Check and try every output of a command. Where a default is taken, `args` gets the next free name."""
    if getattr(args, "print", False):  # of fetch
        return
    names = OUTPUTS[args.tool]
    given = {name: value for name in names if (value := getattr(args, name, None))}
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        tables = name == "out" and args.tool in OR_TABLES
        check_suffix(flag, value, names[name], tables)
        folder = not names[name] or tables and is_folder(value)
        if not folder and os.path.isfile(value) and args.tool != "judge":  # which resumes
            if isinstance(value, Default):
                vars(args)[name] = beside(value)
                print(f"{value} is there already: this goes to {getattr(args, name)}", file=sys.stderr)
            elif os.path.getsize(value):
                print(f"{flag} {value} is there already, and is replaced at the end", file=sys.stderr)
        if name != "out_shards" and args.tool not in MAKE_PARENTS and not Path(value).absolute().parent.is_dir():
            raise FileNotFoundError(f"{flag} {value}: its folder does not exist")
        try_output(getattr(args, name), folder)
