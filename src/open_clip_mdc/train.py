"""Train CLIP models and captioners with OpenCLIP's own training loop and flags.

    open_clip_train --model MDC-ViT-B-32 --train-data 'cc12m/{00000..01242}.tar' --dataset-type webdataset ...
    python -m open_clip_mdc.train --model MDC-ViT-B-32 ...
    torchrun --nproc_per_node 8 -m open_clip_mdc.train -- --model MDC-ViT-B-32 ...      (mind the --)

This file registers the captioners, reports flags that cannot work, and calls `open_clip_train.main.main`.
"""
import logging
import multiprocessing
import sys

from .data.files import end_when_terminated
from .errors import Refusal, complaint, of_worker
from .integration.arguments import parse, parse_first


def main(argv: list[str] | None = None) -> int | None:
    """Train, and return OpenCLIP's exit status (None or -1). Bad flags end the process with one line."""
    end_when_terminated()
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # also while modules are imported, which takes seconds
        sys.exit("interrupted")


def run(argv: list[str]) -> int | None:
    parse_first(argv)
    import torch.distributed as dist

    from .data.weights import Misfit
    from .integration.check_flags import find_problem, find_warnings
    from .integration.checkpoints import first_lines
    from .integration.patches import register
    from .integration.processes import keep_freed_memory, leave_at_exit
    from .integration.runs import bring_latest
    register(training=True)
    from open_clip_train.distributed import world_info_from_env
    from open_clip_train.main import main as train
    args = parse(argv)
    if problem := find_problem(args):
        raise Refusal(problem)
    try:
        if world_info_from_env()[1] == 0:  # logging would make OpenCLIP print each line twice
            for warning in find_warnings(args):
                print(f"warning: {warning}", file=sys.stderr)
            bring_latest(args)
        keep_freed_memory(args.device)
        logging.raiseExceptions = False  # on a full disk every line of the log would print a traceback
        status = train(argv)
        leave_at_exit()
        return status
    except FloatingPointError as problem:  # on all ranks: wait for rank 0 to print, as torchrun kills all once one ends
        if world_info_from_env()[1] == 0:
            print(f"error: {problem}", file=sys.stderr, flush=True)
        if dist.is_initialized():
            dist.barrier()
        sys.exit(1)
    except (ValueError, OSError) as problem:
        raise Refusal(complaint(problem, args, argv).strip().splitlines()[-1]) from None
    except KeyError as problem:  # FSDP2 looks up the optimizer's state by names of parameters
        if not (args.resume and getattr(args, "fsdp", False) and "state." in str(problem)):
            raise
        raise Refusal(f"--resume {args.resume} was trained without --fsdp: go on without it, or give its weights by "
                      "--pretrained") from None
    except (RuntimeError, MemoryError) as problem:
        if not (isinstance(problem, Misfit) or "Error(s) in loading state_dict" in str(problem)):
            sys.exit(f"error: {of_worker(problem)}")
        flag = f"--resume {args.resume}" if args.resume else f"--pretrained {args.pretrained}"
        raise Refusal(f"{flag} holds no weights of {args.model}: {first_lines(problem)}") from None
    except KeyboardInterrupt:
        sys.exit(f"interrupted: to resume after its last checkpoint, add --resume latest --name {args.name or 'NAME'}")
    finally:
        for child in multiprocessing.active_children():
            if not child.daemon:  # that of --remote-sync, for which Python would wait for ever
                child.terminate()
        for name in list(logging.root.manager.loggerDict):  # OpenCLIP set all to INFO, and PyTorch logs at exit
            if name.startswith("torch."):
                logging.getLogger(name).setLevel(logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())
