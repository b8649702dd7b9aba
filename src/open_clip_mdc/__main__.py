"""`python -m open_clip_mdc TOOL ...`: the same as `open_clip_mdc TOOL ...`."""
from .cli import main

main()
