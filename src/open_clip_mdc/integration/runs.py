"""Find the checkpoint that is meant in a run folder of open_clip_train, and the architecture that belongs to it."""
import ast
import math
import shlex
import shutil
import sys
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from ..data.files import AnyPath, file_state, new_file, parse_json
from ..data.weights import stored_epoch
from . import plugins
from .configs import FOLDER

# Settings in params.txt from which the model and its preprocessing are built (create_model_and_transforms).
MODEL_ARGS = ("force_quick_gelu", "force_custom_text", "force_image_size", "force_context_length", "image_mean",
              "image_std", "image_interpolation", "image_resize_mode")
MOST_PARAMS, MOST_LITERAL = 1_000_000, 100  # characters that are read of params.txt, and of one of its values
# The names that OpenCLIP looks for in a folder.
WEIGHTS_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.safetensors", "open_clip_pytorch_model.bin",
                 "open_clip_pytorch_model.pth", "model.safetensors", "pytorch_model.bin", "pytorch_model.pth",
                 "model.pth")
SIGLIP_ARGS = {"init_logit_scale": math.log(10), "init_logit_bias": -10}  # as in open_clip_train.main
PHOTO, PHOTO_MODEL = "photo", "MDC-small-timm-tf_efficientnet_lite0"  # the packaged captioner and its architecture
CONFIG = "open_clip_config.json"
IMAGE_SETTINGS = ("mean", "std", "interpolation", "resize_mode")
KNOWN = {"interpolation": "bicubic, bilinear, random", "resize_mode": "shortest, longest, squash"}
SIZES = {"mean": "three numbers", "std": "three numbers above 0", "size": "one or two numbers"}


class Checkpoint(NamedTuple):
    """A model config's name, its weights, and the arguments of its run (`find`)."""

    model_name: str
    weights: str | None  # None for a local-dir: or hf-hub: id, which names its own
    model_args: dict


def latest_checkpoint(folder: Path) -> Path:
    """Return the epoch_*.pt that stores the highest epoch, whatever its name and time.

    An epoch_latest.pt (--save-most-recent) may be older than the numbered ones. A warning tells if it, or the highest
    number, is not taken.
    """
    found = sorted(filter(Path.is_file, folder.glob("epoch_*.pt")))
    if not found:
        if sharded := max((path.parent for path in folder.glob("epoch_*/.metadata")), key=epoch_in_name, default=None):
            raise FileNotFoundError(f"{sharded} is a sharded checkpoint: make it one file by python -m torch."
                                    f"distributed.checkpoint.format_utils dcp_to_torch {sharded} {sharded}.pt")
        raise FileNotFoundError(f"{folder} has no epoch_*.pt: give a checkpoint file or a run of open_clip_train")
    return _latest(tuple((path, *file_state(path)) for path in found))


def epoch_in_name(path: Path) -> float:
    """Return the epoch in the name of a checkpoint, infinity for epoch_latest, and -1 for any other name."""
    number = path.stem.removeprefix("epoch_")
    return math.inf if number == "latest" else int(number) if number.isdecimal() else -1


@lru_cache  # one warning per process, unless a file has changed
def _latest(found: tuple) -> Path:
    paths = [path for path, *_ in found]
    if len(paths) == 1:
        return paths[0]
    epochs = {path: stored_epoch(path) for path in paths}  # None if it cannot be read
    expected = max(paths, key=epoch_in_name)
    best = max(paths, key=lambda path: (-1 if epochs[path] is None else epochs[path], epoch_in_name(path)))
    if over := [path for path in paths if path != best and (path == expected or epochs[path] is None)]:
        told = ", ".join(f"{path.name} ({'cannot be read' if epochs[path] is None else f'epoch {epochs[path]}'})"
                         for path in over)
        # OpenCLIP sets up logging only later.
        print(f"warning: {best} is taken (epoch {epochs[best]}), not {told}", file=sys.stderr)
    return best


def params_file(checkpoint: Path) -> Path:
    """Return the path of the params.txt of a checkpoint's run. A link belongs to the run in whose folder it is."""
    return checkpoint.absolute().parent.parent / "params.txt"


