"""Several processes train as one does: two of them, on the CPU, over gloo."""

import copy
import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException

import data.prepare
from config.runtime.devices import use_plain_attention
from config.runtime.distributed import full_tensor, parallelize_model
from config.runtime.errors import exit_program
from config.runtime.muon import Float32Muon
from conftest import TINY, differences, load, log_of, refused, run_program
from cover import GRID, perturb, settings
from data.dataset import Dataset
from model import GPT, GPTConfig

RUN = f"{TINY} --grad_accum_steps=4 --dropout=0.1 --lr_decay=none --seed=5"


# of a process that has imported PyTorch already, which takes seconds
two_processes = partial(torch.multiprocessing.start_processes, nprocs=2, start_method="forkserver")
torch.multiprocessing.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"])


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


# -- gradients -----------------------------------------------------------------------------------------------


def compare(rank, folder):
    """Be one of two processes that compare."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    wrong = [*compare_gradients(rank), *compare_types(rank), *compare_muon(rank)]
    dist.barrier()
    assert not wrong, wrong
    exit_program()  # as train.py ends: the interpreter's clearing up could abort a thread of gloo's


def compare_gradients(rank):
    """Return what differs between the gradients of the model that both train together and the whole model's own."""
    wrong = []
    for kind, method in GRID:
        # FSDP meets parameters of every kind and all that is recomputed; to DDP one parameter is as good as another
        parallels = ["fsdp"] if kind == "standard" or method == "m4.2+input" else []
        if (kind, method) == ("standard", "m1"):
            parallels.append("ddp")
        for parallel in parallels:
            one = perturb(GPT(GPTConfig(**settings(kind, method, n_layer=2)))).double()
            model = copy.deepcopy(one)
            idx = torch.randint(19, (2, 12), generator=torch.Generator().manual_seed(0))
            one(idx, idx)[1].backward()
            together = parallelize_model(model, parallel, torch.device("cpu"))
            together(idx[rank : rank + 1], idx[rank : rank + 1])[1].backward()
            for (name, p), q in zip(model.named_parameters(), one.parameters()):
                if not torch.allclose(full_tensor(p.grad), q.grad, rtol=1e-9, atol=1e-11):
                    wrong.append(f"{parallel}, {kind}, {method}: {name}")
    return wrong


def compare_types(rank):
    """Return what differs under autocast between matrices that travel in its type and float32, which it casts.

    Nothing does, to the last bit, where a matrix is used once. What a recomputed layer's gradients are summed in is
    up to PyTorch: bfloat16 up to 2.14, float32 from 2.15 on.
    """
    wrong = []
    idx = torch.randint(19, (1, 12), generator=torch.Generator().manual_seed(rank))
    for kind in ("standard", "w2-diagonal", "summed-5.4"):
        one = perturb(GPT(GPTConfig(**settings(kind, "standard", n_layer=2, bias=True))))
        results = []
        for dtype in (torch.bfloat16, None):
            model = copy.deepcopy(one)
            together = parallelize_model(model, "fsdp", torch.device("cpu"), dtype)
            use_plain_attention(False)  # for both alike
            with torch.autocast("cpu", torch.bfloat16):
                loss = together(idx, idx)[1]
            loss.backward()
            gradients = {name: full_tensor(p.grad) for name, p in model.named_parameters()}
            results.append({"loss": loss.detach(), **gradients})
        ours, plain = results
        wrong += [f"{kind}: {name}" for name in ours if not torch.equal(ours[name], plain[name])]
    return wrong


def compare_muon(rank):
    """Return which matrices Float32Muon moves differently where FSDP has sharded them."""
    one = GPT(GPTConfig(**settings("standard", "m1", n_layer=2)))
    model = copy.deepcopy(one)
    together = parallelize_model(model, "fsdp", torch.device("cpu"))
    idx = torch.randint(19, (2, 12), generator=torch.Generator().manual_seed(0))
    for moved, forward, batch in ((one, one, idx), (model, together, idx[rank : rank + 1])):
        matrices = moved.param_groups(weight_decay=0.0)[0]["params"]
        optimizer = Float32Muon(matrices, lr=0.1, adjust_lr_fn="match_rms_adamw")
        for _ in range(2):
            forward(batch, batch)[1].backward()
            optimizer.step()
            optimizer.zero_grad()
    wrong = []
    for (name, p), q in zip(model.named_parameters(), one.parameters()):
        if not torch.allclose(full_tensor(p), q, rtol=1e-4, atol=1e-4):
            wrong.append(f"Muon: {name}")
    return wrong


