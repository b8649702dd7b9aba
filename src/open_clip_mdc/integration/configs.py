"""Model configs by name: a prefix such as MDC- in front of any OpenCLIP config makes it a captioner.

`model_configs/objectives.json` is a table. A row is a name pattern, in which * stands for the base config, and the
`caption_cfg` that it adds. Other names need no row: any interval of t (MDC-*-t0.25-0.75), and any BERT masking ratio
in percent (BERT-*-r50), and any size of blocks (MDC-*-b4), or several (MDC-*-b4-2-8), and any percentage of rows of
ARC in a mix (Mix-*-arc40).

The base gives the image tower. If its text tower fits, the decoder takes that tower's size. This file needs the
standard library only.
"""
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from importlib import import_module, resources

FOLDER = resources.files("open_clip_mdc.model_configs")
GROUPS = json.loads((FOLDER / "objectives.json").read_bytes())
ROWS = {}  # `caption_cfg` by pattern, filled by `add_rows`
# Bases for captioners only: the image tower is a frozen VQ-VAE (models/vq.py). A row overrides settings of its "base".
# Its "listed" are the patterns of objectives.json that `open_clip.list_models()` shows.
VQ_ROWS = json.loads((FOLDER / "vq.json").read_bytes())

BaseConfig = Callable[[str], dict | None]  # returns a new copy of a base's config by name, or None if it is not known
Readings = Iterator[tuple[str, dict]]  # each base and `caption_cfg` that a name may mean
CLIP_VOCABULARY = 49408
PAPER_DECODER = {"context_length": 77, "vocab_size": CLIP_VOCABULARY, "width": 512, "heads": 8, "layers": 12}
DECODER_KEYS = (*PAPER_DECODER, "mlp_ratio", "norm_kwargs", "tokenizer_kwargs")
NUMBER = r"[0-9]*\.?[0-9]+"  # in names of intervals and ratios


def add_rows(rows: Mapping[str, Mapping]) -> None:
    """Add rows {pattern: `caption_cfg`} to the table. A row starts from the settings of the row that it "extends"."""
    for pattern, row in rows.items():
        base = row.get("extends")
        if pattern.count("*") != 1 or base is not None and base not in ROWS:
            raise ValueError(f"{pattern!r} extends {base!r}: a pattern needs one * for the base's name, and may extend "
                             f"only a row that exists")
        ROWS[pattern] = {**ROWS.get(base, {}), **{key: value for key, value in row.items() if key != "extends"}}


for _group in GROUPS.values():
    add_rows(_group["rows"])


def intervals() -> dict[tuple[float, float], str]:
    """Return the pattern of each interval of t (Table 5), widest first."""
    rows = {(row["t_min"], row["t_max"]): pattern for pattern, row in ROWS.items()
            if pattern.startswith("MDC-") and row == ROWS["MDC-*"] | {key: row.get(key) for key in ("t_min", "t_max")}}
    return dict(sorted(rows.items()))


def architectures() -> dict[str, dict]:
    """Return the packaged CLIP configs by name: small towers for small data."""
    return {file.stem: json.loads(file.read_bytes()) for file in sorted(FOLDER.glob("ViT-*.json"))}


def listed() -> list[str]:
    """Return the names that `open_clip.list_models()` shows: the paper's rows. Other bases work unlisted."""
    return [pattern.replace("*", base) for group in GROUPS.values() for pattern in group["rows"]
            for base in group["bases"]] + [
                pattern.replace("*", base) for base, row in VQ_ROWS.items() for pattern in row["listed"]]


def readings(name: str) -> Readings:
    """Yield each base and `caption_cfg` that a name may mean, rows of the table first."""
    for pattern, caption_cfg in ROWS.items():
        prefix, suffix = pattern.split("*")
        if name.startswith(prefix) and name.endswith(suffix):
            yield name[len(prefix):len(name) - len(suffix)], caption_cfg
    for pattern, meanings in PATTERNS:
        if found := re.fullmatch(pattern, name):
            yield from meanings(found)


def any_interval(found: re.Match) -> Readings:
    yield found[1], {**ROWS["MDC-*"], "t_min": float(found[2]), "t_max": float(found[3])}


def any_ratio(found: re.Match) -> Readings:
    ratio = float(found[2]) / 100
    yield found[1], {**ROWS["BERT-*-r15"], "t_min": ratio, "t_max": ratio}


def any_blocks(found: re.Match) -> Readings:
    sizes = tuple(map(int, found[2].split("-")))
    # A block of one token is masked or it is not. There is nothing to learn from a visible one.
    yield found[1], {**ROWS["MDC-*-b4"], "block_sizes": sizes, **({"t_min": 1.0} if sizes == (1,) else {})}


def any_share(found: re.Match) -> Readings:
    yield found[1], {**ROWS["Mix-*-arc25"], "autoregressive_share": float(found[2]) / 100}


# Names without a row: a pattern, and a function that yields each base and `caption_cfg` that its match may mean.
PATTERNS = [(rf"MDC-(.+)-t({NUMBER})-({NUMBER})", any_interval), (rf"BERT-(.+)-r({NUMBER})", any_ratio),
            (r"MDC-(.+)-b([1-9]\d*(?:-[1-9]\d*)*)", any_blocks), (rf"Mix-(.+)-arc({NUMBER})", any_share)]
PROJECTED = set()  # keys of `caption_cfg` whose models project features to the base's `embed_dim`


