"""train.py: a resumed run is the run that was never stopped, and no crash leaves less than the last checkpoint."""

import os
import shutil

import pytest
import torch
from test_train import contents, go, lines, on_cpu, settings, warm, weights  # noqa: F401

import data
import train
from config import parse
from losses import METHODS
from run import optimizer_state

RL = "--lr 1e-3 --mu 2 --beta 0.1 --eval_every 3 --save_every 3 --keep 9 --weight_decay 0.1"
RUNS = {
    "sft": "--method sft --lr 1e-2 --eval_every 3 --save_every 3 --keep 9 --warmup 2",
    "fgrpo": f"--method fgrpo {RL}",
    "grpo": f"--method grpo {RL} --old_logp recompute",
    "ppo": f"--method ppo {RL} --critic_lr 3 --optimizer_dtype bfloat16",  # the critic and all moments
    "focal": f"--method focal_grpo {RL} --focal_ema 0.5 --max_examples 8",  # success rates of prompts seen before
    "fuse": f"--method fgrpo {RL} --kl_fuse 1e-3",  # the halved rate, and how many were blown in a row
}


@pytest.fixture(scope="module")
def sft(tmp_path_factory) -> str:
    return warm(tmp_path_factory)


def resume(run, text="") -> dict[str, float]:
    return train.main(parse(["--run_dir", str(run), "--resume", *text.split()]))


def trainer(run, step: int) -> dict:
    """trainer.pt without the sizes of the files beside it: a tokenizer that was loaded is saved with a flag more."""
    state = torch.load(os.path.join(run, "checkpoints", f"step-{step:06d}", "trainer.pt"), weights_only=True)
    return {k: v for k, v in state.items() if k != "files"}


def equal(a, b) -> bool:
    """Bit for bit, through dicts and lists."""
    if torch.is_tensor(a):
        return a.dtype == b.dtype and torch.equal(torch.nan_to_num(a, 7), torch.nan_to_num(b, 7))  # nan: not seen yet
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def steps(run) -> list[str]:
    return sorted(os.listdir(os.path.join(run, "checkpoints")))


def refused(capsys, call) -> str:
    with pytest.raises(SystemExit) as stop:
        call()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1, error
    return error


