"""What a card does with the models: training step, decoding, scoring, waiting. Parts of `benchmarks.gpu`."""
import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from .captions import random_text
from .contestants import Contestant, contestant, count_flops, vocab_size
from .gpu_kernels import Bench, Row, ceiling, refusable

LENGTH = 15  # tokens that are decoded
TEXTS = 6  # batches of other lengths that take turns, as in training


def batches(bench: Bench, side: Contestant, batch: int) -> Callable[[], tuple]:
    texts = [side.prepare(random_text(batch, vocab_size(side.model), seed=i)).to(bench.device) for i in range(TEXTS)]
    image = torch.randn(batch, 3, *side.model.visual.image_size, device=bench.device)
    turns = itertools.cycle(texts)
    return lambda: (image, next(turns))


def heaviest(bench: Bench, step: Callable[[], None], number: int = 10) -> tuple[float, list[tuple[str, float, int]]]:
    cuda = bench.device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        step()
        if cuda:
            torch.cuda.synchronize()
    time = "self_device_time_total" if cuda else "self_cpu_time_total"
    events = sorted(profiler.key_averages(), key=lambda event: -getattr(event, time))
    return sum(getattr(event, time) for event in events) / 1e3, [
        (event.key[:70], round(getattr(event, time) / 1e3, 2), event.count) for event in events[:number]]


def train_step(bench: Bench, name: str, size: str, batch: int, compiled: bool, peak: float) -> Row:
    from torch._dynamo.utils import counters
    torch._dynamo.reset()
    counters.clear()
    backend = ("eager" if bench.small else "inductor") if compiled else None
    side = contestant(name, size, bench.device, compile_with=backend)
    optimizer = torch.optim.AdamW(side.model.parameters(), 1e-4)
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
        row["TFLOP/s"] = count_flops(forward_backward) / row["ms"] / 1e9  # batches have one mean length
        row["share"] = row["TFLOP/s"] / peak
    return row


def steps(bench: Bench) -> Iterator[Row]:
    """MDC and CLIP in turn, eager and compiled; the compiled step does the multiplications of the eager one."""
    peak = ceiling(bench)
    for size in bench.sizes:
        for batch in bench.batches:
            flops = {}
            for compiled in (False, True):
                for name in ("MDC", "CLIP"):
                    row = refusable({"model": name, "size": size, "batch": batch,
                                     "mode": "compiled" if compiled else "eager"},
                                    partial(train_step, bench, name, size, batch, compiled, peak))
                    if "TFLOP/s" in row:
                        flops[name] = row["TFLOP/s"] * row["ms"]
                    elif name in flops and "ms" in row:
                        row["TFLOP/s"] = flops[name] / row["ms"]
                        row["share"] = row["TFLOP/s"] / peak
                    yield row
                    if bench.device == "cuda":
                        torch.cuda.empty_cache()


def waits(function: Callable[[], object]) -> tuple[int, str]:
    """Return how often the host waits for the device, by PyTorch's own detector, and where."""
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

    given = give()
    forward()  # what is waited for once only
    for name, function in (("training, forward", forward), ("training, backward", lambda: batch["loss"].backward()),
                           (f"decoding, {LENGTH} tokens", lambda: side.model.generate(image, length=LENGTH)),
                           ("scoring, heuristic", lambda: side.model.log_likelihood(image, text.to(bench.device)))):
        number, places = waits(function)
        yield {"what": name, "waits": number, "where": places}


def decoding(bench: Bench) -> Iterator[Row]:
    """Also with TF32 allowed, as the decoder computes in float32 whatever autocast says."""
    model = contestant("MDC", bench.sizes[0], bench.device).model.eval()
    for batch in (2,) if bench.small else (1, 32, 256):
        image = torch.randn(batch, 3, *model.visual.image_size, device=bench.device)
        for precision, tokens_per_step in itertools.product(("float32", "bfloat16", "bfloat16, TF32"), (1, 3)):
            torch.backends.cuda.matmul.allow_tf32 = "TF32" in precision
            with nullcontext() if precision == "float32" else bench.autocast():
                ms = bench.milliseconds(partial(model.generate, image, length=LENGTH, tokens_per_step=tokens_per_step),
                                        5, 2)
            torch.backends.cuda.matmul.allow_tf32 = False
            yield {"batch": batch, "precision": precision, "tokens a step": tokens_per_step, "ms": ms,
                   "images/s": 1e3 * batch / ms}


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
