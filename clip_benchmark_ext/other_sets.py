"""Build clip_benchmark's own data sets without downloads, and your own class folders.

clip_benchmark's builders download missing files into your folder. Here they may only read, and a message says which
files they need.
"""
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from clip_benchmark.datasets import builder
from torch.utils.data import Dataset
from torchvision.datasets import DatasetFolder, ImageFolder
from torchvision.transforms import Compose

from open_clip_mdc.data.images import decode_image, upright
from open_clip_mdc.data.paths import is_hidden, is_image
from open_clip_mdc.errors import close_names

from .datasets.masks import MASKED, MaskedImages

FOLDER = "folder"
VALIDATION = ("val", "validation", "valid")
FOLDER_LAYOUT = "DIR/train/CLASS/*, DIR/test/CLASS/*"
_CLASSES = "ROOT/CLASS/*.JPEG, a folder for each of ImageNet's classes"
_KARPATHY = "ROOT/{0}_SPLIT_karpathy.txt (or --annotation_file) and ROOT/*.jpg"
_DEVKIT = "ROOT/meta.bin and ROOT/val/CLASS/*.JPEG, as torchvision's ImageNet makes them"
# The files that clip_benchmark reads. For other data sets they are those of their torchvision class, download=True.
LAYOUTS = {
    "imagenet1k": _DEVKIT, "imagenet-w": _DEVKIT, "babel_imagenet": _DEVKIT,
    "imagenet1k-unverified": "ROOT/train/CLASS/*.JPEG and ROOT/val/CLASS/*.JPEG",
    "imagenetv2": "ROOT/ImageNetV2-matched-frequency/", "imagenet_sketch": _CLASSES, "imagenet-a": _CLASSES,
    "imagenet-r": _CLASSES, "imagenet-o": _CLASSES, "objectnet": "ROOT/objectnet-1.0/ and its mappings/* in ROOT",
    "fer2013": "ROOT/train/CLASS/*.jpg and ROOT/test/CLASS/*.jpg",
    "mscoco_captions": "ROOT/coco_SPLIT_karpathy.json (or --annotation_file) and ROOT/val2014/*.jpg (of train: "
                       "ROOT/train2014)",
    "flickr8k": _KARPATHY.format("flickr8k"), "flickr30k": _KARPATHY.format("flickr30k"),
}
UPSTREAM = (*LAYOUTS, *"""cifar10 cifar100 voc2007 voc2007_multilabel multilingual_mscoco_captions crossmodal3600 xtd10
            xtd200 flickr30k-200 food101 sun397 cars fgvc_aircraft dtd pets caltech101 flowers mnist stl10 eurosat gtsrb
            country211 pcam renderedsst2 dummy""".split())  # the last is for clip_benchmark's tests
PREFIXES = ("wds/", "vtab/", "tfds/")  # before any name
FETCHES = ("subprocess.Popen", "os.system", "os.posix_spawn", "socket.connect", "socket.getaddrinfo", "urllib.Request")


def covers(name: str) -> bool:
    return name == FOLDER or name in UPSTREAM or name.startswith(PREFIXES)


def known_name(name: str) -> str:
    name = FOLDER if name == "imagefolder" else name
    if covers(name) or name in MASKED:
        return name
    from .selection_datasets import ROWS, find_row
    if find_row(name):
        return name
    families = dict.fromkeys(row.split("/")[0] + "/NAME" * ("/" in row) for row in ROWS)
    theirs = "clip_benchmark's (cifar10, ...)"
    names = ", ".join((*families, *(f"{prefix}NAME" for prefix in PREFIXES), *MASKED, theirs))
    raise ValueError(f"--dataset {name} is not known{close_names(name, (*ROWS, *MASKED, *UPSTREAM))}. Class folders: "
                     f"--dataset folder --dataset_root DIR ({FOLDER_LAYOUT}). Others: {names}")


class Fetching(PermissionError):
    """Raised when a builder is about to download, to start a program, or to write to the user's folder."""


_reading: list[str] = []  # the folder of the running builder


def _hook(event: str, args: tuple) -> None:
    if not _reading:
        return
    writes = event == "open" and len(args) > 2 and isinstance(args[2], int) and args[2] & (
        os.O_WRONLY | os.O_RDWR | os.O_CREAT) or event in ("os.mkdir", "os.rename", "os.remove")
    if event in FETCHES or writes and isinstance(args[0], (str, bytes, os.PathLike)) and Path(
            os.path.abspath(os.fsdecode(args[0]))).is_relative_to(_reading[-1]):
        raise Fetching(f"{event} {args[0]!r}")


_watch = cache(lambda: sys.addaudithook(_hook))  # for ever, as Python cannot remove an audit hook


