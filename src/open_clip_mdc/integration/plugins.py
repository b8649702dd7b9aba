"""Plug-ins: objectives and model names from outside this package, in a Python module with a JSON file beside it.

    open_clip_train --plugin my_objective.py --model Mine-ViT-B-32 ...
    open_clip_mdc caption --plugin my_objective.py --pretrained logs/RUN photos/

The module registers its objectives by `@register_objective` when it is imported. `my_objective.json`, if it exists,
holds rows of model names like those of model_configs/objectives.json. An installed package needs no flag: it names its
module under the entry point `open_clip_mdc.objectives`.

A run remembers its plug-ins in params.txt. But no module is ever imported because a file names it, so code that comes
with weights runs only if you ask for it.
"""
import json
import sys
from importlib import import_module, metadata
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from . import configs

OWN = "open_clip_mdc.extras"
ENTRY_POINTS = "open_clip_mdc.objectives"
_loaded = set()  # names, as `name_of` returns them


def load_plugin(name: str) -> None:
    """Import a plug-in, the name of a module or of a .py file, and add its rows of model names. Later calls do nothing.

    Raises ValueError if it cannot be imported, or if its JSON file holds no rows.
    """
    key = name_of(name)
    imported = key in sys.modules
    if key in _loaded:
        if name.endswith(".py") and Path(name).exists() and not Path(name).samefile(sys.modules[key].__file__):
            raise ValueError(f"--plugin {name}: a plug-in {key} is loaded already: give the file another name")
        return
    from ..objectives.registry import OBJECTIVES  # it imports torch
    try:
        _load(name)
    except BaseException:  # so that a file can be mended and loaded again
        if name.endswith(".py") and not imported:
            sys.modules.pop(key, None)
            for own in [each for each, objective in OBJECTIVES.items() if objective.corrupt.__module__ == key]:
                del OBJECTIVES[own]
        raise
    _loaded.add(key)


def _load(name: str) -> None:
    try:
        module = _import_file(Path(name)) if name.endswith(".py") else import_module(name)
    except (Exception, SystemExit) as problem:  # a plug-in is anybody's code
        raise ValueError(f"--plugin {name} cannot be imported ({type(problem).__name__}: {problem})") from problem
    if not getattr(module, "__file__", None):
        raise ValueError(f"--plugin {name} has no file, as a folder without __init__.py: give NAME.py, or a module")
    rows = Path(module.__file__).with_suffix(".json")
    if rows.is_file():
        try:
            configs.add_rows(json.loads(rows.read_text(encoding="utf-8"))["rows"])
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise ValueError(f"--plugin {name}: {rows} holds no rows of model names ({problem})") from problem


def load_installed() -> None:
    """Load the plug-ins that installed packages name as entry points, and this package's own."""
    load_plugin(OWN)
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        load_plugin(entry.value)


def name_of(plugin: str) -> str:
    """Return the name by which a run remembers a plug-in: the module's, without the folder of its file."""
    return Path(plugin).stem if plugin.endswith(".py") else plugin


def missing(names: str) -> list[str]:
    """Return those of a run's plug-ins, as params.txt names them, that are not loaded."""
    return [name for name in names.split(", ") if name and name not in _loaded]


def _import_file(path: Path) -> ModuleType:
    if path.stem in sys.modules:
        raise ValueError(f"a module {path.stem} is loaded already: give the file another name")
    spec = spec_from_file_location(path.stem, path.resolve())
    module = sys.modules[path.stem] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
