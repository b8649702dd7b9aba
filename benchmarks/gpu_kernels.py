"""What a card does with the operators that captioning is made of, the package apart: parts of `benchmarks.gpu`.

Dimensions: B captions, P patches, M asked tokens.
"""
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from open_clip_mdc.models.captioner import LOSS_ROWS

from .captions import lengths
from .turns import take_turns

Row = dict[str, object]


class Bench(NamedTuple):
    device: str  # "cuda" | "cpu"
    small: bool  # seconds on a CPU: to see that everything runs
    sizes: tuple[str, ...] = ("ViT-B-16",)
    batches: tuple[int, ...] = (128, 1024)

    def milliseconds(self, function: Callable[[], object], rounds: int = 10, warm_up: int = 3) -> float:
        rounds, warm_up = (1, 1) if self.small else (rounds, warm_up)
        return 1e3 * median(take_turns({"": function}, rounds, warm_up)[""])

    def peak_gb(self, function: Callable[[], object]) -> float | None:
        if self.device != "cuda":
            return None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 1e9

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16)


def refusable(row: Row, measure: Callable[[], Row]) -> Row:
    try:
        return row | measure()
    except (RuntimeError, ImportError, NotImplementedError) as problem:  # out of memory is a RuntimeError
        return row | {"note": f"{type(problem).__name__}: {str(problem).splitlines()[0][:100]}"}


def ceiling(bench: Bench) -> float:
    n = 128 if bench.small else 8192
    x, y = (torch.randn(n, n, device=bench.device, dtype=torch.bfloat16) for _ in "xy")
    return 2 * n ** 3 / bench.milliseconds(lambda: x @ y) / 1e9


def ceilings(bench: Bench) -> Iterator[Row]:
    yield {"what": "bfloat16 product", "TFLOP/s": ceiling(bench)}
    big = torch.empty(1 << (20 if bench.small else 32), dtype=torch.uint8, device=bench.device)
    yield {"what": "copy on the device", "GB/s": 2 * big.numel() / bench.milliseconds(big.clone) / 1e6}


def copies(bench: Bench) -> Iterator[Row]:
    image = torch.randn(4 if bench.small else 1024, 3, 224, 224)
    for kind, x in (("float32", image), ("uint8", image.to(torch.uint8))):
        for memory in ("pageable", "pinned") if bench.device == "cuda" else ("pageable",):
            x = x.pin_memory() if memory == "pinned" else x
            ms = bench.milliseconds(partial(x.to, bench.device, non_blocking=True))
            yield {"what": f"{memory} {kind}", "ms": ms, "GB/s": x.numel() * x.element_size() / ms / 1e6}


def losses(bench: Bench) -> Iterator[Row]:
    """Cross-entropy over the vocabulary, forward and backward: M as of 1,024 captions of 14 and of 60 tokens."""
    width, vocab_size = (32, 1000) if bench.small else (512, 49408)
    linear = torch.nn.Linear(width, vocab_size, bias=False, device=bench.device)

    def whole(h: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(linear(h).float(), target, reduction="none")

    def chunks(h: Tensor, target: Tensor) -> Tensor:
        return torch.cat([checkpoint(whole, *c, use_reentrant=False)
                          for c in zip(h.split(LOSS_ROWS), target.split(LOSS_ROWS), strict=True)])

    def fused(h: Tensor, target: Tensor) -> Tensor:
        return F.linear_cross_entropy(h.bfloat16(), linear.weight.bfloat16(), target, reduction="none",
                                      options=torch.nn.LinearCrossEntropyOptions())

    ways = {"whole": whole, f"chunks of {LOSS_ROWS}": chunks}
    if not bench.small:  # compilation takes a minute on a CPU
        ways |= {"whole, compiled": torch.compile(whole), "chunks, compiled": torch.compile(chunks)}
    if hasattr(F, "linear_cross_entropy"):
        ways["F.linear_cross_entropy (its loss is bfloat16)"] = fused
    for asked in (64,) if bench.small else (9984, 45312):
        hidden, target = torch.randn(asked, width, device=bench.device), torch.arange(asked, device=bench.device) % 999
        weight = torch.rand(asked, device=bench.device)

        def step(way: Callable, hidden: Tensor = hidden, target: Tensor = target, weight: Tensor = weight) -> None:
            linear.weight.grad = None
            with bench.autocast():
                loss = (way(hidden.clone().requires_grad_(), target) * weight).sum()
            loss.backward()

        for name, way in ways.items():
            one = partial(step, way)
            yield refusable({"tokens": asked, "what": name},
                            lambda one=one: {"ms": bench.milliseconds(one, 5), "GB": bench.peak_gb(one)})


def attentions(bench: Bench) -> Iterator[Row]:
    """Self-attention of B captions and their cross-attention to P patches, forward and backward, one layer."""
    batch, heads, depth, patches = (2, 2, 16, 9) if bench.small else (1024, 8, 64, 196)
    tokens = torch.from_numpy(lengths(batch))
    longest, total = -(-int(tokens.max()) // 16) * 16, int(tokens.sum())
    is_key = (torch.arange(longest) < tokens[:, None]).to(bench.device)[:, None, None]

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, device=bench.device, dtype=torch.bfloat16, requires_grad=True)

    q, k, v = (make(batch, heads, longest, depth) for _ in "qkv")
    image = [make(batch, heads, patches, depth) for _ in "kv"]
    padded = F.scaled_dot_product_attention
    ways: dict[str, Callable[[], Tensor]] = {
        f"self, padded to {longest}, mask": lambda: padded(q, k, v, attn_mask=is_key),
        f"self, padded to {longest}, no mask": lambda: padded(q, k, v),
        "cross, padded": lambda: padded(q, *image),
    }
    if bench.device == "cuda":
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def by(backend: str) -> Tensor:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return padded(q, k, v, attn_mask=is_key)

        def packed(*args) -> Tensor:
            from torch.nn.attention.varlen import varlen_attn  # here: an older PyTorch has none, which is a row's note
            return varlen_attn(*args)

        for backend in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"):
            ways[f"self, padded, mask, by {backend}"] = partial(by, backend)
        starts = F.pad(tokens.cumsum(0), (1, 0)).int().to(bench.device)
        image_starts = torch.arange(0, (batch + 1) * patches, patches, dtype=torch.int32, device=bench.device)
        pq, pk, pv = (make(total, heads, depth) for _ in "qkv")
        pik, piv = (make(batch * patches, heads, depth) for _ in "kv")
        ways |= {"self, varlen_attn": partial(packed, pq, pk, pv, starts, starts, longest, longest),
                 "cross, varlen_attn": partial(packed, pq, pik, piv, starts, image_starts, longest, patches)}
    for name, way in ways.items():
        yield refusable({"what": name}, lambda way=way: {
            "ms": bench.milliseconds(lambda: way().float().sum().backward())})
