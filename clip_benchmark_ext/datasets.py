"""The compositionality data sets (SugarCrepe, ARO, Winoground, VALSE) as lists of cases read from local folders.

Place in the paper: the data of the compositionality table (ARO and SugarCrepe; Winoground and VALSE beside them). They
fit clip_benchmark's `image_caption_selection` task. Nothing is ever downloaded; a missing file says where to get it.

    dataset = build_dataset("sugar_crepe/swap_obj", root, transform)
    images, captions = dataset[0]     # [3, H, W] and C texts, the right one first
                                      # Winoground: [2, 3, H, W] and 2 texts, caption i belongs to image i
    loader = DataLoader(dataset, batch_size=64, collate_fn=dataset.collate_fn)   # order kept: case k is `cases[k]`
    metrics = {**selection_metrics(dataset.name, scores, dataset.cases), **dataset.facts}     # selection.py

`dataset.cases` holds the records (what a metric needs: key, captions, group), `dataset.facts` what a result must state
about its data: rows left out for want of a picture, hash of the perturbation file.

Dimensions: B batch, C candidates, I images of a case, H and W the transform's size.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath

from clip_benchmark.datasets.builder import image_captions_collate_fn
from PIL import Image
from torch import Tensor, stack
from torch.utils.data import Dataset

from .perturb import Tagger, frozen_options

SUGAR_CREPE_SUBSETS = ("add_att", "add_obj", "replace_att", "replace_obj", "replace_rel", "swap_att", "swap_obj")
VALSE_PIECES = ("existence", "plurals", "counting-hard", "counting-small-quant", "counting-adversarial", "relations",
                "action-replacement", "actant-swap", "coreference-standard", "coreference-hard", "foil-it")
DATASETS = (*(f"sugar_crepe/{subset}" for subset in SUGAR_CREPE_SUBSETS),
            "aro/vg_relation", "aro/vg_attribution", "aro/coco_order", "aro/flickr30k_order", "winoground",
            *(f"valse/{piece}" for piece in VALSE_PIECES))

_DRIVE = "https://drive.google.com/uc?id="
_VG_IMAGES = f"vgr_vga_images.zip from {_DRIVE}1qaPlrwhGNMrR3a11iopZUT_GPP_LrgP9 (pictures)"
_KARPATHY = "https://storage.googleapis.com/sfr-vision-language-research/datasets"


@dataclass(frozen=True)
class Source:
    """Where a data set's files are looked for and, if they are not there, where to get them.

    `folders` are tried below the root, in this order, for `file`; `images` below the folder of `file`, for pictures.
    """

    file: str
    folders: tuple[str, ...]
    images: tuple[str, ...]
    fetch: str
    layout: str


@dataclass(frozen=True)
class Case:
    """One decision: which of `captions` fits the image; the first one does (Winoground: caption i fits image i).

    `group` is what the official metric averages over: the relation, the pair of attributes, the subset, the piece.
    `box` is (left, upper, right, lower) in pixels of the picture, or None for the whole of it.
    """

    key: str
    images: tuple[Path, ...]
    captions: tuple[str, ...]
    group: str
    box: tuple[int, int, int, int] | None = None


@dataclass(eq=False, repr=False)
class SelectionDataset(Dataset):
    """Map-style data set over cases; see the head of this file for what an item is."""

    name: str
    cases: list[Case]
    transform: Callable[[Image.Image], Tensor] | None = None
    facts: dict[str, int | str] = field(default_factory=dict)
    collate_fn = staticmethod(image_captions_collate_fn)  # [B, 3, H, W] or [B, I, 3, H, W], and B lists of C texts

    def __len__(self) -> int:
        return len(self.cases)

    def __getitem__(self, index: int) -> tuple[Tensor | Image.Image | list[Image.Image], list[str]]:
        """Item `index`.

        Raises:
            ValueError: the picture cannot be decoded.
        """
        case = self.cases[index]
        images = [_open_rgb(path, case.box) for path in case.images]
        if self.transform is not None:
            images = [self.transform(image) for image in images]
            images = images[0] if len(images) == 1 else stack(images)
        elif len(images) == 1:
            images = images[0]
        return images, list(case.captions)


def is_selection_dataset(name: str) -> bool:
    """Whether `build_dataset` knows this name (VALSE: any piece, the file may be the user's own)."""
    return name in DATASETS or re.fullmatch(r"valse/[\w-]+", name) is not None


def build_dataset(
    name: str,
    root: str | Path,
    transform: Callable[[Image.Image], Tensor] | None = None,
    perturbations: str | Path | None = None,
    tagger: Tagger | None = None,
) -> SelectionDataset:
    """Read a data set from `root` (clip_benchmark's --dataset_root).

    Args:
        name: one of `DATASETS`.
        root: the folder that was fetched; each message about a missing file describes it.
        transform: from an RGB picture to [3, H, W]; None leaves pictures as they are.
        perturbations: ARO Order only: the frozen negatives (perturb.py); default beside the captions' file.
        tagger: ARO Order only: part-of-speech tagger for making the negatives at first use.

    Raises:
        FileNotFoundError: a file, a folder or some pictures are missing; says which, what to fetch and the layout.
        ValueError: unknown name, or the data are not in the format they should have; says which row.
    """
    root = Path(root)
    if not is_selection_dataset(name):
        raise ValueError(f"unknown data set {name!r}; there are: {', '.join(DATASETS)}")
    family, _, part = name.partition("/")
    if family == "sugar_crepe":
        cases, facts = _sugar_crepe(name, part, root)
    elif family == "valse":
        cases, facts = _valse(name, part, root)
    elif name == "winoground":
        cases, facts = _winoground(name, root)
    elif part in ("vg_relation", "vg_attribution"):
        cases, facts = _visual_genome(name, part, root)
    else:
        cases, facts = _order(name, part, root, perturbations, tagger)
    return SelectionDataset(name, cases, transform, facts)


def _sugar_crepe(name: str, subset: str, root: Path) -> tuple[list[Case], dict]:
    """A dict from keys (with gaps) to filename, caption, negative_caption. Official: github.com/RAIVNLab/sugar-crepe.

    A file `rows_with_image.json` ({subset: [keys]}) beside it restricts the set to those rows.
    """
    source = Source(
        file=f"{subset}.json",
        folders=("", "sugar_crepe", "data"),
        images=("val2017", "images", "../val2017"),
        fetch=f"https://raw.githubusercontent.com/RAIVNLab/sugar-crepe/main/data/{subset}.json and "
              "http://images.cocodataset.org/zips/val2017.zip (pictures)",
        layout=f"ROOT/{subset}.json, ROOT/val2017/*.jpg",
    )
    path = _find(source, name, root)
    rows = _read_json(path, dict)
    left_out = 0
    selection = path.with_name("rows_with_image.json")
    if selection.is_file():
        keys = _value(_read_json(selection, dict), subset, list, selection, "the file")
        unknown = [key for key in keys if key not in rows]
        if unknown:
            raise ValueError(f"{selection} names rows that {path} does not have, such as {unknown[0]!r}")
        left_out, rows = len(rows) - len(set(keys)), {key: rows[key] for key in dict.fromkeys(keys)}
        if left_out:
            logging.warning("%s: %d of %d rows are left out, because %s names only %d; this is not the full data set",
                            name, left_out, left_out + len(rows), selection, len(rows))
    folder = _image_folder(source, name, path)
    cases = []
    for key, row in rows.items():
        filename, caption, negative = _texts(row, ("filename", "caption", "negative_caption"), path, key)
        cases.append(Case(key, (_inside(folder, filename, path, key),), (caption, negative), subset))
    _need_images(source, name, folder, cases)
    return cases, {"cases_left_out": left_out}


def _visual_genome(name: str, part: str, root: Path) -> tuple[list[Case], dict]:
    """ARO's VG-Relation and VG-Attribution: a list of crops with a true and a false caption."""
    file, drive_id = {
        "vg_relation": ("visual_genome_relation.json", "1kX2iCHEv0CADL8dSO1nMdW-V0NqIAiP3"),
        "vg_attribution": ("visual_genome_attribution.json", "13tWvOrNOLHxl3Rm9cR3geAdHx2qR3-Tw"),
    }[part]
    source = Source(file, ("", "aro"), ("images",), f"{file} from {_DRIVE}{drive_id} and {_VG_IMAGES}",
                    f"ROOT/{file}, ROOT/images/*.jpg")
    path = _find(source, name, root)
    folder = _image_folder(source, name, path)
    cases = []
    for index, row in enumerate(_read_json(path, list)):
        image, true, false = _texts(row, ("image_path", "true_caption", "false_caption"), path, index)
        left, upper, width, height = (
            round(_value(row, key, (int, float), path, index)) for key in ("bbox_x", "bbox_y", "bbox_w", "bbox_h"))
        if width <= 0 or height <= 0:
            raise ValueError(f"{path}, row {index}: an empty box, {width} x {height} pixels")
        if part == "vg_relation":
            (group,) = _texts(row, ("relation_name",), path, index)
        else:
            attributes = _value(row, "attributes", list, path, index)
            if len(attributes) != 2:
                raise ValueError(f"{path}, row {index}: 'attributes' should have two entries, not {len(attributes)}")
            group = f"{attributes[0]}_{attributes[1]}"
        cases.append(Case(str(index), (_inside(folder, image, path, index),), (true, false), group,
                          (left, upper, left + width, upper + height)))
    _need_images(source, name, folder, cases)
    return cases, {"cases_left_out": 0}


def _order(
    name: str, part: str, root: Path, perturbations: str | Path | None, tagger: Tagger | None
) -> tuple[list[Case], dict]:
    """ARO's COCO-Order and Flickr30k-Order: one case per caption of Karpathy's test split, five word orders each."""
    file, pictures, layout = {
        "coco_order": ("coco_karpathy_test.json", "http://images.cocodataset.org/zips/val2014.zip", "val2014/*.jpg"),
        "flickr30k_order": ("flickr30k_test.json", "https://forms.illinois.edu/sec/229675", "flickr30k-images/*.jpg"),
    }[part]
    source = Source(file, ("", "aro", part.partition("_")[0]), (),
                    f"{_KARPATHY}/{file} and {pictures} (pictures)", f"ROOT/{file}, ROOT/{layout}")
    path = _find(source, name, root)
    keys, images, captions = [], [], []
    for index, row in enumerate(_read_json(path, list)):
        (image,) = _texts(row, ("image",), path, index)
        for number, caption in enumerate(_value(row, "caption", list, path, index)):
            keys.append(f"{image}#{number}")
            images.append(_inside(path.parent, image, path, index))
            captions.append(caption)
            if not isinstance(caption, str):
                raise ValueError(f"{path}, row {index}: a caption is {caption!r}, not a text")
    frozen = path.with_name(f"{part}_perturbations.json") if perturbations is None else Path(perturbations)
    cases = [Case(key, (image,), (), part) for key, image in zip(keys, images, strict=True)]
    _need_images(source, name, path.parent, cases)  # before the minutes that tagging may take
    options, sha256 = frozen_options(frozen, name, captions, tagger)
    cases = [Case(case.key, case.images, tuple(texts), part) for case, texts in zip(cases, options, strict=True)]
    return cases, {"cases_left_out": 0, "perturbations": str(frozen), "perturbations_sha256": sha256}


def _winoground(name: str, root: Path) -> tuple[list[Case], dict]:
    """Two images, two captions of the same words. Official: huggingface.co/datasets/facebook/winoground (gated)."""
    source = Source(
        file="examples.jsonl",
        folders=("", "data", "winoground", "winoground/data"),
        images=("images", "../images"),
        fetch="data/examples.jsonl and data/images.zip from https://huggingface.co/datasets/facebook/winoground "
              "(needs an account that accepted its terms)",
        layout="ROOT/examples.jsonl, ROOT/images/ex_0_img_0.png, ...",
    )
    path = _find(source, name, root)
    folder = _image_folder(source, name, path)
    cases = []
    for index, line in enumerate(path.read_text(encoding="utf-8").split("\n")):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {index + 1} is not JSON: {error}") from error
        first, second, caption_0, caption_1 = _texts(
            row, ("image_0", "image_1", "caption_0", "caption_1"), path, index)
        images = tuple(  # the official file names pictures without ".png"
            _inside(folder, image if PurePosixPath(image).suffix else f"{image}.png", path, index)
            for image in (first, second))
        cases.append(Case(str(row.get("id", index)), images, (caption_0, caption_1),
                          str(row.get("collapsed_tag", "winoground"))))
    _need_images(source, name, folder, cases)
    return cases, {"cases_left_out": 0}


def _valse(name: str, piece: str, root: Path) -> tuple[list[Case], dict]:
    """A caption and a foil; rows that at least two of three annotators confirmed, as the official README asks."""
    source = Source(
        file=f"{piece}.json",
        folders=("", "data", "valse"),
        images=("images", "../images"),
        fetch=f"https://raw.githubusercontent.com/Heidelberg-NLP/VALSE/main/data/{piece}.json (pieces: "
              f"{', '.join(VALSE_PIECES)}), and the pictures from the data set that its field 'dataset' names",
        layout=f"ROOT/{piece}.json, ROOT/images/*.jpg (of all source data sets together)",
    )
    path = _find(source, name, root)
    folder = _image_folder(source, name, path)
    cases, not_validated = [], 0
    for key, row in _read_json(path, dict).items():
        votes = _value(row, "mturk", dict, path, key)
        if _value(votes, "caption", int, path, f"{key}, mturk") < 2:
            not_validated += 1
            continue
        image, caption, foil = _texts(row, ("image_file", "caption", "foil"), path, key)
        cases.append(Case(key, (_inside(folder, image, path, key),), (caption, foil), piece))
    _need_images(source, name, folder, cases)
    return cases, {"cases_left_out": 0, "rows_not_validated": not_validated}


def _open_rgb(path: Path, box: tuple[int, int, int, int] | None) -> Image.Image:
    """A picture as RGB (some of COCO's are grey), cut to `box`."""
    try:
        with Image.open(path) as image:
            image = image.convert("RGB")
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # all that Pillow raises on bad files
        raise ValueError(f"cannot read the picture {path}: {error}") from error
    return image if box is None else image.crop(box)


def _find(source: Source, name: str, root: Path) -> Path:
    """The annotation file, in the first folder below `root` that has it."""
    for folder in source.folders:
        if (path := root / folder / source.file).is_file():
            return path
    raise FileNotFoundError(f"{name}: no {source.file} in {root}. {_how_to_get(source)}")


def _image_folder(source: Source, name: str, path: Path) -> Path:
    """The first folder for pictures that exists beside the annotation file."""
    for folder in source.images:
        if (candidate := path.parent / folder).is_dir():
            return candidate
    raise FileNotFoundError(
        f"{name}: no folder of pictures ({' or '.join(source.images)}) in {path.parent}. {_how_to_get(source)}")


def _need_images(source: Source, name: str, folder: Path, cases: list[Case]) -> None:
    """Every picture is there, or one message says how many are not."""
    if not cases:
        raise ValueError(f"{name}: {source.file} has no rows")
    missing = {path for path in {path for case in cases for path in case.images} if not path.is_file()}
    if missing:
        rows = sum(any(path in missing for path in case.images) for case in cases)
        raise FileNotFoundError(f"{name}: {rows} of {len(cases)} rows have no picture; {len(missing)} files are "
                                f"missing in {folder}, such as {min(missing).name}. {_how_to_get(source)}")


def _how_to_get(source: Source) -> str:
    """What to fetch, from where, and the folder it should make."""
    return f"Fetch {source.fetch}. The folder given by --dataset_root (ROOT) should then hold: {source.layout}"


def _inside(folder: Path, name: str, path: Path, row: str | int) -> Path:
    """`folder`/`name`, if that cannot lead out of the folder: names in a data file are not to be trusted.

    Raises:
        ValueError: the name is empty, absolute, has "..", a backslash, a drive or a NUL.
    """
    parts = PurePosixPath(name).parts
    if (not parts or PurePosixPath(name).is_absolute() or ".." in parts or "\\" in name or "\0" in name
            or PureWindowsPath(name).drive):
        raise ValueError(f"{path}, row {row}: refused the file name {name!r}, which leads out of {folder}")
    return folder / name


def _read_json(path: Path, kind: type) -> dict | list:
    """The content of a JSON file whose outermost value must be of `kind`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, kind):
        raise ValueError(f"{path} should hold a JSON {kind.__name__}, not a {type(content).__name__}")
    return content


def _value(row: dict, key: str, kind: type | tuple[type, ...], path: Path, number: str | int):
    """row[key], of the right kind."""
    value = row.get(key) if isinstance(row, dict) else None
    if not isinstance(value, kind):
        raise ValueError(f"{path}, row {number}: {key!r} is missing or of a wrong kind ({value!r})")
    return value


def _texts(row: dict, keys: Iterable[str], path: Path, number: str | int) -> list[str]:
    """The values of several keys, all of them texts."""
    return [_value(row, key, str, path, number) for key in keys]
