"""Functions of webdataset that read shards, safe for shards from anywhere (patches.py)."""
from webdataset.handlers import reraise_exception

from ..data.shards import META, as_file, training_members
from .openclip import hook


@hook
def gopen(original, url, mode="rb", *args, **kwargs):
    """Wrap `webdataset.gopen.gopen`: open an existing file as a file, even if its name begins with pipe:."""
    return original(as_file(url) if mode == "rb" else url, mode, *args, **kwargs)


@hook
def tar_file_iterator(original, fileobj, skip_meta=META, handler=reraise_exception, select_files=None,
                      rename_files=None):
    """Replace `webdataset.tariterators.tar_file_iterator`: check a member's size before it is read."""
    return training_members(fileobj, skip_meta, handler, select_files, rename_files)
