"""The installed version of OpenCLIP. `version` is the module with all that differs between 3.3 and 4.x."""
from importlib import metadata

from . import openclip3, openclip4

try:
    MAJOR = int(metadata.version("open_clip_torch").partition(".")[0])
except metadata.PackageNotFoundError:  # listing the models needs no OpenCLIP
    MAJOR = 0
version = openclip4 if MAJOR > 3 else openclip3
