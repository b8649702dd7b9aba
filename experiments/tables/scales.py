"""The scales at which tables run: the paper's, and small ones.

This file imports the standard library alone, so that `make -n table1 SCALE=paper` prints its commands where nothing is
installed.
"""
from argparse import ArgumentTypeError

from clip_benchmark_ext.datasets.sugar_crepe import GROUPS as SUGAR_CREPE_GROUPS

from . import contexts
from .scale import CPU, Backbone, Captioning, Data, Probe, Scale, Selection, Tuning, made, pairs

SHOTS = (1, 4, 16, 64, 256)  # numbers of images that `open_clip_mdc scenes --without` renders of a concept
CONCEPT = "yellow star"

# Commands that preflight.py prints. {{data}} is the user's folder.
IMG2DATASET = ("img2dataset --url_list {0}.tsv --input_format tsv --url_col url --caption_col caption --output_format "
               "webdataset --image_size 256 --resize_mode keep_ratio --output_folder {{data}}/{0}")
KARPATHY = "open_clip_mdc prepare {0} --images {0}-images --annotations dataset_{0}.json --out {{data}}/{0}"
PROBES = "hf download clip-benchmark/wds_{0} --repo-type dataset --local-dir {1}"

PAPER = Scale(
    name="paper",
    data={
        "cc3m": Data("{data}/cc3m", "CC3M", 332, 2905954, IMG2DATASET.format("cc3m")),
        "cc12m": Data("{data}/cc12m", "CC12M", 1243, 10968539, IMG2DATASET.format("cc12m")),
        **{f"recap-{n}m": Data(f"{{data}}/recap-{n}m", f"Recap-{n}M", 100 * n, n * 1_000_000,
                               "python -m experiments.prepare_recap --shards 'RECAP-DATACOMP/{{00000..99999}}.tar' "
                               f"--pairs {n}000000 --out {{data}}/recap-{n}m") for n in (5, 10, 20, 30)},
        "coco": Data("{data}/coco/train", "MSCOCO", 114, 113287, KARPATHY.format("coco")),
        "flickr30k": Data("{data}/flickr30k/train", "Flickr30k", 29, 29000, KARPATHY.format("flickr30k")),
    },
    backbones={"ViT-B-32": Backbone(5e-4, 0.1), "ViT-B-16": Backbone(5e-4, 0.2), "ViT-L-14": Backbone(4e-4, 0.2, 2)},
    batch=1024, warmup=10000, epochs=32, workers=8, seeds=(0,), gpus=8,
    train_flags=("--precision", "amp_bf16", "--beta1", "0.9", "--beta2", "0.98",
                 "--lr-scheduler", "cosine"),
    eval_flags=(),
    alt="cc12m", long="recap-10m", search="cc3m", amounts=("recap-5m", "recap-10m", "recap-20m", "recap-30m"),
    ratios=("cc12m", "recap-10m"),
    probes={"ImageNet": Probe("wds/imagenet1k", 50000), "Food101": Probe("wds/food101", 25250),
            "CIFAR-10": Probe("wds/vtab/cifar10", 10000), "CIFAR-100": Probe("wds/vtab/cifar100", 10000),
            "Pets": Probe("wds/vtab/pets", 3669)},
    probe_root="{data}/probe/{{dataset_cleaned}}",
    selection=(
        Selection("{data}/aro", ("aro/vg_relation",), "ARO relation"),
        Selection("{data}/aro", ("aro/vg_attribution",), "ARO attribute"),
        Selection("{data}/aro", ("aro/coco_order",), "COCO order"),
        Selection("{data}/aro", ("aro/flickr30k_order",), "Flickr30k order"),
        *(Selection("{data}/sugarcrepe", tuple(f"sugar_crepe/{s}" for s in subsets), f"SugarCrepe {group}")
          for group, subsets in SUGAR_CREPE_GROUPS.items()),
    ),
    draws=1024,
    captioning=(Captioning("{data}/coco", "wds/coco", "MSCOCO", ("10", "15", "20"), "coco", "laion2b_s13b_b90k"),
                Captioning("{data}/flickr30k", "wds/flickr30k", "Flickr30k", ("10", "15", "20"), "flickr30k")),
    fetch=tuple(("{data}/" + name, KARPATHY.format(name)) for name in ("coco", "flickr30k")),
)

