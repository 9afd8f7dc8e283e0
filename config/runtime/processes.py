"""The processes that torchrun has started, or the one that python has."""

import os
import sys


def world_size() -> int:
    """Return the number of processes that torchrun has started, 1 without it."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def rank(name="RANK") -> int:
    """Return torchrun's number of this process, or its LOCAL_RANK. For a single process they mean nothing."""
    return int(os.environ[name]) if world_size() > 1 else 0


def join(device):
    """Under torchrun, join the other processes, for training on `device`."""
    if world_size() > 1:
        import torch.distributed as dist

        store, *_ = next(dist.rendezvous("env://"))
        # torchrun's store outlives the processes: restarted ones would find the addresses of those that died
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        report_error = sys.excepthook
        dist.init_process_group(backend, store=store, rank=rank(), world_size=world_size())
        sys.excepthook = report_error  # instead of its own, which holds back our message


def joined():
    """Return torch.distributed if this process has joined others, else None."""
    dist = sys.modules.get("torch.distributed")  # if an import was interrupted, only a part of it
    return dist if hasattr(dist, "is_initialized") and dist.is_initialized() else None


def all_reduce(tensor, operation="SUM"):
    """Return the sum, or "MAX", of a tensor over all processes."""
    if dist := joined():
        dist.all_reduce(tensor, getattr(dist.ReduceOp, operation))
    return tensor


def barrier():
    if dist := joined():
        dist.barrier()
