"""Trains CLIP, MDC and ARC models with OpenCLIP's own loop; every flag is upstream's.

    open_clip_train --model MDC-ViT-B-32 --train-data 'cc12m/{00000..01242}.tar' --dataset-type webdataset ...
    python -m open_clip_mdc.train --model MDC-ViT-B-32 ...
    torchrun --nproc_per_node 8 -m open_clip_mdc.train -- --model MDC-ViT-B-32 ...      (mind the --)

This file registers the captioners, refuses at once what cannot work, and calls `open_clip_train.main.main`.
"""
import difflib
import logging
import os
import sys

import torch

from .integration import is_captioner, register

# What contrasts, distils or reads a text tower has no meaning for a captioner: flag, what to do instead.
NOT_FOR_CAPTIONERS = {
    "siglip": "a captioner has one loss; leave it out",
    "distill_model": "a captioner has no contrastive features to distil; leave it out",
    "distill_pretrained": "a captioner has no contrastive features to distil; leave it out",
    "lock_text": "the text decoder is what gives the gradient; use --lock-image to train it alone",
    "horovod": "start with torchrun instead",
    "trace": "a traced model cannot train; leave it out",
    "torchscript": "use --torchcompile",
    "imagenet_val": "use clip_benchmark (linear probe, or zero-shot by likelihood) on the checkpoint",
    "imagenet_v2": "use clip_benchmark (linear probe, or zero-shot by likelihood) on the checkpoint",
}


def missing_files(data: str | None, dataset_type: str) -> list[str]:
    """Local files of --train-data or --val-data that do not exist; upstream waits forever for shards it cannot open."""
    from open_clip_train.data import expand_urls
    if not data or dataset_type == "synthetic":
        return []
    files = [data] if data.endswith(("csv", "tsv")) or dataset_type == "csv" else expand_urls(data)[0]
    return [f for f in files if "://" not in f and not f.startswith("pipe:") and not os.path.exists(f)]


def rows_without_caption(args) -> str | None:
    """Upstream would train on the word "nan" for an empty field of a csv file."""
    import pandas as pd
    for path in (args.train_data, args.val_data):
        if path and (args.dataset_type == "csv" or path.endswith((".csv", ".tsv"))):
            frame = pd.read_csv(path, sep=args.csv_separator)
            for key in (args.csv_img_key, args.csv_caption_key):
                if key not in frame:
                    return f"{path} has no column {key!r}, only {list(frame)}: see --csv-caption-key, --csv-separator"
            empty = frame.index[frame[args.csv_caption_key].isna()]
            if len(empty):
                return f"{path} has {len(empty)} rows without a caption, first line {empty[0] + 2}: fill or drop them"
    return None


def find_problem(args) -> str | None:
    """The first thing in the parsed flags that cannot work, in one line that says what to do; None if all is well."""
    import open_clip
    if open_clip.get_model_config(args.model) is None:
        close = difflib.get_close_matches(args.model, open_clip.list_models(), n=3, cutoff=0.5)
        return f"--model {args.model} is not known; close to it: {', '.join(close) or 'nothing'}"
    for name in ("train_data", "val_data"):
        missing = missing_files(getattr(args, name), args.dataset_type)
        if missing:
            return f"--{name.replace('_', '-')}: {len(missing)} files do not exist, the first is {missing[0]}"
    if args.precision == "amp" and not (args.device.startswith("cuda") and torch.cuda.is_available()):
        logging.warning("--precision amp (the default) is float16, some 50 times slower than --precision fp32 on a CPU")
    if not is_captioner(args.model):
        return None
    for flag, instead in NOT_FOR_CAPTIONERS.items():
        if getattr(args, flag):
            return f"--{flag.replace('_', '-')} makes no sense for the captioner {args.model}: {instead}"
    if "vit" not in args.model.lower() and args.beta2 == 0.999:
        logging.warning(f"No 'vit' in {args.model}, so upstream set Adam's beta2 to 0.999; the paper's is 0.98")
    return rows_without_caption(args)


def main(argv: list[str] | None = None) -> int | None:
    """Returns upstream's exit status (None or -1); exits with one line on bad flags."""
    argv = sys.argv[1:] if argv is None else argv
    register()
    from open_clip_train.main import main as upstream_main
    from open_clip_train.params import parse_args
    try:
        problem = find_problem(parse_args(argv))
    except ValueError as error:  # a name that asks for what cannot be
        problem = error
    if problem:
        sys.exit(f"error: {problem}")
    return upstream_main(argv)


if __name__ == "__main__":
    sys.exit(main())
