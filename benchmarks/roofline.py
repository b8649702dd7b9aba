"""How fast a GPU could be at best: a training step's time from the bytes and multiplications of its operators.

    python -m benchmarks.roofline                      5 minutes; writes predictions.json and GPU.md

An eager step's kernel takes as long as its bytes or its multiplications need, whichever is longer, and a kernel takes
LAUNCH seconds of the host to issue; what is not hidden behind the kernels' own work is added. A compiled step keeps its
matrix work, and half of the time of the rest: Inductor's own count of bytes for an encoder block falls by that much.
This is an upper bound in speed (ideal kernels, no gaps): expect 0.7 to 0.85 of it. Ratios are better founded.
"""
import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from open_clip_mdc.data.files import write_json
from open_clip_mdc.text.packing import each_tensor, pack_tokens
from open_clip_mdc.text.special_tokens import eot_id, mask_id, sot_id, valid_tokens

from .fake import FakeStep, Watch, cuda_rules
from .gpu_report import FOLDER, read_json, write_report
from .memory import peak_gb

LAUNCH = 8e-6  # seconds of the host for each kernel in eager mode
LEAST = 2.5e-6  # seconds of the shortest kernel
FUSED = 0.5  # of the time of all that is no matrix work is left when compiled
CASES = [(name, size, batch, tokens) for size in ("ViT-B-32", "ViT-B-16", "ViT-L-14") for batch in (128, 1024)
         for name, tokens in (("MDC", 14.1), ("MDC", 60.0), ("CLIP", 14.1))]
LENGTH = 15  # tokens that are decoded


class Chip(NamedTuple):
    """What real kernels reach, in bytes and floating-point operations a second."""

    bytes: float
    matrix: float  # bfloat16 products of a step's sizes
    attention: float
    single: float  # float32 products
    ceiling: float  # one large bfloat16 product: what shares are shares of


H200 = Chip(bytes=4.0e12, matrix=650e12, attention=350e12, single=50e12, ceiling=790e12)
TF32 = 300e12  # float32 products of an H200 where TF32 is allowed


class Part(NamedTuple):
    """Of a step; adds up."""

    kernels: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    matrix_seconds: float = 0.0
    other_seconds: float = 0.0


def tensors(values) -> list[torch.Tensor]:
    """All tensors of nested lists and tuples."""
    if isinstance(values, torch.Tensor):
        return [values]
    return [x for value in values for x in tensors(value)] if isinstance(values, (tuple, list)) else []


def moved_bytes(name: str, args: tuple, out) -> int:
    """What an operator reads and writes: each storage once, of a table only the rows that are looked up."""
    looked_up = 2 * sum(x.numel() * x.element_size() for x in tensors(out))
    total, seen = 0, set()
    for x in tensors(args) + tensors(out):
        storage = x.untyped_storage()
        if storage._cdata in seen:
            continue
        seen.add(storage._cdata)
        size = storage.nbytes() if 0 in x.stride() else x.numel() * x.element_size()
        total += min(size, looked_up) if name in ("index", "embedding", "gather", "index_select") else size
    return total


class Roofline(Watch):
    """Kernels, FLOPs, bytes and seconds of each part of the step."""

    def __init__(self, chip: Chip):
        super().__init__()
        self.chip, self.parts = chip, {}

    def see(self, operator, args: tuple, kwargs: dict, out) -> None:
        if not self.is_kernel(operator):
            return
        packet, name = operator._overloadpacket, operator._overloadpacket.__name__
        flops = flop_registry[packet](*args, **kwargs, out_val=out) if packet in flop_registry else 0
        moved = moved_bytes(name, args, out)
        single = flops and tensors(out)[0].dtype == torch.float32
        rate = self.chip.single if single else self.chip.attention if "attention" in name else self.chip.matrix
        seconds = max(flops / rate, moved / self.chip.bytes, LEAST)
        new = Part(1, flops, moved, seconds * (flops > 0), seconds * (flops == 0))
        self.parts[self.part] = Part(*map(sum, zip(self.parts.get(self.part, Part()), new, strict=True)))


