"""The command `clip_benchmark`, extended to captioners and to more tasks and data sets.

    clip_benchmark eval --model mdc --pretrained RUN --dataset sugar_crepe/swap_obj --dataset_root DIR
    torchrun --nproc_per_node 8 -m clip_benchmark_ext.cli eval --distributed --model mdc ...
    clip_benchmark build *.json

Its own flags are read as they are there. Ours (flags.py) go with them as `args.flags`. Its loop over models, data sets
and languages then calls the replacement of its `run` (run.py). Flags are read before torch is imported.
"""
import argparse
import json
import sys
from pathlib import Path

from open_clip_mdc import errors as messages
from open_clip_mdc.data.files import end_when_terminated
from open_clip_mdc.data.outputs import check_unread, files_in
from open_clip_mdc.integration.decoding_flags import add_row
from open_clip_mdc.integration.patches import SHARDS, Replacement, register
from open_clip_mdc.integration.plugins import load_plugin

from .flags import Flags, make_parser

BENCHMARK = (
    *SHARDS,
    Replacement("clip_benchmark.cli:run", "clip_benchmark_ext.run:run",
                "one model on one data set, rewritten: captioners, more data sets with their official metrics, "
                "features cached by content, captions saved before they are scored, result files with all settings"),
)

# A copy of the flags of clip_benchmark, whose own parser takes seconds to import. A test compares the two.
THEIR_FLAGS = Path(__file__).with_name("clip_benchmark_flags.json")


def their_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    for name, about in json.loads(THEIR_FLAGS.read_bytes()).items():
        command = commands.add_parser(name, help=about["help"])
        command.set_defaults(which=name)
        exclusive = None
        for row in about["flags"]:
            group = command
            if row.pop("exclusive", False):
                exclusive = group = exclusive or command.add_mutually_exclusive_group()
            add_row(group, row)
    return parser


def parse(argv: list[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace, Flags]:
    own, rest = make_parser().parse_known_args(argv)
    flags = Flags(**vars(own))
    parser = their_parser()
    try:
        args = parser.parse_args(rest)
    except SystemExit as end:
        if rest[:1] == ["eval"] and not end.code:  # --help
            make_parser().print_help()
        raise
    args.task = flags.task
    return parser, args, flags


OUTPUTS = ("output", "save_clf", "save_captions", "save_coco_results")


def check(args: argparse.Namespace, argv: list[str]) -> None:
    given = {arg.partition("=")[0] for arg in argv}
    if given.isdisjoint(("--model", "--pretrained_model")):
        raise ValueError("--model is missing: mdc, arc or another captioner with --pretrained RUN, or a model of "
                         f"OpenCLIP with a tag, such as --model {args.model[0]} --pretrained {args.pretrained[0]}")
    for name, lowest in (("batch_size", 1), ("num_workers", 0)):
        if getattr(args, name) < lowest:
            raise ValueError(f"--{name} {getattr(args, name)} should be at least {lowest}")
    from .tasks import TASKS
    read = {name: {*task.arguments, *task.flags, *task.captioner_flags} for name, task in TASKS.items()}
    others = set().union(*read.values()) - {"batch_size", "seed", "normalize"}
    for name in sorted(others - read.get(args.task, others)):  # "auto" may be any task
        if f"--{name}" in given:
            print(f"warning: --{name} changes nothing for --task {args.task}", file=sys.stderr)
    values = {**vars(args), **args.flags._asdict(), "flags": None,
              "pretrained": args.pretrained_model or args.pretrained}
    for name in OUTPUTS:
        if template := values.get(name):
            check_unread(f"--{name}", template, files_in(x for key, x in values.items() if key not in OUTPUTS))
            for field in "dataset model pretrained language".split():
                if isinstance(values[field], list) and values[field][1:] and "{" + field not in template:
                    raise ValueError(f"--{name} {template} is one file for several --{field}: put {{{field}}} into it")


def main(argv: list[str] | None = None) -> int | None:
    end_when_terminated()
    argv = sys.argv[1:] if argv is None else argv
    parser, args, flags = messages.read_flags(parse, argv)
    if not hasattr(args, "which"):
        return parser.print_help()
    register()
    register(table=BENCHMARK)
    import torch
    from clip_benchmark import cli as upstream

    from open_clip_mdc.integration.checkpoints import default_device
    from open_clip_mdc.integration.processes import keep_freed_memory, leave_at_exit
    from open_clip_mdc.models.precision import emulated

    from . import distributed
    try:
        if args.which == "build":
            return upstream.main_build(args)
        args.flags = flags
        check(args, argv)
        for plugin in flags.plugin or ():
            load_plugin(plugin)
        if flags.datasets:
            from .datasets import known
            known.use(flags.datasets)
        device = default_device()
        if args.distributed:  # clip_benchmark gives each process other data sets, here processes share each one
            args.distributed = False
            distributed.start(device)
        keep_freed_memory(device)
        if args.amp and args.verbose and emulated(device, torch.bfloat16):
            print("warning: this CPU is tens of times slower in autocast's bfloat16 than in float32. Give --no_amp",
                  file=sys.stderr)
        upstream.main_eval(args)
        leave_at_exit()
    except (ValueError, OSError) as problem:
        raise messages.Refusal(messages.complaint(problem, args, argv, "_")) from None
    except (RuntimeError, MemoryError) as problem:
        sys.exit(f"error: {messages.of_worker(problem)}")
    except KeyboardInterrupt:
        sys.exit("interrupted")


if __name__ == "__main__":
    sys.exit(main())
