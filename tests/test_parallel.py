"""Several processes train as one does: two of them, on the CPU, over gloo."""

import copy
import os
import shutil
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import ProcessExitedException
from torch.nn.parallel import DistributedDataParallel

import data.prepare
from conftest import TINY, differences, load, log_of, progress, refused, run_program
from cover import GRID, perturb, settings
from data.dataset import Dataset
from model import GPT, GPTConfig

RUN = f"{TINY} --gradient_accumulation_steps=4 --dropout=0.1 --lr_decay=none --seed=5"

# of a process that has imported PyTorch already, which takes seconds
two_processes = partial(torch.multiprocessing.start_processes, nprocs=2, start_method="forkserver")
torch.multiprocessing.set_forkserver_preload(["torch.distributed.fsdp"])


def train_together(folder, arguments, before=None):
    """Run train.py in `folder` by two processes, as torchrun starts them. Each calls `before`, if given, at first."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    two_processes(train, (folder, arguments, port, before))


def train(rank, folder, arguments, port, before):
    """Be one of two processes that train. What it prints goes to a file."""
    os.chdir(folder)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    sys.stdout = sys.stderr = open(f"printed{rank}.txt", "w", encoding="utf-8")
    if before:
        before()
    data.prepare.DATA = folder / "data"
    run_program("train.py", *arguments.split())


def shard(model):
    """Shard a model as its user would, block by block."""
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=False)  # later layers recompute it
    return fully_shard(model)


# DDP sees that one parameter is used many times, FSDP whatever a kind or a method does with parameters
WRAPPED = [(wrap, "standard", "m1") for wrap in (DistributedDataParallel, fully_shard)]
WRAPPED += [(shard, kind, method) for kind, method in GRID if kind == "standard" or method == "m4.2+input"]


def compare_gradients(rank, folder):
    """Be one of two processes that train. Compare their gradients with those of the whole batch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    idx = torch.randint(19, (2, 12), generator=torch.Generator().manual_seed(0))
    for wrap, kind, method in WRAPPED:
        one = perturb(GPT(GPTConfig(**settings(kind, method, n_layer=2)))).double()
        model = copy.deepcopy(one)
        one(idx, idx)[1].backward()
        together = wrap(model)
        together(idx[rank : rank + 1], idx[rank : rank + 1])[1].backward()
        for (name, p), q in zip(model.named_parameters(), one.parameters()):
            gradient = p.grad if wrap is DistributedDataParallel else p.grad.full_tensor()
            assert torch.allclose(gradient, q.grad, rtol=1e-9, atol=1e-11), (wrap.__name__, kind, method, name)
    dist.barrier()
    dist.destroy_process_group()


def test_gradients_of_every_method(tmp_path):
    two_processes(compare_gradients, (tmp_path,))


def numbers(out, event, name):
    return [line[name] for line in log_of(out, event)]


def send_the_second(number, step):
    """Let the second process get a signal in each micro-step of a step."""
    batch = Dataset.batch

    def batch_and_signal(data, seed, iter_num, *rest, **named):
        if os.environ["RANK"] == "1" and iter_num == step - 1:
            os.kill(os.getpid(), number)
        return batch(data, seed, iter_num, *rest, **named)

    Dataset.batch = batch_and_signal


def test_two_processes_are_one_and_a_kill_changes_nothing(repo):
    run = f"{RUN} --gradient_accumulation_steps=2 --residual=m4.2 --attention=summed_qk --qk_scale=5.4"
    run += " --max_iters=8 --checkpoint_interval=2 --eval_interval=4 --init_from=auto"
    repo(f"train.py {run} --max_iters=4 --out_dir=one")
    train_together(repo.folder, f"{run} --out_dir=whole")
    # where bfloat16 is fast, the run computes in it
    assert numbers("whole", "step", "loss")[:4] == pytest.approx(numbers("one", "step", "loss"), abs=5e-3)
    assert numbers("whole", "step", "grad_norm")[:4] == pytest.approx(numbers("one", "step", "grad_norm"), rel=0.1)

    with pytest.raises(ProcessExitedException):
        train_together(repo.folder, f"{run} --out_dir=killed", before=partial(send_the_second, signal.SIGKILL, 6))
    train_together(repo.folder, f"{run} --out_dir=killed")
    assert [len(log_of("killed", event)) for event in ("start", "resume", "end")] == [1, 1, 1]
    assert progress("killed") == progress("whole")
    for name in ("ckpt.pt", "best.pt"):
        assert differences(f"killed/{name}", f"whole/{name}") == []


