"""Several ranks against one, step by step, and what happens when a rank dies, hangs or is started again.

A host process (this file as a script) imports everything once and forks the ranks, with the variables that torchrun sets: a
world costs a second, not ten. Every world leaves its results and its stderr in a folder, and the tests below look at them.
One run restarts under the torchrun command itself; others are in test_dist.py. Left out: NCCL, more than one machine.
"""

import contextlib
import math
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from test_train import CPU, ROOT, go, lines, on_cpu, same, settings, warm, weights  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode

import data
import eval as evaluation
import losses
import model
import train
from config import parse
from losses import AGGREGATES, METHODS, resolve

STEPS = {
    name: f"--method {name}" for name in METHODS
}  # every row, every aggregate, and what gathers numbers over ranks
STEPS |= {f"{m} {a}": f"--method {m} --aggregate {a}" for m in ("grpo", "fgrpo") for a in AGGREGATES}
STEPS |= {
    "refill": "--method grpo --refill 3 --group_size 2",
    "refill, focal": "--method focal_grpo --refill 3 --focal_ema 0.5 --group_size 2",
    "refill, few": "--method grpo --refill 3 --max_examples 6",
    "difficulty": "--method gfpo --keep_by_difficulty 2 3 4 --rejected drop",
    "adaptive": "--method fgrpo --lam_schedule adaptive --credit causal",
    "batch_std": "--method grpo --scale batch_std --dual_clip 3 --entropy 0.1",
    "kl": "--method fgrpo --beta 0.3 --kl_mask completion --kl_ratio",
    "kl in reward": "--method grpo --beta 0.3 --kl_in reward --kl k1",
    "kl in reward, tokens": "--method ppo --beta 0.3 --kl_in reward --kl k1",
    "tis": "--method cispo --tis 1.1",
    "model's pairs": "--method s_dpo --pair_source model",
    "phases": "--method fgrpo --micro_tokens 100000",
    "budgets": "--method fgrpo --micro_tokens 1 --kv_tokens 1",
}
FOUR = [
    "fgrpo",
    "grpo",
    "gfpo",
    "rank_grpo",
    "ppo",
    "mult_dpo",
    "sft",
    "refill",
    "refill, focal",
    "difficulty",
    "adaptive",
]
RUN = "--method fgrpo --init SFT --steps 5 --lr 1e-3 --mu 2 --beta 0.1 --eval_examples 2 --log_samples 6"
FUSE = "--method fgrpo --init SFT --steps 8 --lr 1e-2 --beta 0.1 --kl_fuse 1e-9 --eval_every 1 --eval_examples 4"
TIMEOUT = 400  # seconds for all worlds: a hang is the usual failure


# ---------------------------------------------------------------------------------------------------------------------
# What every rank does


class Kept(torch.optim.SGD):
    """An optimiser that keeps the whole gradients in place of using them."""

    def step(self):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        self.grads = [g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in grads if g is not None]


def nets(sft: str):
    """Policy, reference (near to it) and critic, sharded where there are several ranks. Steps leave them as they are."""
    cfg = parse(settings("unused", f"--init {sft}"))
    policy = evaluation.open_policy(cfg, data.load(cfg, "train"), CPU)
    reference = model.load(cfg, policy.tokenizer, CPU).requires_grad_(False)
    critic = model.Critic(model.load(cfg, policy.tokenizer, CPU))
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in [*reference.parameters(), *critic.head.parameters()]:
            p.add_(0.02 * torch.randn(p.shape, generator=g))
    if dist.is_initialized():
        policy.model, reference, critic = (model.shard(m, torch.float32) for m in (policy.model, reference, critic))
    return policy, reference, critic


