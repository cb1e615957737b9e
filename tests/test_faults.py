# ruff: noqa: F811 (fixtures of other files)
"""Faults put in on purpose: kills at random moments, full disks, cut and edited files, numbers that are not finite.

Each must leave what was there, end in one line, and cost no more than the steps since the last checkpoint.
"""

import dataclasses
import errno
import json
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_resume import done, equal, refused, resume, run, steps, trainer  # noqa: F401
from test_train import TINY, contents, go, lines, on_cpu, sft, weights  # noqa: F401

import data
import eval as evaluation
import run as run_folder
import train
from config import parse

# ---------------------------------------------------------------------------------------------------------------------
# Kills. Runs are children of a warm server, so that a start costs tenths of a second and not the import of torch.

WRITES = ("os.rename", "os.remove", "os.rmdir", "os.symlink", "os.mkdir")  # audit events; and open, to write
TEXT = "--method fgrpo --steps 8 --save_every 2 --eval_every 3 --keep 1 --lr 1e-3 --kl_fuse 100"


def life(ready, folder: str, flags: list[str], fault: str, at: int, limit: int) -> None:
    """One process of a run. fault "event": dies by SIGKILL before its change number `at` of the run folder; "half": in the
    middle of its write number `at` to a log; "count": prints how many changes there are; "size": no file may exceed limit."""
    torch.set_num_threads(1)
    sys.stderr = open(os.path.join(os.path.dirname(folder), "stderr.txt"), "a")
    left = [at]

    def watch(event, args):
        writes = event == "open" and isinstance(args[1], str) and args[1][0] in "wa"
        if (writes or event in WRITES) and str(args[0]).startswith(folder):
            left[0] -= 1
            if left[0] < 0 and fault == "event":
                os.kill(os.getpid(), signal.SIGKILL)

    def half(self, name, rows):
        left[0] -= 1
        text = run_folder.lines_of(rows)
        with open(os.path.join(folder, name), "a") as f:
            f.write(text[: len(text) // 2] if left[0] < 0 else text)
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    if fault in ("event", "count"):
        sys.addaudithook(watch)
    if fault == "half":
        run_folder.Run.append = half
    if fault == "size":
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        ready.send(0)
        train.main(parse(flags))
    except KeyboardInterrupt:  # as at the end of train.py
        sys.exit(130)
    finally:
        if fault == "count":
            print(-left[0], file=open(os.path.join(os.path.dirname(folder), "count"), "w"))


class Lives:
    """Starts the processes of one run, the first with its flags, later ones with --resume, and keeps the count."""

    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([
        "test_faults", "torch._dynamo", "torch.distributed.tensor", "transformers.models.qwen3.modeling_qwen3",
        "transformers.models.auto.modeling_auto", "transformers.generation.utils", "transformers.quantizers.auto",
    ])  # fmt: skip

    def __init__(self, folder: str, text: str):
        self.folder, self.text = folder, text
        self.more: list[str] = []  # flags beside --resume
        self.ends: list[int] = []  # exit codes
        self.lost: list[int] = []  # steps behind the last checkpoint at every death

    def flags(self) -> list[str]:
        if os.path.exists(os.path.join(self.folder, "config.yaml")):
            return ["--run_dir", self.folder, "--resume", *self.more]
        return [*TINY, *self.text.split(), "--run_dir", self.folder]

    def start(self, fault="", at=0, limit=0):
        os.makedirs(os.path.dirname(self.folder), exist_ok=True)
        ready, theirs = self.server.Pipe()
        child = self.server.Process(target=life, args=(theirs, self.folder, self.flags(), fault, at, limit))
        child.start()
        ready.recv()
        return child

    def end(self, child) -> int:
        child.join(60)
        assert child.exitcode is not None, "hangs"
        self.ends.append(child.exitcode)
        if child.exitcode:
            path = os.path.join(self.folder, "log.jsonl")
            done = max((run_folder.step_of(x) or 0 for x in run_folder.read_lines(path)), default=0)
            folder = os.path.join(self.folder, "checkpoints")
            saved = [int(n[5:]) for n in (os.listdir(folder) if os.path.isdir(folder) else []) if n.startswith("step-")]
            self.lost.append(done - max(saved, default=0))
        return child.exitcode

    def finished(self) -> bool:
        return os.path.isdir(os.path.join(self.folder, "checkpoints", "step-000008"))


@pytest.fixture(scope="module")
def whole(sft, tmp_path_factory):
    """The run that nobody disturbed, its length in seconds and its number of changes of the folder."""
    alive = Lives(str(tmp_path_factory.mktemp("whole") / "run"), f"{TEXT} --init {sft}")
    child, began = alive.start("count"), time.perf_counter()
    assert alive.end(child) == 0 and alive.finished()
    took = time.perf_counter() - began
    return alive, took, int(open(os.path.join(os.path.dirname(alive.folder), "count")).read())


def is_as_undisturbed(alive: Lives, other: Lives) -> bool:
    """Each step once and in order, the same numbers, the same files; bit for bit."""
    a, b = alive.folder, other.folder
    assert [row["step"] for row in lines(a)] == list(range(1, 9))
    assert lines(a) == lines(b) and lines(a, "samples.jsonl") == lines(b, "samples.jsonl")
    assert sorted(os.listdir(a)) == sorted(os.listdir(b)) and steps(a) == steps(b)
    assert os.readlink(f"{a}/checkpoints/best") == os.readlink(f"{b}/checkpoints/best")
    return equal(weights(a, 8), weights(b, 8)) and equal(trainer(a, 8), trainer(b, 8))


def until_finished(alive: Lives, faults) -> None:
    """A life per fault, as long as the run is not done; then one that nothing disturbs, unless it was done in between."""
    for fault in faults:
        fault(alive)
        if alive.finished() and not alive.ends[-1]:
            break
    else:
        assert alive.end(alive.start()) == 0


def at_a_moment(numbers: random.Random, took: list[float]):
    """A signal at a random moment: mostly SIGKILL, now and then SIGTERM, or Ctrl-C once or twice."""

    def fault(alive: Lives):
        child, began = alive.start(), time.perf_counter()
        child.join(numbers.uniform(0, took[0]))
        if not child.is_alive():  # the machine is faster now than when it was measured
            took[0] = min(took[0], time.perf_counter() - began)
        kind = numbers.choice([signal.SIGKILL] * 7 + [signal.SIGTERM, signal.SIGINT, signal.SIGINT])
        for _ in range(2 if kind == signal.SIGINT and numbers.random() < 0.5 else 1):
            if child.is_alive():
                os.kill(child.pid, kind)
                child.join(0.02)
        # 1, or death by SIGINT: Ctrl-C beside main(), in the server's own code or while the interpreter ends
        beside = (1, -signal.SIGINT) if kind == signal.SIGINT else ()
        code = alive.end(child)
        assert code in (0, -signal.SIGKILL, -signal.SIGTERM, 130, *beside), f"{kind!r} ended a run with {code}"

    return fault


def test_a_run_killed_at_random_moments_ends_as_if_nothing_had_happened(whole, tmp_path):
    """20 signals at random moments, whatever the run is doing: start, rollout, update, evaluation, save."""
    other, took = whole[0], [whole[1]]
    numbers, ends, lost, runs = random.Random(0), [], [], 0
    while len(ends) < 20:
        alive = Lives(str(tmp_path / str(runs) / "run"), other.text)
        until_finished(alive, [at_a_moment(numbers, took) for _ in range(20 - len(ends))])
        assert is_as_undisturbed(alive, other)
        ends, lost, runs = ends + [e for e in alive.ends if e], lost + alive.lost, runs + 1
    assert max(lost) <= 2 and ends.count(-signal.SIGKILL) >= 5


def test_a_run_killed_between_any_two_changes_of_its_folder_ends_as_if_nothing_had_happened(whole, tmp_path):
    """SIGKILL between fsync and rename, rename and link, in the middle of deleting an old checkpoint (drawn from all such
    points), and in the middle of a line of a log."""
    other, _, changes = whole
    numbers = random.Random(1)
    drawn = [("event", numbers.randrange(changes // 2)) for _ in range(14)]
    ends: list[int] = []
    for i, faults in enumerate([drawn[:7], drawn[7:], [("half", n) for n in (3, 0, 7)]]):
        alive = Lives(str(tmp_path / str(i) / "run"), other.text)
        until_finished(alive, [lambda alive, f=f: alive.end(alive.start(*f)) for f in faults])
        assert is_as_undisturbed(alive, other)
        ends += alive.ends
    assert ends.count(-signal.SIGKILL) >= 10


@pytest.mark.parametrize(
    "limit, what", [(1500, "--run_dir"), (0, "log.jsonl"), (50_000, "step 10"), (100_000, "step 10")]
)
def test_a_disk_that_is_full_ends_in_one_line_and_nothing_is_lost(limit, what, whole, tmp_path):
    """A real limit on the size of files (RLIMIT_FSIZE) cuts config.yaml, a line of the log, the weights or trainer.pt."""
    folder = tmp_path / "run"
    shutil.copytree(whole[0].folder, folder, symlinks=True)
    expected = Lives(str(tmp_path / "other" / "run"), "")
    shutil.copytree(folder, expected.folder, symlinks=True)
    alive = Lives(str(folder), "")
    alive.more = expected.more = ["--steps", "10"]
    before = contents(folder)
    size = max(os.path.getsize(folder / name) for name in ("log.jsonl", "config.yaml"))
    assert alive.end(alive.start("size", limit=limit or size + 100)) == 2
    error = (tmp_path / "stderr.txt").read_text().splitlines()[-1]
    assert "cannot write" in error and what in error and ("too large" in error or "inline_container" in error), error
    after = contents(folder)
    logs = ("log.jsonl", "samples.jsonl", "config.yaml")
    assert {k: v for k, v in after.items() if k not in logs} == {k: v for k, v in before.items() if k not in logs}
    assert all(after[name].startswith(before[name]) for name in logs[:2])
    assert alive.end(alive.start()) == 0 and expected.end(expected.start()) == 0
    assert lines(folder) == lines(expected.folder) and [row["step"] for row in lines(folder)] == list(range(1, 11))
    assert equal(weights(folder, 10), weights(expected.folder, 10)) and steps(folder) == steps(expected.folder)


# ---------------------------------------------------------------------------------------------------------------------
# Places that cannot be written, loggers that fail


@pytest.mark.parametrize("place", ["/proc/run", "FILE/run", "READONLY"])
def test_a_place_that_cannot_be_written_ends_in_one_line(place, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("kept")
    if place == "READONLY":  # root may write anywhere, so the error is injected

        def full(*args, **kwargs):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr(run_folder.os, "makedirs", full)
    folder = place.replace("FILE", str(tmp_path / "file")).replace("READONLY", str(tmp_path / "x"))
    error = refused(capsys, lambda: go(folder, "--method sft --steps 1"))
    assert folder in error and contents(tmp_path) == {"file": b"kept"}


def test_results_of_an_evaluation_are_written_whole_or_not_at_all(sft, tmp_path, capsys, monkeypatch):
    flags = f"--init {sft} --split valid --run_dir {tmp_path}".split()
    evaluation.main(flags)
    before, _ = contents(tmp_path), capsys.readouterr()

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    error = refused(capsys, lambda: evaluation.main(flags))
    assert "No space left" in error and str(tmp_path) in error and contents(tmp_path) == before


def test_an_extra_logger_that_fails_is_left_out_and_training_goes_on(tmp_path, capsys, monkeypatch):
    calls = []

    def log(metrics, step):
        calls.append(step)
        if step == 2:
            raise ConnectionError("the network is down")

    monkeypatch.setattr(
        run_folder, "logger", lambda name: SimpleNamespace(init=lambda **kw: 0, log=log, finish=lambda: 1)
    )
    go(tmp_path / "a", "--method sft --steps 4 --report wandb")
    assert calls == [1, 2] and [row["step"] for row in lines(tmp_path / "a")] == [1, 2, 3, 4]
    assert capsys.readouterr().err.count("--report wandb failed (the network is down)") == 1


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints that were cut or edited, or are of something else


def cut(name):
    def damage(folder):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return damage


def edit(change):
    """Change the dict in trainer.pt."""

    def damage(folder):
        state = torch.load(folder / "trainer.pt", weights_only=True)
        change(state)
        torch.save(state, folder / "trainer.pt")

    return damage


def header(folder):
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[9] ^= 255
    (folder / "model.safetensors").write_bytes(content)


def loses_a_tensor(folder):
    """A whole file, but one weight short: transformers would fill it with random numbers."""
    state = load_file(folder / "model.safetensors")
    state.pop("model.norm.weight")
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    edit(lambda s: s.pop("files") and s.pop("format"))(folder)


class Evil:
    def __reduce__(self):
        return (os.system, ("touch /tmp/evil",))


DAMAGE = {
    "weights cut": (cut("model.safetensors"), "model.safetensors"),
    "weights gone": (lambda f: os.remove(f / "model.safetensors"), "model.safetensors"),
    "header": (header, "model.safetensors"),
    "a weight gone": (loses_a_tensor, "lack model.norm.weight"),
    "state cut": (cut("trainer.pt"), "trainer.pt"),
    "state gone": (lambda f: os.remove(f / "trainer.pt"), "trainer.pt"),
    "state empty": (lambda f: (f / "trainer.pt").write_bytes(b""), "trainer.pt"),
    "state of another kind": (lambda f: torch.save([1], f / "trainer.pt"), "trainer.pt"),
    "code in the state": (lambda f: torch.save({"step": Evil()}, f / "trainer.pt"), "trainer.pt"),
    "unknown key": (edit(lambda s: s.update(extra=1)), "extra"),
    "missing key": (edit(lambda s: s.pop("optimizer")), "optimizer"),
    "another step": (edit(lambda s: s.update(step=2)), "step 2"),
    "step no integer": (edit(lambda s: s.update(step=3.0)), "key step is of type float"),
    "files no dict": (edit(lambda s: s.update(files=[1])), "key files is of type list"),
    "file no name": (edit(lambda s: s.update(files={3: 4})), "3: missing"),
    "best no number": (edit(lambda s: s.update(best="x")), "key best is of type str"),
    "shape of a moment": (edit(lambda s: s["optimizer"]["state"][0].update(exp_avg=torch.ones(3, 3))), "exp_avg"),
    "moment gone": (edit(lambda s: s["optimizer"]["state"][0].pop("exp_avg_sq")), "exp_avg_sq"),
    "moment no tensor": (edit(lambda s: s["optimizer"]["state"][0].update(exp_avg=1.0)), "trainer.pt"),
    "more parameters": (edit(lambda s: s["optimizer"]["param_groups"][0]["params"].append(99)), "trainer.pt"),
    "state of more parameters": (edit(lambda s: s["optimizer"]["state"].update({99: s["optimizer"]["state"][0]})), "trainer.pt"),
    "another memory": (edit(lambda s: s["memory"].update(success=torch.ones(1))), "success"),
    "memory gone": (edit(lambda s: s.update(memory={})), "trainer.pt"),
    "random state": (edit(lambda s: s.update(rng=torch.ones(3))), "trainer.pt"),
    "tokenizer cut": (cut("tokenizer.json"), "tokenizer.json"),
    "tokenizer gone": (lambda f: os.remove(f / "tokenizer.json"), "tokenizer.json"),
    "model config cut": (cut("config.json"), "config.json"),
    "settings gone": (lambda f: os.remove(f / "config.yaml"), "config.yaml"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_checkpoint_that_was_cut_or_edited_is_refused_and_the_one_before_still_loads(kind, run, capsys):
    """One line names the folder and the file and says what to do; nothing is touched; and doing it works."""
    damage, named = DAMAGE[kind]
    folder = run / "checkpoints" / "step-000003"
    damage(folder)
    before = contents(run)
    capsys.readouterr()
    error = refused(capsys, lambda: resume(run, "--steps 4"))
    assert "step-000003" in error and named in error and contents(run) == before
    assert "delete it to go on from the one before" in error or kind == "a weight gone"
    if kind in ("weights cut", "a weight gone", "another memory"):
        shutil.rmtree(folder)  # best is a link to nowhere now
        resume(run, "--steps 4")
        assert [row["step"] for row in lines(run)] == [1, 2, 3, 4]


def test_a_checkpoint_of_newer_code_is_refused_and_one_of_older_code_is_read(run, capsys):
    expected = shutil.copytree(run, run.parent / "expected", symlinks=True)
    folder = run / "checkpoints" / "step-000003"
    edit(lambda s: s.update(format=run_folder.FORMAT + 1, new_key=1))(folder)
    before, _ = contents(run), capsys.readouterr()
    error = refused(capsys, lambda: resume(run, "--steps 4"))
    assert "newer version" in error and contents(run) == before

    def older(state):
        for key in ("format", "new_key", "files", "data", "best_step"):
            del state[key]
        del state["memory"]["bad"]

    edit(older)(folder)
    resume(run, "--steps 4")
    resume(expected, "--steps 4")
    assert equal(weights(run, 4), weights(expected, 4)) and lines(run) == lines(expected)


def test_a_run_edited_by_hand_or_with_any_other_setting_is_not_a_continuation(run, capsys, monkeypatch):
    """config.yaml of the run against that of the checkpoint: the first was edited. And no field slips through."""
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("lr: 0.01", "lr: 0.02"))
    assert "--lr was 0.01" in refused(capsys, lambda: resume(run, "--steps 4"))
    cfg = parse(["--config", str(run / "checkpoints" / "step-000003" / "config.yaml"), "--run_dir", str(run)])
    monkeypatch.setattr(run_folder, "parse", lambda argv: cfg)
    folder = run_folder.Run.__new__(run_folder.Run)
    for field in dataclasses.fields(cfg):
        folder.cfg = dataclasses.replace(cfg, **{field.name: "another"})
        if field.name in run_folder.Run.MAY_CHANGE:
            continue
        error = refused(capsys, lambda: folder.compare("config.yaml"))
        assert f"--{field.name} was" in error


@pytest.mark.parametrize("change", ["one example less", "other gold", "another tokenizer"])
def test_a_run_whose_data_or_tokenizer_changed_is_not_continued(change, run, capsys, monkeypatch):
    """The order of the data is a function of the number of examples; the checkpoint knows it, and a checksum of them."""
    before, load = contents(run), data.load

    def other(cfg, split):
        got = load(cfg, split)
        if change == "one example less":
            got.examples.pop()
        else:
            got.examples[0].gold = {k: v + 1 for k, v in got.examples[0].gold.items()}
        return got

    if change == "another tokenizer":
        folder = run / "checkpoints" / "step-000003"
        text = (folder / "tokenizer.json").read_text()
        vocab = json.loads(text)["model"]["vocab"]
        a, b = sorted(vocab, key=vocab.get)[5:7]
        mixed = text.replace(json.dumps(a) + ": 5", json.dumps(b) + ": 5").replace(
            json.dumps(b) + ": 6", json.dumps(a) + ": 6"
        )
        assert mixed != text and json.loads(mixed)["model"]["vocab"][a] == 6
        (folder / "tokenizer.json").write_text(mixed)
        before = contents(run)
    else:
        monkeypatch.setattr(data, "load", other)
    error = refused(capsys, lambda: resume(run, "--steps 4"))
    assert "checksum" in error and "64 examples" in error and contents(run) == before


def test_a_run_killed_before_its_first_checkpoint_starts_again_in_its_folder(tmp_path, monkeypatch):
    """As if nothing had happened. But a run whose checkpoints are gone keeps its log."""
    go(tmp_path / "whole", "--method sft --lr 1e-2 --steps 4")
    order = data.order

    def crash(n, seed, step, batch_size):
        if step == 2:
            raise RuntimeError("killed")
        return order(n, seed, step, batch_size)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(data, "order", crash)
        go(tmp_path / "a", "--method sft --lr 1e-2 --steps 4")
    assert len(lines(tmp_path / "a")) == 2
    resume(tmp_path / "a")
    assert lines(tmp_path / "a") == lines(tmp_path / "whole")
    assert equal(weights(tmp_path / "a", 4), weights(tmp_path / "whole", 4))


# ---------------------------------------------------------------------------------------------------------------------
# Numbers that are not finite


def poison(monkeypatch, at: set[int], name="completion_loss", value=math.nan):
    """Log-probs (or values) become NaN in the update of some steps (from 1)."""
    step, work, order = [0], getattr(train.lm, name), data.order

    def count(*args):
        step[0] = args[2] + 1
        return order(*args)

    def broken(*args, **kwargs):
        wrong = value if step[0] in at else 1
        if loss_fn := kwargs.pop("loss_fn", None):
            return work(*args, loss_fn=lambda rows, logp, h: loss_fn(rows, logp * wrong, h), **kwargs)
        out = work(*args, **kwargs)
        return out * wrong if out.requires_grad else out

    monkeypatch.setattr(data, "order", count)
    monkeypatch.setattr(train.lm, name, broken)


@pytest.mark.parametrize("kind", ["nan", "inf", "critic", "reward"])
def test_a_step_that_is_not_finite_is_skipped_counted_and_set_aside(kind, sft, tmp_path, capsys, monkeypatch):
    """Once: the weights stay as they were, the batch can be looked at, and the run goes on."""
    run = tmp_path / "a"
    method = "ppo" if kind == "critic" else "fgrpo"
    if kind == "reward":
        score, calls = train.rewards.score, []

        def infinite(*args, **kwargs):
            got = score(*args, **kwargs)
            calls.append(1)
            if len(calls) == 2:
                got.reward[0] = math.inf
            return got

        monkeypatch.setattr(train.rewards, "score", infinite)
    else:
        poison(monkeypatch, {2}, "completion_values" if kind == "critic" else "completion_loss",
               math.inf if kind == "inf" else math.nan)  # fmt: skip
    go(run, f"--method {method} --init {sft} --steps 3 --lr 1e-3 --save_every 1 --keep 9 --mu 2")
    log = lines(run)
    assert [row["bad"] for row in log] == [0, 1, 0] and [row["skipped"] for row in log] == [0, 1, 0]
    assert "step-000002" not in steps(run) and not equal(weights(run, 1), weights(run, 3))
    assert "step 2: loss or gradient is not finite" in capsys.readouterr().err
    assert os.listdir(run / "bad") == ["step-000002"]
    batch = torch.load(run / "bad" / "step-000002" / "rank-0.pt", weights_only=True)
    assert batch["tokens"].shape == batch["mask"].shape == batch["logp"].shape == batch["token_adv"].shape
    assert len(batch["prompt_ids"]) == 4 and len(batch["reward"]) == len(batch["tokens"]) == 16
    state = trainer(run, 3)
    assert all(v.isfinite().all() for s in state["optimizer"]["state"].values() for v in s.values())
    assert int(state["memory"]["bad"]) == 0


def test_several_bad_steps_in_a_row_stop_the_run_and_the_good_checkpoint_stays(sft, tmp_path, capsys, monkeypatch):
    run = tmp_path / "a"
    poison(monkeypatch, {2, *range(4, 20)})
    with pytest.raises(SystemExit) as stop:
        go(run, f"--method fgrpo --init {sft} --steps 20 --lr 1e-3 --save_every 1 --keep 1 --max_bad_steps 3")
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 2 and "steps 4 to 6" in error and str(run / "bad") in error and "step-000003" in error
    assert [row["bad"] for row in lines(run)] == [0, 1, 0, 1, 1, 1]
    assert steps(run)[-1] == "step-000003" and all(w.isfinite().all() for w in weights(run, 3).values())
    assert len(os.listdir(run / "bad")) == 4
    monkeypatch.undo()
    resume(run, "--steps 5")  # from step 3, the last good one
    assert [row["bad"] for row in lines(run)] == [0, 1, 0, 0, 0]


def test_the_last_bad_batches_stay_and_so_does_what_somebody_put_beside_them(tmp_path):
    (tmp_path / "bad" / "analysis").mkdir(parents=True)
    (tmp_path / "bad" / "notes.txt").write_text("kept")
    folder = run_folder.Run(parse(["--run_dir", str(tmp_path)]), 0)
    for step in range(1, 9):
        folder.set_aside(step, {})
    kept = [f"step-{step:06d}" for step in range(4, 9)]
    assert sorted(os.listdir(tmp_path / "bad")) == ["analysis", "notes.txt", *kept]


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path):
    """Also beyond six digits, where that of their names is another."""
    for name in ("step-1000000", "step-999999", "step-", "step-²", "step-000002", ".step-000003", "best"):
        (tmp_path / name).mkdir()
    assert train.lm.steps_in(str(tmp_path)) == ["step-000002", "step-999999", "step-1000000"]


@pytest.mark.parametrize(
    "line", ['{"step": 4, "lo', '{"step": "x"}\n', '{"step": NaN}\n', "[1]\n", "7\n", "[" * 100_000 + "\n", "\0\n"]
)
def test_a_damaged_line_of_a_log_has_no_step(line):
    assert run_folder.step_of(line) is None and run_folder.step_of('{"step": 4}\n') == 4


def test_weights_that_are_not_finite_are_never_saved_over_good_ones(tmp_path, capsys, monkeypatch):
    """A weight turns NaN after step 2 (a rate too high does that): step 1 stays the last checkpoint."""
    work = train.update

    def update(policy, *args):
        out = work(policy, *args)
        if int(args[-1].bad) == 0 and len(os.listdir(tmp_path / "a" / "checkpoints")) > 0:
            with torch.no_grad():
                policy.model.get_input_embeddings().weight[0, 0] = math.nan
        return out

    monkeypatch.setattr(train, "update", update)
    with pytest.raises(SystemExit):
        go(tmp_path / "a", "--method sft --lr 1e-2 --steps 9 --save_every 1 --keep 1 --eval_every 0 --max_bad_steps 2")
    error = capsys.readouterr().err
    assert "warning: step 2 is not saved: model.embed_tokens.weight is not finite" in error
    assert "steps 3 to 4" in error and "step-000001" in steps(tmp_path / "a")
    assert all(w.isfinite().all() for w in weights(tmp_path / "a", 1).values())


def test_a_run_that_changed_nothing_says_so(tmp_path, capsys):
    """Random weights write no well-formed answer: all rewards are equal. That is no bad step, but no success either."""
    go(tmp_path / "a", "--method grpo --steps 2")
    assert [row["skipped"] for row in lines(tmp_path / "a")] == [1, 1] and not os.path.exists(tmp_path / "a" / "bad")
    assert [row["bad"] for row in lines(tmp_path / "a")] == [0, 0]
    assert "warning: none of the steps" in capsys.readouterr().err
    go(tmp_path / "b", "--method sft --steps 2")
    assert "warning" not in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Signals, pipes, and the same run twice


def test_a_signal_while_evaluating_saves_that_step(tmp_path, monkeypatch):
    work = train.evaluate

    def evaluate(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return work(*args)

    monkeypatch.setattr(train, "evaluate", evaluate)
    go(tmp_path / "a", "--method sft --steps 9 --eval_every 2")
    assert len(lines(tmp_path / "a")) == 2 and "step-000002" in steps(tmp_path / "a")


@pytest.mark.parametrize("where", ["evaluation", "save"])
def test_a_second_ctrl_c_stops_at_once_and_the_last_checkpoint_stands(where, run, monkeypatch):
    """In the middle of an evaluation, and of a save, whose half is removed."""
    expected = shutil.copytree(run, run.parent / "expected", symlinks=True)
    resume(expected, "--steps 5")
    place, name = (train, "evaluate") if where == "evaluation" else (torch, "save")

    def twice(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    before, handlers = contents(run / "checkpoints"), [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(place, name, twice)
        resume(run, "--steps 5")
    for number, handler in zip((signal.SIGINT, signal.SIGTERM), handlers):
        signal.signal(number, handler)
    assert contents(run / "checkpoints") == before
    resume(run, "--steps 5")
    assert lines(run) == lines(expected) and equal(weights(run, 5), weights(expected, 5))


def test_a_missing_data_file_is_named_at_resume_and_nothing_is_touched(run, capsys, monkeypatch):
    """The files of another data set than the built-in ones were moved since."""
    for path in (run / "config.yaml", run / "checkpoints" / "step-000003" / "config.yaml"):
        path.write_text(path.read_text().replace("data: world", "data: movielens"))
    before, _ = contents(run), capsys.readouterr()
    error = refused(capsys, lambda: resume(run, f"--steps 4 --data_dir {run.parent / 'moved'}"))
    assert "moved" in error and contents(run) == before


def test_a_copy_of_a_run_that_holds_a_folder_in_place_of_the_link_is_refused(run, capsys):
    """cp -rL makes folders of links; what is in it may be the only copy, so it is not deleted."""
    best = run / "checkpoints" / "best"
    target = best.resolve()
    best.unlink()
    shutil.copytree(target, best)
    before, _ = contents(run), capsys.readouterr()
    error = refused(capsys, lambda: resume(run, "--steps 4"))
    assert "checkpoints/best" in error and contents(run) == before


def test_a_listing_into_a_closed_pipe_has_no_traceback():
    """python losses.py | head -1"""
    read, write = os.pipe()
    os.close(read)
    path = os.path.join(os.path.dirname(train.__file__), "losses.py")
    done = subprocess.run([sys.executable, path], stdout=write, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(write)
    assert done.stderr == "" and done.returncode == -signal.SIGPIPE


def test_the_same_settings_give_the_same_log_twice_and_the_same_samples_in_any_cut(sft, tmp_path):
    """Same seed: log and samples are equal to the last digit. Cuts of the work by memory do not touch the samples of a
    step (rounding of the gradient may, from the next step on)."""
    text = f"--method fgrpo --init {sft} --lr 1e-3 --mu 2 --beta 0.1 --log_samples 16"
    go(tmp_path / "a", f"{text} --steps 3")
    go(tmp_path / "b", f"{text} --steps 3")
    assert lines(tmp_path / "a") == lines(tmp_path / "b")
    assert lines(tmp_path / "a", "samples.jsonl") == lines(tmp_path / "b", "samples.jsonl")
    for i, cut_by in enumerate(("--micro_tokens 1", "--micro_tokens 130 --kv_tokens 1", "--kv_tokens 200")):
        go(tmp_path / str(i), f"{text} --steps 2 --lr 0 --min_lr 0 {cut_by}")
        assert len(lines(tmp_path / str(i), "samples.jsonl")) == 32
        assert lines(tmp_path / str(i), "samples.jsonl")[:16] == lines(tmp_path / "a", "samples.jsonl")[:16]
