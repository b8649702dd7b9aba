"""Processes that train or evaluate: their memory on a CPU, and their end."""
import atexit
import ctypes
import os
import platform

import torch
import torch.distributed as dist

# Parameters of mallopt in glibc's malloc.h.
TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4


def keep_freed_memory(device: str) -> None:
    """Let this process keep the memory that it frees, for its next tensors, if its models run on the CPU.

    Otherwise glibc gives large tensors back to the system, which has to clear their pages anew in each step. That is a
    third of the time of a step of EfficientNet-Lite0 at 128 px (benchmarks/RESULTS.md). Other libraries of C are left
    as they are, and so is a process whose environment has MALLOC_ variables.
    """
    if torch.cuda.is_available() and device != "cpu":  # without a GPU, "cuda" is OpenCLIP's default and means the CPU
        return
    if platform.libc_ver()[0] == "glibc" and not any(name.startswith("MALLOC_") for name in os.environ):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(MMAP_MAX, 0)
        mallopt(TRIM_THRESHOLD, 2 ** 31 - 1)  # bytes, the most that it takes
        mallopt(TOP_PAD, 64 * 2 ** 20)


def leave_at_exit() -> None:
    """Let this process destroy its process group when it exits. Call it once all work is done.

    Otherwise gloo's threads may free their last tensors while the interpreter shuts down, which aborts a process that
    has finished (PyTorch's pull request 179291). After an error the group is left alone, as other processes may still
    wait in a collective operation, and to destroy it would wait for them (torchtitan's pull request 1342).
    """
    if dist.is_initialized():
        atexit.register(dist.destroy_process_group)
