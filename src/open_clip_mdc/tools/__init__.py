"""The command line tools beside training and evaluation: `open_clip_mdc TOOL ...`.

    open_clip_mdc scenes --out scenes            the embedded data set
    open_clip_mdc lengths 'cc3m/{000..331}.tar'  caption lengths (the paper's Fig. 3)
    open_clip_mdc caption --pretrained ...       captions of pictures, and how they came about
    open_clip_mdc reconstruct --checkpoint ...   hidden captions and what a model makes of them

A tool is a module with `add_arguments(parser)` and `run(args)`; it is imported when it is called for.
"""
import argparse
import sys
from importlib import import_module

TOOLS = {
    "scenes": "render the embedded data set",
    "prepare": "write shards of COCO, Flickr30k, Flickr8k, Recap-DataComp to train and test on",
    "lengths": "count the tokenised caption lengths of webdatasets (Fig. 3)",
    "caption": "caption pictures: JSONL, and a page that shows how",
    "score": "log-likelihoods of captions for pictures, as CSV or JSONL",
    "judge": "let an LLM choose the best of several systems' captions (Table 3)",
    "reconstruct": "show what a trained model makes of half-hidden captions",
    "schedule-search": "measure gradient noise over t and propose [t_min, t_max]",
}


def main(argv: list[str] | None = None) -> None:
    """Exits with 2 on wrong usage and with 1 and one line on bad input."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="open_clip_mdc", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    tools = parser.add_subparsers(dest="tool", required=True)
    for name, summary in TOOLS.items():
        tool = tools.add_parser(name, help=summary)
        if argv[:1] == [name]:
            import_module(f".{name.replace('-', '_')}", __name__).add_arguments(tool)
    args = parser.parse_args(argv)
    try:
        import_module(f".{args.tool.replace('-', '_')}", __name__).run(args)
    except (ValueError, OSError) as problem:
        sys.exit(f"error: {problem}")

