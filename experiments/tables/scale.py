"""A scale: where its data is, how its models are trained, what they are evaluated on."""
import shlex
from pathlib import Path
from typing import NamedTuple


class Data(NamedTuple):
    """Training captions: webdataset shards 00000.tar and so on in a folder."""

    folder: str  # {data} is the user's folder, {out} that of the experiment; in all paths of this file
    label: str  # in tables
    shards: int  # counted where the folder is there
    samples: int  # of an epoch
    fetch: str = ""  # the command that makes the folder; nothing where Scale.prepare does
    first: bool = False  # only the folder's first shards

    def count(self, data: Path, out: Path) -> int:
        folder = Path(self.folder.format(data=data, out=out))
        return self.shards if self.first else len(list(folder.glob("*.tar"))) or self.shards

    def pattern(self, data: Path, out: Path) -> str:
        shards = self.count(data, out)
        return self.folder.format(data=data, out=out) + (
            f"/{{00000..{shards - 1:05d}}}.tar" if shards > 1 else "/00000.tar")


class Backbone(NamedTuple):
    """Hyperparameters that go with a size of model (the paper's Tables 6 to 8)."""

    lr: float
    weight_decay: float
    accumulate: int = 1


class Probe(NamedTuple):
    dataset: str  # wds/NAME
    images: int  # of its test split


class Selection(NamedTuple):
    root: str
    subsets: tuple[str, ...]
    label: str
    cases: int = 0  # of a subset, where results do not say it


def pairs(root: str, subsets: str, cases: int = 0) -> tuple[Selection, ...]:
    return tuple(Selection(root, (f"sugar_crepe/{subset}",), subset, cases) for subset in subsets.split())


class Captioning(NamedTuple):
    """Captions of a test set, after fine-tuning on `train` (a key of Scale.data) if it is given."""

    root: str
    dataset: str
    label: str
    train: str | None
    lengths: tuple[str, ...]
    coca: str | None = None  # tag of the weights that OpenCLIP's CoCa is fine-tuned from


class Tuning(NamedTuple):
    """Hyperparameters of fine-tuning. Ours, the paper does not name its own."""

    lr: float = 5e-5
    weight_decay: float = 0.1
    batch: int = 256  # over all processes
    epochs: int = 10


class Made(NamedTuple):
    folder: str
    command: tuple[str, ...]
    tables: tuple[str, ...] = ()  # that need it; all if there is none


def made(name: str, command: str, *tables: str) -> Made:
    """Return data in the experiment's folder, and the command that makes it but for --out."""
    folder = f"{{out}}/data/{name}"
    return Made(folder, (*shlex.split(command), "--out", folder), tables)


class Scale(NamedTuple):
    name: str
    data: dict[str, Data]
    backbones: dict[str, Backbone]
    batch: int  # over all processes
    warmup: int  # steps, but no more than a tenth of all
    epochs: int
    workers: int  # of a process, where there are shards enough
    train_flags: tuple[str, ...]
    eval_flags: tuple[str, ...]
    alt: str  # keys of data: short captions, long ones, those of the schedule search, growing subsets
    long: str
    search: str
    amounts: tuple[str, ...]
    ratios: tuple[str, ...]  # keys of data on which BERT's masking ratios are compared
    probes: dict[str, Probe]  # by label
    probe_root: str
    selection: tuple[Selection, ...]
    draws: int  # Monte Carlo, per caption
    captioning: tuple[Captioning, ...]
    prepare: tuple[Made, ...] = ()
    tuning: Tuning = Tuning()
    curve: tuple[int, ...] = ()  # epochs whose checkpoints are evaluated for learning curves (curves.py); all are kept
    seeds: tuple[int, ...] = (0, 1, 2)
    gpus: int = 0  # 0: the CPU
    article: bool = False  # whether the claims of article.py and views.py are measured
    # Times the epochs of the scale, for all tables but those of probes: where captions, or their likelihoods, are asked
    # for. Diffusion learns late which attribute is whose; before, there is little to see.
    caption_epochs: int = 1
    val: str | None = None  # shards on which the bound is measured, for mcdiffusion.py's claims
    tables: tuple[str, ...] = ()  # and ledgers, that it has; all if there is none
    image: str | None = None  # SOURCE of --pretrained-image for all captioners
    free: tuple[str, ...] = ()  # flags of a run that trains such a tower, too
    margin: float = 1.0  # points within which rows are called level
    cider_margin: float = 1.0
    fetch: tuple[tuple[str, str], ...] = ()  # folders and files of {data}, and what to run for each

    @property
    def backbone(self) -> str:  # the one of the ablations
        return next(iter(self.backbones))


CPU = dict(batch=32, workers=1, draws=64, train_flags=("--precision", "fp32"),
           eval_flags=("--no_amp", "--num_workers", "0", "--quiet"))
