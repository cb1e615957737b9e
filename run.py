"""The run folder: what a training run writes, and how it goes on from there.

    RUN_DIR/config.yaml     the resolved configuration
    RUN_DIR/log.jsonl       a line per optimiser step
    RUN_DIR/samples.jsonl   some decoded rollouts of each step, with their rewards
    RUN_DIR/checkpoints/    step-N: a Hugging Face folder plus trainer.pt and config.yaml; best: a link to the best one
    RUN_DIR/bad/            step-N/rank-R.pt: batches whose loss or gradient was not finite, the last few

Left out: anything that knows of losses or rewards; train.py calls it.
"""

import contextlib
import fcntl
import json
import math
import os
import shutil
import socket
import sys
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

import model as lm
from config import Config, dump, fail, parse
from files import Lazy

FORMAT = 1  # of trainer.pt: to be raised with any change that older code would misread
KEYS = {"format": int, "step": int, "data": str, "files": dict, "optimizer": dict, "critic": dict | None, "memory": dict,
        "rng": torch.Tensor, "best": float | None, "best_step": int | None}  # of trainer.pt, and their types  # fmt: skip
SINCE_1 = {"format", "files", "data", "best_step"}  # what trainer.pt of format 0 lacks
ASIDE = 5  # batches kept in bad/
ON = "make room, then go on from the last checkpoint with --resume"


