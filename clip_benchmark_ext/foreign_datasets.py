"""Build clip_benchmark's own data sets without downloads, and your own class folders.

clip_benchmark's builders download what is not there. So `check_there` looks first for the files that they need.
"""
import logging
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from clip_benchmark.datasets import builder
from torch.utils.data import Dataset
from torchvision.datasets import DatasetFolder, ImageFolder
from torchvision.transforms import Compose

from open_clip_mdc.data.files import parse_json
from open_clip_mdc.data.images import decode_image, upright
from open_clip_mdc.data.paths import is_hidden, is_image

from .datasets import known
from .datasets.known import FOREIGN, MASKED

FOLDER = "folder"
VALIDATION = ("val", "validation", "valid")
FOLDER_LAYOUT = "DIR/train/CLASS/*, DIR/test/CLASS/*"
HELD_OUT = 0.2  # share of the images that are the test split, if there is only train
PREFIXES = ("wds/", "vtab/", "tfds/")  # before any name


def covers(name: str) -> bool:
    return name == FOLDER or name in FOREIGN or name.startswith(PREFIXES)


def kind_of(name: str) -> str:
    """Return the kind of a data set, of datasets.json. Class folders are "foreign", a plug-in's sets "selection"."""
    return "foreign" if covers(name) else known.kind_of(name) or "selection"


def known_name(name: str) -> str:
    name = FOLDER if name == "imagefolder" else name
    if not covers(name) and name not in MASKED:
        from .selection_datasets import find_row
        find_row(name)
    return name


def missing(name: str, root: str, problem: object) -> FileNotFoundError:
    layout = FOREIGN.get(name, {}).get("layout", "the files of its class in torchvision or clip_benchmark")
    return FileNotFoundError(f"{name} is not complete in {root}, and nothing is downloaded ({problem}): give "
                             f"--dataset_root ROOT with {layout}, or a webdataset by --dataset wds/{name}")


def check_there(name: str, root: str, split: str, annotation_file: str | None, language: str) -> None:
    """Raise FileNotFoundError that names the files of a data set if a builder of clip_benchmark would download some."""
    row = FOREIGN.get(name, {})
    if not os.path.isdir(root) or not os.listdir(root):
        raise missing(name, root, "it is no folder with files")
    names = {"split": split, "language": language, "photos": "train" if split == "train" else "val",
             "annotator": "zh" if language == "zh" else "karpathy"}
    files = [os.path.join(root, file.format(**names)) for file in row.get("files", ())]
    if "annotation" in row:
        files.append(annotation_file or os.path.join(root, row["annotation"].format(**names)))
    for file in files:
        if not os.path.exists(file):
            raise missing(name, root, f"there is no {file}")


class ClassFolders(ImageFolder):
    """Images in a folder per class. Hidden files and folders are left out."""

    @property
    def place(self) -> str:
        return self.root

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        names = sorted(entry.name for entry in os.scandir(directory) if entry.is_dir() and not is_hidden(entry.name))
        if not names:
            raise FileNotFoundError(f"no class folder in {directory}: --dataset folder reads {FOLDER_LAYOUT}")
        return names, {name: number for number, name in enumerate(names)}


def texts_of(name: str, *keys: str) -> list[str]:
    """Return the texts of the first of the keys that a file has, or if it is not there clip_benchmark's of its name."""
    path = Path(name) if os.path.exists(name) else Path(builder.__file__).parent / name
    found = builder.value_from_first_key_found(parse_json(path.read_bytes(), path), keys)
    if not isinstance(found, (list, dict)):
        raise ValueError(f"{path} should have a list of texts for {keys[0]!r}, not {found!r:.100}")
    return found


def templates_of(name: str, file: str | None, language: str) -> list[str]:
    """Return the templates of a data set, or else ImageNet's, from a custom file or clip_benchmark's of a language."""
    return texts_of(file or f"{language}_zeroshot_classification_templates.json", name, "imagenet1k")


tell = cache(logging.warning)  # once, as a data set is built several times


