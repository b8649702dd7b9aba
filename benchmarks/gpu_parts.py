"""Parts of `benchmarks.gpu`: what the card reaches at best, and what the models reach on it."""
import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from open_clip_mdc.decoding.confidence import fully_masked

from .captions import lengths, random_text
from .contestants import Contestant, captioners, contestant, count_flops, vocab_size
from .turns import Work, take_turns

LENGTH = 15  # tokens of a decoded caption
TEXTS = 6  # batches of different lengths that take turns, as in training
Row = dict[str, object]


class Bench(NamedTuple):
    device: str  # "cuda" | "cpu"
    small: bool  # tiny sizes that run within seconds on a CPU, to try the script
    sizes: tuple[str, ...] = ("ViT-B-16",)
    batches: tuple[int, ...] = (128, 1024)

    def milliseconds(self, function: Work, rounds: int = 10, warm_up: int = 3) -> float:
        rounds, warm_up = (1, 1) if self.small else (rounds, warm_up)
        return 1e3 * median(take_turns({"": function}, rounds, warm_up)[""])

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16)


def ceiling(bench: Bench) -> float:
    n = 128 if bench.small else 8192
    x, y = (torch.randn(n, n, device=bench.device, dtype=torch.bfloat16) for _ in "xy")
    return 2 * n ** 3 / bench.milliseconds(lambda: x @ y) / 1e9


def ceilings(bench: Bench) -> Iterator[Row]:
    yield {"what": "bfloat16 product", "TFLOP/s": ceiling(bench)}
    big = torch.empty(1 << (20 if bench.small else 32), dtype=torch.uint8, device=bench.device)
    yield {"what": "copy on the device", "GB/s": 2 * big.numel() / bench.milliseconds(big.clone) / 1e6}
    weights = torch.zeros(1 << (10 if bench.small else 27), device=bench.device)
    weights.grad = torch.zeros_like(weights)
    for fused in (False, True):  # ideally, both moments and the weights are read and written, and the gradient read
        optimizer = torch.optim.AdamW([weights], 1e-4, fused=fused or None)
        yield {"what": "AdamW, fused" if fused else "AdamW, by PyTorch's default",
               "GB/s": 7 * weights.nbytes / bench.milliseconds(optimizer.step) / 1e6}


def batches(bench: Bench, side: Contestant, batch: int) -> Callable[[], tuple]:
    texts = [side.prepare(random_text(batch, vocab_size(side.model), seed=i)).to(bench.device) for i in range(TEXTS)]
    image = torch.randn(batch, 3, *side.model.visual.image_size, device=bench.device)
    turns = itertools.cycle(texts)
    return lambda: (image, next(turns))


def heaviest(bench: Bench, step: Callable[[], None]) -> tuple[float, list[tuple[str, float, int]]]:
    cuda = bench.device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        step()
        if cuda:
            torch.cuda.synchronize()
    time = "self_device_time_total" if cuda else "self_cpu_time_total"
    events = sorted(profiler.key_averages(), key=lambda event: -getattr(event, time))
    return sum(getattr(event, time) for event in events) / 1e3, [
        (event.key[:70], round(getattr(event, time) / 1e3, 2), event.count) for event in events[:10]]


def train_step(bench: Bench, name: str, size: str, batch: int, compiled: bool, peak: float) -> Row:
    from torch._dynamo.utils import counters
    torch._dynamo.reset()
    counters.clear()
    backend = ("eager" if bench.small else "inductor") if compiled else None
    side = contestant(name, size, bench.device, compile_with=backend)
    # As `open_clip_train` trains each: a captioner's AdamW is fused on a GPU.
    fused = name == "MDC" and bench.device == "cuda"
    optimizer = torch.optim.AdamW(side.model.parameters(), 1e-4, fused=fused or None)
    give = batches(bench, side, batch)

    def forward_backward() -> None:
        with bench.autocast():
            loss = side.loss(*give())
        loss.backward()

    def step() -> None:
        forward_backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    row = {"ms": bench.milliseconds(step, rounds=2 * TEXTS, warm_up=TEXTS + 2)}
    row |= {"samples/s": 1e3 * batch / row["ms"], "graphs": counters["stats"].get("unique_graphs", 0)}
    if bench.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        row["GB"] = torch.cuda.max_memory_allocated() / 1e9
    row["kernel ms"], row["kernels"] = heaviest(bench, step)
    if not compiled:
        row["TFLOP/s"] = count_flops(forward_backward) / row["ms"] / 1e9  # all batches have the same mean length
        row["share"] = row["TFLOP/s"] / peak
    return row


