"""A seed is a seed: all random numbers of a training run are a function of --seed, epoch, rank and worker.

Upstream seeds a process once, when it starts, and its webdataset shuffle by process id and clock: no two runs of one
seed are equal, and a resumed run repeats the noise of its first epoch. Here each epoch is seeded anew: `seed_noise` in
the process that trains, `SeedEachPass` where samples are read, which is in the workers, if there are any.
"""
import random
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from open_clip_train.data import DataInfo, ResampledShards2, SharedEpoch
from torch.utils.data import get_worker_info
from webdataset.filters import _shuffle


def seed_noise(*keys: int) -> None:
    """Seeds PyTorch, numpy and Python by all of the keys together."""
    seeds = np.random.SeedSequence(keys).generate_state(3)
    torch.manual_seed(int(seeds[0]))
    np.random.seed(int(seeds[1]))
    random.seed(int(seeds[2]))


def worker_id() -> int:
    """The number of this worker of a DataLoader, 0 where the process reads by itself."""
    worker = get_worker_info()
    return 0 if worker is None else worker.id


class SeedEachPass:
    """A stage of a webdataset pipeline: seeds whatever the stages after it draw, each time the data are read.

    An epoch may be several passes over a worker's shards; each pass has its own noise.
    """

    def __init__(self, seed: int, rank: int, shared_epoch: SharedEpoch):
        """Args: `shared_epoch` is upstream's, by which the training process tells its workers the epoch."""
        self.seed, self.rank, self.shared_epoch = seed, rank, shared_epoch
        self.epoch, self.passes = -1, 0

    def __call__(self, samples: Iterable) -> Iterator:
        epoch = self.shared_epoch.get_value()
        self.passes = self.passes + 1 if epoch == self.epoch else 0
        self.epoch = epoch
        seed_noise(self.seed, epoch, self.rank, worker_id(), self.passes)
        yield from samples


def seed_webdataset(info: DataInfo, seed: int, rank: int) -> None:
    """Makes a training webdataset of upstream's repeatable: shards, order, captions and augmentation.

    Raises:
        RuntimeError: upstream's pipeline has no sample shuffle where this function looks for it.
    """
    loader = info.dataloader.pipeline[0]
    # Workers that live on draw their first seed once a run: not from the numbers that also make masks and dropout.
    loader.generator = torch.Generator().manual_seed(seed)
    stages = loader.dataset.pipeline
    if isinstance(stages[0], ResampledShards2):  # adds the epoch to what this returns; needs no pass, it never ends
        stages[0].worker_seed = lambda: int(np.random.SeedSequence([seed, rank, worker_id()]).generate_state(1)[0])
    places = [i for i, stage in enumerate(stages) if getattr(stage, "f", None) is _shuffle]
    if len(places) != 1:
        raise RuntimeError(f"the webdataset pipeline has {len(places)} sample shuffles, not 1: {stages}")
    stages[places[0]].kw["rng"] = random  # by default a generator of its own, seeded by process id and clock
    stages.insert(places[0], SeedEachPass(seed, rank, info.shared_epoch))
