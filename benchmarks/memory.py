"""Peak memory of a training step on a GPU, counted on fake tensors: batches that no machine at hand holds.

    python -m benchmarks.memory --sizes ViT-B-16 --batches 1024 --tokens 14.1,60

Eager, amp_bf16. Weights, gradients and Adam's two moments (16 bytes a parameter) come on top. On a card some bytes more
are lost to the allocator's gaps.
"""
import argparse
import weakref

import torch

from open_clip_mdc.data.markdown import markdown_table

from .fake import FakeStep, Watch

BLOCK = 512  # bytes: what CUDA's allocator rounds up to


class Bytes(Watch):
    """Bytes of all storages alive, and their peak in each part of the step."""

    def __init__(self):
        super().__init__()
        self.now, self.seen, self.peaks = 0, weakref.WeakSet(), {}

    def see(self, operator, args: tuple, kwargs: dict, out) -> None:
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor) and x.untyped_storage() not in self.seen:
                storage = x.untyped_storage()
                size = -(-storage.nbytes() // BLOCK) * BLOCK
                self.seen.add(storage)
                self.now += size
                weakref.finalize(storage, self.free, size)
        self.peaks[self.part] = max(self.peaks.get(self.part, 0), self.now)

    def free(self, size: int) -> None:
        self.now -= size


def peak_gb(step: FakeStep) -> dict[str, float]:
    """GB at the peak of each part, and "loss, added": what the loss adds to the bytes alive before it."""
    watch = Bytes()
    step.run(watch)
    peaks = {part: size / 1e9 for part, size in watch.peaks.items()}
    before_loss = max(peaks.get(part, 0) for part in ("decoder", "text"))
    return peaks | {"loss, added": max(peaks["loss"], peaks["loss, backward"]) - before_loss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="ViT-B-32,ViT-B-16,ViT-L-14")
    parser.add_argument("--batches", default="128,1024")
    parser.add_argument("--tokens", default="14.1,60", help="means of tokens a caption, SOT and EOT included")
    args = parser.parse_args()
    rows = []
    for size in args.sizes.split(","):
        for batch in map(int, args.batches.split(",")):
            for name, tokens in [("MDC", float(t)) for t in args.tokens.split(",")] + [("CLIP", 14.1)]:
                step = FakeStep(name, size, batch, tokens)
                peaks = peak_gb(step)
                fixed = 16 * sum(p.numel() for p in step.side.model.parameters()) / 1e9
                rows.append((f"{name} {size}", batch, tokens if name == "MDC" else "77", f"{max(peaks.values()):.1f}",
                             f"{peaks['loss, added']:.1f}" if name == "MDC" else None, f"{fixed:.1f}"))
                print(rows[-1], flush=True)
    print(markdown_table(("model", "batch", "tokens", "peak, GB", "loss adds, GB", "weights and optimizer, GB"), rows))


if __name__ == "__main__":
    main()
