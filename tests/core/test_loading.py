"""Claims about the way from a shard to a training step."""
import os
from types import SimpleNamespace

import open_clip
import pytest
import torch
from benchmark.models import CLIP_CONFIG
from conftest import images, json_lines, on_gpu, picture, png, run, write_csv, write_json, write_tar
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor
from training import equal, open_clip_train_each, pipeline, train_flags, weights

import open_clip_mdc
from open_clip_mdc.data.captions import CAPTION_SEPARATOR
from open_clip_mdc.data.images import open_image
from open_clip_mdc.integration import prefetch as loading
from open_clip_mdc.integration import training as hooks
from open_clip_mdc.integration.data import seed_noise
from open_clip_mdc.integration.openclip import MAJOR

SHARDS, PER_SHARD = 4, 12


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """48 images, as 4 shards of two captions each and as a csv file of one caption each."""
    folder = tmp_path_factory.mktemp("data")
    rows = [("filepath", "title")]
    for shard in range(SHARDS):
        content = {}
        for i in range(shard * PER_SHARD, (shard + 1) * PER_SHARD):
            captions = f"a red circle number {i}", f"a blue square number {i}"
            rows.append((folder / picture(folder / f"{i}.png", i), captions[0]))
            content |= {f"{i}.png": png(i), f"{i}.txt": CAPTION_SEPARATOR.join(captions).encode()}
        write_tar(folder / f"{shard}.tar", content)
    write_csv(folder / "train.csv", rows, delimiter="\t")
    return folder


# More samples an epoch than there are: a worker reads its shards more than once.
SOURCES = {"csv": "--dataset-type csv", "webdataset": "--dataset-type webdataset --train-num-samples 80",
           "resampled": "--dataset-type webdataset --train-num-samples 80 --dataset-resampled"}
# where samples come from, workers, models
CASES = ["webdataset_0_MDC-ViT-Ti-8", "webdataset_0_ViT-Ti-8", "webdataset_2_MDC-ViT-Ti-8", "webdataset_2_ViT-Ti-8",
         "csv_2_MDC-ViT-Ti-8", "csv_2_ViT-Ti-8", "resampled_0_MDC-ViT-Ti-8", "resampled_2_MDC-ViT-Ti-8"]


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """Run every case by the real `main`, in two processes.

    One is unbroken, then has another seed. One is stopped and resumed.
    """
    logs = tmp_path_factory.mktemp("logs")

    def argvs(name, more):
        for case in CASES:
            source, workers, model = case.split("_")
            path = data / ("train.csv" if source == "csv" else f"{{0..{SHARDS - 1}}}.tar")
            yield train_flags(SOURCES[source], "--batch-size 8 --lr-scheduler const", more, data=path, logs=logs,
                              name=f"{name}-{case}", model=model, workers=workers)

    open_clip_train_each(*argvs("unbroken", "--epochs 2"), *argvs("other", "--seed 1"))
    open_clip_train_each(*argvs("broken", "--epochs 1"), *argvs("broken", "--epochs 2 --resume latest"))
    return logs


@pytest.mark.parametrize("case", CASES)
def test_a_seed_is_a_seed_and_a_resumed_run_equals_the_unbroken_one(runs, case):
    for epoch in (1, 2):
        assert equal(weights(runs, epoch, f"unbroken-{case}"), weights(runs, epoch, f"broken-{case}"))
    assert not equal(weights(runs, 1, f"unbroken-{case}"), weights(runs, 1, f"other-{case}"))


def order(data, seed=0, rank=0, epochs=(0,)) -> list[list[tuple[int, str]]]:
    """Return what a training loader reads in each epoch: (image, colour in the caption that was drawn)."""
    info = pipeline(data / f"{{0..{SHARDS - 1}}}.tar", pil_to_tensor, train_num_samples=96, batch_size=12, rank=rank,
                    seed=seed)
    read = []
    for epoch in epochs:
        info.set_epoch(epoch)
        texts = [c.split() for _, captions in map(loading.pair, info.dataloader) for c in captions]
        read.append([(int(words[4]), words[1]) for words in texts])
    return read


def test_order_and_captions_differ_between_passes_epochs_seeds_and_ranks_and_repeat_otherwise(data):
    (zero, one), (other_seed,), (other_rank,) = order(data, epochs=(0, 1)), order(data, seed=1), order(data, rank=1)
    first, second = zero[:48], zero[48:]  # an epoch of 96 samples reads the 48 images twice
    assert {i for i, _ in first} == {i for i, _ in second} == set(range(48))
    assert {colour for _, colour in first} == {"red", "blue"}
    reads = [first, second, one[:48], other_seed[:48], other_rank[:48]]
    assert all(a != b and [i for i, _ in a] != [i for i, _ in b] and dict(a) != dict(b)
               for n, a in enumerate(reads) for b in reads[:n])
    assert order(data, epochs=(1,)) == [one]


