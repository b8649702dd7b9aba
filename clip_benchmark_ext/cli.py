"""clip_benchmark with captioners: everything upstream's command does, and what likelihoods and GAP features add.

    clip_benchmark eval --model mdc --pretrained RUN --dataset wds/cifar10 --dataset_root DIR --task linear_probe
    clip_benchmark eval --model mdc --pretrained RUN --dataset sugar_crepe --dataset_root DIR
    torchrun --nproc_per_node 8 -m clip_benchmark_ext.cli eval --distributed --model mdc ...
    clip_benchmark build *.json

Upstream's parser reads its flags, ours (flags.py) travel beside them as `args.flags`; its loop over models, data sets
and languages then calls what stands in for its `run` (run.py).
"""
import sys

import torch

from open_clip_mdc.integration import BENCHMARK, register
from open_clip_mdc.messages import complaint

from .flags import make_parser, read_flags


def main(argv: list[str] | None = None) -> int | None:
    """Exits with one line on bad input."""
    register()
    register(BENCHMARK)
    from clip_benchmark import cli as upstream

    from . import distributed
    flags, rest = read_flags(sys.argv[1:] if argv is None else argv)
    sys.argv = [sys.argv[0], *rest]
    try:
        parser, args = upstream.get_parser_args()
    except SystemExit as end:
        if rest[:1] == ["eval"] and not end.code:  # --help
            make_parser().print_help()
        raise
    if not hasattr(args, "which"):
        return parser.print_help()
    try:
        if args.which == "build":
            return upstream.main_build(args)
        args.flags = flags
        if args.distributed:  # upstream would deal out whole data sets; ours shares each
            args.distributed = False
            distributed.start("cuda" if torch.cuda.is_available() else "cpu")
        return upstream.main_eval(args)
    except (ValueError, OSError) as problem:
        sys.exit(f"error: {complaint(problem, args, '_')}")


if __name__ == "__main__":
    sys.exit(main())