def test_a_run_moves_between_numbers_of_processes(repo):
    run = f"{RUN} --residual=m3.2 --attention=w2 --dtype=float32"
    repo(f"train.py {run} --max_iters=6 --out_dir=one")
    moved = f"{run} --out_dir=moved"
    with pytest.raises(ProcessExitedException) as end:  # the second of two signals is ignored, as under torchrun
        stop = partial(send_the_second, signal.SIGUSR1, 2)
        train_together(repo.folder, f"{moved} --max_iters=6 --checkpoint_interval=9", before=stop)
    assert end.value.exit_code == 128 + signal.SIGUSR1 and load("moved/ckpt.pt")["iter_num"] == 2
    repo(f"train.py {moved} --max_iters=4 --init_from=resume --checkpoint_interval=9")
    train_together(repo.folder, f"{moved} --max_iters=6 --init_from=resume")
    for event, name in ("step", "loss"), ("eval", "val_loss"), ("eval", "train_loss"):
        assert numbers("moved", event, name) == pytest.approx(numbers("one", event, name), abs=1e-5)
    one, moved = load("one/ckpt.pt"), load("moved/ckpt.pt")
    torch.testing.assert_close(moved["model"], one["model"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(moved["optimizer"]["state"], one["optimizer"]["state"], rtol=1e-3, atol=1e-6)


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files")
def test_a_full_disk_ends_all_processes(repo):
    """Under torchrun itself, which ends the others; the same command without the limit then goes on."""
    run = f"{RUN} --max_iters=8 --checkpoint_interval=2 --init_from=auto --out_dir=run"
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc_per_node=2 train.py {run}"
    limited = subprocess.run(["bash", "-c", f"ulimit -f 20; timeout 280 {torchrun}"], capture_output=True, text=True)
    line = "train.py: error: run/ckpt.pt: File too large\n"
    assert limited.returncode == 1 and limited.stderr.count(line) == 1, limited.stderr
    assert not list(Path("run").glob("*.pt*"))
    train_together(repo.folder, run)
    assert load("run/ckpt.pt")["iter_num"] == 8


def test_steps_that_cannot_be_shared_out_are_refused(repo, monkeypatch, capsys):
    for variable in ["RANK=0", "LOCAL_RANK=0", "WORLD_SIZE=3", "MASTER_ADDR=localhost", "MASTER_PORT=1"]:
        monkeypatch.setenv(*variable.split("="))
    error = refused(repo, f"train.py {TINY} --gradient_accumulation_steps=4", capsys)
    assert "gradient_accumulation_steps = 4" in error and "multiple of 3" in error


def second_elsewhere():
    if os.environ["RANK"] == "1":
        os.chdir("elsewhere")


def test_processes_with_folders_of_their_own_are_refused(repo):
    """... as on two machines that share none: the second would begin at step 0."""
    run = f"{RUN} --out_dir=run --init_from=auto"
    repo(f"train.py {run} --max_iters=2")
    shutil.copytree(".", "elsewhere", ignore=shutil.ignore_patterns("run", "elsewhere"))
    with pytest.raises(ProcessExitedException) as end:
        train_together(repo.folder, f"{run} --max_iters=4", before=second_elsewhere)
    assert end.value.exit_code == 2
    assert "begin at ['step 2, text" in Path("printed0.txt").read_text() and load("run/ckpt.pt")["iter_num"] == 2