def add(*parts: Part) -> Part:
    return Part(*map(sum, zip(*parts, strict=True)))


def eager_seconds(part: Part) -> float:
    return max(part.matrix_seconds + part.other_seconds, part.kernels * LAUNCH)


def predict(step: FakeStep, chip: Chip = H200) -> tuple[dict[str, Part], dict[str, dict[str, float]]]:
    """The parts of a step; and for "eager" and "compiled" its milliseconds, samples/s and TFLOP/s."""
    watch = Roofline(chip)
    step.run(watch)
    moved = 28 * sum(p.numel() for p in step.side.model.parameters())
    watch.parts["AdamW"] = Part(1, 0.0, moved, 0.0, moved / chip.bytes)
    whole = add(*watch.parts.values())
    seconds = {"eager": eager_seconds(whole),
               "compiled": whole.matrix_seconds + FUSED * whole.other_seconds}
    batch = len(step.image)
    return watch.parts, {mode: {"ms": 1e3 * s, "samples/s": batch / s, "TFLOP/s": whole.flops / s / 1e12,
                                "share": whole.flops / s / chip.ceiling} for mode, s in seconds.items()}


@torch.no_grad()
def predict_decoding(size: str, batch: int, chip: Chip = H200) -> dict[str, float]:
    """Captions of LENGTH tokens, one token a step, eager, bfloat16: the image once, then the mean step LENGTH times.

    The decoder outside training computes in float32, whatever autocast says.
    """
    step, watch = FakeStep("MDC", size, batch), Roofline(chip)
    model = step.side.model.eval()
    ids = [sot_id, *[mask_id] * LENGTH, eot_id]
    text = torch.tensor([[name(model.vocab_size) for name in ids]]).expand(batch, -1)
    packed = each_tensor(pack_tokens(text, valid_tokens(text, model.vocab_size), False), step.mode.from_tensor)
    with step.mode, watch, cuda_rules():
        watch.part = "image"
        image_kv = model.text.project_image(model.encode_image_tokens(step.image))
        watch.part = "step"
        hidden = model.text(packed, image_kv)[:batch * (LENGTH + 1) // 2]
        model.text.output(hidden).float().log_softmax(1).max(1)
    seconds = eager_seconds(watch.parts["image"]) + LENGTH * eager_seconds(watch.parts["step"])
    return {"ms": 1e3 * seconds, "images/s": batch / seconds, "kernels a step": watch.parts["step"].kernels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of predictions.json and GPU.md")
    args = parser.parse_args()
    predictions = {"chip": "H200", **H200._asdict(), "steps": [], "decoding": []}
    for name, size, batch, tokens in CASES:
        step = FakeStep(name, size, batch, tokens)
        parts, modes = predict(step)
        peaks = peak_gb(FakeStep(name, size, batch, tokens))
        memory = {"GB": max(peaks.values()) + 16 * sum(p.numel() for p in step.side.model.parameters()) / 1e9,
                  "loss GB": peaks["loss, added"]}
        case = {"model": name, "size": size, "batch": batch, "tokens": tokens if name == "MDC" else 77}
        predictions["steps"] += [case | {"mode": "eager"} | modes["eager"] | memory
                                 | {"parts": {key: part._asdict() for key, part in parts.items()}},
                                 case | {"mode": "compiled"} | modes["compiled"]]
        print(case, modes, memory, flush=True)
    predictions["decoding"] = [
        {"batch": batch, "precision": precision, "tokens a step": 1, **predict_decoding("ViT-B-16", batch, chip)}
        for batch in (1, 32, 256)
        for precision, chip in (("bfloat16", H200), ("bfloat16, TF32", H200._replace(single=TF32)))]
    write_json(args.out / "predictions.json", predictions, indent=1)
    write_report(args.out, read_json(args.out / "gpu.json"))


if __name__ == "__main__":
    main()