def interval_name(name: str, t_min: float, t_max: float, base_config: BaseConfig) -> str:
    """Return the name of the captioner of the same base with t uniform on an interval and the loss weight 1/t.

    The base is called BASE if the name does not contain it, as a folder's name does not.
    """
    base = next((base for base, _ in readings(name.replace("/", "-"))
                 if base in VQ_ROWS or base_config(base) is not None), "BASE")
    return intervals().get((t_min, t_max), f"MDC-*-t{t_min}-{t_max}").replace("*", base)


def has_image_tower(config: dict) -> bool:
    """Return whether a config has an image tower. OpenCLIP 4.x has audio models and GenLIP, which have none."""
    return "vision_cfg" in config and "genlip_cfg" not in config


def captioner(name: str, base_config: BaseConfig) -> dict | None:
    """Return the config of a captioner's name, such as MDC-ViT-B-32, or None if it is not one.

    The base timm-NAME is timm's image encoder NAME. small-BASE has a small decoder instead of the paper's (small.json).
    "/" is read as "-", as in OpenCLIP. Raises ValueError for an impossible interval or ratio.
    """
    name = name.replace("/", "-")
    for base, caption_cfg in readings(name):
        config = with_codes(base, base_config) if base in VQ_ROWS else any_base(base, base_config)
        if config is None or "caption_cfg" in config or not has_image_tower(config):
            continue
        low, high = caption_cfg.get("t_min", 0), caption_cfg.get("t_max", 1)
        one_ratio = not name.startswith("MDC-") or "block_sizes" in caption_cfg
        if not (0 <= low < high <= 1 or 0 < low == high <= 1 and one_ratio):
            raise ValueError(f"{name} cannot be made: give an interval of t within 0 and 1, the lower end first, as in "
                             f"MDC-{base}-t0.25-0.75, or a ratio above 0 and up to 100 %, as in BERT-{base}-r50")
        vision, text = config["vision_cfg"], config["text_cfg"]
        return {
            # The features are not projected, so this is the tower's width. timm and ResNets know their own.
            "embed_dim": config.get("embed_dim", 512) if PROJECTED & caption_cfg.keys() else
            None if "timm_model_name" in vision or isinstance(vision.get("layers"), list) else vision.get("width", 768),
            "custom_text": True,
            "vision_cfg": vision,
            "text_cfg": {k: text[k] for k in DECODER_KEYS if k in text} if fits(text) else dict(PAPER_DECODER),
            "caption_cfg": dict(caption_cfg),
            **{key: config[key] for key in ("quick_gelu", "vq_cfg") if key in config},
        }
    return None


def with_codes(name: str, base_config: BaseConfig) -> dict:
    """Return the config of a base in VQ_ROWS: that of its own base, with the settings of its row."""
    row = deepcopy(VQ_ROWS[name])
    base = row["base"]
    config = with_codes(base, base_config) if base in VQ_ROWS else base_config(base)
    return {
        "vision_cfg": row.get("vision_cfg", config["vision_cfg"]),
        "text_cfg": {**config["text_cfg"], **row.get("text_cfg", {})},
        "vq_cfg": {**config.get("vq_cfg", {}), **row["vq_cfg"]},
    }


def any_base(name: str, base_config: BaseConfig) -> dict | None:
    """Return the config of an OpenCLIP base, of timm-NAME or of small-BASE, or None if it is not known."""
    config = base_config(name) or timm_base(name)
    if config is None and name.startswith("small-"):
        config = any_base(name.removeprefix("small-"), base_config)
        return config and config | {"text_cfg": json.loads((FOLDER / "small.json").read_bytes())}
    return config


def timm_cfg(encoder: str):
    """Return what timm says of the weights of an encoder, or None if it knows no such name or tag."""
    with suppress(RuntimeError):  # of a wrong tag
        return import_module("timm").get_pretrained_cfg(encoder)


def timm_base(name: str) -> dict | None:
    """Return the config of timm-NAME, at the image size of timm's encoder NAME, or None if it is not known."""
    if not name.startswith("timm-"):
        return None
    encoder = name.removeprefix("timm-")
    if (known := timm_cfg(encoder)) is None:
        return None
    height, width = known.input_size[1:]
    return {"vision_cfg": {"timm_model_name": encoder, "image_size": height if height == width else [height, width]},
            "text_cfg": dict(PAPER_DECODER)}


def fits(text_cfg: dict) -> bool:
    """Return whether the decoder can take a text tower's size: SOT and EOT must be the last ids, as in CLIP's BPE."""
    own = "hf_model_name" in text_cfg or "hf_tokenizer_name" in text_cfg
    return not own and (text_cfg["vocab_size"] == CLIP_VOCABULARY or "bpe_path" in text_cfg.get("tokenizer_kwargs", {}))


def has_patch_tower(model_name: str) -> bool:
    """Return whether a name is that of a captioner, or of a model whose image tower is a captioner's."""
    return bool({"caption_cfg", "image_pool"} & (import_module("open_clip").get_model_config(model_name) or {}).keys())


def is_captioner(model_name: str) -> bool:
    """Return whether a name is that of a captioner. A model's class may be hidden by DDP or torch.compile."""
    return "caption_cfg" in (import_module("open_clip").get_model_config(model_name) or {})


# Functions (name, `base_config`) that return the config of a name, or None. The first that knows a name makes it.
MAKERS = [captioner]
