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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from clip_benchmark.datasets.builder import image_captions_collate_fn
from PIL import Image
from torch import Tensor, stack
from torch.utils.data import Dataset

from .local_files import Source, find, image_folder, inside, need_images, open_rgb, read_json, texts, value
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
        images = [open_rgb(path, case.box) for path in case.images]
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
    path = find(source, name, root)
    rows = read_json(path, dict)
    left_out = 0
    selection = path.with_name("rows_with_image.json")
    if selection.is_file():
        keys = value(read_json(selection, dict), subset, list, selection, "the file")
        unknown = [key for key in keys if key not in rows]
        if unknown:
            raise ValueError(f"{selection} names rows that {path} does not have, such as {unknown[0]!r}")
        left_out, rows = len(rows) - len(set(keys)), {key: rows[key] for key in dict.fromkeys(keys)}
        if left_out:
            logging.warning("%s: %d of %d rows are left out, because %s names only %d; this is not the full data set",
                            name, left_out, left_out + len(rows), selection, len(rows))
    folder = image_folder(source, name, path)
    cases = []
    for key, row in rows.items():
        filename, caption, negative = texts(row, ("filename", "caption", "negative_caption"), path, key)
        cases.append(Case(key, (inside(folder, filename, path, key),), (caption, negative), subset))
    need_images(source, name, folder, [case.images for case in cases])
    return cases, {"cases_left_out": left_out}


def _visual_genome(name: str, part: str, root: Path) -> tuple[list[Case], dict]:
    """ARO's VG-Relation and VG-Attribution: a list of crops with a true and a false caption."""
    file, drive_id = {
        "vg_relation": ("visual_genome_relation.json", "1kX2iCHEv0CADL8dSO1nMdW-V0NqIAiP3"),
        "vg_attribution": ("visual_genome_attribution.json", "13tWvOrNOLHxl3Rm9cR3geAdHx2qR3-Tw"),
    }[part]
    source = Source(file, ("", "aro"), ("images",), f"{file} from {_DRIVE}{drive_id} and {_VG_IMAGES}",
                    f"ROOT/{file}, ROOT/images/*.jpg")
    path = find(source, name, root)
    folder = image_folder(source, name, path)
    cases = []
    for index, row in enumerate(read_json(path, list)):
        image, true, false = texts(row, ("image_path", "true_caption", "false_caption"), path, index)
        left, upper, width, height = (
            round(value(row, key, (int, float), path, index)) for key in ("bbox_x", "bbox_y", "bbox_w", "bbox_h"))
        if width <= 0 or height <= 0:
            raise ValueError(f"{path}, row {index}: an empty box, {width} x {height} pixels")
        if part == "vg_relation":
            (group,) = texts(row, ("relation_name",), path, index)
        else:
            attributes = value(row, "attributes", list, path, index)
            if len(attributes) != 2:
                raise ValueError(f"{path}, row {index}: 'attributes' should have two entries, not {len(attributes)}")
            group = f"{attributes[0]}_{attributes[1]}"
        cases.append(Case(str(index), (inside(folder, image, path, index),), (true, false), group,
                          (left, upper, left + width, upper + height)))
    need_images(source, name, folder, [case.images for case in cases])
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
    path = find(source, name, root)
    keys, images, captions = [], [], []
    for index, row in enumerate(read_json(path, list)):
        (image,) = texts(row, ("image",), path, index)
        for number, caption in enumerate(value(row, "caption", list, path, index)):
            keys.append(f"{image}#{number}")
            images.append(inside(path.parent, image, path, index))
            captions.append(caption)
            if not isinstance(caption, str):
                raise ValueError(f"{path}, row {index}: a caption is {caption!r}, not a text")
    frozen = path.with_name(f"{part}_perturbations.json") if perturbations is None else Path(perturbations)
    cases = [Case(key, (image,), (), part) for key, image in zip(keys, images, strict=True)]
    need_images(source, name, path.parent, [case.images for case in cases])  # before the minutes that tagging may take
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
    path = find(source, name, root)
    folder = image_folder(source, name, path)
    cases = []
    for index, line in enumerate(path.read_text(encoding="utf-8").split("\n")):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {index + 1} is not JSON: {error}") from error
        first, second, caption_0, caption_1 = texts(
            row, ("image_0", "image_1", "caption_0", "caption_1"), path, index)
        images = tuple(  # the official file names pictures without ".png"
            inside(folder, image if PurePosixPath(image).suffix else f"{image}.png", path, index)
            for image in (first, second))
        cases.append(Case(str(row.get("id", index)), images, (caption_0, caption_1),
                          str(row.get("collapsed_tag", "winoground"))))
    need_images(source, name, folder, [case.images for case in cases])
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
    path = find(source, name, root)
    folder = image_folder(source, name, path)
    cases, not_validated = [], 0
    for key, row in read_json(path, dict).items():
        votes = value(row, "mturk", dict, path, key)
        if value(votes, "caption", int, path, f"{key}, mturk") < 2:
            not_validated += 1
            continue
        image, caption, foil = texts(row, ("image_file", "caption", "foil"), path, key)
        cases.append(Case(key, (inside(folder, image, path, key),), (caption, foil), piece))
    need_images(source, name, folder, [case.images for case in cases])
    return cases, {"cases_left_out": 0, "rows_not_validated": not_validated}
