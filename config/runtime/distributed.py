"""Several processes that train one model: torchrun starts them, DDP or FSDP2 joins them."""

import os
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F

from config.runtime.common import UserError, install_excepthook, pick_device, print0, resource_errors


def init_distributed(device) -> torch.device:
    """Join the other processes, if torchrun has started several. Return this one's device, of that kind."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size == 1:
        return device
    if device.type not in ("cuda", "cpu"):
        raise UserError(f"device = {device.type!r} does not work with {world_size} processes: it must be cuda or cpu")
    if device.type == "cuda":
        device = pick_device(f"cuda:{os.environ['LOCAL_RANK']}")
        torch.cuda.set_device(device)
    store, rank, world_size = next(dist.rendezvous("env://"))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # which outlives the processes: started again, they would find the addresses of those that have died
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    install_excepthook()  # PyTorch has put one of its own before it, which keeps back what is printed
    return device


@resource_errors()
def parallelize_model(model, parallel, device, dtype=None):
    """Return what to call in the place of `model`, as the processes train it together on `device`.

    With `parallel` = "ddp" each process keeps a whole model. With "fsdp" it keeps a share of every parameter. There the
    blocks' matrices are gathered in `dtype`, which is autocast's, or None.
    """
    if not dist.is_initialized():
        return model.to(device)
    if parallel == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model.to(device), gradient_as_bucket_view=True)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing is written into these views
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    # Each block's group has its matrices only. They are gathered in `dtype`, which autocast would cast them to anyway,
    # and their gradients are averaged in their own. All else is in the model's group, which must be made first.
    matrices = set(model.param_groups(weight_decay=0.0)[0]["params"])
    fully_shard(model, mesh=mesh, ignored_params=matrices)
    policy = MixedPrecisionPolicy(dtype, reduce_dtype=model.embed.weight.dtype, cast_forward_inputs=False)
    for block in model.blocks:
        # A layer that later ones recompute stays gathered until the end of its backward pass, for all of them.
        reshard, others = block.residual is None, set(block.parameters()) - matrices
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, ignored_params=others, mp_policy=policy)
    return model


def compile_or_eager(model, device, ctx):
    """Compile the blocks of `model`; where PyTorch finds no compiler, on any process, all of them stay eager."""
    print0("compiling ...")
    reason = ""
    try:  # on the least that needs a compiler, forward and backward, and no other process
        with ctx:
            compiled = torch.compile(lambda x: F.silu(x @ x).sum())
            compiled(torch.ones(64, 64, device=device, requires_grad=True)).backward()
    except Exception as error:
        reason = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
    if dist_max(bool(reason)):
        print0(f"not compiled, eager from here: {reason or 'another process could not'}")
    else:
        model.compile_blocks()


def dist_max(number) -> int:
    """Return the largest that any process has of an integer."""
    if not dist.is_initialized():
        return int(number)
    number = torch.tensor(int(number))
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return number.item()


def dist_sum(tensor):
    """Return the sum of the processes' tensors, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def full_tensor(tensor):
    """Return a tensor, gathered where FSDP has sharded it; all processes must ask at once."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
