"""The run folder: what a training run writes, and how it goes on from there.

    RUN_DIR/config.yaml     the resolved configuration
    RUN_DIR/log.jsonl       a line per optimiser step
    RUN_DIR/samples.jsonl   some decoded rollouts of each step, with their rewards
    RUN_DIR/checkpoints/    step-N: a Hugging Face folder plus trainer.pt and config.yaml; best: a link to the best one

Left out: anything that knows of losses or rewards; train.py calls it.
"""

import fcntl
import json
import math
import os
import shutil
import socket
import sys
from dataclasses import asdict, replace

import torch
import torch.distributed as dist
from tqdm import tqdm

import model as lm
from config import Config, dump, fail, parse


def write(path: str, text: str) -> None:
    """Write aside, sync, rename: a reader sees the old file or the new one, never half of it (F50)."""
    with open(path + ".tmp", "w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(path + ".tmp", path)


def lines_of(rows: list[dict]) -> str:
    """Rows -> JSON lines."""
    return "".join(to_json(r) + "\n" for r in rows)


def to_json(value, **how) -> str:
    """JSON that strict readers take: NaN and infinities, which it does not have, become null."""

    def known(x):
        if isinstance(x, dict):
            return {k: known(v) for k, v in x.items()}
        if isinstance(x, list | tuple):
            return [known(v) for v in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return json.dumps(known(value), allow_nan=False, **how)


class Run:
    """One run's folder, on every rank; only rank 0 writes.

    A checkpoint (weights, tokenizer, optimiser, step, RNG, best metric, configuration) is written aside, synced and
    renamed, so a crash leaves the last one whole (F50). Data position: the step, of which the order is a function.
    """

    MAY_CHANGE = ("config", "steps", "run_dir", "resume", "report", "data_dir", "init", "micro_tokens", "kv_tokens",
                  "rank_timeout", "plan", "plan_ranks", "plan_gb", "eval_every", "save_every", "diagnose_every", "keep", "log_samples", "attention", "checkpointing", "split", "against", "ranker",
                  "baseline", "reward_workers", "reward_timeout", "max_reward_errors")  # fmt: skip

    def __init__(self, cfg: Config, rank: int):
        self.cfg, self.main, self.checkpoint = cfg, rank == 0, ""
        self.best, self.best_step = None, None  # highest best_metric so far, and the step it was measured at
        self.folder = os.path.join(cfg.run_dir, "checkpoints")
        old = os.path.join(cfg.run_dir, "config.yaml")
        if cfg.resume:
            self.checkpoint = self.latest()
            self.compare(old)
        elif os.path.exists(old) or self.steps():
            fail(f"--run_dir {cfg.run_dir} holds a run already: continue it with --resume, or choose another folder")

    def say(self, text: str) -> None:
        if self.main:
            tqdm.write(text, file=sys.stderr)

    def steps(self) -> list[str]:
        """Names of the checkpoints, oldest first."""
        names = os.listdir(self.folder) if os.path.isdir(self.folder) else []
        return sorted(n for n in names if n.startswith("step-") and n[5:].isdigit())

    def latest(self) -> str:
        if not self.steps():
            fail(f"--resume: {self.cfg.run_dir} holds no checkpoint; start it anew in another --run_dir")
        return os.path.join(self.folder, self.steps()[-1])

    def compare(self, path: str) -> None:
        """A resumed run must be the same experiment."""
        was = parse(["--config", path])
        if was.steps != self.cfg.steps and was.schedule != "constant":
            fail(
                f"--resume: --steps was {was.steps} in {path}; a {was.schedule} schedule depends on it, so it cannot change"
            )
        for key, value in asdict(was).items():
            if key not in self.MAY_CHANGE and getattr(self.cfg, key) != value:
                fail(
                    f"--resume: --{key} was {value!r} in {path} and is {getattr(self.cfg, key)!r} now; start a new run for that"
                )
        self.cfg.init = was.init

    def read_state(self) -> dict:
        """trainer.pt of the checkpoint to go on from."""
        try:
            state = torch.load(os.path.join(self.checkpoint, "trainer.pt"), map_location="cpu", weights_only=True)
        except Exception as e:
            reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
            fail(f"--resume: {self.checkpoint} is damaged ({reason}); delete it to go on from the one before")
        if state["step"] > self.cfg.steps:
            fail(f"--resume: the run is at step {state['step']} already, beyond --steps {self.cfg.steps}")
        return state

    def open(self, optimizer, critic=None, memory: dict[str, torch.Tensor] | None = None) -> int:
        """Claim the folder, now that everything is loaded: a start that failed before leaves no run behind. On resume
        load optimiser, critic, memory (in place) and step of the checkpoint and drop log lines behind it. Returns the first
        step to do."""
        state = self.read_state() if self.checkpoint else {}
        if dist.is_initialized():
            dist.barrier()  # every rank has seen the folder free before the first one writes
        try:
            os.makedirs(self.folder, exist_ok=True)
            self.writer = reporter(self.cfg) if self.main else None
            if self.main:
                self.lock = open(os.path.join(self.cfg.run_dir, ".lock"), "a")  # held until the run ends
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.lock.truncate(0)
                self.lock.write(launched())
                self.lock.flush()
                write(os.path.join(self.cfg.run_dir, "config.yaml"), dump(replace(self.cfg, resume=False)))
        except BlockingIOError:
            fail(f"--run_dir {self.cfg.run_dir} is in use by another process; choose another folder")
        except OSError as e:
            fail(f"--run_dir {self.cfg.run_dir} cannot be written: {e}")
        if not self.checkpoint:
            return 0
        load_optimizer(optimizer, state["optimizer"])
        torch.set_rng_state(state["rng"])
        if critic is not None:
            lm.load_state(critic, state["critic"])
        for key, value in (memory or {}).items():
            value.copy_(state["memory"][key])
        self.best, self.best_step = state["best"], state.get("best_step")
        if self.main and state.get("best_step"):
            self.link_best(state["best_step"])  # a kill between writing a checkpoint and linking it would lose the link
        for name in ("log.jsonl", "samples.jsonl"):
            path = os.path.join(self.cfg.run_dir, name)
            if self.main and os.path.exists(path):
                with open(path, encoding="utf-8", errors="replace") as f:
                    lines = f.readlines()
                write(path, "".join(line for line in lines if (step_of(line) or math.inf) <= state["step"]))
        return state["step"]

    def log(self, step: int, metrics: dict, timing: dict, samples: list[dict]) -> None:
        """A line of log.jsonl, and lines of samples.jsonl."""
        if not self.main:
            return
        self.append("log.jsonl", [{"step": step, **metrics, **timing}])
        self.append("samples.jsonl", [{"step": step, **row} for row in samples])
        if self.writer:
            self.writer(step, metrics)

    def append(self, name: str, rows: list[dict]) -> None:
        with open(os.path.join(self.cfg.run_dir, name), "a", encoding="utf-8") as f:
            f.write(lines_of(rows))

    def improves(self, value: float | None) -> bool:
        """Is this the best evaluation so far? Called on every rank: all must agree on what to save."""
        better = value is not None and (self.best is None or value > self.best)
        self.best = value if better else self.best
        return better

    def save(self, step: int, policy, optimizer, better: bool, critic=None, memory: dict | None = None) -> None:
        """A checkpoint; called on every rank, because gathering shards is collective."""
        weights, state = lm.full_state(policy.model), optimizer_state(optimizer, self.main)
        values = None if critic is None else lm.full_state(critic) or critic.state_dict()
        self.best_step = step if better else self.best_step
        if not self.main:
            return
        name = f"step-{step:06d}"
        aside, final = os.path.join(self.folder, f".{name}"), os.path.join(self.folder, name)
        shutil.rmtree(aside, ignore_errors=True)
        try:
            lm.save(policy.model, policy.tokenizer, aside, weights)
            write(os.path.join(aside, "config.yaml"), dump(replace(self.cfg, resume=False)))
            torch.save({"optimizer": state, "step": step, "rng": torch.get_rng_state(), "best": self.best,
                        "best_step": self.best_step, "critic": values, "memory": memory or {}},
                       os.path.join(aside, "trainer.pt"))  # fmt: skip
            for file in os.listdir(aside):
                sync(os.path.join(aside, file))
        except BaseException as e:
            shutil.rmtree(aside, ignore_errors=True)  # half a checkpoint is no use, and a full disk needs the room
            if isinstance(e, OSError) or "PytorchStreamWriter" in str(e) or "inline_container" in str(e):
                fail(f"cannot save step {step} in {self.folder} ({str(e).strip().splitlines()[0]}); make room, then go on "
                     f"from the last checkpoint with --resume")  # fmt: skip
            raise
        shutil.rmtree(final, ignore_errors=True)
        os.rename(aside, final)
        sync(self.folder)
        if better:
            self.link_best(step)
        best = os.path.realpath(os.path.join(self.folder, "best"))
        for old in self.steps()[: -self.cfg.keep]:
            path = os.path.join(self.folder, old)
            if os.path.realpath(path) != best and not os.path.islink(
                path
            ):  # what a link points at is not ours to delete
                shutil.rmtree(path)

    def restore(self, policy, reference, best: bool) -> None:
        """Put weights back that lie nearer to the reference (kl_fuse): of the best checkpoint, or of the start where there is
        none, or where that one is beyond the bound too."""
        folder = lm.checkpoint_of(self.cfg.run_dir) if best and self.steps() else ""
        if folder:
            lm.load_weights(policy.model, folder)
        else:
            state = lm.full_state(reference)
            lm.load_state(policy.model, reference.state_dict() if state is None else state)
        self.say(f"kl_fuse: blown three times in a row; weights of {folder or 'the start'} restored")

    def link_best(self, step: int) -> None:
        """Point checkpoints/best at the checkpoint of a step, if that is there."""
        name, link = f"step-{step:06d}", os.path.join(self.folder, ".best")
        if os.path.isdir(os.path.join(self.folder, name)):
            if os.path.lexists(link):
                os.remove(link)
            os.symlink(name, link)
            os.replace(link, os.path.join(self.folder, "best"))

    def close(self) -> None:
        if self.writer:
            self.writer(None, {})
        if self.main:
            self.lock.close()


def launched() -> str:
    """The torchrun that started this process: the same in a worker that it restarted, another for every other command."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', '')} {socket.gethostname()} {os.getppid()}"


def continued(cfg: Config) -> Config:
    """torchrun --max-restarts gives a restarted worker the same command: it goes on from the last checkpoint of the run that
    this torchrun began, or begins it again where there is none. Every other run in the folder stays refused (Run)."""
    if cfg.resume or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return cfg
    resume = [False]
    if not dist.is_initialized() or dist.get_rank() == 0:  # one rank decides: the others may be on another machine
        lock = os.path.join(cfg.run_dir, ".lock")
        ours = os.path.exists(lock) and open(lock, encoding="utf-8", errors="replace").read() == launched()
        folder = os.path.join(cfg.run_dir, "checkpoints")
        resume = [ours and any(n.startswith("step-") for n in os.listdir(folder))]
        for name in ("config.yaml", "log.jsonl", "samples.jsonl") if ours and not resume[0] else ():
            if os.path.exists(path := os.path.join(cfg.run_dir, name)):
                os.remove(path)
    if dist.is_initialized():
        dist.broadcast_object_list(resume)
    return replace(cfg, resume=resume[0])


def step_of(line: str) -> int | None:
    """The step of a log line; None for a damaged one (a crash may leave half a line)."""
    try:
        return json.loads(line)["step"] if line.endswith("\n") else None
    except (ValueError, KeyError, TypeError):
        return None


def sync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def optimizer_state(optimizer, keep: bool) -> dict:
    """The optimiser's state with whole tensors on the CPU, in the order of the parameters: the same on any number of
    ranks. All ranks gather; only those that keep it hold it."""
    state, whole = optimizer.state_dict(), {}
    for i, s in state["state"].items():
        whole[i] = dict(s)  # a copy: these are the optimiser's own dicts
        for k, v in s.items():
            if torch.is_tensor(v):
                v = v.full_tensor() if hasattr(v, "full_tensor") else v
                whole[i][k] = v.cpu() if keep else None
    return {**state, "state": whole}


def load_optimizer(optimizer, state: dict) -> None:
    """Inverse of optimizer_state: shards what the parameters shard."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, s in state["state"].items():
        p = parameters[i]
        for k, v in s.items():
            if isinstance(p, DTensor) and torch.is_tensor(v) and v.shape == p.shape:
                s[k] = distribute_tensor(v.to(p.device), p.device_mesh, p.placements)
    optimizer.load_state_dict(state)


def reporter(cfg: Config):
    """A function (step, metrics) that also sends them to TensorBoard or wandb; None: log.jsonl alone."""
    if cfg.report == "none":
        return None
    try:
        if cfg.report == "wandb":
            import wandb

            wandb.init(dir=cfg.run_dir, name=os.path.basename(os.path.normpath(cfg.run_dir)), config=asdict(cfg))
            return lambda step, metrics: wandb.log(metrics, step) if step else wandb.finish()
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        fail(f"--report {cfg.report} needs a package that is not installed: pip install {cfg.report}")
    board = SummaryWriter(cfg.run_dir)
    return lambda step, metrics: [board.add_scalar(k, v, step) for k, v in metrics.items()] if step else board.close()
