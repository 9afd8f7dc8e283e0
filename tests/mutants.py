"""
Small mistakes that the tests must find: python tests/mutants.py [FILE ...]

Puts each mistake into a copy of the repository, one at a time, and runs there the tests that are named next to it.
A mistake survives if they all pass. Tries only the mistakes in the FILEs, if any are given. Ends with exit code 1 if
a mistake survives, if its place is not in its file exactly once, or if a test fails without it.
"""

import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORKERS = 2

# tests that find several
LOOP = "test_trainer.py"
CLOCK = "test_train.py -k clock"
REFERENCE = "test_model.py -k reference"
DROPOUT = "test_model.py -k dropout"
START = "test_model.py -k start_at"
CHECKPOINTING = "test_model.py -k activation_checkpointing"
EXPORT = "test_export.py"
COMPARE = "test_compare.py"
VERDICTS = "test_verdicts.py"
EXAMINE = "test_examine.py"
RUNS = "test_runs.py"

# file: [(what stands there, what to put in its place, which tests must find it)]
MUTANTS = {
    "train.py": [
        # the learning rate
        ("(iter_num - warmup_iters) / max(max_iters - warmup_iters, 1)", "iter_num / max_iters", LOOP),
        ("(1 + math.cos(math.pi * ratio)) / 2", "math.cos(math.pi * ratio / 2)", LOOP),
        ("min_lr_frac + (1 - min_lr_frac) * coeff", "coeff", LOOP),
        # the optimizers
        ("(beta1, beta2), device.type", "(beta2, beta1), device.type", LOOP),
        ("configure_optimizers(weight_decay,", "configure_optimizers(0.0,", LOOP),
        # the gradient
        ("grad_clip or math.inf", "math.inf", LOOP),
        ("(raw_model.parameters(), grad_clip", "(raw_model.blocks.parameters(), grad_clip", LOOP),
        ("model(x, y)[1] / len(micro_steps)", "model(x, y)[1]", LOOP),
        ("model(x, y)[1] / len(micro_steps)", "model(x, y)[1] / grad_accum_steps", "test_parallel.py"),
        ("loss += micro_loss.detach()", "loss = micro_loss.detach() * grad_accum_steps", LOOP),
        ("data.batch(seed, iter_num, micro_step,", "data.batch(seed, iter_num, 0,", LOOP),
        ("scaler.unscale_(opt)", "pass", LOOP),
        ("    scaler.update()\n", "", "test_resume.py -k float16"),
        ("(distributed.all_sum(loss) / world_size)", "distributed.all_sum(loss)", "test_parallel.py"),
        ("micro_step == micro_steps[-1]", "micro_step == micro_steps[0]", "test_parallel.py"),
        ('"code": code}', '"code": code_version()}', "test_resume.py -k hashed"),
        ("began = t0 = time.perf_counter()", "began = t0 = time.time()", CLOCK),
        ("if ptdtype != torch.float32 else", "if ptdtype == torch.float16 else", LOOP),
        # random numbers
        ("torch.manual_seed(seed)\n", "torch.manual_seed(1337)\n", LOOP),
        ("derive_seed(seed, iter_num, micro_step)", "derive_seed(seed, iter_num)", LOOP),
        # evaluating
        ("    model.eval()\n", "", LOOP),
        ("        with ctx:\n            loss =", "        if True:\n            loss =", LOOP),
        ("torch.tensor([loss.item() * count, count])", "torch.tensor([loss.item(), 1])", LOOP),
        ('tokens["val"] / data.meta["bytes"]["val"]', 'tokens["train"] / data.meta["bytes"]["train"]', LOOP),
        ("if val_loss < best_val_loss and save(best)", "if save(best)", "test_train.py"),
        # the clock
        ("speed = iters * tokens_per_iter", "speed = iters * batch_size * block_size", CLOCK),
        ("    t0 = time.perf_counter()\n", "", CLOCK),
        ("/ local_iter_num * (max_iters", "/ iter_num * (max_iters", CLOCK),
        # resuming
        ("    distributed.restore_optimizers(ckpt,", "    (lambda *_: None)(ckpt,", "test_resume.py -k after_any"),
        ("checkpoint.lowest_loss(out)", "math.inf", "test_resume.py -k never_worse"),
    ],
    "model.py": [
        # the parts of a Llama
        ("(-angle.sin(), angle.sin())", "(angle.sin(), -angle.sin())", REFERENCE),
        ("torch.arange(start, stop,", "torch.arange(0, stop - start,", "test_model.py -k cached"),
        ("torch.promote_types(like.dtype, torch.float32)", "like.dtype", "test_model.py -k exact_angles"),
        ("self.head.weight = self.embed.weight", "self.head.weight.data = self.embed.weight.data", REFERENCE),
        ("is_causal=T > 1", "is_causal=False", "test_model.py -k future"),
        # Wasserstein-2, and summed scores
        ("to(exact).square().sum(-1,", "to(exact).detach().square().sum(-1,", REFERENCE),
        ("-sum(part.to(exact).square()", "-sum(part.square()", "test_model.py -k bfloat16"),
        # recomputing
        (
            "mlp_branch(x + self.recompute_attn(x, kept, cache))",
            "mlp_branch(self.recompute_attn(x, kept, cache))",
            REFERENCE,
        ),
        ("self.attn_norm(x)\n        return", "F.rms_norm(x, x.shape[-1:])\n        return", REFERENCE),
        ("cache(self.attn.values(normed))", "self.attn.values(normed)", "test_model.py -k cached"),
        ("self.mix.softmax(dim=0)", "self.mix.detach().softmax(dim=0)", REFERENCE),
        ("use_reentrant=False", "use_reentrant=False, preserve_rng_state=False", CHECKPOINTING),
        ("if self.config.activation_checkpointing and", "if False and", CHECKPOINTING),
        # dropout
        ("self.dropout.p if self.training else 0.0", "0.0", DROPOUT),
        ("return self.dropout(self.output(", "return (self.output(", DROPOUT),
        # initial values
        ("(2 * self.config.n_layer) ** -0.5", "self.config.n_layer ** -0.5", START),
        ("std=module.in_features**-0.5", "std=module.out_features**-0.5", START),
        ("normal_(module.weight)  # if tied", "normal_(module.weight, std=0.02)  # if tied", START),
        ("Parameter(torch.zeros(self.H))", "Parameter(torch.empty(self.H))", "test_extend.py -k entry"),
        ("per_group.copy_(", "(lambda keys: None)(", "test_model.py -k tell_tokens_apart"),
        # the loss, the optimizer, generating
        ("(vectors, 0.0)", "(vectors, weight_decay)", LOOP),
        # the operations counted
        ("3 * counter.get_total_flops()", "2 * counter.get_total_flops()", "test_model.py -k operations"),
        ("block_size, self.flops = block_size, None", "block_size = block_size", "test_model.py -k operations"),
        # kernels
        ("elif S > D and (", "elif (", "test_model.py -k layout"),
        ("+ 0.1 * self.tau_shift", "+ self.tau_shift", REFERENCE),
        ("block_size - block_size // 2 :", "block_size // 2 :", "test_model.py -k past_the_context"),
        ("p.cumsum(dim=-1) - p >= top_p", "p.cumsum(dim=-1) >= top_p", "test_model.py -k top_p"),
    ],
    "sample.py": [
        (".to(device).eval()", ".to(device).train()", "test_train.py -k sampling"),
        ("temperature, top_k or None,", "temperature, None,", "test_train.py -k likeliest"),
        ("os.path.expanduser(export), ", "export, ", "test_train.py -k tilde"),
    ],
    "data/dataset.py": [
        ('self.read("train", places)', 'self.read("val", places)', "test_dataset.py"),
        ("derive_seed(seed, epoch) %", "derive_seed(seed, 0) %", "test_dataset.py"),
        ("version != VERSION", "version is None", "test_dataset.py -k damaged"),
        ("path.stat().st_size != size", "False", "test_dataset.py -k damaged"),
        ("ids.nbytes <= HASHED", "ids.nbytes <= 9", "test_dataset.py -k damaged"),
        ('ids.max() >= self.meta["vocab_size"]', "False", "test_dataset.py -k vocabulary"),
        ("np.minimum(places, targets)", "np.minimum(places, targets - 1)", "test_dataset.py"),
        ("ids[:, 1:], -1)", "ids[:, 1:], 0)", "test_dataset.py"),
        ("np.arange(0, targets, block_size)", "np.arange(0, targets - block_size, block_size)", "test_dataset.py"),
    ],
    "data/prepare.py": [
        ('yield "train", several, part[:left]', 'yield "train", several, part', "test_corpus.py -k begins_once"),
        ('yield "val", False, part[left:]', 'yield "val", several, part[left:]', "test_corpus.py -k begins_once"),
        ('text in parts if split == "train")', "text in parts)", "test_corpus.py -k learned"),
        ("islice(blocks, 0, None, 1 + cut // SAMPLE)", "islice(blocks, SAMPLE // 1000)", "test_corpus.py -k learned"),
        ("            os.fsync(file.fileno())\n", "", "test_preprocess.py -k on_the_disk"),
        ('meta.get("settings", {})', "{}", "test_preprocess.py -k text_is_new"),
        ("Path(name).resolve() for", "Path(name) for", "test_corpus.py -k linked"),
        ("if size >= limit", "if size > 2 * limit", "test_corpus.py -k limit"),
        ('== meta["text_sha256"]', '!= meta["text_sha256"]', "test_preprocess.py -k text_is_new"),
    ],
    "config/runtime/checkpoint.py": [
        ('"init_from", "overwrite",', '"init_from", "overwrite", "seed",', "test_resume.py -k other"),
        ('data.meta["sha256"] != trained_on["sha256"]', "False", "test_resume.py -k other_data"),
        ('data.tokenizer.state() != checkpoint["tokenizer"]', "False", "test_resume.py -k other_data"),
        ("log.first_checkpoint if log.pending else path", "path", "test_resume.py -k kill_while"),
        ("            log.hold_folder()\n", "", "test_resume.py -k moved"),
        ("getattr(old, name) != getattr(model.config, name)", "False", "test_finetune.py -k another_is"),
        ('was["files"] if training else', 'was["files"] or', "test_resume.py -k model_py"),
        ("was.keys() ^ settings.keys()", "settings.keys() - was.keys()", "test_resume.py -k has_lost"),
    ],
    "config/runtime/checks.py": [
        ("    GPTConfig(**of_model", "    dict(**of_model", "test_bad_input.py -k test_train"),
        ("if settings[name] != defaults[name]]", "if False]", "test_train.py -k named_after"),
        ("Path(name).expanduser()", "Path(name)", "test_train.py -k tilde"),
    ],
    "config/runtime/log.py": [
        ('facts["step"] > iter_num:', 'facts["step"] >= iter_num:', "test_resume.py"),
        ("            self.file.truncate(self.end_of(iter_num))\n", "            pass\n", "test_resume.py"),
        ('line.endswith(b"\\n")', "line", "test_resume.py -k torn_last"),
        ("bool(lines) and lines[-1]", "False and lines[-1]", "test_resume.py -k log_without"),
        ("self.pending = io.BytesIO()", "self.file.truncate(0)", "test_resume.py -k its_place"),
        ("elif self.first_checkpoint.exists():", "elif False:", "test_resume.py -k kill_while"),
        ("if first or not self.path.exists():", "if first:", "test_resume.py -k deleted"),
        ("if not ours or", "if", "test_resume.py -k moved"),
        ("first and self.look() != self.found", "False", "test_resume.py -k meanwhile"),
        ('        probe.write_bytes(b"")\n        probe.unlink()\n', "", "test_resume.py -k written_to"),
        ("        if not self.pending:\n", "        if True:\n", "test_tracking.py -k old_curve"),
        (', "data/*.py")', ")", "test_tracking.py -k version"),
    ],
    "config/runtime/distributed.py": [
        ("reduce_dtype=model.embed.weight.dtype", "reduce_dtype=dtype", "test_parallel.py -k gradients"),
        ("full_state_dict=True, strict=False)", "full_state_dict=True)", "test_resume.py -k without_a_gradient"),
        ("    scaler.load_state_dict(", "    dict(", "test_resume.py -k float16"),
        (" or rank() >= int(size)", "", "test_bad_input.py -k torchrun"),
    ],
    "config/runtime/devices.py": [
        ("getattr(torch, dtype)", 'torch.bfloat16 if dtype == "float16" else getattr(torch, dtype)', LOOP),
    ],
    "config/runtime/muon.py": [
        ('pick_dtype("auto", device) == torch.bfloat16', "True", "test_muon.py -k slow"),
        ('pick_dtype("auto", device) == torch.bfloat16', "False", "test_muon.py -k fast"),
        (', adjust_lr_fn="match_rms_adamw"', "", "test_muon.py"),
        ('(1 - group["lr"] * group["weight_decay"])', '(1 - group["weight_decay"])', "test_muon.py"),
    ],
    "config/runtime/errors.py": [
        ("    exit_code = 3", "    exit_code = 2", "test_resume.py -k second_process"),
        (", line_buffering=True", "", "test_bad_input.py -k full_disk_is"),
    ],
    "config/runtime/files.py": [
        ('or "version" not in checkpoint', "or not checkpoint", "test_bad_input.py -k test_checkpoint"),
        ('for name in ("new.pt", *names)', "for name in names", "test_resume.py -k kill_while"),
    ],
    "config/runtime/waiting.py": [
        ("cores * idle / total + 0.5", "cores + 0.5", "test_train.py -k asleep"),
        ("1 < threads", "threads", "test_train.py -k asleep"),
    ],
    "config/runtime/maps.py": [
        ("torch.eye(T)", "torch.eye(T).flip(0)", "test_maps.py"),
    ],
    "data/huggingface.py": [
        ("difference < 1e-4 * ours.abs().max()", "True", EXPORT),
        ("if len(tensors) < len(model.state_dict()):", "if False:", EXPORT),
        ('(theirs.hidden_act, "silu")', '("silu", "silu")', "test_llama.py"),
    ],
    "data/modeling_gpt.py": [
        ("input_ids[:, -self.config.block_size :]", "input_ids[:, : self.config.block_size]", EXPORT),
        ("attention_mask[:, 1:] > attention_mask[:, :-1]", "attention_mask[:, 1:] < attention_mask[:, :-1]", EXPORT),
    ],
    "tests/bench/examine.py": [
        ("logits.logsumexp(dim=-1)", "logits.max(dim=-1).values", EXAMINE),
        ("(y[rows] >= 0).sum(dim=1)", "y.size(1)", EXAMINE),
        (".tensor_split([1])", ".split(9999)", EXAMINE),
        ("difference.abs().max() < EXACT or", "difference.abs().max() < 9 or", EXAMINE),
        ("not read.isfinite().all()", "False", EXAMINE),
        ("p.add_(0.1 * torch.randn_like(p))", "pass", EXAMINE),
        ("if p.requires_grad and torch.equal(p, before[name])", "if False", EXAMINE),
        ("train_briefly(home, options, folder, count=False)", "raise", EXAMINE),
        ("-whole[windows", "-whole[0 * windows", EXAMINE),
    ],
    "tests/bench/operations.py": [
        ("(STEPS[1] - STEPS[0])", "STEPS[1]", EXAMINE),
        ("    return 2 * math.prod(q[:-1]) * k[-2]", "    return math.prod(q[:-1]) * k[-2]", EXAMINE),
        ("            shape.insert(dim, 1)\n", "            shape.append(1)\n", EXAMINE),
        ('    "mkldnn_rnn_layer": recurrent,\n', "", EXAMINE),
    ],
    "tests/bench/tasks.py": [
        ("((step + 1) / warmup", "(step / warmup", "test_experiments.py -k fair"),
        ("else decayed)", "else highest)", "test_experiments.py -k fair"),
        ("held_out if step == HELD_OUT else seen", "seen", "test_experiments.py -k entailments"),
        ("y[asked][None])", "y[asked][None].clamp(max=0))", "test_experiments.py -k published_recipe"),
    ],
    "tests/bench/speed.py": [
        ("second / first for first", "second / times[0][0] for first", "test_bench.py -k alternate"),
    ],
    "tests/bench/plan.py": [
        ("math.exp(-slope", "math.exp(slope", "test_compare.py -k own_rate"),
        ("rounded(own * self.rate(base) / ", "rounded(own * own / ", "test_compare.py -k begins_where"),
        ('self.options["first_seed"] - 1\n', 'self.options["first_seed"]\n', "test_compare.py -k begins_where"),
        ("self.standing[one].judged.verdict == UNDECIDED]", "True]", "test_compare.py -k from_nothing"),
        ("if not min(losses) < best < max(losses):", "if False:", "test_compare.py -k edge"),
        ("2 * len(self.others(candidate))", "len(self.others(candidate))", "test_compare.py -k earlier"),
        ("if None in ours + theirs else", "if False else", "test_compare.py -k resumed"),
        ("gain_of(runs, base, paired) if equal else None", "gain_of(runs, base, paired)", "test_compare.py -k equal"),
        ("not 2 <= looks[0]", "not 1 <= looks[0]", "test_compare.py -k mistakes"),
        ("sorted(missing, key=lambda run: run.seed)", "list(missing)", "test_compare.py -k alternate"),
        ("seeds_matter([losses[one] for one in alike])", "seeds_matter([base, runs])", "test_compare.py -k alike"),
        ("paired = candidate in alike and ", "paired = ", "test_compare.py -k alike"),
    ],
    "tests/bench/stats.py": [
        ("return best / 2 if best", "return best / 8 if best", "test_compare.py -k is_lowered"),
        ("min(sorted(scores), key", "min(scores, key", "test_compare.py -k is_lowered"),
        ("math.sqrt(total), total**2", "math.sqrt(total) / 2, total**2", VERDICTS),
        ("if gain.value + gain.half(level) < 0:", "if gain.value < 0:", VERDICTS),
        ("paired and rung == 1)", "False)", VERDICTS),
        ("key=lambda rung: mean(rungs[rung]))\n    gain", "key=lambda rung: -rung)\n    gain", VERDICTS),
        ("if rise.value > rise.half(0.9):", "if False:", VERDICTS),
        ("freedom, of_seeds / variance) < 0.02", "freedom, of_seeds / variance) < 2", VERDICTS),
        ("max(LEAST, self.error", "max(0.0, self.error", VERDICTS),
        ("math.ceil(math.log2(cost))", "math.floor(math.log2(cost))", VERDICTS),
        ("(1 + level) / 2", "level", VERDICTS),
    ],
    "tests/bench/report.py": [
        ('open(folder.parent / LEDGER, "ab")', 'open(folder / "x", "ab")', COMPARE),
        ("if not MAY_DIFFER.fullmatch(file)", "if False", COMPARE),
        ("if seconds > SLOWER * operations:", "if False:", COMPARE),
        ('if one["verdict"] != PAYS or look[0] == first_seed', "if False", "test_compare.py -k earlier"),
    ],
    "tests/bench/compare.py": [
        (
            "if time.time() + comparison.run_seconds(run.flops) < deadline:",
            "if time.time() < deadline:",
            "test_compare.py -k budget",
        ),
        ("codes = {PAYS: 0, CRASHED: 1, REFUSED: 4", "codes = {PAYS: 0, CRASHED: 1, REFUSED: 0", COMPARE),
        ("with redirect_stdout(sys.stderr):", "if True:", "test_runs.py -k any_shell"),
    ],
    "tests/bench/variants.py": [
        ('("dataset", "block_size", ', '("dataset", ', "test_compare.py -k mistakes"),
        (
            "for part in (files, common, options):",
            "for part in (files, options, common):",
            "test_compare.py -k are_read",
        ),
        ("        for diff in diffs:\n", "        for diff in diffs[-1:]:\n", "test_runs.py -k code_is"),
        ('{"GIT_CEILING_DIRECTORIES"', '{"NOTHING"', "test_runs.py -k diff_applies"),
        ("ast.dump(ast.parse(content))", "content", "test_runs.py -k comments"),
        ("    if links:\n", "    if False:\n", "test_runs.py -k does_not_work"),
    ],
    "tests/bench/runs.py": [
        ('"--init_from=auto"', '"--init_from=scratch"', COMPARE),
        ("        if self.signal.number:  #", "        if self.signal.number and not ended:  #", RUNS),
        ("if torch.get_num_threads() > 1 else len(cores)", "if torch.get_num_threads() else len(cores)", RUNS),
        ("if steps != run.steps:", "if False:", "test_compare.py -k misreports"),
        ('if used != asked and asked != "auto"', "if False", "test_compare.py -k misreports"),
        ("read_bytes()[before:]", "read_bytes()", RUNS),
        ('run.folder / "output.txt", "ab")', 'run.folder / "output.txt", "wb")', RUNS),
    ],
}


