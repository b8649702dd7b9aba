"""Run `python -m open_clip_mdc COMMAND ...`, the same as `open_clip_mdc COMMAND ...`."""
from .cli import main

main()
