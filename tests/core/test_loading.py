"""Claims about the way from a shard to a training step.    pytest tests/core/test_loading.py"""
from types import SimpleNamespace

import open_clip_train.data
import pandas as pd
import pytest
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor
from training import equal, open_clip_train_each, train_flags, weights

import open_clip_mdc
from open_clip_mdc.data.shards import tar_writer
from open_clip_mdc.tokens import CAPTION_SEPARATOR

SHARDS, PER_SHARD = 4, 12


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """48 pictures, as 4 shards of two captions each and as a csv file of one caption each."""
    folder = tmp_path_factory.mktemp("data")
    rows = []
    for shard in range(SHARDS):
        with tar_writer(folder / f"{shard}.tar") as write:
            for i in range(shard * PER_SHARD, (shard + 1) * PER_SHARD):
                path = folder / f"{i}.png"
                Image.effect_noise((40, 40), 10 + 5 * i).convert("RGB").save(path)
                captions = f"a red circle number {i}", f"a blue square number {i}"
                write.write({"__key__": str(i), "png": path.read_bytes(), "txt": CAPTION_SEPARATOR.join(captions)})
                rows.append({"filepath": str(path), "title": captions[0]})
    pd.DataFrame(rows).to_csv(folder / "train.csv", sep="\t", index=False)
    return folder


# where samples come from, workers, models
CASES = [
    ("webdataset", "0", "MDC-ViT-Ti-8"), ("webdataset", "0", "ViT-Ti-8"),
    ("webdataset", "2", "MDC-ViT-Ti-8"), ("webdataset", "2", "ViT-Ti-8"),
    ("csv", "2", "MDC-ViT-Ti-8"), ("csv", "2", "ViT-Ti-8"),
    ("resampled", "0", "MDC-ViT-Ti-8"), ("resampled", "2", "MDC-ViT-Ti-8"),
]


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """Every case by the real `main`, in two processes: one unbroken, and another seed; one stopped and resumed."""
    logs = tmp_path_factory.mktemp("logs")

    def argv(name, case, *more):
        source, workers, model = case
        path = data / "train.csv" if source == "csv" else data / f"{{0..{SHARDS - 1}}}.tar"
        # More samples an epoch than there are: a worker reads its shards more than once.
        flags = ["--dataset-type", "csv"] if source == "csv" else ["--dataset-type", "webdataset",
                                                                   "--train-num-samples", "80"]
        flags += ["--dataset-resampled"] if source == "resampled" else []
        return train_flags(*flags, "--batch-size", "8", "--lr-scheduler", "const", *more, data=path, logs=logs,
                           name=f"{name}-{'-'.join(case)}", model=model, workers=workers)

    open_clip_train_each(*[argv("unbroken", case, "--epochs", "2") for case in CASES],
                         *[argv("other", case, "--epochs", "1", "--seed", "1") for case in CASES])
    open_clip_train_each(*[argv("broken", case, "--epochs", "1") for case in CASES],
                         *[argv("broken", case, "--epochs", "2", "--resume", "latest") for case in CASES])
    return logs


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_seed_is_a_seed_and_a_resumed_run_equals_the_unbroken_one(runs, case):
    name = "-".join(case)
    first = weights(runs, 1, f"unbroken-{name}")
    assert equal(first, weights(runs, 1, f"broken-{name}")), "two runs of one seed differ"
    assert equal(weights(runs, 2, f"unbroken-{name}"), weights(runs, 2, f"broken-{name}"))
    assert not equal(first, weights(runs, 1, f"other-{name}")), "two seeds give one run"


def order(data, seed=0, rank=0, epochs=(0,)) -> list[list[tuple[int, str]]]:
    """What a training loader of upstream's reads per epoch: (picture, colour in the caption that was drawn)."""
    open_clip_mdc.register()
    args = SimpleNamespace(train_data=str(data / f"{{0..{SHARDS - 1}}}.tar"), train_num_samples=96, batch_size=12,
                           train_data_upsampling_factors=None, world_size=1, rank=rank, seed=seed, workers=0)
    info = open_clip_train.data.get_wds_dataset(args, pil_to_tensor, is_train=True, tokenizer=lambda caption: [caption])
    read = []
    for epoch in epochs:
        info.set_epoch(epoch)
        read.append([(int(c.split()[4]), c.split()[1]) for _, captions in info.dataloader for c in captions])
    return read


def test_order_and_captions_differ_between_passes_epochs_seeds_and_ranks_and_repeat_otherwise(data):
    (zero, one), (other_seed,), (other_rank,) = order(data, epochs=(0, 1)), order(data, seed=1), order(data, rank=1)
    first, second = zero[:48], zero[48:]  # an epoch of 96 samples reads the 48 pictures twice
    assert {i for i, _ in first} == {i for i, _ in second} == set(range(48))
    assert {colour for _, colour in first} == {"red", "blue"}
    reads = [first, second, one[:48], other_seed[:48], other_rank[:48]]
    assert all(a != b and [i for i, _ in a] != [i for i, _ in b] and dict(a) != dict(b)
               for n, a in enumerate(reads) for b in reads[:n])
    assert order(data, epochs=(1,)) == [one]