@contextmanager
def reading_only(name: str, root: str) -> Iterator[None]:
    """Refuse downloads, new programs and writes below `root` within the block.

    Raises FileNotFoundError that names the files which a data set needs.
    """
    _watch()
    _reading.append(os.path.abspath(root))
    try:
        yield
    except Exception as problem:
        cause = problem
        while cause is not None and not isinstance(cause, Fetching):
            cause = cause.__cause__ or cause.__context__
        if cause is None and not isinstance(problem, (FileNotFoundError, RuntimeError)):  # the latter is torchvision's
            raise
        raise FileNotFoundError(f"{name} is not complete in {root}, and nothing is downloaded ({problem}): give "
                                f"--dataset_root ROOT with "
                                f"{LAYOUTS.get(name, 'the files of its class in torchvision or clip_benchmark')}, or a "
                                f"webdataset by --dataset wds/{name}") from problem
    finally:
        _reading.pop()


class ClassFolders(ImageFolder):
    """Images in a folder per class. Hidden files and folders are left out."""

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        names = sorted(entry.name for entry in os.scandir(directory) if entry.is_dir() and not is_hidden(entry.name))
        if not names:
            raise FileNotFoundError(f"no class folder in {directory}: --dataset folder reads {FOLDER_LAYOUT}")
        return names, {name: number for number, name in enumerate(names)}


def read_json(name: str) -> dict:
    own = Path(builder.__file__).with_name(name)
    return json.loads((Path(name) if os.path.exists(name) else own).read_bytes())


def class_folders(root: str, split: str, transform, language: str = "en", classnames: str | None = None,
                  templates: str | None = None) -> ClassFolders:
    """Return your own images in class folders. Without a test split, val (validation, valid) is the test split.

    `classnames` and `templates` are clip_benchmark's custom files, with the key "folder". By default a class has the
    name of its folder, with spaces for "_", and the templates are ImageNet's. Raises FileNotFoundError.
    """
    names = (split, *(VALIDATION if split in ("test", "val") else ()))
    folder = next((path for name in names if (path := Path(root, name)).is_dir()), None)
    if folder is None:
        raise FileNotFoundError(f"no folder {split} in {root}: --dataset folder reads {FOLDER_LAYOUT}")
    dataset = ClassFolders(str(folder), transform, is_valid_file=lambda path: (
        not is_hidden(os.path.relpath(path, folder)) and is_image(path)), allow_empty=True)
    filled = set(dataset.targets)
    if empty := [name for name, number in dataset.class_to_idx.items() if number not in filled]:
        if not filled:
            raise FileNotFoundError(f"no image in the class folders of {folder}")
        logging.warning("%s has no image of %s", folder, ", ".join(empty))
    dataset.classes = (read_json(classnames)[FOLDER] if classnames else
                       [name.replace("_", " ") for name in dataset.class_to_idx])
    found = read_json(templates or f"{language}_zeroshot_classification_templates.json")
    dataset.templates = builder.value_from_first_key_found(found, [FOLDER, "imagenet1k"])
    return dataset


def build(name: str, root: str, transform, split: str, **options) -> Dataset:
    """Return a data set of clip_benchmark's, by its `options`, or class folders. Images are turned upright."""
    if transform is not None and not name.startswith("wds/"):  # not nested, as imagenet-w looks into it
        transform = Compose([upright, *getattr(transform, "transforms", [transform])])
    if name == FOLDER:
        dataset = class_folders(root, split, transform, options["language"], options["custom_classname_file"],
                                options["custom_template_file"])
    elif "://" in root:  # a download that was asked for
        return builder.build_dataset(name, root, transform, split, **options)
    else:
        try:
            with reading_only(name, root):
                dataset = builder.build_dataset(name, root, transform, split, download=False, **options)
        except ModuleNotFoundError as problem:
            raise ValueError(f"{name} needs the package {problem.name}, which is not installed") from problem
    if isinstance(dataset, DatasetFolder):
        dataset.loader = decode_image
    return dataset


def _place(dataset: Dataset) -> str | None:
    if isinstance(dataset, MaskedImages):
        return dataset.split
    return dataset.root if isinstance(dataset, ClassFolders) else None


def _filled(dataset: Dataset) -> str:
    return "if need be empty" if isinstance(dataset, ClassFolders) else "with an image each"  # torchvision wants one


def check_classes(splits: Mapping[str, Dataset]) -> None:
    if "val" in splits and (place := _place(splits["val"])) is not None and place == _place(splits["test"]):
        raise ValueError(f"{place} is both the validation and the test split, as there is no other: leave out "
                         "--val_split")
    numbers = {split: dataset.class_to_idx for split, dataset in splits.items() if hasattr(dataset, "class_to_idx")}
    for split, own in numbers.items():
        first = next(iter(numbers))
        if unlike := sorted(own.items() ^ numbers[first].items()):
            only = sorted(own.keys() ^ numbers[first].keys()) or [unlike[0][0]]
            raise ValueError(f"{split} and {first} have different classes, so that labels differ: {len(own)} and "
                             f"{len(numbers[first])}, and {only[0]!r} is only in {split if only[0] in own else first}. "
                             f"Add the missing folders, {_filled(splits[split])}")


def check_names(dataset: Dataset) -> None:
    folders = len(set(getattr(dataset, "class_to_idx", {}).values()))
    names = getattr(dataset, "classes", None) or []
    if folders and names and folders != len(names):
        raise ValueError(f"{len(names)} class names, but {folders} class folders in {dataset.root}: add the missing "
                         f"folders, {_filled(dataset)}, or give --custom_classname_file")