@pytest.mark.parametrize("kind", RUNS)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(kind, sft, tmp_path, monkeypatch):
    """Loss jumps, data seen twice, a fresh optimiser, another rank's random state (F48): each would show here. The run
    is cut twice, once at a checkpoint and once by a crash behind it, when the log is ahead of the weights."""
    text = RUNS[kind] + ("" if kind == "sft" else f" --init {sft}")
    whole, parts, order = tmp_path / "whole", tmp_path / "parts", data.order
    torch.manual_seed(0)  # as at the start of a process
    last = go(whole, f"{text} --steps 7")
    torch.manual_seed(0)
    go(parts, f"{text} --steps 3")

    def crash(n, seed, step, batch_size):
        if step == 5:
            raise RuntimeError("out of memory")
        return order(n, seed, step, batch_size)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(data, "order", crash)
        resume(parts, "--steps 7")
    assert [row["step"] for row in lines(parts)] == [1, 2, 3, 4, 5] and steps(parts)[-1] == "step-000003"
    assert resume(parts, "--steps 7") == last
    assert lines(parts) == lines(whole) and lines(parts, "samples.jsonl") == lines(whole, "samples.jsonl")
    for step in (3, 6, 7):
        assert equal(weights(whole, step), weights(parts, step)) and equal(trainer(whole, step), trainer(parts, step))
    state = trainer(parts, 7)
    updates = {"sft": [7], "fuse": range(2, 14)}.get(kind, [14])
    assert state["step"] == 7 and float(state["optimizer"]["state"][0]["step"]) in updates
    assert lines(parts)[2]["valid/mrr"] >= 0 and len({row["grad_norm"] for row in lines(parts)}) == 7


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished run of three steps with two checkpoints; tests copy it before they touch it."""
    run = tmp_path_factory.mktemp("done") / "run"
    go(run, "--method sft --lr 1e-2 --steps 3 --save_every 1 --keep 9 --eval_every 1")
    return run


@pytest.fixture
def run(done, tmp_path):
    return shutil.copytree(done, tmp_path / "run", symlinks=True)


CHANGES = "--lr 0.5|--method fgrpo|--seed 1|--batch_size 8|--world_noise 0.4|--width 64|--eval_k 1 2 3|--mu 2"


@pytest.mark.parametrize("change", CHANGES.split("|"))
def test_another_experiment_is_not_a_continuation(change, run, capsys):
    before = contents(run)
    error = refused(capsys, lambda: resume(run, f"--steps 4 {change}"))
    key, value = change.split(" ", 1)[0], change.split()[-1]
    assert f"{key} was" in error and value in error and "--resume" in error
    assert contents(run) == before


def test_another_number_of_steps_is_another_schedule(tmp_path, capsys):
    """A linear or cosine rate depends on the last step: the steps done so far would have had other rates."""
    run = tmp_path / "run"
    go(run, "--method sft --lr 1e-2 --steps 3 --schedule cosine --save_every 1")
    before, _ = contents(run), capsys.readouterr()
    error = refused(capsys, lambda: resume(run, "--steps 4"))
    assert "--steps was 3" in error and "cosine" in error and contents(run) == before
    shutil.rmtree(run / "checkpoints" / "step-000003")
    (run / "checkpoints" / "best").unlink()
    resume(run, "--steps 3")
    assert [row["step"] for row in lines(run)] == [1, 2, 3]


def test_what_does_not_change_the_experiment_may_change(run):
    resume(run, "--steps 4 --micro_tokens 50 --save_every 2 --keep 1 --log_samples 0 --eval_every 3")
    assert [row["step"] for row in lines(run)] == [1, 2, 3, 4]
    cfg = parse(["--config", str(run / "config.yaml")])
    assert (cfg.steps, cfg.micro_tokens, cfg.resume) == (4, 50, False)


def test_the_learning_rate_of_a_resumed_step_is_that_of_the_schedule(tmp_path):
    """The optimiser's stored rate is the last step's; the next one must come from the schedule."""
    text = "--method sft --lr 1e-2 --schedule cosine --warmup 2 --save_every 3 --keep 9 --steps 6"
    go(tmp_path / "whole", text)
    go(tmp_path / "parts", text)
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-000006")
    (tmp_path / "parts" / "checkpoints" / "best").unlink()
    resume(tmp_path / "parts")
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    assert equal(weights(tmp_path / "parts", 6), weights(tmp_path / "whole", 6))


def test_resume_without_a_run_or_a_checkpoint_ends_in_one_line(run, tmp_path, capsys):
    error = refused(capsys, lambda: resume(tmp_path / "nowhere"))
    assert "--resume" in error and "nowhere" in error and not (tmp_path / "nowhere").exists()
    shutil.rmtree(run / "checkpoints")
    assert "no checkpoint" in refused(capsys, lambda: resume(run))
    (run / "config.yaml").unlink()
    assert "config.yaml" in refused(capsys, lambda: resume(run))


def test_a_half_written_checkpoint_is_ignored(run):
    """The machine died while step 4 was being written: its folder still has the name that begins with a dot (F50)."""
    aside = run / "checkpoints" / ".step-000004"
    shutil.copytree(run / "checkpoints" / "step-000003", aside)
    (aside / "trainer.pt").write_bytes(b"half")
    (aside / "left.over").write_bytes(b"")
    resume(run, "--steps 5")
    assert [row["step"] for row in lines(run)] == [1, 2, 3, 4, 5]
    assert steps(run) == ["best", *(f"step-{i:06d}" for i in range(1, 6))]
    assert "left.over" not in os.listdir(run / "checkpoints" / "step-000004")


def test_a_truncated_last_line_of_the_log_is_tolerated(run):
    """A full disk or a lost machine cuts a line in the middle."""
    expected = shutil.copytree(run, run.parent / "expected", symlinks=True)
    resume(expected, "--steps 4")
    for name in ("log.jsonl", "samples.jsonl"):
        with open(run / name, "a") as f:
            f.write('{"step": 4, "loss": 0.1}\n{"step": 5, "lo')
    resume(run, "--steps 4")
    assert lines(run) == lines(expected) and lines(run, "samples.jsonl") == lines(expected, "samples.jsonl")


def test_resuming_a_finished_run_does_nothing(run):
    before = {k: v for k, v in contents(run).items() if k != "config.yaml"}
    resume(run)
    assert {k: v for k, v in contents(run).items() if k != "config.yaml"} == before


@pytest.mark.parametrize("keep", [True, False])
def test_saving_leaves_the_optimiser_as_it_was(keep):
    """The state that is written lies on the CPU, and on other ranks than the first nowhere: not so the optimiser's own."""
    p = torch.nn.Parameter(torch.ones(3, device="cuda" if torch.cuda.is_available() else "cpu"))
    optimizer = torch.optim.AdamW([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    before = {k: v for k, v in optimizer.state[p].items()}
    written = optimizer_state(optimizer, keep)["state"][0]
    assert written.keys() == before.keys() and all((v is not None) == keep for v in written.values())
    assert all(optimizer.state[p][k] is v for k, v in before.items())
    optimizer.step()
    assert optimizer.state[p]["step"] == 2


@pytest.mark.parametrize("where", ["weights", "trainer state", "rename"])
def test_a_crash_while_saving_leaves_the_last_checkpoint_whole(where, run, monkeypatch):
    """Written in place, a crash would leave an unreadable latest checkpoint (F50). After the crash the run goes on, and
    ends where it would have ended."""
    expected = shutil.copytree(run, run.parent / "expected", symlinks=True)
    resume(expected, "--steps 5")
    place, name = {"weights": (train.lm, "save"), "trainer state": (torch, "save"), "rename": (os, "rename")}[where]
    work = getattr(place, name)

    def crash(*args, **kwargs):
        if where == "weights":
            work(*args, **kwargs)
        if where == "trainer state":
            with open(args[1], "wb") as f:
                f.write(b"half a checkpoi")
        raise OSError("No space left on device")

    before = {k: v for k, v in contents(run / "checkpoints").items() if k.startswith(("step-", "best"))}
    with monkeypatch.context() as patch:
        patch.setattr(place, name, crash)
        with pytest.raises((OSError, SystemExit)):
            resume(run, "--steps 4")
    after = {k: v for k, v in contents(run / "checkpoints").items() if k.startswith(("step-", "best"))}
    assert after == before
    resume(run, "--steps 5")
    assert equal(weights(run, 5), weights(expected, 5)) and steps(run) == steps(expected)
    assert [row["step"] for row in lines(run)] == [1, 2, 3, 4, 5]


def test_the_last_checkpoints_and_the_best_are_kept(tmp_path, monkeypatch):
    """keep counts the last ones; the best stays beside them, and the link follows best_metric, ties to the older."""
    scores = iter([0.1, 0.5, 0.5, 0.3, 0.2, 0.4, 0.6, 0.1])
    monkeypatch.setattr(train, "evaluate", lambda *a: [{"metrics": {"ndcg@2": next(scores), "mrr": 0.0}}])
    run = tmp_path / "run"
    go(run, "--method sft --steps 6 --eval_every 1 --save_every 1 --keep 2")
    assert steps(run) == ["best", "step-000002", "step-000005", "step-000006"]
    assert os.readlink(run / "checkpoints" / "best") == "step-000002" and trainer(run, 6)["best"] == 0.5
    resume(run, "--steps 7")  # 0.6: better than the best of the first part
    assert steps(run) == ["best", "step-000006", "step-000007"]
    assert os.readlink(run / "checkpoints" / "best") == "step-000007"
    resume(run, "--steps 8")  # 0.1: not
    assert os.readlink(run / "checkpoints" / "best") == "step-000007" and trainer(run, 8)["best"] == 0.6
    assert train.lm.checkpoint_of(str(run)).endswith("best")
    moved = shutil.move(run, tmp_path / "moved")  # the link is relative: the folder may be moved
    assert equal(weights(moved, "best"), weights(moved, 7))


def test_a_better_evaluation_is_saved_even_where_no_checkpoint_was_due(tmp_path, monkeypatch):
    scores = iter([0.1, 0.5, 0.2])
    monkeypatch.setattr(train, "evaluate", lambda *a: [{"metrics": {"ndcg@2": next(scores)}}])
    go(tmp_path / "run", "--method sft --steps 6 --eval_every 2 --keep 1")
    assert steps(tmp_path / "run") == ["best", "step-000004", "step-000006"]
    assert os.readlink(tmp_path / "run" / "checkpoints" / "best") == "step-000004"


def test_every_method_can_be_resumed(sft, tmp_path):
    for method in METHODS:
        go(tmp_path / method, f"--method {method} --init {sft} --steps 1")
        resume(tmp_path / method, "--steps 2")
        assert [row["step"] for row in lines(tmp_path / method)] == [1, 2]
    assert parse(settings(tmp_path, "")).resume is False