@contextlib.contextmanager
def replacing(path: str):
    """A name to write to, which becomes the file in the end: a reader sees the old one or the new one, never half (F50)."""
    try:
        yield path + ".tmp"
        os.replace(path + ".tmp", path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(path + ".tmp")  # half a file is no use, and a full disk needs the room
        raise


def write(path: str, text: str) -> None:
    """Write aside, sync, rename."""
    with replacing(path) as aside, open(aside, "w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())


@contextlib.contextmanager
def writing(what: str, advice="make room or choose another place"):
    """A disk that is full, read-only or gone ends in one line. safetensors and torch.save have errors of their own for it."""
    try:
        yield
    except Exception as e:
        if isinstance(e, OSError | SafetensorError) or "PytorchStreamWriter" in str(e) or "inline_container" in str(e):
            fail(f"cannot write {what} ({reason(e)}); {advice}")
        raise


def reason(e: Exception) -> str:
    """First line of an error's text, or its type where it has none."""
    return next((line.strip() for line in str(e).splitlines() if line.strip()), type(e).__name__)


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
    """One run's folder, on every rank; only rank 0 writes, but for what set_aside keeps.

    A checkpoint (weights, tokenizer, optimiser, step, RNG, best metric, configuration) is written aside, synced and
    renamed, so a crash leaves the last one whole (F50). Data position: the step, of which the order is a function.
    """

    MAY_CHANGE = ("config", "steps", "run_dir", "resume", "report", "data_dir", "init", "micro_tokens", "kv_tokens",
                  "attention", "checkpointing", "share_prefix", "eval_every", "save_every", "diagnose_every", "keep", "log_samples",
                  "max_bad_steps", "rank_timeout", "reward_workers", "reward_timeout", "max_reward_errors",
                  "plan", "plan_ranks", "plan_gb", "split", "against", "ranker", "baseline", "average", "rare",
                  "subsample", "keep_answers")  # fmt: skip

    def __init__(self, cfg: Config, rank: int):
        self.cfg, self.rank, self.main, self.checkpoint = cfg, rank, rank == 0, ""
        self.best, self.best_step = None, None  # highest best_metric so far, and the step it was measured at
        self.data = ""  # fingerprint of what is trained on
        self.folder = os.path.join(cfg.run_dir, "checkpoints")
        self.package = logger(cfg.report) if self.main else None
        old = os.path.join(cfg.run_dir, "config.yaml")
        if cfg.resume:
            self.checkpoint = self.latest()
            if self.checkpoint:
                self.read_state(mmap=True)  # a cut or newer one is refused before anything is loaded
                if not os.path.isfile(os.path.join(self.checkpoint, "config.yaml")):
                    self.damaged("config.yaml", "missing")
            self.compare(os.path.join(self.checkpoint or cfg.run_dir, "config.yaml"))
        elif os.path.exists(old) or self.steps():
            fail(f"--run_dir {cfg.run_dir} holds a run already: continue it with --resume, or choose another folder")

    def say(self, text: str) -> None:
        if self.main:
            tqdm.write(text, file=sys.stderr)

    def steps(self) -> list[str]:
        """Names of the checkpoints, oldest first."""
        return lm.steps_in(self.folder)

    def latest(self) -> str:
        """Folder of the last checkpoint. Empty: the run was killed before its first one, so it starts at step 0."""
        if self.steps():
            return os.path.join(self.folder, self.steps()[-1])
        path = os.path.join(self.cfg.run_dir, "log.jsonl")
        done = max((step_of(line) or 0 for line in read_lines(path)), default=0)
        if done > self.cfg.save_every > 0:  # there was one: its log is all that is left
            fail(f"--resume: {self.cfg.run_dir} holds no checkpoint, though {path} reaches step {done}; put them back, or "
                 f"start anew in another --run_dir")  # fmt: skip
        return ""

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

    def damaged(self, file: str, why: str):
        """Leave: the checkpoint to go on from was cut or edited."""
        advice = ("delete it to go on from the one before" if len(self.steps()) > 1 else
                  "there is no other, so start anew in another --run_dir")  # fmt: skip
        fail(f"--resume: {self.checkpoint} is damaged ({file}: {why}); {advice}")

    def read_state(self, mmap=False) -> dict:
        """trainer.pt of the checkpoint to go on from, checked, and the sizes of the files beside it. mmap: do not read the
        tensors."""
        try:
            state = torch.load(
                os.path.join(self.checkpoint, "trainer.pt"), map_location="cpu", weights_only=True, mmap=mmap
            )
        except Exception as e:
            self.damaged("trainer.pt", reason(e))
        if not isinstance(state, dict) or not isinstance(state.get("format", 0), int):
            self.damaged("trainer.pt", "not written by this program")
        if state.get("format", 0) > FORMAT:
            fail(f"--resume: {self.checkpoint} was written by a newer version of this code (format {state['format']}, here "
                 f"{FORMAT}); go on with that version")  # fmt: skip
        missing = KEYS.keys() - state.keys() - (set() if state.get("format") else SINCE_1)
        if wrong := missing or state.keys() - KEYS.keys():
            self.damaged("trainer.pt", f"key {min(map(str, wrong))} is {'missing' if missing else 'unknown'}")
        if wrong := next((k for k, value in state.items() if not isinstance(value, KEYS[k])), ""):
            self.damaged("trainer.pt", f"key {wrong} is of type {type(state[wrong]).__name__}")
        if state["step"] != int(os.path.basename(self.checkpoint)[5:]):
            self.damaged("trainer.pt", f"it is of step {state['step']}")
        for name, size in state.get("files", {}).items():
            path = os.path.join(self.checkpoint, str(name))
            if not os.path.isfile(path) or os.path.getsize(path) != size:
                self.damaged(name, f"{os.path.getsize(path)} bytes, not {size}" if os.path.isfile(path) else "missing")
        for name in sorted(os.listdir(self.checkpoint)):
            if name.endswith(".safetensors"):
                try:
                    with safe_open(os.path.join(self.checkpoint, name), "pt"):
                        pass
                except Exception as e:
                    self.damaged(name, reason(e))
        if state["step"] > self.cfg.steps:
            fail(f"--resume: the run is at step {state['step']} already, beyond --steps {self.cfg.steps}")
        return state

    def open(self, optimizer, critic=None, memory: dict[str, torch.Tensor] | None = None, data="") -> int:
        """Claim the folder, now that everything is loaded: a start that failed before leaves no run behind. On resume
        load optimiser, critic, memory (in place) and step of the checkpoint and drop log lines behind it. data: fingerprint
        of the examples. Returns the first step to do."""
        self.data, start = data, 0
        if self.checkpoint:
            state = self.read_state()
            start = state["step"]
            if state.get("data", data) != data:
                fail(f"--resume: the training examples, or how they become tokens, are not those of {self.checkpoint}: "
                     f"{state['data']} then, {data} now; put the data back or start a new run")  # fmt: skip
            try:
                self.load(state, optimizer, critic, memory or {})
            except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as e:
                self.damaged("trainer.pt", f"{type(e).__name__}: {reason(e)}")
        best = os.path.join(self.folder, "best")
        if os.path.isdir(best) and not os.path.islink(best):
            fail(
                f"--run_dir {self.cfg.run_dir}: checkpoints/best is a folder, not a link (made by a copy?); rename or delete it"
            )
        if dist.is_initialized():
            dist.barrier()  # every rank has seen the folder free before the first one writes
        if self.main:
            with writing(f"--run_dir {self.cfg.run_dir}"):
                self.claim(start)
        return start

    def load(self, state: dict, optimizer, critic, memory: dict[str, torch.Tensor]) -> None:
        """Put a checkpoint's state where it belongs; raises where it does not fit."""
        load_optimizer(optimizer, state["optimizer"])
        torch.set_rng_state(state["rng"])
        if critic is not None:
            lm.load_state(critic, state["critic"])
        saved = {"bad": torch.tensor(0)} | state["memory"]  # format 0 had no count of bad steps
        for key, value in memory.items():
            if saved[key].shape != value.shape:
                raise ValueError(f"memory {key} has shape {list(saved[key].shape)}, not {list(value.shape)}")
            value.copy_(saved[key])
        self.best, self.best_step = state["best"], state.get("best_step")

    def claim(self, start: int) -> None:
        """Lock the folder, write config.yaml, and tidy what a kill left half done."""
        os.makedirs(self.folder, exist_ok=True)
        self.lock = open(os.path.join(self.cfg.run_dir, ".lock"), "a")  # held until the run ends
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.lock.truncate(0)
            self.lock.write(launched())
            self.lock.flush()
        except BlockingIOError:
            fail(f"--run_dir {self.cfg.run_dir} is in use by another process; choose another folder")
        self.writer = reporter(self.cfg, self.package)
        write(os.path.join(self.cfg.run_dir, "config.yaml"), dump(replace(self.cfg, resume=False)))
        for name in os.listdir(self.folder):
            if name.startswith(".step-"):
                shutil.rmtree(os.path.join(self.folder, name))
        if self.best_step:
            self.link_best(self.best_step)  # a kill between writing a checkpoint and linking it would lose the link
        if self.checkpoint:
            self.prune()
        for name in ("log.jsonl", "samples.jsonl"):
            path = os.path.join(self.cfg.run_dir, name)
            lines = read_lines(path)
            kept = [line for line in lines if (step_of(line) or math.inf) <= start]
            if kept != lines:
                write(path, "".join(kept))

    def log(self, step: int, metrics: dict, timing: dict, samples: list[dict]) -> None:
        """A line of log.jsonl, and lines of samples.jsonl."""
        if not self.main:
            return
        self.append("log.jsonl", [{"step": step, **metrics, **timing}])
        self.append("samples.jsonl", [{"step": step, **row} for row in samples])
        self.report(step, metrics)

    def report(self, step: int | None, metrics: dict) -> None:
        """Send metrics to the extra logger; one that fails is left out from then on: it is no reason to stop training."""
        try:
            if self.writer:
                self.writer(step, metrics)
        except Exception as e:
            self.writer = None
            self.say(f"warning: --report {self.cfg.report} failed ({reason(e)}); training goes on without it")

    def append(self, name: str, rows: list[dict]) -> None:
        path = os.path.join(self.cfg.run_dir, name)
        with writing(path, ON), open(path, "a", encoding="utf-8") as f:
            f.write(lines_of(rows))

    def set_aside(self, step: int, batch: dict) -> None:
        """Keep a batch whose loss or gradient was not finite, for inspection (torch.load): every rank its own share."""
        bad = os.path.join(self.cfg.run_dir, "bad")
        folder = os.path.join(bad, f"step-{step:06d}")
        path = os.path.join(folder, f"rank-{self.rank}.pt")
        self.say(f"step {step}: loss or gradient is not finite; no update was made, the batch is in {folder}")
        with writing(path, ON):
            os.makedirs(folder, exist_ok=True)
            with replacing(path) as aside:
                torch.save(batch, aside)
            for old in lm.steps_in(bad)[:-ASIDE] if self.main else []:
                shutil.rmtree(os.path.join(bad, old))

    def give_up(self, step: int, bad: int):
        """Leave after too many bad steps in a row; every rank comes here, one speaks."""
        self.close()
        last = f"the last checkpoint is {self.steps()[-1]}" if self.steps() else "there is no checkpoint yet"
        if self.main:
            fail(f"steps {step - bad + 1} to {step} had a loss or gradient that is not finite (--max_bad_steps); look at their "
                 f"batches in {os.path.join(self.cfg.run_dir, 'bad')} and at the steps before in log.jsonl; {last}. "
                 f"Often a lower --lr or --grad_clip helps, in a new run")  # fmt: skip
        sys.exit(2)

    def improves(self, value: float | None) -> bool:
        """Is this the best evaluation so far? Called on every rank: all must agree on what to save."""
        better = value is not None and (self.best is None or value > self.best)
        self.best = value if better else self.best
        return better

    def save(self, step: int, policy, optimizer, better: bool, critic=None, memory: dict | None = None) -> None:
        """A checkpoint; called on every rank, because gathering shards is collective."""
        weights, state = lm.full_state(policy.model), optimizer_state(optimizer, self.main)
        values = None if critic is None else lm.full_state(critic) or critic.state_dict()
        if not self.main:
            return
        whole = weights or policy.model.state_dict()
        if wrong := next((k for k, w in whole.items() if not w.isfinite().all()), None):
            self.say(f"warning: step {step} is not saved: {wrong} is not finite")
            return
        self.best_step = step if better else self.best_step
        name = f"step-{step:06d}"
        aside, final = os.path.join(self.folder, f".{name}"), os.path.join(self.folder, name)
        with writing(f"step {step} to {self.folder}", ON):
            for log in ("log.jsonl", "samples.jsonl"):
                if os.path.exists(path := os.path.join(self.cfg.run_dir, log)):
                    sync(path)  # a checkpoint must not outlive the lines before it
            shutil.rmtree(aside, ignore_errors=True)
            try:
                lm.save(policy.model, policy.tokenizer, aside, weights)
                files = {file: os.path.getsize(os.path.join(aside, file)) for file in sorted(os.listdir(aside))}
                write(os.path.join(aside, "config.yaml"), dump(replace(self.cfg, resume=False)))
                torch.save({"optimizer": state, "step": step, "rng": torch.get_rng_state(), "best": self.best,
                            "best_step": self.best_step, "critic": values, "memory": memory or {}, "format": FORMAT,
                            "files": files, "data": self.data}, os.path.join(aside, "trainer.pt"))  # fmt: skip
                for file in os.listdir(aside):
                    sync(os.path.join(aside, file))
            except BaseException:
                shutil.rmtree(aside, ignore_errors=True)  # half a checkpoint is no use, and a full disk needs the room
                raise
            shutil.rmtree(final, ignore_errors=True)
            os.rename(aside, final)
            sync(self.folder)
            if better:
                self.link_best(step)
            self.prune()

    def prune(self) -> None:
        """Delete all but the last checkpoints and the best. Renamed first: a kill halfway leaves no half checkpoint."""
        best = os.path.realpath(os.path.join(self.folder, "best"))
        for old in self.steps()[: -self.cfg.keep]:
            path, aside = os.path.join(self.folder, old), os.path.join(self.folder, f".{old}")
            # what a link points at is not ours to delete
            if os.path.realpath(path) != best and not os.path.islink(path):
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(path, aside)
                shutil.rmtree(aside)

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
        if self.main:
            self.report(None, {})
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
        resume = [ours and os.path.exists(os.path.join(cfg.run_dir, "config.yaml"))]
    if dist.is_initialized():
        dist.broadcast_object_list(resume)
    return replace(cfg, resume=resume[0])


def read_lines(path: str) -> list[str]:
    """Lines of a log; none where there is no file."""
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8", errors="replace") as f:
        return f.readlines()


def step_of(line: str) -> int | None:
    """The step of a log line; None for a damaged one (a crash may leave half a line, an editor anything)."""
    try:
        step = json.loads(line)["step"] if line.endswith("\n") else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) else None


def fingerprint(examples: Sequence, prompts: Sequence[list[int]], demos: Sequence[list[int]]) -> str:
    """Number and checksum of the usable examples, as token ids. The order of the data is a function of their number, so a run
    cannot go on with others, nor with another tokenizer. Left out: candidates, of which the prompt speaks. Of lazy examples a
    few speak for all."""
    crc, number = 0, len(examples)
    if isinstance(examples, Lazy):
        few = range(0, len(examples), max(1, len(examples) // 50))
        examples, prompts, demos = ([x[i] for i in few] if x else x for x in (examples, prompts, demos))
    for e in examples:
        sought = (e.id, e.check, e.answer) if e.check else (e.id, e.gold, e.responders)
        crc = zlib.crc32(repr(sought).encode("utf-8", "replace"), crc)
    for ids in (*prompts, *demos):
        crc = zlib.crc32(array("q", ids).tobytes(), crc)
    return f"{number} examples, checksum {crc:08x}"


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
    """Inverse of optimizer_state: shards what the parameters shard. Raises where the state is of other parameters."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    for i, s in state["state"].items():
        p = parameters[i]
        if missing := {"step", "exp_avg", "exp_avg_sq"} - s.keys():
            raise ValueError(f"optimizer: parameter {i} lacks {min(missing)}")
        for k, v in s.items():
            if v.shape not in (p.shape, ()):
                raise ValueError(f"optimizer: {k} of parameter {i} has shape {list(v.shape)}, not {list(p.shape)}")
            if isinstance(p, DTensor) and v.shape == p.shape:
                s[k] = distribute_tensor(v.to(p.device), p.device_mesh, p.placements)
    optimizer.load_state_dict(state)
    for group, mine in zip(optimizer.param_groups, settings):
        group.update(mine)  # they are the configuration's, whatever version of torch wrote the file


def logger(name: str):
    """The package behind --report; None: log.jsonl alone."""
    try:
        if name == "wandb":
            import wandb

            return wandb
        if name == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            return SummaryWriter
    except ImportError:
        fail(f"--report {name} needs a package that is not installed: pip install {name}")
    return None


def reporter(cfg: Config, package):
    """A function (step, metrics) that sends them to the package too; step None: the end."""
    if package is None:
        return None
    try:
        if cfg.report == "wandb":
            package.init(dir=cfg.run_dir, name=os.path.basename(os.path.normpath(cfg.run_dir)), config=asdict(cfg))
            return lambda step, metrics: package.log(metrics, step) if step else package.finish()
        board = package(cfg.run_dir)
    except Exception as e:
        fail(f"--report {cfg.report} cannot start: {reason(e)}")
    return lambda step, metrics: [board.add_scalar(k, v, step) for k, v in metrics.items()] if step else board.close()
