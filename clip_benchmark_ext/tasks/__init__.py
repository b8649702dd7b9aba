"""The tasks of `clip_benchmark eval`, functions from a Job and the batches of its split to metrics.

A task's code is imported only when it runs, as most tasks need little of the package.
"""
from collections.abc import Callable
from pkgutil import resolve_name
from typing import NamedTuple

from torch.utils.data import DataLoader

from ..evaluation_job import Job
from ..flags import DECODING, cloze_options, decoding_options, retrieval_options, scoring_options

FlagNames = tuple[str, ...]


class Task(NamedTuple):
    """A task's function, and the arguments and flags that decide its numbers."""

    place: str  # module:function
    arguments: FlagNames = ()  # clip_benchmark's arguments that decide this task's numbers
    flags: FlagNames = ()  # our flags, for any model
    captioner_flags: FlagNames = ()  # our flags, for captioners only
    options: Callable[..., dict] = lambda *_: {}  # a function of flags.py
    of_towers: bool = False  # True if `Job.model` is a `towers.Towers`

    def evaluate(self, job: Job, batches: DataLoader) -> dict:
        return resolve_name(__package__ + self.place)(job, batches)


SCORER = ("scorer", "num_samples", "alpha")
SPLITS = ("train_split", "val_split", "val_proportion")
PROBE = ("fewshot_lr", "fewshot_epochs", "batch_size", "seed", "normalize")
TASKS = {
    "image_caption_selection": Task(".selection:run", (), (), SCORER, scoring_options),
    "zeroshot_classification": Task(
        ".zeroshot:classify", ("custom_classname_file", "custom_template_file", "load_clfs"), (), SCORER,
        scoring_options),
    "zeroshot_retrieval": Task(
        ".retrieval:run", ("annotation_file", "recall_k"), (), (*SCORER, "clip", "shortlist"), retrieval_options),
    "linear_probe": Task(".linear_probe:run", (*SPLITS, "fewshot_k", *PROBE), ("feature", "image_size")),
    "probe": Task(".probe:run", (*SPLITS, *PROBE), ("feature", "image_size"), of_towers=True),
    "cloze": Task(".cloze:run", ("annotation_file",), ("cloze_words",), ("alpha",), cloze_options),
    "segmentation": Task(".segmentation:run", (
        *SPLITS, "fewshot_epochs", "batch_size", "seed"), ("image_size",), of_towers=True),
    "captioning": Task(
        ".captioning:run", ("annotation_file",),
        (*DECODING.values(), "phrase", "train_captions", "clipscore_model", "clipscore_pretrained"), (),
        decoding_options),
}
