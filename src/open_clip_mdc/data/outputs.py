"""Check the outputs of a command before anything is loaded: their suffixes, and that they can be written."""
import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

from .files import AnyPath, open_locked, try_output

FOLDER = ()  # a folder has no suffix
PAGE = (".html", ".htm")
# For each command: the flags that name an output, and the suffixes of each.
OUTPUTS = {
    "finetune": {"out": FOLDER},
    "card": {"out": FOLDER},
    "caption": {"out": (".jsonl", ".csv", ".parquet", ".json"), "html": PAGE},
    "score": {"out": (".csv", ".jsonl"), "out_shards": FOLDER},
    "search": {"out": (".jsonl", ".csv"), "html": PAGE},
    "embed": {"out": FOLDER},
    "scenes": {"out": FOLDER},
    "fetch": {"out": FOLDER},
    "prepare": {"out": FOLDER},
    "export": {"out": FOLDER},
    "attention": {"out": PAGE},
    "vq": {"out": (".pt", ".pth")},
}
# The suffixes that a folder's name may not have. It may be called run-v1.5.
OF_FILES = {suffix for flags in OUTPUTS.values() for suffixes in flags.values() for suffix in suffixes} | {
    f".{suffix}" for suffix in (
        "arrow avif bin bmp ckpt csv feather gif gz h5 hdf5 jpeg jpg jsonl log md msgpack npy npz onnx parquet pdf "
        "pickle pkl safetensors sqlite svg tar tgz tif tiff tsv txt webp xlsx yaml yml zip").split()}
# For each command: the file that it writes beside OUT and that no flag names.
BESIDE = {
    "vq": lambda out: out.with_name(f"{out.name}.png"),  # the contact sheet of `vq fit`
}
RESUMED = ("caption", "search")  # with the journal OUT.part
OR_TABLES = ("caption", "score")  # their --out may also be a folder, with a table for each shard
APPENDED = set()  # their --out is itself the journal
MAKE_PARENTS = {"scenes", "fetch", "finetune", "card", "prepare", "export"}

HELD = {}  # the open files of locks, by path, which reserve default names


class Default(str):
    """An output's default name. A file of that name is not replaced, unlike one that the user names."""


def is_folder(out: str) -> bool:
    """Return whether --out is a folder for tables, one for each shard: it exists as a folder, or has no suffix."""
    return Path(out).is_dir() or not Path(out).suffix


def check_suffix(flag: str, value: str, suffixes: tuple[str, ...], tables: bool = False) -> None:
    """Raise ValueError for a name without one of the `suffixes`. () is for a folder. `tables` also allows a folder."""
    path = Path(value)
    if tables and is_folder(value):
        return
    if not suffixes:
        if path.suffix.lower() in OF_FILES and not path.is_dir():
            raise ValueError(f"{flag} {value} should be a folder, but {path.suffix} is the suffix of a file: "
                             f"give another name")
    elif path.suffix.lower() not in suffixes:
        folder = ", or be a folder (no suffix) for the tables of shards" if tables else ""
        raise ValueError(f"{flag} {value} should end in {' or '.join(suffixes)}{folder}")


def free_name(path: str) -> Default:
    """Return the first of NAME, NAME-2, NAME-3, ... that neither exists nor is written by another process."""
    stem, suffix = os.path.splitext(path)
    return Default(next(name for number in count(1) if not os.path.lexists(
        name := f"{stem}-{number}{suffix}" if number > 1 else path) and reserve(Path(name))))


def reserve(path: Path) -> bool:
    """Hold a lock for a file until `release`. Returns False if another process has it."""
    hidden = path.with_name(f".{path.name}.lock")
    try:
        file = open_locked(hidden)
    except OSError:  # no locks here. A folder that cannot be written is refused by `try_output`
        return True
    if file:
        HELD[hidden] = file
    return file is not None


def release() -> None:
    """Give back the names that this process has reserved."""
    while HELD:
        hidden, file = HELD.popitem()
        hidden.unlink(missing_ok=True)
        file.close()


def files_in(values: Iterable) -> Iterator[str]:
    """Yield the files that values of arguments name: FILE, @FILE, NAME=FILE or MODEL:FILE, alone or in a list."""
    for value in values:
        for text in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(text, str):
                yield from filter(os.path.isfile, (
                    text, text.removeprefix("@"), text.partition("=")[2], text.partition(":")[2]))


def inputs_of(args: argparse.Namespace) -> Iterator[str]:
    return files_in(value for name, value in vars(args).items() if name not in OUTPUTS[args.tool])


def check_unread(flag: str, out: AnyPath, inputs: Iterable[str]) -> None:
    """Raise ValueError if a command would replace one of the files that it reads, by whatever name."""
    if os.path.isfile(out) and (same := next((name for name in inputs if os.path.samefile(name, out)), None)):
        raise ValueError(f"{flag}: {out} would replace {same}, which is read: give another name")


def check_beside(args: argparse.Namespace) -> None:
    """Check the second file of a command. It is replaced only together with OUT, as no flag names it."""
    if args.tool not in BESIDE or getattr(args, "action", "fit") != "fit":
        return
    second = BESIDE[args.tool](Path(args.out))
    check_unread(f"--out {args.out}", second, inputs_of(args))
    if os.path.lexists(second) and not os.path.exists(args.out):
        raise ValueError(f"--out {args.out} comes with {second}, which exists already: remove it or give another name")
    try_output(second)


def ready(args: argparse.Namespace) -> None:
    """Check every output of a command. If the file of a default name exists, `args` gets the next free name."""
    if getattr(args, "print", False):  # fetch --print writes nothing
        return
    for name, suffixes in OUTPUTS.get(args.tool, {}).items():
        value = getattr(args, name, None)
        if not value:
            continue
        flag = f"--{name.replace('_', '-')}"
        tables = name == "out" and args.tool in OR_TABLES
        check_suffix(flag, value, suffixes, tables)
        if not isinstance(value, Default):  # which is never replaced
            check_unread(flag, value, inputs_of(args))
        folder = not suffixes or tables and is_folder(value)
        if isinstance(value, Default) and not folder:
            vars(args)[name] = free_name(value)
            if getattr(args, name) != value:
                print(f"{value} exists already: writing to {getattr(args, name)}", file=sys.stderr)
        elif not folder and os.path.isfile(value) and args.tool not in APPENDED and os.path.getsize(value):
            print(f"{flag} {value} exists already, and is replaced at the end", file=sys.stderr)
        if name != "out_shards" and args.tool not in MAKE_PARENTS and not Path(value).absolute().parent.is_dir():
            raise FileNotFoundError(f"{flag} {value}: its folder does not exist")
        try_output(getattr(args, name), folder)
        if name == "out" and args.tool in RESUMED and not folder:
            try_output(f"{args.out}.part")
    check_beside(args)