def one_step(text: str, sft: str, policy, reference, critic) -> dict:
    """The parts of a step of main(), in its order; old log-probs are moved off the policy's, so that ratios are not 1."""
    rank, world = train.place()
    cfg = parse(settings("unused", f"--init {sft} --grad_clip 0 --micro_tokens 130 {text}"), world)
    method, step = resolve(cfg), 3
    reference = reference if cfg.beta else None
    critic = critic if method.baseline == "critic" else None
    task = train.usable(data.load(cfg, "train"), policy, cfg, method)
    # now, as in main(): after a forward without gradient FSDP shows whole weights of the root in place of the shards
    optimizer = Kept([p for m in (policy.model, critic) if m is not None for p in m.parameters()], 1.0)
    batch = data.order(len(task.examples), cfg.seed, step, cfg.batch_size)[rank::world]
    batch, roll, scored = train.SOURCES[method.source](task, policy, batch, step, cfg, method)
    look = train.measure(policy, reference, critic, roll, cfg, method)
    if method.source == "sample":
        look.logp_old = torch.where(roll.mask, look.logp_old + 0.3 * torch.sin(10 * look.logp_old), 0)
    memory = train.Memory(torch.linspace(0, 1, len(task.examples)))
    ema = memory.gamma_of(batch, scored, roll, cfg)
    unit_weights = train.unit_weights_at(cfg, method, step, scored, roll)
    got = losses.credit(scored, roll, look, method, cfg, unit_weights, ema, train.all_sum, train.all_gather)
    metrics = train.update(policy, critic, optimizer, roll, look, got, cfg, method, memory)
    metrics |= train.describe(scored, got, roll, cfg)
    ids = [task.examples[i].id for i in batch]
    rows = [
        (ids[g], roll.tokens[b][roll.mask[b]].tolist(), scored.reward[b].tolist())
        for b, g in enumerate(roll.group.tolist())
    ]
    return {"batch": batch, "rows": rows, "grads": optimizer.grads, "metrics": metrics, "success": memory.success,
            "first": train.first_samples(ids, roll, scored, cfg)}  # fmt: skip


def steps(names: list[str], sft: str) -> dict[str, dict]:
    some = nets(sft)
    return {name: one_step(STEPS[name], sft, *some) for name in names}


def evaluations(sft: str) -> list[list[dict]]:
    """Rows of evaluations that do not go into the ranks: five examples two at a time, and a single one."""
    cfg = parse(settings("unused", f"--init {sft}"))
    policy, _, _ = nets(sft)
    examples, prompts = data.fit(data.load(cfg, "valid"), policy.tokenizer, cfg)
    evaluation.CHUNK, chunk = 2, evaluation.CHUNK
    rows = [evaluation.evaluate(policy, examples[:n], prompts[:n], cfg) for n in (5, 1)]
    evaluation.CHUNK = chunk
    return rows


