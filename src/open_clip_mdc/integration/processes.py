"""The end of processes that have trained or evaluated together."""
import atexit

import torch.distributed as dist


def leave_at_exit() -> None:
    """Let this process destroy its process group when it exits. Call it once all work is done.

    Otherwise gloo's threads may free their last tensors while the interpreter shuts down, which aborts a process that
    has finished (PyTorch's pull request 179291). After an error the group is left alone, as other processes may still
    wait in a collective operation, and to destroy it would wait for them (torchtitan's pull request 1342).
    """
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