def read_params(path: Path) -> dict[str, str]:
    """Return the `name: value` lines of the params.txt that open_clip_train writes."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return dict(line.split(": ", 1) for line in file.read(MOST_PARAMS).splitlines() if ": " in line)


def literal(text: str):
    """Parse a number, list or None written by str(), and return other text as it is. Evaluates nothing."""
    try:
        return ast.literal_eval(text) if len(text) <= MOST_LITERAL else text  # a longer one could nest too deeply
    except (ValueError, SyntaxError, TypeError):  # the last for {[]: 1}
        return text


def find(pretrained: str, model_name: str | None = None) -> Checkpoint:
    """Return the model, weights and settings that `pretrained` stands for.

    It is a checkpoint, a run folder, a folder with open_clip_config.json, local-dir:DIR, hf-hub:ID or "photo", the
    packaged captioner (write ./photo for a folder of that name). `model_name` is the architecture of a checkpoint
    outside a run folder. Raises FileNotFoundError if there is none, and ValueError if its architecture is not known.
    """
    if pretrained == PHOTO:
        if model_name:
            raise ValueError(f"{PHOTO} is the packaged captioner: leave out --model {model_name}, or give weights of "
                             "that model by --pretrained")
        return find(f"local-dir:{FOLDER / PHOTO}")
    if pretrained.startswith(("local-dir:", "hf-hub:")):
        check_folder(pretrained)
        return Checkpoint(pretrained, None, {})
    path = Path(pretrained)
    if not path.exists():
        raise FileNotFoundError(f"no checkpoint at {pretrained}: give a file, a run folder, local-dir:DIR or hf-hub:ID")
    if (path / "open_clip_config.json").exists():
        return find(f"local-dir:{path}")
    if path.is_dir():
        if (path / "config.json").exists():
            raise ValueError(f"{path} is a folder for timm or transformers, with the image encoder only: give the run, "
                             "or the folder that export --to open_clip wrote")
        path = latest_checkpoint(path if path.absolute().name == "checkpoints" else path / "checkpoints")
    params = params_file(path)
    if params.exists():
        values = read_params(params)
        name = model_name or values.get("model")
        if not name:
            raise ValueError(f"{params} names no model: give --model too")
        if not model_name and ":" in name:  # a place to load from, which only the user may name
            raise ValueError(f"{params} says where to load a model from, not its name: if you trust that place, add "
                             f"--model {shlex.quote(name)}")
        if lost := plugins.missing(values.get("plugin", "")):
            raise ValueError(f"{path} was trained with the plug-in {lost[0]}: give --plugin {lost[0]}, or its file")
        args = {arg: literal(values[arg]) for arg in MODEL_ARGS if values.get(arg, "None") != "None"}
        if values.get("siglip") == "True":
            args |= SIGLIP_ARGS
        return Checkpoint(name, str(path), args)
    if model_name is None:
        raise ValueError(f"{path} is not in a run folder (there is no {params}): give --model too")
    return Checkpoint(model_name, str(path), {})


def weights_file(pretrained: str, model_name: str) -> str:
    """Return the file of weights that --pretrained of training stands for: all that `find` takes, but no hub.

    A tag of OpenCLIP is returned as it is. Raises ValueError or FileNotFoundError as `find` does.
    """
    place = str(FOLDER / PHOTO) if pretrained == PHOTO else pretrained.removeprefix("local-dir:")
    if not Path(place).is_dir():
        return place
    if not (Path(place) / CONFIG).exists():
        return find(place, model_name).weights
    check_folder(f"local-dir:{place}")
    return str(weights_in(Path(place)))


def image_settings(weights: Path) -> dict | None:
    """Return how images were prepared for weights: IMAGE_SETTINGS and "size", as far as what lies beside tells them.

    That is the params.txt of a run, which names only what is not OpenCLIP's default, or open_clip_config.json. None
    means that there is neither. Raises ValueError if it is damaged.
    """
    if (params := params_file(weights)).exists():
        values = read_params(params)
        told = {name: literal(values.get(f"image_{name}", "None")) for name in IMAGE_SETTINGS}
        return checked_settings(told | {"size": literal(values.get("force_image_size", "None"))}, params)
    if not (path := weights.parent / CONFIG).is_file():
        return None
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
        told = {**config["preprocess_cfg"], "size": config["model_cfg"]["vision_cfg"].get("image_size")}
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"{path} does not tell how images are prepared ({type(problem).__name__}: {problem}): mend it,"
                         " or move the weights") from problem
    return checked_settings(told, path)


def without_settings(weights: str, model_name: str) -> str | None:
    """Return one line that says that nothing beside weights tells how images were prepared for them, or None."""
    import open_clip
    if image_settings(Path(weights)) is not None or "vq_cfg" in open_clip.get_model_config(model_name):
        return None
    return f"{weights}: no {CONFIG} beside it tells mean and std of its images, so OpenCLIP's are taken"


def checked_settings(told: dict, where: AnyPath) -> dict:
    """Return the settings that are given. Raises ValueError for a value that images cannot be prepared by."""
    told = {name: told[name] for name in (*IMAGE_SETTINGS, "size") if told.get(name) is not None}
    for name, value in told.items():
        parts = list(value) if isinstance(value, (list, tuple)) else [value]
        kinds = set(map(type, parts))
        if name in KNOWN:
            right = value in KNOWN[name].split(", ")
        elif name == "size":
            right = len(parts) in (1, 2) and kinds == {int}
        else:
            # Images are float32. They are divided by "std".
            least = -1e38 if name == "mean" else 0
            right = len(parts) in (1, 3) and kinds <= {int, float} and least < min(parts) and max(parts) < 1e38
            told[name] = parts
        if not right:
            raise ValueError(f"{where}: its image {name} is {repr(value)[:80]}, not {(KNOWN | SIZES)[name]}")
    return told


def weights_in(folder: Path) -> Path | None:
    """Return the file of weights that OpenCLIP would load from a folder."""
    return next(filter(Path.is_file, (folder / name for name in WEIGHTS_FILES)), None)


def check_folder(model_name: str) -> None:
    """Raise FileNotFoundError if a local-dir: holds no weights, as OpenCLIP would return an untrained model."""
    scheme, _, place = model_name.partition(":")
    if scheme == "local-dir" and not weights_in(Path(place)):
        raise FileNotFoundError(f"{place} has no weights ({WEIGHTS_FILES[0]}): copy or export the model again")


def has_latest(args) -> bool:
    """Return whether there is a checkpoint for --resume latest. Without one OpenCLIP starts from scratch."""
    return any(Path(args.logs, args.name, "checkpoints").glob("epoch_*.pt"))


def bring_latest(args) -> None:
    """Copy the highest epoch to epoch_latest.pt, the only one that OpenCLIP resumes from with --save-most-recent."""
    if args.resume == "latest" and args.save_most_recent and has_latest(args):
        best = latest_checkpoint(Path(args.logs, args.name, "checkpoints"))
        if best.name != "epoch_latest.pt":
            with new_file(best.with_name("epoch_latest.pt")) as partial:
                shutil.copyfile(best, partial)
