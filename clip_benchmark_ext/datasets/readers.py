"""Read the official files of data sets with one image per case. A reader takes a name and a folder."""
import csv
import io
import logging
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from open_clip_mdc.data.paths import inside
from open_clip_mdc.data.text import read_text

from .local_files import Cell, Source, find, image_folder, need_images, read_json, texts, value
from .perturb import Tagger, frozen_options

VALSE_PIECES = ("existence", "plurals", "counting-hard", "counting-small-quant", "counting-adversarial", "relations",
                "action-replacement", "actant-swap", "coreference-standard", "coreference-hard", "foil-it")

SUGAR_CREPE_PP = ("swap_obj", "swap_att", "replace_obj", "replace_att", "replace_rel")
WHATSUP = {  # the file, the folder of images, and Google Drive's id of the file
    "controlled_images_a": ("controlled_images_dataset.json", "controlled_images", "1ap8mmmpQjLIjPGuplkpBgc1hoEHCj4hm"),
    "controlled_images_b": ("controlled_clevr_dataset.json", "controlled_clevr", "1unNNosLbdy9NDjgj4l8fsQP3WiAAGA6z"),
    "coco_qa_one_obj": ("coco_qa_one_obj.json", "val2017", "1RsMdpE9mmwnK4zzMPpC1-wTU_hNis-dq"),
    "coco_qa_two_obj": ("coco_qa_two_obj.json", "val2017", "1TCEoM0mgFmz8T4cF7PQ3XJmO6JjtiQ-s"),
    "vg_qa_one_obj": ("vg_qa_one_obj.json", "vg_images", "1ARMRzRdohs9QTr1gpIfzyUzvW20wYp_p"),
    "vg_qa_two_obj": ("vg_qa_two_obj.json", "vg_images", "1sjVG5O3QMY8s118k7kQM8zzDZH12i_95"),
}
NEGBENCH = {"coco": ("COCO_val", "val2017"), "voc2007": ("VOC2007", "JPEGImages"), "synthetic": ("synthetic", "images")}

_DRIVE = "https://drive.google.com/uc?id="
_VG_IMAGES = f"vgr_vga_images.zip from {_DRIVE}1qaPlrwhGNMrR3a11iopZUT_GPP_LrgP9 (images)"
_KARPATHY = "https://storage.googleapis.com/sfr-vision-language-research/datasets"


@dataclass(frozen=True)
class Case:
    """One decision, which of `captions` fits the image."""

    key: str
    images: tuple[Path | Cell, ...]
    captions: tuple[str, ...]  # the right ones first, or with two images caption i for image i
    group: str  # relation, pair of attributes, subset or piece, over which the official metric averages
    box: tuple[int, int, int, int] | None = None  # (left, upper, right, lower) in pixels, or None for the whole image
    right: int = 1  # number of right captions

    @property
    def wrong(self) -> tuple[str, ...]:
        """Return the captions that do not fit the first image."""
        return self.captions[self.right:]


Read = tuple[list[Case], dict]  # cases, and facts about them for the result file


def sugar_crepe(name: str, root: Path, **_) -> Read:
    """Read SugarCrepe, a caption and a negative per image: github.com/RAIVNLab/sugar-crepe.

    A file `rows_with_image.json` ({subset: [keys]}) beside it restricts the set to these rows.
    """
    subset = name.partition("/")[2]
    source = Source(f"{subset}.json", ("", "sugar_crepe", "data"), ("val2017", "images", "../val2017"),
                    f"https://raw.githubusercontent.com/RAIVNLab/sugar-crepe/main/data/{subset}.json and "
                    "http://images.cocodataset.org/zips/val2017.zip (images)",
                    f"ROOT/{subset}.json, ROOT/val2017/*.jpg")
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
            logging.warning("%s is not the full data set: %d of %d rows are left out, because %s names only %d",
                            name, left_out, left_out + len(rows), selection, len(rows))
    folder = image_folder(source, name, path)
    cases = []
    for key, row in rows.items():
        filename, caption, negative = texts(row, ("filename", "caption", "negative_caption"), path, key)
        cases.append(Case(key, (inside(folder, filename, path, key),), (caption, negative), subset))
    need_images(source, name, folder, cases)
    return cases, {"cases_left_out": left_out}


def visual_genome(name: str, root: Path, **_) -> Read:
    """Read ARO's VG-Relation and VG-Attribution, a true and a false caption per image crop."""
    part = name.partition("/")[2]
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
    need_images(source, name, folder, cases)
    return cases, {"cases_left_out": 0}


def order(name: str, root: Path, perturbations: str | Path | None = None, tagger: Tagger | None = None) -> Read:
    """Read ARO's COCO-Order and Flickr30k-Order, five word orders of each caption of Karpathy's test split."""
    part = name.partition("/")[2]
    file, archive, layout = {
        "coco_order": ("coco_karpathy_test.json", "http://images.cocodataset.org/zips/val2014.zip", "val2014/*.jpg"),
        "flickr30k_order": ("flickr30k_test.json", "https://forms.illinois.edu/sec/229675", "flickr30k-images/*.jpg"),
    }[part]
    source = Source(file, ("", "aro", part.partition("_")[0]), (),
                    f"{_KARPATHY}/{file} and {archive} (images)", f"ROOT/{file}, ROOT/{layout}")
    path = find(source, name, root)
    cases = []
    for index, row in enumerate(read_json(path, list)):
        (image,) = texts(row, ("image",), path, index)
        for number, caption in enumerate(value(row, "caption", list, path, index)):
            cases.append(Case(f"{image}#{number}", (inside(path.parent, image, path, index),), (caption,), part))
            if not isinstance(caption, str):
                raise ValueError(f"{path}, row {index}: a caption is {caption!r}, not a text")
    frozen = path.with_name(f"{part}_perturbations.json") if perturbations is None else Path(perturbations)
    need_images(source, name, path.parent, cases)  # first, as tagging may take minutes
    options, sha256 = frozen_options(frozen, name, [case.captions[0] for case in cases], tagger)
    cases = [replace(case, captions=tuple(texts)) for case, texts in zip(cases, options, strict=True)]
    return cases, {"cases_left_out": 0, "perturbations": str(frozen), "perturbations_sha256": sha256}