SWAPS = "swap_att swap_obj replace_rel"
SCENE_SHARDS = "{out}/data/scenes/train/{{00000..0000%d}}.tar"
TEST_SHARDS = "open_clip_mdc prepare shards --captions-key caption --test"  # a scene has one caption

SCENES = Scale(
    **CPU, name="scenes",
    data={
        "short": Data("{out}/data/scenes/train", "short captions", 8, 20000),
        "long": Data("{out}/data/scenes/train-long", "long captions", 8, 20000),
        **{f"short-{n}of8": Data("{out}/data/scenes/train", f"{n}/8", n, n * 2500, first=True) for n in (1, 2, 4)},
        "big": Data("{out}/data/big/train", "three objects, 64 px", 8, 20000),
        "fewshot": Data("{out}/data/fewshot/train", f"without {CONCEPT}", 8, 20000),
        **{f"shots-{n}": Data(f"{{out}}/data/fewshot/shots-{n}", f"{n} of {CONCEPT}", 1, 3200) for n in SHOTS},
    },
    backbones={"ViT-Ti-8": Backbone(5e-4, 0.1)}, warmup=50, epochs=1,
    alt="short", long="long", search="short", amounts=("short-1of8", "short-2of8", "short-4of8", "short"),
    ratios=("short",),
    probes={"16 classes": Probe("wds/probe", 1600)}, probe_root="{out}/data/scenes/probe",
    selection=pairs("{out}/data/scenes/sugarcrepe", SWAPS, 400),
    captioning=(Captioning("{out}/data/captions", "wds/captions", "scenes", ("8", "10", "auto")),),
    prepare=(
        made("scenes", "open_clip_mdc scenes --num-pairs 400"),
        made("captions", f"{TEST_SHARDS} {{out}}/data/scenes/val/00000.tar"),
        made("big", "open_clip_mdc scenes --size 64 --objects 3 --sizes --num-probe 1 --num-pairs 1", "table7"),
        made("captions-big", f"{TEST_SHARDS} {{out}}/data/big/val/00000.tar", "table7"),
        made("vq.pt", f"open_clip_mdc vq fit --model MCD-VQ-ViT-Ti-8 --train-data {SCENE_SHARDS % 7}", "table6"),
        made("fewshot", f"open_clip_mdc scenes --without '{CONCEPT}' --num-val 500 --num-probe 1 --num-pairs 1",
             "figure8"),
        made("concept", f"{TEST_SHARDS} {{out}}/data/fewshot/concept/00000.tar", "figure8"),
        made("without", f"{TEST_SHARDS} {{out}}/data/fewshot/val/00000.tar", "figure8"),
        made("rates", "open_clip_mdc scenes --seed 1 --num-train 1 --num-val 1 --num-pairs 1", "rates"),
    ),
    rates=(2.5e-4, 5e-4, 1e-3, 2e-3), chosen={"MDC": 1e-3, "ARC": 1e-3},
    tuning=Tuning(lr=3e-4, batch=32, epochs=1),
    article=True, caption_epochs=4, val="{out}/data/scenes/val/00000.tar", margin=3.0, cider_margin=20.0,
    void={"cider-length": "cannot fail, as all true captions have 8 tokens and two of ten must be wrong",
          "long": "cannot show, as the probe asks for what the short captions say already"},
)

PHOTOGRAPHS = "{data}/flickr8k/train/{{00000..00005}}.tar"

