"""The version of OpenCLIP, asked here alone: 3.3, or 4.x, which trains by tasks and batches with names."""
from importlib import metadata

try:
    MAJOR = int(metadata.version("open_clip_torch").partition(".")[0])
except metadata.PackageNotFoundError:  # models can be listed without it
    MAJOR = 0
