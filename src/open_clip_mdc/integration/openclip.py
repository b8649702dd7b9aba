"""The installed version of OpenCLIP: 3.3, or 4.x, which trains tasks on batches that are dictionaries."""
from importlib import metadata

try:
    MAJOR = int(metadata.version("open_clip_torch").partition(".")[0])
except metadata.PackageNotFoundError:  # listing the models needs no OpenCLIP
    MAJOR = 0