FLICKR8K = Scale(
    **CPU | dict(train_flags=("--precision", "fp32", "--force-image-size", "64")), name="flickr8k",
    data={
        "captions": Data("{out}/data/captions/train", "five captions", 6, 30000),
        "joined": Data("{out}/data/joined/train", "five captions joined", 6, 30000),
        **{f"captions-{n}of6": Data("{out}/data/captions/train", f"{n},000", n, n * 5000, first=True)
           for n in (1, 2, 4)},
    },
    # Images of 64 px instead of the config's 96 take three fifths of the time. It is spent on more epochs, as after one
    # epoch captions are not yet language.
    backbones={"ViT-Ti-16": Backbone(1e-3, 0.1)}, warmup=10_000, epochs=4,
    alt="captions", long="joined", search="captions",
    amounts=("captions-1of6", "captions-2of6", "captions-4of6", "captions"), ratios=("captions",),
    probes={"CIFAR-10": Probe("wds/cifar10", 2000)}, probe_root="{data}/probe/cifar10",
    selection=pairs("{out}/data/pairs", "swap_att swap_obj replace_att replace_obj replace_rel"),
    captioning=(Captioning("{out}/data/captions", "wds/captions", "Flickr8k", ("10", "15", "20", "auto")),),
    prepare=(
        made("val", "open_clip_mdc prepare shards --val {data}/flickr8k/val/*.tar"),
        made("vq.pt", f"open_clip_mdc vq fit --model MCD-VQ-ViT-Ti-16 --train-data {PHOTOGRAPHS}", "table6"),
        made("captions", f"open_clip_mdc prepare shards --train {PHOTOGRAPHS} --test {{data}}/flickr8k/test/*.tar"),
        made("joined", f"open_clip_mdc prepare shards --train {PHOTOGRAPHS} --join"),
        made("pairs", "python -m experiments.flickr8k pairs --shards {data}/flickr8k/test/*.tar"),
    ),
    article=True, val="{out}/data/val/val/00000.tar",
    fetch=(("{data}/flickr8k", "open_clip_mdc fetch flickr8k --out RAW; open_clip_mdc prepare flickr8k --images "
                               "RAW/Flicker8k_Dataset --annotations RAW/dataset_flickr8k.json --out {data}/flickr8k"),
           ("{data}/probe/cifar10", PROBES.format("vtab-cifar10", "{data}/probe/cifar10"))),
)

# Photographs with captions in {data}/train, val and test, in any layout that `open_clip_mdc prepare shards` reads, and
# a pretrained encoder. A run reads 120,000 captions (four times Flickr8k's 30,000), whatever the photographs are.
PHOTO_CAPTIONS = made("captions", "open_clip_mdc prepare shards --train {data}/train --test {data}/test")
PHOTO_PAIRS = made("pairs", "python -m experiments.flickr8k pairs --shards {out}/data/captions/test/0.tar",
                   "likelihoods", "towers")


def photos(name: str, base: str, image: str, size: str = "224") -> Scale:
    """Return a scale with a small decoder on the encoder of an OpenCLIP base or of timm-NAME, and its weights."""
    return Scale(
        **CPU | dict(batch=64, train_flags=("--precision", "fp32", "--force-image-size", size, "--beta2", "0.98")),
        name=name,
        data={"captions": Data("{out}/data/captions/train", "captions", 6, 30000)},
        backbones={f"small-{base}": Backbone(1e-3, 0.1)}, warmup=150, epochs=4,
        alt="captions", long="captions", search="captions",
        selection=pairs("{out}/data/pairs", "swap_att swap_obj replace_att replace_obj replace_rel"),
        captioning=(Captioning("{out}/data/val", "wds/val", "validation", ("10",)),
                    Captioning("{out}/data/captions", "wds/captions", "test", ("10",))),
        prepare=(made("val", "open_clip_mdc prepare shards --test {data}/val"), PHOTO_CAPTIONS, PHOTO_PAIRS),
        tables=("photos", "tries", "likelihoods", "words"), image=image, tuning=Tuning(1e-3, 0.1, 64, epochs=2),
        fetch=(("{data}/../probe", PROBES.format("vtab-cifar10", "{data}/../probe/cifar10")),
               ("{data}", "open_clip_mdc fetch flickr8k --out RAW; open_clip_mdc prepare flickr8k --images "
                          "RAW/Flicker8k_Dataset --annotations RAW/dataset_flickr8k.json --out {data}")),
    )


ENCODERS = "{data}/../encoders"
EFFICIENTNET = "timm-tf_efficientnet_lite0", f"{ENCODERS}/efficientnet_lite0"
PHOTOS = photos("photos", *EFFICIENTNET)
PHOTOS_UNLOCKED = PHOTOS._replace(name="photos-unlocked", free=("--unlock-image-after", "3", "--image-lr-scale", "0.1"))
# The first 500 of them, over and over.
FEW = PHOTOS._replace(
    name="few", tables=("epochs", "repetition"), epochs=1,
    data={"captions": Data("{out}/data/few", "500 photographs", 1, 2500)},
    # Only the last epoch is validated. The archived runs were trained in bfloat16.
    train_flags=("--precision", "amp_bf16", *PHOTOS.train_flags[2:], "--val-frequency", "1000"),
    val="{out}/data/val/val/00000.tar",
    captioning=(Captioning("{out}/data/captions", "wds/captions", "test", ("auto",)),),
    prepare=(made("val", "open_clip_mdc prepare shards --val {data}/val"),
             PHOTO_CAPTIONS,
             made("few", "python -m experiments.flickr8k first --shards {out}/data/captions/train/00000.tar")))
