"""The command `open_clip_mdc TOOL ...`: every tool besides training and evaluation.

A tool is a row of TOOLS, a list in flags.json and a module with `run(args)`. The module is imported after the flags
are read, so that `--help` is quick.
"""
import argparse
import os
import re
import sys
from collections.abc import Callable
from importlib import import_module

from ..data.files import end_when_terminated
from ..data.outputs import ready, release
from ..errors import Refusal, check_none_empty, complaint, of_worker, read_flags, usable_stdout
from ..integration.plugins import load_plugin
from ..version import __version__
from . import arguments as flags
from .shared import docstring

TOOLS = {
    "list": "list the models, objectives, tasks and data sets that you can name",
    "scenes": "render the built-in synthetic data set",
    "fetch": "download data sets to train and test on, or say how to get them",
    "prepare": "write shards to train and test on, from your own data, COCO or Flickr",
    "finetune": "fine-tune a captioner on your photographs, and show its captions before and after",
    "card": "say on one page what a frozen image encoder knows, beside random weights and pixels",
    "caption": "caption images and write JSONL (optionally an HTML page), or caption shards into Parquet",
    "score": "compute log-likelihoods of captions given images, and filter image-text pairs by them",
    "search": "find the images that fit a sentence best",
    "embed": "write image features of webdataset shards as Parquet tables",
    "attention": "show where in the image each word of a caption comes from",
    "app": "try a captioner in your browser: caption, fill in words, score sentences, see where words come from",
    "vq": "train or import the frozen VQ-VAE of a model that reads discrete image tokens",
    "export": "export a model for OpenCLIP, timm, transformers and torch, and upload it to the Hugging Face hub",
}
RESUMES = "caption card embed fetch finetune search experiments.judge experiments.prepare_recap".split()
# What makes the evidence is in the folder experiments of a clone. The Makefile has its targets.
MOVED = {"lengths": "make figure3", "schedule-search": "docs/training.md", "judge": "make table3",
         "prepare cub": "docs/reproduce.md", "prepare recap": "docs/data.md"}


def examples(tool: str) -> str:
    """Return the commands in the docstring of a tool's module, without importing it."""
    said = docstring(f"{__name__}.{tool}")
    return "examples:\n" + "\n".join(re.findall(r"^ +(?:open_clip_\w+ |    -).*", said, re.MULTILINE))


def usage(tool: argparse.ArgumentParser) -> str:
    """Return the usage line: required arguments only, as the options follow in groups."""
    needed = []
    for action in tool._actions:
        if action.required:
            value = action.metavar or action.dest.upper()
            needed += [*action.option_strings[:1], value if action.nargs is None else f"{value} [{value} ...]"]
    return " ".join([tool.prog, "[options]", *needed])


def module_of(tool: str) -> str:
    return re.sub("[- ]", "_", tool)


def parse(argv: list[str]) -> argparse.Namespace:
    for name in {argv[0], " ".join(argv[:2])} & MOVED.keys() if argv else ():
        sys.exit(f"open_clip_mdc {name} is now python -m experiments.{module_of(name)} in a clone ({MOVED[name]})")
    parser = argparse.ArgumentParser(prog="open_clip_mdc", description="Tools for captioners. To train one, run "
                                     "open_clip_train. To evaluate one, run clip_benchmark eval. For the options of a "
                                     "tool, run open_clip_mdc TOOL --help.")
    parser.add_argument("--version", action="version", version=f"open_clip_mdc {__version__}")
    tools = parser.add_subparsers(dest="tool", required=True, metavar="TOOL")
    for name, summary in TOOLS.items():
        tool = tools.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.",
                                epilog=examples(name) if argv[:1] == [name] else None,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
        flags.add(tool, name)
        if name not in ("prepare", "vq"):
            tool.usage = usage(tool)
    if "_ARGCOMPLETE" in os.environ:  # the shell asks for completions
        import argcomplete
        argcomplete.autocomplete(parser)
    return read_flags(parser.parse_args, argv)


def main(argv: list[str] | None = None) -> None:
    """Run a tool. Exits with status 2 and one line on wrong usage or bad input."""
    argv = (sys.argv[1:] if argv is None else argv) or ["--help"]
    args = parse(argv)
    finish(lambda: import_module(f"{__name__}.{args.tool}").run(args), args, argv)


def finish(job: Callable[[], None], args: argparse.Namespace, argv: list[str]) -> None:
    """Do the job of a tool, once its outputs are checked. Exits with status 2 and one line on bad input."""
    end_when_terminated()
    # Model threads that spin while they wait would take cores from the processes that decode images.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    usable_stdout()
    try:
        check_none_empty(args, argv)
        ready(args)
        for plugin in getattr(args, "plugin", None) or ():
            load_plugin(plugin)
        job()
        sys.stdout.flush()
    except BrokenPipeError:  # who read along has gone, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains as it ends
        sys.exit(1)
    except (ValueError, OSError) as problem:
        raise Refusal(complaint(problem, args, argv)) from None
    except (RuntimeError, MemoryError) as problem:
        sys.exit(f"error: {of_worker(problem)}")
    except KeyboardInterrupt:
        resumes = args.tool in RESUMES or getattr(args, "pairs", None)
        sys.exit("interrupted: run the same command again" + (" to resume" if resumes else ""))
    finally:
        release()