class Collectives(TorchDispatchMode):
    """Counts the calls of torch.distributed."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.namespace in ("c10d", "_c10d_functional")
        return function(*args, **(kwargs or {}))


def collectives(sft: str) -> dict[int, int]:
    """Collectives of a rollout, by its longest completion."""
    policy, _, _ = nets(sft)
    out = {}
    for length in (1, 4, 24):
        cfg = parse(settings("unused", f"--init {sft} --max_new_tokens {length}"))
        with Collectives() as seen:
            roll = policy.rollout([[3, 4, 5]] * 2, 4, 1.0, [(dist.get_rank(), 0, i) for i in range(2)], cfg)
        assert roll.tokens.shape[1] > length / 2
        out[length] = seen.count
    return out


def sharded(folder: str, sft: str) -> list[bool]:
    """Does every rank hold a part of policy, reference and critic only? Asked in the middle of main()."""
    from torch.distributed.fsdp import FSDPModule

    found, measure = [], train.measure

    def asked(policy, reference, critic, *args):
        for m in (policy.model, reference, critic):
            parts = [p.to_local().numel() < p.numel() for p in m.parameters() if p.shape[0] > 1]
            found.append(isinstance(m, FSDPModule) and all(parts))
        return measure(policy, reference, critic, *args)

    train.measure = asked
    go(os.path.join(folder, "ppo"), f"--method ppo --beta 0.1 --kl_in reward --kl k1 --steps 1 --init {sft}")
    train.measure = measure
    return found


@contextlib.contextmanager
def group():
    train.launch()
    yield dist.get_rank()
    dist.destroy_process_group()


def two(folder: str, sft: str) -> None:
    with group() as rank:
        seen = {"steps": steps(list(STEPS), sft), "evaluations": evaluations(sft), "collectives": collectives(sft)}
        seen["sharded"] = sharded(folder, sft)
        go(os.path.join(folder, "fuse"), FUSE.replace("SFT", sft))
        go(os.path.join(folder, "bf16"), f"--method sft --init {sft} --dtype bfloat16 --steps 2 --lr 1e-6 --tie false")
        go(os.path.join(folder, "bf16 rl"), f"--method fgrpo --init {sft} --dtype bfloat16 --steps 2 --lr 1e-4")
        torch.save(seen, os.path.join(folder, f"two{rank}.pt"))


def four(folder: str, sft: str) -> None:
    with group() as rank:
        seen = {"steps": steps(FOUR, sft), "evaluations": evaluations(sft)}
        train.main(parse(["--run_dir", os.path.join(folder, "on four"), "--resume", "--steps", "7"], 4))
        torch.save(seen, os.path.join(folder, f"four{rank}.pt"))


def process(fault: str, *argv: str) -> None:
    """`python train.py ARGV` in a worker; the first time, rank 1 comes to grief in its third step."""
    order = data.order

    def bad(n, seed, step, batch_size):
        if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], step) == ("1", "0", 2):
            if fault == "raise":
                raise ValueError("what went wrong")
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "hang":
                time.sleep(1000)
        return order(n, seed, step, batch_size)

    data.order = bad
    sys.argv = ["train.py", *argv]
    runpy.run_path(os.path.join(ROOT, "train.py"), run_name="__main__")


# ---------------------------------------------------------------------------------------------------------------------
# The host


def world(folder: str, name: str, ranks: int, target, *args, restarts=0) -> None:
    """Run target on so many ranks, as torchrun does: the first that fails ends the others, and all start again if they may.
    Leaves NAME.err (stderr) and NAME.txt: seconds, and which rank failed first and how."""
    began = time.monotonic()
    for attempt in range(restarts + 1):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        env = {"WORLD_SIZE": ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": name,
               "TORCHELASTIC_RESTART_COUNT": attempt}  # fmt: skip
        alive, cause, end = {}, "", math.inf
        for rank in range(ranks):
            if not (pid := os.fork()):
                os.environ.update({k: str(v) for k, v in {**env, "RANK": rank, "LOCAL_RANK": rank}.items()})
                os.dup2(os.open(os.path.join(folder, f"{name}.err"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
                code = 1
                try:
                    target(*args)
                    code = 0
                except SystemExit as e:
                    code = e.code
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                os._exit(code)
            alive[pid] = rank
        while alive:
            pid, status = os.waitpid(-1, os.WNOHANG)
            rank = alive.pop(pid, None)
            if rank is not None and status and not cause:
                cause, end = f"rank {rank} left with {os.waitstatus_to_exitcode(status)}", time.monotonic() + 2
                for other in alive:
                    os.kill(other, signal.SIGTERM)
            if time.monotonic() > end:
                for other in alive:
                    os.kill(other, signal.SIGKILL)
            time.sleep(0.02)
        if not cause:
            break
    with open(os.path.join(folder, f"{name}.txt"), "w") as f:
        f.write(f"{time.monotonic() - began:.1f}\n{cause}")


def host(folder: str, sft: str) -> None:
    flags = [*settings(os.path.join(folder, "RUN"), RUN.replace("SFT", sft)), "--rank_timeout", "60"]

    def command(name: str, fault: str, *more: str, restarts=0, run="") -> None:
        argv = [a.replace("RUN", run or name) if a.startswith(folder) else a for a in flags]
        world(folder, name, 2, process, fault, *argv, *more, restarts=restarts)

    command("whole", "none", "--save_every", "1", "--keep", "9")
    under_torchrun = (
        f"-m torch.distributed.run --standalone --nproc_per_node 2 --max-restarts 1 {__file__} process raise"
    )
    argv = [a.replace("RUN", "restarted") if a.startswith(folder) else a for a in flags]
    with open(os.path.join(folder, "restarted.err"), "w") as f:
        subprocess.run([sys.executable, *under_torchrun.split(), *argv, "--save_every", "1", "--keep", "9"], stderr=f)
    command("begun again", "raise", restarts=1)
    command("foreign", "none", restarts=1, run="whole")
    for fault in ("raise", "kill"):
        command(fault, fault)
    command("hang", "hang", "--rank_timeout", "2")
    shutil.copytree(os.path.join(folder, "whole"), os.path.join(folder, "on one"), symlinks=True)
    shutil.copytree(os.path.join(folder, "whole"), os.path.join(folder, "on four"), symlinks=True)
    world(folder, "two", 2, two, folder, sft)
    world(folder, "four", 4, four, folder, sft)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder of the host, and what one process does instead, computed meanwhile."""
    sft, folder = warm(tmp_path_factory), str(tmp_path_factory.mktemp("ranks"))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"PYTHONPATH": os.pathsep.join([ROOT, os.path.dirname(__file__)]), "TOKENIZERS_PARALLELISM": "false"}
    out = open(os.path.join(folder, "host.err"), "w")
    hosting = subprocess.Popen([sys.executable, __file__, folder, sft], env=env, stderr=out, stdout=out)
    try:
        alone = {"steps": steps(list(STEPS), sft), "evaluations": evaluations(sft)}
        go(os.path.join(folder, "fuse alone"), FUSE.replace("SFT", sft))
        go(os.path.join(folder, "bf16 alone"), f"--method sft --init {sft} --dtype bfloat16 --steps 2 --lr 1e-6")
        hosting.wait(TIMEOUT)
    except subprocess.TimeoutExpired:
        pytest.fail(f"the worlds did not end in {TIMEOUT} s: {sorted(os.listdir(folder))}")
    finally:
        if hosting.poll() is None:
            hosting.terminate()
            hosting.wait(60)
    assert hosting.returncode == 0, open(os.path.join(folder, "host.err")).read()[-4000:]
    for name in ("two", "four"):
        assert ended(folder, name)[1] == "", open(os.path.join(folder, f"{name}.err")).read()[-4000:]
    read = lambda name: torch.load(os.path.join(folder, f"{name}.pt"), weights_only=False)  # noqa: E731
    return folder, alone, {2: [read(f"two{r}") for r in range(2)], 4: [read(f"four{r}") for r in range(4)]}, sft