# What each objective makes of the encoder. An epoch has each photograph once. The tower is locked for the first 12 of
# 20 epochs. They cost little with cached tokens, and the decoder learns most of what it learns in them. A training with
# a free tower takes half an hour of a core at 128 px.
TOWERS = photos("towers", *EFFICIENTNET, size="128")._replace(
    tables=("towers",), epochs=20,
    data={"captions": Data("{out}/data/captions/train", "captions", 6, 6000)},
    free=("--unlock-image-after", "12", "--image-lr-scale", "0.1"),
    probes={"CIFAR-10": Probe("wds/cifar10", 2000)}, probe_root="{data}/../probe/cifar10",
    captioning=FEW.captioning, prepare=(PHOTO_CAPTIONS, PHOTO_PAIRS))
# Two sentences a photograph. A blind twin of each run is trained on, without photographs, for a third of the steps.
SENTENCES = photos("sentences", *EFFICIENTNET, size="128")._replace(
    tables=("sentences",), epochs=2, alt="pairs",
    data={"pairs": Data("{out}/data/pairs", "pairs of sentences", 6, 30000),
          "again": Data("{out}/data/pairs", "pairs of sentences, again", 6, 20000),
          "blind": Data("{out}/data/blind", "pairs of sentences, grey images", 6, 20000)},
    tuning=Tuning(lr=5e-4, batch=64, epochs=1),
    prepare=(made("pairs", "python -m experiments.flickr8k sentences --shards {data}/train/{{00000..00005}}.tar"),
             made("blind", "python -m experiments.flickr8k grey --shards {data}/train/{{00000..00005}}.tar"),
             made("held-out", "python -m experiments.flickr8k sentences --shards {data}/test/00000.tar")))
# 81 tokens. At 224 px there are 256, and each of the 8,000 photographs takes a quarter of a second of a core.
PHOTOS_VIT = photos("photos-vit", "timm-vit_small_patch14_dinov2", f"{ENCODERS}/vit_small_patch14_dinov2_saliency",
                    size="126")

# The rich world takes hours of two CPU cores, or of a GPU. A run has eight epochs and one cosine schedule. Each epoch
# is a new draw of half of the scenes. All checkpoints are kept for learning curves (curves.py). Warm-up is a tenth.
RICH_FOLDER = "{out}/data/rich"
RICH_SCENES = "open_clip_mdc scenes --world rich --noise 0.1 --num-val 500"
RICH_CAPTIONS = made("captions", "open_clip_mdc prepare shards --captions-key captions --test "
                                 f"{RICH_FOLDER}/val/00000.tar")


def rich_data(shards: int, samples: int) -> dict[str, Data]:
    return {"short": Data(f"{RICH_FOLDER}/train", "short captions", shards, samples),
            "long": Data(f"{RICH_FOLDER}/train-long", "long captions", shards, samples)}


def rich_probes(images: int) -> dict[str, Probe]:
    return {name: Probe(f"wds/probe-{name}", images)
            for name in ("colour", "shape", "size", "count", "position", "relation")}


RICH = Scale(
    **CPU, name="rich",
    data=rich_data(8, 20_000),
    backbones={"ViT-Ti-8-rich": Backbone(5e-4, 0.1)}, warmup=10_000, epochs=8,
    alt="short", long="long", search="short", ratios=("short",),
    probes=rich_probes(1000), probe_root=f"{RICH_FOLDER}/{{{{dataset_cleaned}}}}",
    selection=pairs(f"{RICH_FOLDER}/sugarcrepe", SWAPS, 400),
    captioning=(Captioning("{out}/data/captions", "wds/captions", "rich scenes", ("auto", "10", "15")),),
    prepare=(made("rich", f"{RICH_SCENES} --num-train 40000 --num-probe 1000 --num-pairs 400 --jobs 2"), RICH_CAPTIONS,
             made("rates", f"{RICH_SCENES} --seed 1 --num-train 1 --num-probe 1000 --num-pairs 1", "rates")),
    rates=(2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3), chosen={"MDC": 1e-3, "ARC": 2e-3},
    curve=(1, 2, 4, 8), margin=2.0, cider_margin=20.0,
)

