"""The rich world's two sizes: hours of two CPU cores, and of a GPU.

A run is eight epochs with one cosine schedule, each of half of the scenes, drawn anew: every scene is read about four
times. The checkpoints are kept, for learning curves (curves.py). Warm-up is a tenth of a run.
"""
from .scale import CPU, Backbone, Captioning, Data, Probe, Scale, made, pairs

FOLDER = "{out}/data/rich"
SUBSETS = "swap_att swap_obj replace_rel"
SCENES = "open_clip_mdc scenes --world rich --noise 0.1 --num-val 500"
CAPTIONS = made("captions", f"open_clip_mdc prepare shards --captions-key captions --test {FOLDER}/val/00000.tar")


def data(shards: int, samples: int) -> dict[str, Data]:
    return {"short": Data(f"{FOLDER}/train", "short captions", shards, samples),
            "long": Data(f"{FOLDER}/train-long", "long captions", shards, samples)}


def probes(images: int) -> dict[str, Probe]:
    return {name: Probe(f"wds/probe-{name}", images)
            for name in ("colour", "shape", "size", "count", "position", "relation")}


RICH = Scale(
    **CPU, name="rich",
    data=data(8, 20_000),
    backbones={"ViT-Ti-8-rich": Backbone(5e-4, 0.1)}, warmup=10_000, epochs=8,
    alt="short", long="long", search="short", amounts=(), ratios=("short",),
    probes=probes(1000), probe_root=f"{FOLDER}/{{{{dataset_cleaned}}}}",
    selection=pairs(f"{FOLDER}/sugarcrepe", SUBSETS, 400),
    captioning=(Captioning("{out}/data/captions", "wds/captions", "rich scenes", None, ("10", "15", "auto")),),
    prepare=(made("rich", f"{SCENES} --num-train 40000 --num-probe 1000 --num-pairs 400 --jobs 2"), CAPTIONS),
    curve=(1, 2, 4, 8),
)

GPU = RICH._replace(
    name="gpu",
    data=data(100, 500_000),
    backbones={"ViT-S-16-128": Backbone(1e-3, 0.1)},
    batch=1024, workers=16, gpus=1, seeds=(0,),
    train_flags=("--precision", "amp_bf16"), eval_flags=("--quiet",),
    probes=probes(5000), selection=pairs(f"{FOLDER}/sugarcrepe", SUBSETS, 2000),
    prepare=(made("rich", f"{SCENES} --size 128 --num-train 1000000 --num-probe 5000 --num-pairs 2000 --jobs 16"),
             CAPTIONS),
)
