"""Claims about --cache-features on two ranks, by the real command."""
import json

import pytest
import torch
from conftest import png, read_json, times, untrained_captioner, write_tar
from safetensors.torch import load_file
from tools.shard_files import COLOURS, SHAPES
from torchvision.transforms import ToTensor
from training import checkpoint, equal, losses, open_clip_train, run_ranks, train_flags, weights

from open_clip_mdc.integration.feature_cache import FeatureCache, digest

SHARDS, EACH = 4, 40  # images: two batches of the tower a shard
KILLED = 3  # batches: each rank, with two of the shards, is within its second one

# argv: the file of counts, runs as JSON, and the number of batches after which a rank dies. A run's count is of the
# images that the tower of this rank saw.
RUNS = """
import json, os, signal, sys, torch
from open_clip_mdc.models import towers
from open_clip_mdc.models.towers import tower
seen, real = [], towers.patch_tokens
rank = int(os.environ["RANK"])
def counted(visual, image, masked=None):
    seen.append(len(image) if image.ndim == 4 else 0)
    if sys.argv[3:] == [str(len(seen))]:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(visual, image, masked)
towers.patch_tokens = counted
from open_clip_mdc.train import main
counts = {}
for argv in json.loads(sys.argv[2]):
    assert not main(argv)
    counts[argv[argv.index("--name") + 1]] = sum(seen)
    seen.clear()
    torch.distributed.init_process_group = lambda *args, **kwargs: None  # the processes have met
    with open(f"{sys.argv[1]}{rank}", "w") as file:
        json.dump(counts, file)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A cache whose first filling was killed, and what is trained on it: the folder, what was kept, images by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    for shard in range(SHARDS):
        write_tar(folder / f"{shard}.tar", {
            f"{i:03d}.{kind}": content for i in range(EACH) for kind, content in (
                ("png", png(EACH * shard + i)), ("txt", f"a {COLOURS[i % 4]} {SHAPES[shard % 2]}".encode()))})

    def flags(name, *more, epochs=2, cache=folder / "cache", **other):
        cached = ("--cache-features", cache) if cache else ()
        return train_flags("--dataset-type", "webdataset", "--batch-size", "8", "--train-num-samples", SHARDS * EACH,
                           "--epochs", epochs, "--lock-image", *cached, *more, logs=folder, name=name,
                           data=folder / f"{{0..{SHARDS - 1}}}.tar", **other)
    broken = run_ranks("python", "-c", RUNS, str(folder / "none"), json.dumps([flags("broken")]), str(KILLED),
                       check=False)
    kept = times((folder / "cache").rglob("*.safetensors"))
    assert all(rank.returncode for rank in broken) and not checkpoint(folder, 1, "broken").exists()
    # The captions have one length and ARC has no noise: a step on all images is the same on one process as on two.
    arc = dict(model="ARC-ViT-Ti-8", epochs=3)
    run_ranks("python", "-c", RUNS, str(folder / "count"), json.dumps([
        flags("filled"), flags("resumed", "--resume", checkpoint(folder, 1, "filled")),
        flags("workers", workers="2", epochs=1),
        flags("without", "--aug-cfg", "scale=(1.0,1.0)", workers="2", epochs=1, cache=None),  # the whole image
        flags("whole", "--batch-size", SHARDS * EACH // 2, **arc)]))
    open_clip_train(*flags("one", "--batch-size", SHARDS * EACH, **arc), logs=folder, name="one", model=arc["model"])
    counts = [read_json(folder / f"count{rank}") for rank in (0, 1)]
    return folder, kept, {name: [count[name] for count in counts] for name in counts[0]}


def test_a_rank_computes_what_no_other_does(tmp_path):
    """Else the others would wait in a collective operation, which gives up after some minutes, for a slow one."""
    # The hash of the last one ends in a zero, which numpy leaves out of bytes.
    images = [png(0, 32), png(1, 32), next(image for number in range(10_000) if digest(
        image := png(2, 32) + str(number).encode()).endswith(b"\0"))]
    for n, image in enumerate(images):
        write_tar(tmp_path / f"{n}.tar", {"0.png": image, "0.txt": b"a red circle"})
    cache = FeatureCache(str(tmp_path / "cache"), str(tmp_path / "{0..2}.tar"), ToTensor())
    cache.fill(untrained_captioner().visual, "fp32", "cpu", rank=1, world_size=2)
    for image, file in zip(images, cache.files, strict=True):
        assert torch.equal(cache.tokens(digest(image)), load_file(file)["tokens"][0])
    assert cache.tokens(digest(b"another")) is None and len(cache.digests) == 3


def test_two_ranks_share_the_work_and_go_on_where_one_was_killed(trained):
    folder, kept, counts = trained
    files = times((folder / "cache").rglob("*.safetensors"))
    assert 0 < len(kept) < SHARDS == len(files) and kept.items() <= files.items()
    assert sum(counts["filled"]) == EACH * (SHARDS - len(kept))
    assert not any(sum(counts[name]) for name in ("resumed", "workers", "whole"))
    assert sum(counts["without"]) == EACH * SHARDS


def test_who_resumes_and_reads_the_cache_trains_to_the_weights_of_who_filled_it(trained):
    folder = trained[0]
    assert equal(weights(folder, 2, "filled"), weights(folder, 2, "resumed"))
    assert not equal(weights(folder, 1, "filled"), weights(folder, 2, "filled"))


def test_with_workers_each_caption_meets_the_tokens_of_its_image(trained):
    """Else the losses of the run without a cache would not be those to 16 bit."""
    steps = SHARDS * EACH // 16  # the runs that follow in these processes write to the same log
    cached, plain = (losses(trained[0], name)[:steps] for name in ("workers", "without"))
    assert len(plain) == steps
    torch.testing.assert_close(torch.tensor(cached), torch.tensor(plain), atol=2e-3, rtol=0)


def test_two_ranks_train_to_the_weights_of_one_process_of_twice_the_batch(trained):
    folder = trained[0]
    one, two = (weights(folder, 3, name) for name in ("one", "whole"))
    assert len(losses(folder, "one")) == len(losses(folder, "whole")) == 3
    torch.testing.assert_close(two, one, atol=1e-5, rtol=1e-5)
