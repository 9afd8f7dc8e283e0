"""Several processes that train one model: torchrun starts them, DDP or FSDP2 joins them."""

import os
import warnings

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from config.runtime.devices import machine_name, pick_attention_kernel, pick_device
from config.runtime.errors import UserError, exit_program, install_excepthook, rank


def world_size() -> int:
    """Return the number of processes, 1 without torchrun. Raise a UserError if torchrun's variables are incomplete."""
    number, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    complete = os.environ.keys() >= {"RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} or size == "1"
    if not complete or not size.isdecimal() or rank() >= int(size):
        cure = "start several processes with torchrun, or unset both"
        raise UserError(f"RANK = {number!r}, WORLD_SIZE = {size!r} in the environment do not work: {cure}")
    return int(size)


def init(device):
    """Join the other processes. Return this one's device, its rank, and what the run computes on, in words."""
    device, size = pick_device(device), world_size()
    if size > 1:
        if device.type == "cuda":
            device = pick_device(f"cuda:{os.environ['LOCAL_RANK']}")
            torch.cuda.set_device(device)
        store, *_ = next(dist.rendezvous("env://"))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # it outlives the processes: restarted ones would find the addresses of those that died
            store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank(), world_size=size)
        install_excepthook()  # again: init_process_group installs one that holds back our message
    return device, rank(), machine_name(device, size)


def parallelize_model(model, parallel, device, dtype=None):
    """Return `model` on `device`, so that the processes train it together.

    With "ddp" each process keeps a whole model, with "fsdp" a share of every parameter; there the blocks' matrices are
    gathered in `dtype`, which is autocast's, or None.
    """
    pick_attention_kernel(model, device, dtype)
    if not dist.is_initialized():
        return model.to(device)
    if parallel == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model.to(device), gradient_as_bucket_view=True)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing is written into these views
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    # Each block's group has its matrices only. They are gathered in `dtype`, which autocast would cast them to anyway,
    # and their gradients are averaged in their own. All else is in the model's group, which must be made first.
    matrices = set(model.param_groups(weight_decay=0.0)[0]["params"])
    fully_shard(model, mesh=mesh, ignored_params=matrices)
    policy = MixedPrecisionPolicy(dtype, reduce_dtype=model.embed.weight.dtype, cast_forward_inputs=False)
    for block in model.blocks:
        # A layer that later ones recompute stays gathered until the end of its backward pass, for all of them.
        reshard, others = model.config.residual == "standard", set(block.parameters()) - matrices
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, ignored_params=others, mp_policy=policy)
    return model


def training_state(model, optimizers, scaler) -> dict:
    """Return what a checkpoint needs to resume, gathered on the CPU; all processes must call this."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)  # first, or FSDP's parameters are not found below
    begun = any(optimizer.state for optimizer in optimizers)  # with float16 the first steps may all have been skipped
    learned = get_optimizer_state_dict(model, optimizers, options=options) if begun else {}
    return {"model": weights, "optimizer": learned, "scaler": scaler.state_dict()}


def restore_optimizers(state, model, optimizers, scaler):
    if state["optimizer"]:
        options = StateDictOptions(full_state_dict=True, strict=False)  # a parameter without a gradient has no state
        set_optimizer_state_dict(model, optimizers, state["optimizer"], options=options)
    scaler.load_state_dict(state["scaler"])


def all_max(number) -> int:
    number = torch.tensor(int(number))
    if dist.is_initialized():
        dist.all_reduce(number, dist.ReduceOp.MAX)
    return number.item()


def all_sum(tensor):
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def full_tensor(tensor):
    """Return a tensor, gathered where FSDP has sharded it; all processes must call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def barrier():
    if dist.is_initialized():
        dist.barrier()


def exit_together(code=0):
    """End this process, when all others have come as far."""
    barrier()
    exit_program(code)