def ended(folder: str, name: str) -> tuple[float, str, str]:
    """(seconds, which rank failed first and how, stderr) of a world."""
    seconds, cause = open(os.path.join(folder, f"{name}.txt")).read().split("\n", 1)
    return float(seconds), cause, open(os.path.join(folder, f"{name}.err")).read()


# ---------------------------------------------------------------------------------------------------------------------
# One step


@pytest.mark.parametrize("ranks, name", [(2, n) for n in STEPS] + [(4, n) for n in FOUR])
def test_ranks_together_make_the_step_of_one(ran, ranks, name):
    """Same prompts (also those that refill puts in, F54), same samples and rewards in the order of the batch (F45), same
    gradient (F29) and numbers of the log, on answers of unequal length."""
    _, alone, seen, _ = ran
    one, several = alone["steps"][name], [s["steps"][name] for s in seen[ranks]]
    places = len(one["batch"]) // ranks
    assert [several[g % ranks]["batch"][g // ranks] for g in range(places * ranks)] == one["batch"]
    assert sorted(one["rows"]) == sorted(row for s in several for row in s["rows"])
    assert len({len(tokens) for _, tokens, _ in one["rows"]}) > 1 or "sft" in name or "dpo" in name
    size = max(g.abs().max() for g in one["grads"])
    for s in several:
        assert len(s["grads"]) == len(one["grads"]) and size > 1e-4
        assert max((a - b).abs().max() for a, b in zip(s["grads"], one["grads"])) < 1e-5 * size
        ours, theirs = (dict(x["metrics"], wasted=0) for x in (one, s))  # idle rows depend on what is decoded together
        assert theirs == pytest.approx(ours, abs=1e-5, rel=1e-5)
        assert torch.equal(s["success"], one["success"]) and s["first"] == one["first"]
    if "focal_ema" in STEPS[name]:
        assert set((one["success"] != torch.linspace(0, 1, len(one["success"]))).nonzero()[:, 0].tolist()) == set(
            one["batch"]
        )


def test_the_steps_show_what_they_are_for(ran):
    """Prompts were replaced, the log has several samples, and budgets of one token change nothing but the number of parts."""
    _, alone, _, _ = ran
    found = alone["steps"]
    replaced = [a != b for a, b in zip(found["refill"]["batch"], found["grpo"]["batch"])]
    assert (
        any(replaced[::2]) and any(replaced[1::2]) and len(set(found["refill"]["batch"])) == 4
    )  # on both of two ranks
    assert found["refill, few"]["batch"] != found["grpo"]["batch"]
    assert found["fgrpo"]["first"] and not found["sft"]["first"] and found["mult_dpo"]["metrics"]["preference_loss"] > 0
    assert found["phases"]["rows"] == found["budgets"]["rows"] == found["fgrpo"]["rows"]
    for a, b in zip(found["phases"]["grads"], found["budgets"]["grads"]):
        assert torch.allclose(a, b, atol=1e-6)


def test_evaluations_that_do_not_go_into_the_ranks_end(ran):
    """Five examples two at a time are two rollouts on rank 0 and one on rank 1; a rollout gathers the weights (F47)."""
    _, alone, seen, _ = ran
    for several in seen.values():
        for s in several:
            assert s["evaluations"] == alone["evaluations"]


def test_a_rollout_has_no_collective_per_token(ran):
    """The weights are gathered once: an all-gather per sharded part, whatever the length (F42)."""
    for s in ran[2][2]:
        assert len(set(s["collectives"].values())) == 1 and 0 < s["collectives"][24] < 6


def test_policy_reference_and_critic_are_sharded(ran):
    assert [s["sharded"] for s in ran[2][2]] == [[True] * 3] * 2


def test_a_blown_fuse_restores_on_every_rank(ran):
    """Restoring gathers and scatters weights, which once left one rank waiting; both ways of it happen here."""
    folder, _, _, _ = ran
    ours, theirs = (lines(os.path.join(folder, name)) for name in ("fuse alone", "fuse"))
    assert sum(row["fused"] for row in ours) > 3 and "weights of the start restored" in ended(folder, "two")[2]
    for a, b in zip(ours, theirs, strict=True):
        assert dict(b, wasted=0) == pytest.approx(dict(a, wasted=0), abs=1e-4, rel=1e-3)


def test_bfloat16_compute_leaves_float32_weights_which_move(ran):
    """Master weights are fp32 under FSDP2 too: an update of 1e-6 would vanish in a bf16 weight (F38)."""
    folder, _, _, sft = ran
    start, end = weights(sft), weights(os.path.join(folder, "bf16"))
    moved = torch.cat([(end[k] != start[k]).flatten() for k in start])
    assert all(w.dtype == torch.float32 for w in end.values()) and moved.float().mean() > 0.6
    ours, theirs = (lines(os.path.join(folder, name)) for name in ("bf16 alone", "bf16"))
    for a, b in zip(ours, theirs, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=0.02) and b["grad_norm"] == pytest.approx(
            a["grad_norm"], rel=0.1
        )
    assert all(0 < row["sampler_gap"] < 0.05 and row["grad_norm"] > 0 for row in lines(os.path.join(folder, "bf16 rl")))


# ---------------------------------------------------------------------------------------------------------------------
# Death and restart


@pytest.mark.parametrize("fault, cause", [("raise", 1), ("kill", -9), ("hang", 1)])
def test_a_rank_that_dies_takes_the_job_down_and_is_named(ran, fault, cause):
    """Within a minute, with its own traceback first; the ranks that only miss it say so in a line, if at all. Of a rank that
    hangs nobody can tell more than that it does not come (--rank_timeout)."""
    folder, _, _, _ = ran
    seconds, said, error = ended(folder, fault)
    assert seconds < 40 and said == f"rank {0 if fault == 'hang' else 1} left with {cause}"
    assert error.count("Traceback (most recent call last)") == (fault == "raise")
    if fault == "raise":
        assert (
            error.index("Traceback") < error.index("what went wrong") < min(error.find("rank 0 leaves") % 10**9, 10**8)
        )
    if fault == "hang":
        assert "rank 0 leaves: another rank is gone, or late" in error and "--rank_timeout" in error
    assert [row["step"] for row in lines(os.path.join(folder, fault))] == [1, 2]


def test_the_whole_run_says_nothing_but_its_first_line(ran):
    _, cause, error = ended(ran[0], "whole")
    assert cause == "" and error.count("\n") == 1 and "2 x cpu" in error


@pytest.mark.parametrize("name", ["restarted", "begun again"])
def test_restarted_workers_go_on_by_themselves(ran, name):
    """torchrun --max-restarts runs the same command, without --resume: from the last checkpoint, or from the start where
    there is none; each step is logged once, and the end is that of the run that nothing befell, bit for bit. Under torchrun
    itself the dead leave their addresses behind, on which the restarted once waited in vain."""
    folder, _, _, _ = ran
    error = open(os.path.join(folder, f"{name}.err")).read()
    run, whole = os.path.join(folder, name), os.path.join(folder, "whole")
    assert f"steps {2 if name == 'restarted' else 0}..5" in error.splitlines()[-1] and "what went wrong" in error
    for file in ("log.jsonl", "samples.jsonl"):
        assert lines(run, file) == lines(whole, file) and lines(run, file)
    assert [row["step"] for row in lines(run)] == [1, 2, 3, 4, 5]
    assert same(weights(run, 5), weights(whole, 5))


def test_a_restart_does_not_adopt_the_run_of_another_command(ran):
    """The first start refuses the folder, torchrun starts it again, and the second start refuses it too."""
    folder, _, _, _ = ran
    _, cause, error = ended(folder, "foreign")
    assert cause.endswith("left with 2") and error.count("holds a run already") >= 2  # each time by one rank at least
    assert [row["step"] for row in lines(os.path.join(folder, "whole"))] == [1, 2, 3, 4, 5]


def test_a_checkpoint_of_two_ranks_continues_on_one_and_on_four(ran):
    folder, _, _, _ = ran
    one, more = os.path.join(folder, "on one"), os.path.join(folder, "on four")
    train.main(parse(["--run_dir", one, "--resume", "--steps", "7"]))
    assert same(weights(more, 7), weights(one, 7), 1e-5) and not same(weights(one, 7), weights(one, 5), 1e-4)
    assert lines(one, "samples.jsonl") == lines(more, "samples.jsonl") and len(lines(more)) == 7
    state = [
        torch.load(os.path.join(r, "checkpoints", "step-000007", "trainer.pt"), weights_only=True) for r in (one, more)
    ]
    for i, s in state[0]["optimizer"]["state"].items():
        assert same(s, state[1]["optimizer"]["state"][i], 1e-4) and s["step"] == 14


# ---------------------------------------------------------------------------------------------------------------------
# What torchrun sets


@pytest.mark.parametrize("given, said", [
    ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two"), ({"RANK": "-1"}, "RANK=-1"), ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2"),
    ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "1"}, "LOCAL_RANK=1"), ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
    ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}, "MASTER_ADDR"),
])  # fmt: skip
def test_a_wrong_environment_ends_in_one_line(monkeypatch, capsys, given, said):
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(key, raising=False)
    assert train.environment() == (0, 1, 0)
    for key, value in given.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(SystemExit) as stop:
        train.launch()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and said in error and "torchrun" in error


if __name__ == "__main__":
    torch.set_num_threads(1)
    (process if sys.argv[1] == "process" else host)(*sys.argv[1 + (sys.argv[1] == "process") :])