GPU = RICH._replace(
    name="gpu",
    data=rich_data(100, 500_000),
    backbones={"ViT-S-16-128": Backbone(1e-3, 0.1)},
    batch=1024, workers=16, gpus=1, seeds=(0,),
    train_flags=("--precision", "amp_bf16"), eval_flags=("--quiet",),
    probes=rich_probes(5000), selection=pairs(f"{RICH_FOLDER}/sugarcrepe", SWAPS, 2000),
    prepare=(made("rich", f"{RICH_SCENES} --size 128 --num-train 1000000 --num-probe 5000 --num-pairs 2000 --jobs 16"),
             RICH_CAPTIONS), rates=(), chosen={},
)

CUB_SHARDS = ("python -m experiments.prepare_cub --images CUB_200_2011/images --captions text_c10 --split reed "
              "--classes trainvalclasses.txt testclasses.txt --out {data}/cub")
CUB = Scale(
    name="cub", tables=("table6", "figure7", "mcdiffusion"),  # MC-Diffusion's data, and VQ-Diffusion's optimizer
    data={"cub": Data("{data}/cub/train", "CUB-200", 9, 8855, CUB_SHARDS)},
    backbones={"ViT-f8": Backbone(4.5e-4, 0.045)},
    batch=128, warmup=1000, epochs=200, workers=8, seeds=(0,), gpus=8,
    train_flags=("--precision", "amp_bf16", "--beta1", "0.9", "--beta2", "0.96"), eval_flags=(),
    alt="cub", long="cub", search="cub", selection=(), draws=0,
    captioning=(Captioning("{data}/cub", "wds/cub", "CUB-200", ("auto",)),),
    prepare=(made("vq.pt", "open_clip_mdc vq import --model MCD-VQ-ViT-f8-mcs --from {data}/vqgan_gumbel_f8/last.ckpt "
                           "--used {data}/taming_vqvae_2887.pt", "table6", "figure7"),),
    val="{data}/cub/test/0.tar",
    fetch=(("{data}/cub", CUB_SHARDS),
           ("{data}/vqgan_gumbel_f8/last.ckpt", "curl --create-dirs -Lo {data}/vqgan_gumbel_f8/last.ckpt "
                                                "'https://heibox.uni-heidelberg.de/f/34a747d5765840b5a99d/?dl=1'"),
           ("{data}/taming_vqvae_2887.pt", "curl --create-dirs -Lo {data}/taming_vqvae_2887.pt https://github.com/"
            "microsoft/VQ-Diffusion/raw/main/help_folder/statistics/taming_vqvae_2887.pt")),
)

# Long enough that a masked network has learnt to use the other words, which it does late.
CONTEXTS = Scale(
    **CPU | dict(batch=64), name="contexts", tables=("contexts", "between"),
    data=contexts.DATA, backbones={"ViT-Ti-8": Backbone(1e-3, 0.1)}, warmup=10_000, epochs=4,
    alt="r90", long="r90", search="r90", margin=2.0, cider_margin=20.0,
    probes={name: Probe(f"wds/probe-{name}", 1600) for name in ("colour", "shape")},
    probe_root="{out}/data/pairs/{{dataset_cleaned}}", selection=pairs("{out}/data/pairs/sugarcrepe", "swap_att", 400),
    captioning=(Captioning("{out}/data/captions", "wds/captions", "mentions", ("auto",)),),
    prepare=(*contexts.PREPARE,
             made("captions", "open_clip_mdc prepare shards --captions-key captions --test "
                              "{out}/data/r90/val/00000.tar", "between"),
             made("pairs", "open_clip_mdc scenes --world mentions --num-train 1 --num-val 1 --num-pairs 400",
                  "between")))

SCALES = {scale.name: scale for scale in (
    PAPER, SCENES, RICH, GPU, FLICKR8K, PHOTOS, PHOTOS_UNLOCKED, PHOTOS_VIT, FEW, TOWERS, SENTENCES, CUB,
    CONTEXTS)}


def named(name: str) -> Scale:
    """Return the scale of this name. photos-timm-NAME is SCALE=photos on timm's encoder NAME and may download it."""
    encoder = name.removeprefix("photos-timm-")
    if encoder != name:
        return photos(name, f"timm-{encoder}", f"timm:{encoder}")
    if name not in SCALES:
        raise ArgumentTypeError(f"{name} is none of {', '.join(SCALES)}, photos-timm-NAME")
    return SCALES[name]
