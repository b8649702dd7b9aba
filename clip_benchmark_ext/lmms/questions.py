"""Recognise the two questions of lmms-eval that a captioner can answer: for a caption, or whether a thing is there.

    Provide a one-sentence caption for the provided image.      a caption (COCO, NoCaps, Flickr30k, CHAIR, DetailCaps)
    Is there a snowboard in the image?                          yes or no (POPE, arXiv 2305.10355)
"""
import re

PICTURE = r"(?:image|picture|photo|photograph)\b"
CAPTION = re.compile(
    rf"\s*(?:please\s+)?(?:carefully\s+observe\s+the\s+{PICTURE}\s+and\s+)?(?:describe\s+(?:this|the)\s+{PICTURE}|"
    rf"(?:provide|write|give|generate|come\s+up\s+with)\s+an?\s[^?]*\b(?:caption|description)\s[^?]*{PICTURE})[^?]*",
    re.IGNORECASE)
THERE = re.compile(rf"\s*is\s+there\s+(an?\s[^?]+?)\s+in\s+(?:the|this)\s+{PICTURE}\s*\?", re.IGNORECASE)


def asks_for_caption(question: str) -> bool:
    """Return whether a question wants the image described. How long it asks the caption to be is not read."""
    return CAPTION.fullmatch(question) is not None


def statement(question: str) -> str | None:
    """Return what is true of the image if the answer is yes, or None for another kind of question."""
    found = THERE.match(question)
    return found and f"a photo of {found[1]} ."
