"""Devices, dtypes, and when compiling or another attention kernel pays off."""

import math
from contextlib import suppress
from functools import partial

import torch

from config.runtime.processes import rank, world_size
from config.runtime.program import UserError, print0


def pick_device(device) -> torch.device:
    """Return the device of that name, or for "auto" the best one here: cuda (under torchrun its own), mps or cpu."""
    mps = ["mps"] if torch.backends.mps.is_available() else []
    here = [*(f"cuda:{i}" for i in range(torch.cuda.device_count())), *mps, "cpu"]
    name = here[0] if device == "auto" else device
    if name.startswith("cuda") and world_size() > 1 or name == "cuda":
        name = f"cuda:{rank('LOCAL_RANK')}"
    if name not in here:
        raise UserError(f"device = {name!r} is not available: this machine has {', '.join(here)}")
    return torch.device(name)


def peak_flops(device) -> float:
    """Return the dense bfloat16 peak of a GPU in FLOP/s, from its maker's data sheet; nan where unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peaks = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "L40S": 362e12, "A100": 312e12, "RTX 4090": 165e12}
    return next((peak for gpu, peak in peaks.items() if gpu in name), math.nan)


def pick_dtype(dtype, device) -> torch.dtype:
    """Return the type of that name, or for "auto" bfloat16 where `device` multiplies it fast, else float32."""
    if dtype == "auto":
        if device.type == "cuda":
            fast = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            known = device.type == "cpu" and hasattr(torch.cpu, "get_capabilities")
            fast = known and torch.cpu.get_capabilities().get("avx512_bf16")  # CPUs with AMX have it too
        dtype = "bfloat16" if fast else "float32"
    if device.type == "mps" and dtype != "float32":  # reported for PyTorch's causal attention
        raise UserError(f"dtype = {dtype!r} does not work on mps, where 16 bits may leak future tokens: use float32")
    return getattr(torch, dtype)


def count_flops(model) -> float:
    """Return the operations per token of `model`, nan where PyTorch cannot count them, as in code with .item()."""
    with suppress(Exception):  # whatever else is wrong with an edit shows in the first step
        return model.flops_per_token()
    return math.nan


def compile_model(model, compile, device, operations) -> str:
    """Compile the blocks of `model`. Return "true" or "false": whether they are compiled.

    "auto" compiles for runs on a GPU whose operations are so many that compiling takes less time than it saves, and not
    where they cannot be counted (nan).
    """
    if compile == "false" or compile == "auto" and (device.type != "cuda" or not operations >= 5e15):
        return "false"
    print0("compiling ...")
    try:
        torch.compile(lambda x: x.sin() + x.cos())(torch.ones(64, device=device))
    except Exception as error:  # of PyTorch's compiler, Triton or the system's C++ compiler
        print0(f"NOTE    compile = false, since PyTorch's compiler does not work here: {str(error):.150}")
        return "false"
    torch._dynamo.config.suppress_errors = True  # what cannot be compiled stays eager
    torch._dynamo.config.recompile_limit = 64  # sums of 2, 3, ... layers
    compile_blocks(model)
    return "true"


def compile_blocks(model):
    """Compile in place. Layers share the compiled code, so compiling does not take longer for deeper models."""
    parts = [(model, "loss")]
    for block in model.blocks:
        if not block.keeps:
            parts.append((block, "forward"))
            continue
        # a whole block would be compiled again for each number of earlier layers
        parts += [(block, "mlp_branch"), (block, "rerun")]
        if block.attn.reads_earlier:  # score vectors are wider in each layer
            parts.append((block.attn, "project"))
            block.attn.compile()
        else:
            parts.append((block, "first_run"))
        if block.attn_norm.weight.is_cuda:  # it is, which on a CPU takes longer than it saves
            parts.append((block, "sum_layers"))
    for part, name in parts:  # functions of the part itself, so that a deep copy has its own
        setattr(part, name, partial(torch.compile(getattr(type(part), name)), part))


class Loss(torch.nn.Module):
    """The loss of a model, as a module of its own."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, y):
        return self.model(x, y)[1]


def uses_graphs(device):
    return device.type == "cuda" and world_size() == 1


def capture(model, x, y, ctx, graphs):
    """Return a function of a batch (x, y), (B, T), that returns its loss, and whether it runs as CUDA graphs.

    Python takes longer to start a small model's kernels than they run; a graph starts them all at once. It leaves
    gradients in memory of its own, which the next replay overwrites. So there must always be gradients to add them to:
    never set them to None. Otherwise a parameter takes that memory as its gradient, and accumulates in it.
    """
    loss_of = Loss(model)
    if not (graphs and uses_graphs(x.device)):
        return loss_of, False
    try:
        with ctx:
            loss_of = torch.cuda.make_graphed_callables(loss_of, (x, y), allow_unused_input=True)
    except Exception as error:  # an edit that waits for the GPU, as .item() does
        print0(f"NOTE    no CUDA graphs, which do not hold this model: {str(error):.150}")
        return loss_of, False
    for parameter in model.parameters():
        if parameter.requires_grad:  # AdamW would let a frozen one with a gradient decay
            parameter.grad = torch.zeros_like(parameter)
    return loss_of, True


def pick_attention_kernel(model, device, dtype):
    """Select the faster of PyTorch's attention kernels for `model`, for this process.

    On a CPU the fused kernel computes in float32. At short contexts plain products in bfloat16 are up to twice as fast,
    most of all where score vectors are wide. But they hold T x T weights until the backward pass.
    """
    wide = model.config.attention == "summed_qk" and model.config.n_layer > 3
    short = model.config.block_size <= (1024 if wide else 512)
    use_plain_attention(device.type == "cpu" and dtype == torch.bfloat16 and short)


def use_plain_attention(plain):
    """Switch PyTorch's fused attention off, or on. Both switches work on CPUs too, whatever their names say."""
    torch.backends.cuda.enable_flash_sdp(not plain)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(plain)


def machine_name(device):
    """Return a run's hardware and PyTorch, in words: bit-exact resuming requires the same."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    processes = f"{world_size()} x " if world_size() > 1 else ""
    return f"{processes}{device} ({name}), torch {torch.__version__}"
