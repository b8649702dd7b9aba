"""clip_benchmark with captioners: everything upstream's command does, and what likelihoods and GAP features add.

    clip_benchmark eval --model mdc --pretrained RUN --dataset wds/cifar10 --dataset_root DIR --task linear_probe
    clip_benchmark eval --model mdc --pretrained RUN --dataset sugar_crepe --dataset_root DIR
    torchrun --nproc_per_node 8 -m clip_benchmark_ext.cli eval --distributed --model mdc ...
    clip_benchmark build *.json

This file reads our flags (options.py), joins the processes of torchrun, and calls `clip_benchmark.cli.main`.
"""
import sys

import torch

from open_clip_mdc.integration import BENCHMARK, register

from .flags import make_parser, set_options


def main(argv: list[str] | None = None) -> int | None:
    """Exits with one line on bad input."""
    argv = sys.argv[1:] if argv is None else argv
    register()
    register(BENCHMARK)
    from clip_benchmark import cli as upstream

    from . import distributed
    rest = set_options(argv)
    if "eval" in rest and {"-h", "--help"} & set(rest):
        make_parser().print_help()
    if "--distributed" in rest:  # upstream's would deal out whole data sets; ours shares each
        rest.remove("--distributed")
        distributed.start("cuda" if torch.cuda.is_available() else "cpu")
    sys.argv = [sys.argv[0], *rest]  # upstream's parser reads it
    try:
        return upstream.main()
    except (ValueError, FileNotFoundError) as problem:
        sys.exit(f"error: {problem}")


if __name__ == "__main__":
    sys.exit(main())
