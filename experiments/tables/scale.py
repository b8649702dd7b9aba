"""The types of which a scale is made: data, hyperparameters, and what models are evaluated on."""
import shlex
from pathlib import Path
from typing import NamedTuple

Names = tuple[str, ...]
Flags = tuple[str, ...]  # words of a command


class Place(NamedTuple):
    data: Path
    out: Path
    bin: str  # folder of open_clip_train and its siblings with a slash, or nothing
    gpus: int  # 0 is the CPU

    def launch(self, module: str, script: str) -> list[str]:
        if self.gpus > 1:
            return [f"{self.bin}torchrun", "--nproc_per_node", str(self.gpus), "-m", module, "--"]
        return [f"{self.bin}{script}"]

    def fill(self, path: str) -> str:
        return path.format(data=self.data, out=self.out)


class Data(NamedTuple):
    """Images and captions to train on: webdataset shards 00000.tar and so on in a folder."""

    folder: str  # in all paths of this file {data} is the user's folder, {out} the experiment's
    label: str  # its name in tables
    shards: int  # used until the folder exists and its shards can be counted
    samples: int  # per epoch
    fetch: str = ""  # the command that makes the folder, empty where Scale.prepare does
    first: bool = False  # whether only the first shards of the folder are used

    def count(self, place: Place) -> int:
        return self.shards if self.first else len(list(Path(place.fill(self.folder)).glob("*.tar"))) or self.shards

    def pattern(self, place: Place) -> str:
        shards = self.count(place)
        return place.fill(self.folder) + (f"/{{00000..{shards - 1:05d}}}.tar" if shards > 1 else "/00000.tar")


class Backbone(NamedTuple):
    """Hyperparameters that depend on the size of the model (Tables 6 to 8 in the paper)."""

    lr: float
    weight_decay: float
    accumulate: int = 1


class Probe(NamedTuple):
    dataset: str  # wds/NAME
    images: int  # in its test split


class Selection(NamedTuple):
    root: str
    subsets: Names
    label: str
    cases: int = 0  # in each subset, where results do not say it


def pairs(root: str, subsets: str, cases: int = 0) -> tuple[Selection, ...]:
    return tuple(Selection(root, (f"sugar_crepe/{subset}",), subset, cases) for subset in subsets.split())


class Captioning(NamedTuple):
    """A test set to caption. If `train` (a key of Scale.data) is given, models are fine-tuned on it first."""

    root: str
    dataset: str
    label: str
    lengths: Names
    train: str | None = None
    coca: str | None = None  # tag of the pretrained weights that OpenCLIP's CoCa starts from


class Tuning(NamedTuple):
    """Hyperparameters of fine-tuning. They are our choice, as the paper does not name its own."""

    lr: float = 5e-5
    weight_decay: float = 0.1
    batch: int = 256  # over all processes
    epochs: int = 10


class Made(NamedTuple):
    folder: str
    command: Flags
    tables: Names = ()  # the tables that need it, empty for all


def made(name: str, command: str, *tables: str) -> Made:
    """Return data in the experiment's folder and the command that makes it, to which --out is added."""
    folder = f"{{out}}/data/{name}"
    return Made(folder, (*shlex.split(command), "--out", folder), tables)


class Scale(NamedTuple):
    name: str
    data: dict[str, Data]
    backbones: dict[str, Backbone]
    batch: int  # over all processes
    warmup: int  # steps, and at most a tenth of all steps
    epochs: int
    workers: int  # per process, or fewer where there are not enough shards
    train_flags: Flags
    eval_flags: Flags
    alt: str  # key of data: short captions
    long: str  # key of data: long captions
    search: str  # key of data: captions of the search for an interval of t (Table 5)
    selection: tuple[Selection, ...]
    draws: int  # of Monte Carlo, per caption
    captioning: tuple[Captioning, ...]
    amounts: Names = ()  # keys of data: subsets of growing size (Figure 5)
    ratios: Names = ()  # keys of data on which BERT's masking ratios are compared
    probes: dict[str, Probe] = {}  # by label
    probe_root: str = ""
    prepare: tuple[Made, ...] = ()
    tuning: Tuning = Tuning()
    curve: tuple[int, ...] = ()  # epochs that are evaluated for learning curves. If given, all checkpoints are kept
    seeds: tuple[int, ...] = (0, 1, 2)
    gpus: int = 0  # 0: the CPU
    article: bool = False  # whether it has the tables of article.py and views.py
    # Runs whose captions or likelihoods are evaluated are this many times as long as those of probes. A diffusion model
    # learns late which attribute belongs to which object, and before that their captions differ little.
    caption_epochs: int = 1
    val: str = ""  # shards on which the bound is measured, for mcdiffusion.py
    tables: Names = ()  # tables and ledgers of this scale, empty for all
    image: str = ""  # SOURCE of --pretrained-image for all captioners
    free: Flags = ()  # flags of runs that train such an encoder further
    margin: float = 1.0  # points within which two rows count as level
    cider_margin: float = 1.0  # the same for CIDEr
    void: dict[str, str] = {}  # claims that the scale's data decide, by id, with the reason
    rates: tuple[float, ...] = ()  # grid of learning rates
    chosen: dict[str, float] = {}  # of them the best of each objective (rates.py)
    fetch: tuple[tuple[str, str], ...] = ()  # (folder or file of {data}, the command that fetches it)

    @property
    def backbone(self) -> str:  # the backbone of the ablations
        return next(iter(self.backbones))

    @property
    def images(self) -> int:  # that a run reads
        return self.data[self.alt].samples * self.epochs


CPU = dict(batch=32, workers=1, draws=64, train_flags=("--precision", "fp32"),
           eval_flags=("--no_amp", "--num_workers", "0", "--quiet"))
