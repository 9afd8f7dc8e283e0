"""Several processes train as one does: two of them, on the CPU, over gloo."""

import copy
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from config import spread, whole
from conftest import TINY, log_of, refused
from model import GPT, GPTConfig
from reference import GRID, perturb, settings

RUN = f"{TINY} --grad_accum_steps=4 --dropout=0.1 --max_iters=6 --seed=5"


def torchrun(folder, arguments, options=(), before=None):
    """train.py in `folder` with two processes; `before` is called in the new process, for it and its children."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OF": str(folder)}
    return subprocess.Popen(
        [*command, "train.py", *arguments.split()], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=before,
    )  # fmt: skip


def finished(process):
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


# -- gradients -----------------------------------------------------------------------------------------------


def compare_gradients(rank, folder):
    """One of two processes: those of the model that both train together, next to the whole model's own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    wrong = []
    for kind, method in GRID:
        # to DDP a parameter is as good as any other; FSDP spreads them, but for single numbers, and meets replays
        every_kind = ("fsdp",) if method in ("m1", "m4.2+input") else ()
        for how in {"standard": ("ddp", "fsdp"), "w2-scalar": ("fsdp",)}.get(kind, every_kind):
            torch.manual_seed(0)
            one = perturb(GPT(GPTConfig(**settings(kind, method, n_layer=3)))).double()
            model = copy.deepcopy(one)
            idx = torch.randint(19, (2, 12), generator=torch.Generator().manual_seed(0))
            one(idx, idx)[1].backward()
            together = spread(model, how, torch.device("cpu"))
            together(idx[rank : rank + 1], idx[rank : rank + 1])[1].backward()
            for (name, p), q in zip(model.named_parameters(), one.parameters()):
                gradient = whole(p.grad)
                if how == "fsdp" and p.dim() == 0:  # which train.py adds up
                    dist.all_reduce(gradient)
                    gradient /= 2
                if not torch.allclose(gradient, q.grad, rtol=1e-9, atol=1e-11):
                    wrong.append(f"{how}, {kind}, {method}: {name}")
    (folder / f"wrong{rank}.json").write_text(json.dumps(wrong))
    dist.destroy_process_group()


def test_gradients_of_every_method(tmp_path):
    torch.multiprocessing.spawn(compare_gradients, (tmp_path,), nprocs=2)
    assert [json.loads((tmp_path / f"wrong{rank}.json").read_text()) for rank in range(2)] == [[], []]


# -- train.py ------------------------------------------------------------------------------------------------


def compare_losses(one, two, **tolerance):
    for event, name in (("step", "loss"), ("eval", "val_loss"), ("eval", "train_loss")):
        losses = [[line[name] for line in log_of(out) if line["event"] == event] for out in (one, two)]
        assert losses[1] == pytest.approx(losses[0], **tolerance)


def test_two_processes_are_one(repo):
    method = f"{RUN} --residual=m4.2 --attention=summed_qk --qk_scale=5.4 --parallel=fsdp --optimizer=muon"
    repo(f"train.py {method} --out_dir=one")
    finished(torchrun(repo.folder, f"{method} --out_dir=two"))
    compare_losses("one", "two", abs=5e-3)  # Muon computes in bfloat16


def test_a_run_moves_between_numbers_of_processes(repo):
    method = f"{RUN} --residual=m3.2 --attention=w2 --lr_decay=none"
    repo(f"train.py {method} --out_dir=one")
    moved = f"{method} --out_dir=moved"
    finished(torchrun(repo.folder, f"{moved} --max_iters=2 --parallel=ddp"))
    repo(f"train.py {moved} --max_iters=4 --init_from=resume")
    output = finished(torchrun(repo.folder, f"{moved} --init_from=resume --parallel=fsdp"))
    assert "NOTE    so far it ran on cpu" in output
    compare_losses("one", "moved", abs=1e-6)
    one, moved = (torch.load(f"{out}/ckpt.pt", weights_only=True) for out in ("one", "moved"))
    for name, weights in one["model"].items():
        torch.testing.assert_close(moved["model"][name], weights, rtol=1e-4, atol=1e-5)
    for i, state in one["optimizers"][0].items():
        torch.testing.assert_close(moved["optimizers"][0][i], state, rtol=1e-3, atol=1e-6)


def kill(folder, rank):
    """SIGKILL for one of the processes that torchrun has started in a folder, found by their environments."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            environment = path.read_bytes().split(b"\0")
            if {f"RANK={rank}".encode(), f"OF={folder}".encode()} <= set(environment):
                os.kill(int(path.parent.name), signal.SIGKILL)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_process_that_dies(repo, restarts):
    run = f"{TINY} --grad_accum_steps=2 --max_iters=200 --checkpoint_interval=10 --log_interval=100 --eval_interval=1000"
    run += "" if restarts else " --parallel=fsdp --optimizer=muon"
    process = torchrun(repo.folder, f"{run} --out_dir=run", [f"--max_restarts={restarts}"])
    while not (repo.folder / "run" / "ckpt.pt").exists():
        time.sleep(0.05)
    kill(repo.folder, rank=1)
    output, _ = process.communicate(timeout=60)
    (line,) = re.findall(r"^train.py: error.*", output, re.MULTILINE)
    assert "another process of this run has ended; --init_from=resume" in line
    assert (process.returncode == 0) == (restarts == 1), output
    lines = log_of("run")
    assert [line["event"] for line in lines if line["event"] in ("start", "resume", "end")] == (
        ["start", "resume", "end"] if restarts else ["start"]
    )


def test_a_restart_goes_on_with_what_its_job_has_begun_alone(repo, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "first")
    repo(f"train.py {TINY} --lr_decay=none --out_dir=run")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert "steps   4 to 6 " in repo(f"train.py {TINY} --lr_decay=none --out_dir=run --max_iters=6")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "second")
    assert "already holds a run" in refused(repo, f"train.py {TINY} --lr_decay=none --out_dir=run --max_iters=8", capsys)
    assert "steps   0 to 8 " in repo(f"train.py {TINY} --lr_decay=none --out_dir=run --max_iters=8 --overwrite")


def test_without_room_all_processes_go_on(repo):
    resource = pytest.importorskip("resource")  # Windows has no limits on the size of files
    run = f"{TINY} --grad_accum_steps=2 --learning_rate=0.3 --max_iters=20 --out_dir=run --parallel=fsdp --sample_tokens=0"
    too_little = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    process = torchrun(repo.folder, run, before=too_little)
    output, _ = process.communicate(timeout=60)
    assert output.count("NOT SAVED") > 2 and "step 20 could not be saved" in output, output
    assert process.returncode and "Traceback (most recent" not in output.split("could not be saved")[0]


def test_steps_that_cannot_be_shared_out_are_refused(repo, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    error = refused(repo, f"train.py {TINY} --grad_accum_steps=4", capsys)
    assert "grad_accum_steps = 4" in error and "multiple of 3" in error
