"""Functions of the local tasks (tasks/*.yaml): the image of a document, and what lmms-eval's metrics take of it.

The metrics are lmms-eval's own, of its Flickr30k and POPE. Files are named from the folder that lmms-eval runs in.
"""
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

if TYPE_CHECKING:
    from datasets import Dataset

METRICS = ("Bleu_4", "METEOR", "ROUGE_L", "CIDEr")


def numbered(documents: "Dataset") -> "Dataset":
    """Return the samples of shards with their number, as COCO's format names an image by one."""
    return documents.add_column("number", list(range(len(documents))))


def picture_of_shard(document: dict) -> list[Image.Image]:
    return [document[next(suffix for suffix in ("jpg", "jpeg", "png", "webp") if suffix in document)]]


def picture_of_file(document: dict) -> list[Image.Image]:
    return [Image.open(Path("images", document["image"]))]


def caption_and_references(document: dict, answers: list[str]) -> dict[str, dict]:
    """Return for each metric the caption and the lines of KEY.txt, without empty ones."""
    lines = document["txt"].split("\n")
    about = {"answer": [*filter(str.strip, lines)], "pred": answers[0], "image_id": document["number"]}
    return {f"flickr_{metric}": about for metric in METRICS}


def yes_or_no(document: dict, answers: list[str]) -> dict[str, Any]:
    """Return what POPE's metrics take of a line of its files: question_id, image, text, label."""
    from lmms_eval.tasks.pope.utils import pope_process_results
    return pope_process_results({"answer": document["label"], **document}, answers)


def chosen(document: dict, answers: list) -> dict[str, float]:
    """Return whether the right caption has the least loss.

    lmms-eval 0.7 turns the pair of each choice into text before a task sees it, "(12.5, False)".
    """
    losses = [float(str(answer).strip("([").partition(",")[0]) for answer in answers]
    return {"acc": float(losses.index(min(losses)) == document["answer"])}