def steps(bench: Bench) -> Iterator[Row]:
    """Yield training steps of MDC and CLIP, eager and compiled. TFLOP/s of both count the multiplications of eager."""
    peak = ceiling(bench)
    for size, batch in itertools.product(bench.sizes, bench.batches):
        flops = {}
        for compiled, name in itertools.product((False, True), ("MDC", "CLIP")):
            row = {"model": name, "size": size, "batch": batch, "mode": "compiled" if compiled else "eager"}
            try:
                row |= train_step(bench, name, size, batch, compiled, peak)
            except RuntimeError as problem:  # out of memory, say
                row["note"] = f"{type(problem).__name__}: {str(problem).splitlines()[0][:100]}"
            if "TFLOP/s" in row:
                flops[name] = row["TFLOP/s"] * row["ms"]
            elif name in flops and "ms" in row:
                row["TFLOP/s"] = flops[name] / row["ms"]
                row["share"] = row["TFLOP/s"] / peak
            yield row
            if bench.device == "cuda":
                torch.cuda.empty_cache()


def waits(function: Work) -> tuple[int, str]:
    """Return how often and where the host waits for the device, by PyTorch's own detector."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            function()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places = [f"{os.path.basename(w.filename)}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
    return len(places), ", ".join(dict.fromkeys(places))


def syncs(bench: Bench) -> Iterator[Row]:
    size = bench.sizes[0]
    if bench.device != "cuda":
        yield {"what": "all", "note": "only CUDA has a detector"}
        return
    side = contestant("MDC", size, bench.device)
    give, batch = batches(bench, side, 32), {}
    image, text = torch.randn(32, 3, 224, 224, device=bench.device), random_text(32, side.model.vocab_size)[:, None]

    def forward() -> None:
        with bench.autocast():
            batch["loss"] = side.loss(*given)

    captured, given = captioners(size, bench.device)["graphs"], give()
    forward()  # waits that happen once only are not counted
    captured.generate(image, length=LENGTH)
    for name, function in (("training, forward", forward), ("training, backward", lambda: batch["loss"].backward()),
                           (f"decoding, {LENGTH} tokens", lambda: side.model.generate(image, length=LENGTH)),
                           (f"decoding, {LENGTH} tokens, graphs", lambda: captured.generate(image, length=LENGTH)),
                           ("scoring, heuristic", lambda: side.model.log_likelihood(image, text.to(bench.device)))):
        number, places = waits(function)
        yield {"what": name, "waits": number, "where": places}


def decoding(bench: Bench) -> Iterator[Row]:
    """One length, and the lengths of Flickr8k's captions. `differ` counts captions that are not the eager ones."""
    made = captioners(bench.sizes[0], bench.device)
    for batch in (2,) if bench.small else (1, 32, 64, 256):
        image = torch.randn(batch, 3, *made["eager"].visual.image_size, device=bench.device)
        several = {"text": fully_masked(torch.from_numpy(lengths(batch)) - 2, made["eager"].vocab_size)}
        for precision, (tokens, options), mode in itertools.product(("float32", "bfloat16"), (
                (LENGTH, {"length": LENGTH}), (LENGTH, {"length": LENGTH, "tokens_per_step": 3}), ("several", several)),
                made):
            with nullcontext() if precision == "float32" else bench.autocast():
                ms = bench.milliseconds(partial(made[mode].generate, image, **options), 5, 2)
                differ = made[mode].generate(image, **options) != made["eager"].generate(image, **options)
            yield {"batch": batch, "precision": precision, "tokens": tokens, "mode": mode,
                   "tokens a step": options.get("tokens_per_step", 1), "ms": ms, "images/s": 1e3 * batch / ms,
                   "differ": int(differ.any(1).sum())}


def scoring(bench: Bench) -> Iterator[Row]:
    model = contestant("MDC", bench.sizes[0], bench.device).model.eval()
    few, many, draws = (2, 4, 4) if bench.small else (32, 1000, 1024)
    image = torch.randn(few, 3, *model.visual.image_size, device=bench.device)
    pairs = random_text(2 * few, model.vocab_size).view(few, 2, -1).to(bench.device)
    classes = random_text(many, model.vocab_size, mean=8)[None].to(bench.device)
    for what, args, options in (
            (f"heuristic, {few} images, 2 captions each", (image, pairs, "heuristic"), {}),
            (f"heuristic, 1 image, {many} captions", (image[:1], classes, "heuristic"), {}),
            (f"monte_carlo, 1 image, 2 captions, {draws} draws", (image[:1], pairs[:1], "monte_carlo"),
             {"num_samples": draws})):
        with bench.autocast():
            ms = bench.milliseconds(partial(model.log_likelihood, *args, **options), 3, 1)
        yield {"what": what, "ms": ms, "images/s": 1e3 * len(args[0]) / ms}