def test_webdataset_batches_are_pinned_where_there_is_a_gpu(data):
    for device in ("cpu", "cuda:0"):
        for is_train in (True, False):
            info = pipeline(data / "0.tar", pil_to_tensor, is_train, workers=1, device=device)
            assert info.dataloader.pipeline[0].pin_memory is (device == "cuda:0")


JITTER = {"color_jitter_prob": 0.8, "color_jitter": (0.4, 0.4, 0.4, 0.1), "gray_scale_prob": 0.2}
TIMM = {"use_timm": True, "scale": (0.4, 1.0), "color_jitter": 0.4}


@pytest.mark.parametrize("aug_cfg, mode", [
    *(({}, mode) for mode in ("RGB", "L", "RGBA", "P", "1")), (JITTER, "RGB"), (JITTER, "L"), (TIMM, "RGB"),
])
def test_images_normalised_on_the_device_equal_upstreams_to_the_last_bit(aug_cfg, mode):
    _, transform, _ = open_clip_mdc.create_model_and_transforms("ViT-Ti-8", aug_cfg=aug_cfg)
    as_bytes, normalize = loading.split_normalization(transform)
    image = Image.effect_noise((50, 40), 80).convert(mode)
    seed_noise(0)
    expected = transform(image)
    seed_noise(0)
    found = as_bytes(image)
    assert found.dtype == torch.uint8 and found.is_contiguous()
    [(batch, text)] = loading.PrefetchLoader([(found[None], torch.ones(1))], "cpu", normalize)
    assert torch.equal(batch[0], expected) and torch.equal(text, torch.ones(1))


def test_a_transform_that_does_not_end_in_normalisation_stays_as_it_is():
    _, transform, validate = open_clip_mdc.create_model_and_transforms(
        "ViT-Ti-8", aug_cfg={"use_timm": True, "scale": (0.4, 1.0), "re_prob": 0.5})  # erases after normalising
    assert loading.split_normalization(transform) == (transform, None)
    assert loading.split_normalization(len) == (len, None)
    [(image, _)] = loading.PrefetchLoader([(torch.randn(1, 3, 4, 4), torch.ones(1))], "cpu", None)
    assert image.dtype == torch.float32


def test_a_clip_model_trains_and_validates_as_by_openclip_alone_bit_for_bit_but_for_seeds(data, tmp_path):
    """By OpenCLIP's own `main`, first without the plug-in, where each epoch is given the seeds of the plug-in's."""
    write_json(tmp_path / "Tiny-ViT.json", CLIP_CONFIG)
    csv = data / "train.csv"
    alone, registered = (train_flags("--batch-size 8 --epochs 2 --grad-clip-norm 1 --val-data", csv, "--aug-cfg",
                                     "color_jitter=(0.4, 0.4, 0.4, 0.1)", "color_jitter_prob=0.8", data=csv,
                                     logs=tmp_path, name=name, model="Tiny-ViT") for name in ("alone", "registered"))
    run("python", "-c", f"""
import open_clip, open_clip_mdc
from open_clip_mdc.integration.data import seed_noise
from open_clip_train import main
open_clip.add_model_config({str(tmp_path / "Tiny-ViT.json")!r})
train_one_epoch = main.train_one_epoch
def seeded(model, *args, **kwargs):
    seed_noise(0, model.epoch if hasattr(model, "epoch") else args[2], 0)  # 4.x: a state
    train_one_epoch(model, *args, **kwargs)
main.train_one_epoch = seeded
main.main({alone!r})
main.train_one_epoch = train_one_epoch
open_clip_mdc.register(training=True)
assert main.train_one_epoch is not train_one_epoch
main.main({registered!r})
""", fork=True)
    for epoch in (1, 2):
        one, other = (torch.load(tmp_path / name / f"checkpoints/epoch_{epoch}.pt", weights_only=True)
                      for name in ("alone", "registered"))
        assert equal(one["state_dict"], other["state_dict"])
        for state, same in zip(*(x["optimizer"]["state"].values() for x in (one, other)), strict=True):
            assert equal(state, same)
    one, other = (json_lines(tmp_path / name / "checkpoints/results.jsonl") for name in ("alone", "registered"))
    assert one == other and len(one) == 2


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_each_batch_is_sent_before_the_one_before_it_is_used(count):
    """At i batch i is sent, and at i + 1.5 it is used."""
    times = []
    for batch in loading.one_ahead(range(count), lambda i: times.append(i) or i):
        times.append(batch + 1.5)
    assert times == sorted((*range(count), *(i + 1.5 for i in range(count))))