def keep_part(dataset: ClassFolders, split: str, seed: int) -> None:
    """Keep the images of a split: HELD_OUT of each class, drawn with a seed, are "test", and the others "train"."""
    from sklearn.model_selection import train_test_split
    try:
        train, test = train_test_split(dataset.samples, test_size=HELD_OUT, random_state=seed, stratify=dataset.targets)
    except ValueError as problem:
        raise ValueError(f"{dataset.root} is too small to be both train and test ({problem}): add a folder test") \
            from problem
    tell(f"{dataset.root} is split, as there is no folder test: {len(train)} images train and {len(test)} test, drawn "
         f"with --seed {seed}")
    dataset.samples = dataset.imgs = sorted(train if split == "train" else test)
    dataset.targets = [target for _, target in dataset.samples]


def class_folders(root: str, split: str, transform, language: str = "en", classnames: str | None = None,
                  templates: str | None = None, seed: int | None = None) -> ClassFolders:
    """Return your own images in class folders. Without a test split, val (validation, valid) is the test split.

    With a `seed` and train alone, it is split into train and test.

    `classnames` and `templates` are clip_benchmark's custom files, with the key "folder". By default a class has the
    name of its folder, with spaces for "_", and the templates are ImageNet's. Raises FileNotFoundError.
    """
    names = (split, *(VALIDATION if split in ("test", "val") else ()))
    there = {name for name in ("train", "test", *VALIDATION, split) if Path(root, name).is_dir()}
    alone = seed is not None and there == {"train"} and split in ("train", "test")
    folder = next((Path(root, name) for name in (*names, *["train"] * alone) if name in there), None)
    if folder is None:
        raise FileNotFoundError(f"no folder {split} in {root}: --dataset folder reads {FOLDER_LAYOUT}")
    dataset = ClassFolders(str(folder), transform, is_valid_file=lambda path: (
        not is_hidden(os.path.relpath(path, folder)) and is_image(path)), allow_empty=True)
    filled = set(dataset.targets)
    if empty := [name for name, number in dataset.class_to_idx.items() if number not in filled]:
        if not filled:
            raise FileNotFoundError(f"no image in the class folders of {folder}")
        logging.warning("%s has no image of %s", folder, ", ".join(empty))
    dataset.classes = (texts_of(classnames, FOLDER) if classnames else
                       [name.replace("_", " ") for name in dataset.class_to_idx])
    dataset.templates = templates_of(FOLDER, templates, language)
    if alone:
        keep_part(dataset, split, seed)
    return dataset


def build(name: str, root: str, transform, split: str, seed: int | None = None, **options) -> Dataset:
    """Return a data set of clip_benchmark's, by its `options`, or class folders. Images are turned upright."""
    if transform and not name.startswith("wds/"):  # not nested, as imagenet-w looks into it
        transform = Compose([upright, *getattr(transform, "transforms", [transform])])
    if name == FOLDER:
        dataset = class_folders(root, split, transform, options["language"], options["custom_classname_file"],
                                options["custom_template_file"], seed)
    elif "://" in root:  # a download that was asked for
        return builder.build_dataset(name, root, transform, split, **options)
    else:
        if name != "dummy" and not name.startswith("wds/"):
            check_there(name, root, split, options["annotation_file"], options["language"])
        try:
            dataset = builder.build_dataset(name, root, transform, split, download=False, **options)
        except ModuleNotFoundError as problem:
            raise ValueError(f"{name} needs the package {problem.name}, which is not installed") from problem
        except (FileNotFoundError, RuntimeError) as problem:  # the latter is torchvision's
            raise missing(name, root, problem) from problem
    if isinstance(dataset, DatasetFolder):
        dataset.loader = decode_image
    return dataset


def _filled(dataset: Dataset) -> str:
    return "if need be empty" if isinstance(dataset, ClassFolders) else "with an image each"  # torchvision wants one


def check_classes(splits: Mapping[str, Dataset]) -> None:
    places = {split: getattr(dataset, "place", None) for split, dataset in splits.items()}
    if (place := places.get("val")) and place == places["test"]:
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