def first_failure(tests, file=None, old="", new=""):
    """Return the first of the tests that fails, or "" if none does, where `file` has `new` instead of `old`."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "repo"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "__pycache__", "out", "*.bin"))
        if file:
            path = copy / file
            path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
        name, *options = tests.split(maxsplit=2)  # a file, and perhaps -k and a word
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", f"tests/{name}", *options]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode != 1 or not failures:  # such as no tests of that name
        raise SystemExit(f"pytest tests/{tests}: {done.stdout}{done.stderr}")
    return failures[0].split(" - ")[0].split("::")[-1]


def main(files):
    """Print what finds each mistake. Return how many are not found."""
    mutants = [(file, *mutant) for file in files for mutant in MUTANTS[file]]
    counts = [(file, old, (ROOT / file).read_text(encoding="utf-8").count(old)) for file, old, _, _ in mutants]
    moved = [f"{file} has {count} places with {old!r}; one is needed" for file, old, count in counts if count != 1]
    if moved:
        raise SystemExit("\n".join(moved))
    survived = 0
    with ThreadPoolExecutor(WORKERS) as pool:
        needed = sorted({tests for *_, tests in mutants})
        for tests, failure in zip(needed, pool.map(first_failure, needed)):
            if failure:
                raise SystemExit(f"tests/{tests}: {failure} fails even without a mistake")
        trials = pool.map(lambda mutant: first_failure(mutant[3], *mutant[:3]), mutants)
        for (file, old, new, _), failure in zip(mutants, trials):
            print(f"{file}: {old.strip()!r} -> {new.strip()!r}: {failure or 'SURVIVED'}", flush=True)
            survived += not failure
    print(f"{len(mutants) - survived} of {len(mutants)} mistakes found")
    return survived


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(MUTANTS)) > 0)