def test_gradients_of_every_method_and_updates_of_muon(tmp_path):
    two_processes(compare, (tmp_path,))


# -- train.py ------------------------------------------------------------------------------------------------


def numbers(out, event, *names):
    return [line[name] for line in log_of(out, event) for name in names]


def kill_the_second_in_step_6():
    batch = Dataset.batch

    def batch_or_end(data, seed, step, *rest):
        if os.environ["RANK"] == "1" and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return batch(data, seed, step, *rest)

    Dataset.batch = batch_or_end


def test_two_processes_are_one_and_a_kill_changes_nothing(repo):
    run = f"{RUN} --grad_accum_steps=2 --parallel=fsdp --residual=m4.2 --attention=summed_qk --qk_scale=5.4"
    run += " --optimizer=muon --max_iters=8 --checkpoint_interval=2 --eval_interval=4 --init_from=auto"
    repo(f"train.py {run} --max_iters=4 --out_dir=one")
    train_together(repo.folder, f"{run} --out_dir=whole")
    # Muon computes in bfloat16 where that is fast
    assert numbers("whole", "step", "loss")[:4] == pytest.approx(numbers("one", "step", "loss"), abs=5e-3)
    assert numbers("whole", "step", "grad_norm")[:4] == pytest.approx(numbers("one", "step", "grad_norm"), rel=0.1)

    with pytest.raises(ProcessExitedException):
        train_together(repo.folder, f"{run} --out_dir=killed", before=kill_the_second_in_step_6)
    train_together(repo.folder, f"{run} --out_dir=killed")
    assert [len(log_of("killed", event)) for event in ("start", "resume", "end")] == [1, 1, 1]
    for event, names in {"step": ("step", "loss", "grad_norm"), "eval": ("step", "val_loss", "train_loss")}.items():
        assert numbers("killed", event, *names) == numbers("whole", event, *names)
    for name in ("ckpt.pt", "best.pt"):
        assert differences(f"killed/{name}", f"whole/{name}") == []


def test_a_run_moves_between_numbers_of_processes(repo):
    run = f"{RUN} --residual=m3.2 --attention=w2 --dtype=float32"
    repo(f"train.py {run} --max_iters=6 --out_dir=one")
    moved = f"{run} --out_dir=moved"
    train_together(repo.folder, f"{moved} --max_iters=2 --parallel=ddp")
    repo(f"train.py {moved} --max_iters=4 --init_from=resume")
    train_together(repo.folder, f"{moved} --max_iters=6 --init_from=resume --parallel=fsdp")
    assert "NOTE    resuming on 2 x cpu" in Path("printed0.txt").read_text()
    for event, names in {"step": ["loss"], "eval": ["val_loss", "train_loss"]}.items():
        assert numbers("moved", event, *names) == pytest.approx(numbers("one", event, *names), abs=1e-5)
    one, moved = load("one/ckpt.pt"), load("moved/ckpt.pt")
    torch.testing.assert_close(moved["model"], one["model"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(moved["optimizer"]["state"], one["optimizer"]["state"], rtol=1e-3, atol=1e-6)


def test_without_room_all_processes_go_on(repo):
    resource = pytest.importorskip("resource")  # Windows has no limits on the size of files
    run = f"{RUN} --learning_rate=0.3 --max_iters=8 --out_dir=run --parallel=fsdp"
    too_little = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    with pytest.raises(ProcessExitedException) as end:
        train_together(repo.folder, run, before=too_little)
    printed = [Path(f"printed{rank}.txt").read_text() for rank in range(2)]
    assert end.value.exit_code == 2, printed
    assert printed[0].count("NOT SAVED") > 2 and "step 8 could not be saved" in printed[0]
    assert "Traceback" not in printed[0] + printed[1]


def test_steps_that_cannot_be_shared_out_are_refused(repo, monkeypatch, capsys):
    for variable in ["RANK=0", "LOCAL_RANK=0", "WORLD_SIZE=3", "MASTER_ADDR=localhost", "MASTER_PORT=1"]:
        monkeypatch.setenv(*variable.split("="))
    error = refused(repo, f"train.py {TINY} --grad_accum_steps=4", capsys)
    assert "grad_accum_steps = 4" in error and "multiple of 3" in error
