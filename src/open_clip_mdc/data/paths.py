"""The files that a command line names: paths, folders, patterns. Imports no torch, for tools/bulk.py."""
import glob
import os
from pathlib import Path

from braceexpand import braceexpand

IMAGE_FILES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")
SHARDS = (".tar",)


def expand(pattern: str) -> list[str]:
    """The paths of a pattern, as in training. webdataset's own function imports torch: it is asked only for what it
    reads from the environment, where ${NAME} is $WDS_NAME."""
    if "${" in pattern:
        from webdataset.shardlists import expand_urls
        return expand_urls(pattern)
    return [path for part in pattern.split("::") for path in braceexpand(part)]


def find_images(paths: list[str], kinds: tuple[str, ...] = IMAGE_FILES) -> list[Path]:
    """Files as given, what patterns ("*.jpg", "{000..009}.tar") match, and the files in folders; each sorted.

    Args:
        kinds: suffixes of the files that are looked for in folders.

    Raises:
        FileNotFoundError: a path does not exist, a pattern matches nothing, or a folder holds nothing of these kinds.
    """
    found = []
    for path in paths:
        there = os.path.exists(path)  # what is there by that very name is no pattern: "holiday[1].jpg"
        for pattern in [path] if there else expand(path):
            matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
            if not matches:
                raise FileNotFoundError(f"no image or folder {pattern}")
            for match in map(Path, matches):
                files = [match] if not match.is_dir() else sorted(
                    p for p in match.rglob("*") if p.suffix.lower() in kinds and p.is_file())
                if not files:
                    raise FileNotFoundError(f"no image in {match} ({', '.join(kinds)})")
                found += files
    return found
