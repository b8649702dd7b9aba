"""`python -m open_clip_mdc TOOL ...`: the same as `open_clip_mdc TOOL ...`."""
from .tools import main

main()