@on_gpu
def test_batches_on_a_gpu_equal_those_on_the_cpu():
    model, transform, _ = open_clip_mdc.create_model_and_transforms("MDC-ViT-Ti-8")
    _, normalize = loading.split_normalization(transform)
    text = open_clip_mdc.get_tokenizer("MDC-ViT-Ti-8")(["a red circle"] * 4)
    loader = [(torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8), text) for _ in range(5)]
    made = []
    for device in ("cpu", "cuda"):
        seed_noise(0)
        model.seed_t(0)
        batches = loading.PrefetchLoader(loader, device, normalize)
        batches.prepare = model.prepare
        made.append([(image.cpu(), captions.to("cpu")) for image, captions in batches])
    for (image, captions), (image_gpu, captions_gpu) in zip(*made, strict=True):
        torch.testing.assert_close(image, image_gpu, atol=1e-6, rtol=0)
        assert torch.equal(captions.packed.token, captions_gpu.packed.token)


@pytest.mark.parametrize("workers", [0, 1])
def test_shards_without_a_batch_that_can_be_read_end_training_in_one_line(data, tmp_path, workers):
    """Upstream reads them again, for ever: three pairs of a batch of four, one broken image, one without caption."""
    content = {}
    for i, size in enumerate((None, None, None, 40)):
        content |= {f"{i}.png": png(i)[:size], f"{i}.txt": b"a red circle"}
    write_tar(tmp_path / "0.tar", {**content, "9.png": png(9)})
    enough, few = (iter(pipeline(tmp_path / "0.tar", to_tensor, True, open_clip_mdc.get_tokenizer("MDC-ViT-Ti-8"),
                                 batch_size=size, workers=workers, train_num_samples=16).dataloader) for size in (3, 4))
    assert len(loading.pair(next(enough))[0]) == 3
    with pytest.raises(ValueError, match="0.tar: the shards of data worker 0 hold fewer readable pairs "
                                         "than --batch-size: "):
        next(few)


def to_tensor(image: Image.Image) -> torch.Tensor:
    return pil_to_tensor(image.resize((8, 8)))


def test_no_program_is_started_for_an_image(tmp_path, monkeypatch):
    """An EPS under another name: Pillow hands it to Ghostscript."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    Image.new("RGB", (8, 8)).save(tmp_path / "eps.jpg", "EPS")
    with pytest.raises(ValueError, match=f"cannot read the image {tmp_path}/eps.jpg: "):
        open_image(tmp_path / "eps.jpg")
    assert not (tmp_path / "started").exists()


def test_validation_forgets_what_a_killed_run_said_of_epochs_that_it_did_not_save(tmp_path, caplog):
    path = tmp_path / "results.jsonl"
    hooks.forget_from(1, path)
    assert not path.exists()
    one, two, three = (f'{{"nelbo": {n}.5, "epoch": {n}}}\n' for n in "123")
    own = '{"imagenet-zeroshot-val-top1": 0.5}\n'  # upstream's, of a run without --val-data
    for text, epoch, kept in [(one + two + three, 4, one + two + three), (one + two + three, 2, one), (one, 1, ""),
                              (one + two + three[:-5], 3, one + two), (one + "\0\0", 2, one), ("[]\n", 1, ""),
                              (own + own, 3, own + own), (own + one + two, 2, own + one)]:
        path.write_text(text)
        caplog.clear()
        hooks.forget_from(epoch, path)
        assert path.read_text() == kept and bool(caplog.records) == (text[-2:] != "}\n")


def test_zero_shot_results_of_clip_are_kept_and_said_once_an_epoch(tmp_path, monkeypatch):
    """OpenCLIP's own evaluation runs with fewer classes and without --val-data. The second epoch is evaluated twice."""
    open_clip_mdc.register(training=True)
    from open_clip_train import main, zero_shot
    monkeypatch.setattr(zero_shot, "IMAGENET_CLASSNAMES", zero_shot.IMAGENET_CLASSNAMES[:5])
    monkeypatch.setattr(zero_shot, "accuracy", lambda output, target, topk: [1.0, 1.0])  # its own needs numpy < 2.4
    monkeypatch.setattr(zero_shot, "OPENAI_IMAGENET_TEMPLATES", zero_shot.OPENAI_IMAGENET_TEMPLATES[:1])
    model = open_clip.create_model("ViT-Ti-8", output_dict=True)
    data = {"imagenet-val": SimpleNamespace(dataloader=[(images(2), torch.tensor([0, 1]))])}
    args = SimpleNamespace(model="ViT-Ti-8", device="cpu", precision="fp32", rank=0, distributed=False, horovod=False,
                           batch_size=2, epochs=3, val_frequency=1, zeroshot_frequency=1, save_logs=True, wandb=False,
                           train_data="0.tar", checkpoint_path=str(tmp_path))
    if MAJOR > 3:
        from open_clip.task import CLIPTask
        model = CLIPTask(model)
    for epoch in (1, 2, 2, 3):
        main.evaluate(model, data, epoch, args, tokenizer=open_clip.get_tokenizer("ViT-Ti-8"))
    rows = json_lines(tmp_path / "results.jsonl")
    assert [row["epoch"] for row in rows] == [1, 2, 3] and "imagenet-zeroshot-val-top1" in rows[0]