def valse(name: str, root: Path, **_) -> Read:
    """Read VALSE, a caption and a foil per image, of rows that two of three annotators confirmed (as in its README)."""
    piece = name.partition("/")[2]
    source = Source(f"{piece}.json", ("", "data", "valse"), ("images", "../images"),
                    f"https://raw.githubusercontent.com/Heidelberg-NLP/VALSE/main/data/{piece}.json (pieces: "
                    f"{', '.join(VALSE_PIECES)}), and the images from the data set that its field 'dataset' names",
                    f"ROOT/{piece}.json, ROOT/images/*.jpg (of all source data sets together)")
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
    need_images(source, name, folder, cases)
    return cases, {"cases_left_out": 0, "rows_not_validated": not_validated}


def sugar_crepe_pp(name: str, root: Path, **_) -> Read:
    """Read SugarCrepe++, two captions that mean the same and a wrong one: github.com/Sri-Harsha/scpp."""
    subset = name.partition("/")[2]
    source = Source(f"{subset}.json", ("", "data", "scpp/data", "sugar_crepe_pp"),
                    ("val2017", "images", "../val2017", "../images"),
                    f"https://raw.githubusercontent.com/Sri-Harsha/scpp/main/data/{subset}.json and "
                    "http://images.cocodataset.org/zips/val2017.zip (images)",
                    f"ROOT/{subset}.json, ROOT/val2017/*.jpg")
    path = find(source, name, root)
    folder = image_folder(source, name, path)
    content = read_json(path, (list, dict))
    cases = []
    for key, row in content.items() if isinstance(content, dict) else enumerate(content):
        filename, *captions = texts(row, ("filename", "caption", "caption2", "negative_caption"), path, key)
        cases.append(Case(str(key), (inside(folder, filename, path, key),), tuple(captions), subset, right=2))
    need_images(source, name, folder, cases)
    return cases, {"cases_left_out": 0}


def whatsup(name: str, root: Path, **_) -> Read:
    """Read What'sUp, captions that say where something is, the right one first: github.com/amitakamath/whatsup_vlms."""
    subset = name.partition("/")[2]
    file, images, drive_id = WHATSUP[subset]
    source = Source(file, ("", "data", "whatsup", "whatsup_vlms/data"), (images,),
                    f"{file} from {_DRIVE}{drive_id} and its images by https://github.com/amitakamath/whatsup_vlms",
                    f"ROOT/{file}, ROOT/{images}/*")
    path = find(source, name, root)
    folder = image_folder(source, name, path)
    cases = []
    for index, row in enumerate(read_json(path, list)):
        if subset.startswith("controlled"):
            (image,) = texts(row, ("image_path",), path, index)
            image, captions = PurePosixPath(image).name, value(row, "caption_options", list, path, index)
            group = _placed(image, path, index)
        else:
            image, *captions = row if isinstance(row, list) and len(row) == 3 else (None, None)
            image = f"{str(image).zfill(12) if images == 'val2017' else image}.jpg"
            group = subset
        if len(captions) < 2 or not all(isinstance(caption, str) for caption in captions):
            raise ValueError(f"{path}, row {index}: {row!r} has no image with a right caption and wrong ones")
        cases.append(Case(str(index), (inside(folder, image, path, index),), tuple(captions), group))
    need_images(source, name, folder, cases)
    return cases, {"cases_left_out": 0}


def _placed(image: str, path: Path, index: int) -> str:
    parts = PurePosixPath(image).stem.split("_")  # two objects and their relation, such as mug_left_of_plate
    if len(parts) < 3:
        raise ValueError(f"{path}, row {index}: {image!r} does not name two objects and their relation")
    return f"{parts[0]} {parts[1]} {parts[-1]}"


def negbench(name: str, root: Path, **_) -> Read:
    """Read NegBench, multiple choice among captions with and without negation: github.com/m1k2zoo/negbench."""
    stem, images = NEGBENCH[name.partition("/")[2]]
    file = f"{stem}_mcq_llama3.1_rephrased.csv"
    source = Source(file, ("", "images", "data/images", "negbench"), (images, f"../{images}", "."),
                    f"{file} by the link in https://github.com/m1k2zoo/negbench/blob/main/datasets.md and its images",
                    f"ROOT/{file}, ROOT/{images}/*")
    path = find(source, name, root)
    folder = image_folder(source, name, path)
    cases = []
    for index, row in enumerate(csv.DictReader(io.StringIO(read_text(path)))):
        image, kind, place, *captions = texts(row, ("image_path", "correct_answer_template", "correct_answer",
                                                    *(f"caption_{number}" for number in range(4))), path, index)
        if place.strip() not in ("0", "1", "2", "3"):
            raise ValueError(f"{path}, row {index}: correct_answer is {place!r}, not 0 to 3")
        captions.insert(0, captions.pop(int(place)))
        cases.append(Case(str(index), (inside(folder, PurePosixPath(image).name, path, index),), tuple(captions), kind))
    need_images(source, name, folder, cases)
    return cases, {"cases_left_out": 0}
