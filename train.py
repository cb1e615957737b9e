"""The loop: sample -> score -> advantages -> update -> log -> evaluate -> save.

    python train.py --config configs/demo.yaml --method sft --run_dir runs/sft
    python train.py --config configs/demo.yaml --method fgrpo --init runs/sft --run_dir runs/fgrpo
    torchrun --nproc_per_node 8 train.py --config configs/demo.yaml --method fgrpo --init runs/sft --run_dir runs/fgrpo
    python train.py --run_dir runs/fgrpo --resume

Read main() first: it is the whole system. A step's loss is about 0 at mu = 1 (the ratio is 1 and advantages sum to 0):
watch the reward, the gradient norm, and loss_pos / loss_neg (F24). Everything random is a pure function of (seed, step,
prompt, sample), so a resumed run equals an uninterrupted one. Left out: asynchronous rollouts, several reward models,
pipeline and tensor parallelism.
"""

import json
import os
import resource
import shutil
import signal
import sys
import time
from dataclasses import asdict, replace

import torch
import torch.distributed as dist
from tqdm import tqdm

import data
import model as lm
import rewards
from config import Config, dump, fail, parse
from eval import Policy, evaluate, lines_of, means, open_policy, write
from losses import UNITS, advantages, denominators, policy_loss, resolve, spread, unit_weights
from rollout import Rollout, demonstrations, rollout

WATCH = ("reward", "slate_recall", "rank_ndcg", "invalid", "loss", "entropy", "grad_norm")  # in the progress bar


def main(cfg: Config) -> dict[str, float]:
    """Run the experiment; returns the last evaluation on the valid split."""
    rank, world, device = launch()
    row, run = resolve(cfg), Run(cfg, rank)
    train, valid = data.load(cfg, "train"), data.load(cfg, "valid")
    policy = open_policy(replace(cfg, init=run.checkpoint or cfg.init), train.examples, device)
    examples, prompts, demos = usable(train, policy, cfg, row)
    held_out = data.fit(valid, policy.tokenizer, cfg)
    reference = lm.load(cfg, policy.tokenizer, device).requires_grad_(False) if cfg.beta else None
    if world > 1:
        policy.model = lm.shard(policy.model, policy.dtype)
        reference = reference and lm.shard(reference, policy.dtype)
    optimizer = torch.optim.AdamW(
        policy.model.parameters(), cfg.lr, (0.9, cfg.adam_beta2), weight_decay=cfg.weight_decay
    )
    start = run.open(optimizer)
    left_out = ", ".join(f"{n} left out: {why}" for why, n in train.dropped.items())
    run.say(f"{cfg.method} on {cfg.data}: {len(examples)} examples ({left_out or 'none left out'}), "
            f"{sum(p.numel() for p in policy.model.parameters()):,} parameters, {world} x {device.type}, steps {start}..{cfg.steps}")  # fmt: skip

    latest, stop = {}, Signals()
    bar = tqdm(
        range(start, cfg.steps), cfg.method, initial=start, total=cfg.steps, disable=rank > 0 or not sys.stderr.isatty()
    )
    for step in bar:
        began = time.perf_counter()
        batch = data.order(len(examples), cfg.seed, step, cfg.batch_size)[rank::world]
        picked = [examples[i] for i in batch]

        if row.source == "sample":
            roll = sample(policy, [prompts[i] for i in batch], cfg, keys=[(cfg.seed, step, i) for i in batch])
            scored = rewards.score(roll, picked, policy.pieces, cfg, row.unit)
        else:
            roll = demonstrations([prompts[i] for i in batch], [demos[i] for i in batch], device)
            scored = rewards.demonstrated(roll)
        sampled = time.perf_counter()

        adv = advantages(scored.reward, scored.valid, roll.group, row.baseline, row.scale, cfg.adv_eps, cfg.ddof)
        adv = unit_weights(adv, [1.0, *[cfg.lam] * (UNITS[row.unit] - 1)], cfg.credit)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(cfg, step)
        metrics = update(policy, reference, optimizer, roll, scored, adv, cfg, row, world)
        metrics |= describe(scored, adv, roll, world) | {"lr": learning_rate(cfg, step)}

        done, leaving = step + 1, agreed(stop.asked, world, device)
        if not leaving and (done == cfg.steps or (cfg.eval_every and done % cfg.eval_every == 0)):
            few = cfg.eval_examples or len(held_out[0])
            latest = means(evaluate(policy, held_out[0][:few], held_out[1][:few], cfg))
            metrics |= {f"valid/{k}": v for k, v in latest.items()}
        timing = {"seconds_sample": sampled - began, "seconds": time.perf_counter() - began, "memory_gb": peak_memory()}
        run.log(done, metrics, timing, picked, roll, scored)
        bar.set_postfix({k: f"{metrics[k]:.3f}" for k in WATCH if k in metrics}, refresh=False)
        better = run.improves(metrics.get(f"valid/{cfg.best_metric}"))
        if done == cfg.steps or leaving or better or (cfg.save_every and done % cfg.save_every == 0):
            run.save(done, policy, optimizer, better)
        if leaving:
            run.say(f"stopped after step {done}; to go on: python train.py --run_dir {cfg.run_dir} --resume")
            break
    stop.restore()
    run.close()
    return latest


# ---------------------------------------------------------------------------------------------------------------------
# Parts of a step


def sample(policy: Policy, prompts: list[list[int]], cfg: Config, keys: list[tuple]) -> Rollout:
    """group_size samples of every prompt, with the weights whole on this rank."""
    prefix = policy.tokenizer(cfg.prefix, add_special_tokens=False)["input_ids"] if cfg.prefix else []
    with lm.gathered(policy.model):
        return rollout(policy.model, prompts, cfg.group_size, policy.stop, max_new_tokens=cfg.max_new_tokens,
                       temperature=cfg.temperature, keys=keys, prefix=prefix, kv_tokens=cfg.kv_tokens, dtype=policy.dtype)  # fmt: skip


def micro_batches(roll: Rollout, budget: int, world: int) -> list[torch.Tensor]:
    """Rows of each forward: sorted by length, rows x longest <= budget tokens; every rank makes the same number."""
    prompt = torch.tensor([len(p) for p in roll.prompt_ids], device=roll.group.device)[roll.group]
    length = (prompt + roll.mask.sum(1)).tolist()
    out, now = [], []
    for i in sorted(range(len(length)), key=lambda i: -length[i]):
        if now and (len(now) + 1) * length[now[0]] > budget:
            out.append(now)
            now = []
        now.append(i)
    out.append(now)
    if world > 1:  # collectives inside a forward must meet: ranks with fewer get empty ones
        most = torch.tensor(len(out), device=roll.group.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        out += [[]] * (int(most) - len(out))
    return [torch.tensor(rows, dtype=torch.long, device=roll.group.device) for rows in out]


def update(policy, reference, optimizer, roll, scored, adv, cfg, row, world) -> dict[str, float]:
    """mu optimiser updates on one rollout; the loss of every token is divided by a count over the whole step."""

    def total(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        if world > 1:
            dist.all_reduce(x)
        return x

    unit_ids = scored.unit_ids * spread(scored.valid.long(), scored.unit_ids)  # unscorable units are not trained on
    kl_ids = unit_ids if cfg.kl_mask == "loss" else roll.mask.long()
    token_adv = spread(adv.float(), unit_ids)
    apart, units = row.unit == "phase", UNITS[row.unit]
    denom = denominators(unit_ids, row.aggregate, units, cfg.max_new_tokens, roll.group, apart, total)
    kl_denom = denominators((kl_ids > 0).long(), row.aggregate, 1, cfg.max_new_tokens, roll.group, False, total)
    tokens = float(total((unit_ids > 0).double().sum()))
    micro = micro_batches(roll, cfg.micro_tokens, world)

    def forward(model, rows, **kwargs):
        if not len(rows):  # an empty micro-batch still takes part in the collectives: one token, nothing trained
            one = roll.mask[:1, :1]
            logp, h = lm.completion_logp(model, roll.prompt_ids, roll.tokens[:1, :1], one, roll.group[:1])
            return logp[:0], h
        part = (roll.prompt_ids, roll.tokens[rows], roll.mask[rows], roll.group[rows])
        return lm.completion_logp(model, *part, cfg.temperature, policy.dtype, **kwargs)

    def constant(model) -> torch.Tensor:
        out = torch.zeros_like(roll.logp)
        with torch.no_grad():
            for rows in micro:
                out[rows] = forward(model, rows)[0]
        return out

    policy.model.train()
    logp_old = roll.logp
    if row.ratio != "none" and (
        cfg.old_logp == "recompute" or (cfg.old_logp == "auto" and cfg.mu > 1 and policy.dtype != torch.float32)
    ):
        logp_old = constant(policy.model)
    logp_ref = constant(reference) if reference is not None else None

    metrics: dict[str, float] = {}
    for epoch in range(cfg.mu):
        sums: dict[str, torch.Tensor] = {}
        for rows in micro:
            logp, entropy = forward(policy.model, rows, entropy=epoch == 0)
            loss, part = policy_loss(
                logp, logp_old[rows], token_adv[rows], unit_ids[rows], denom[rows], row, max(tokens, 1.0),
                None if logp_ref is None else logp_ref[rows], kl_ids[rows], kl_denom[rows], cfg.beta, cfg.kl, cfg.kl_ratio,
            )  # fmt: skip
            (loss * world).backward()  # FSDP averages over ranks, the denominators already count them all
            if epoch == 0 and len(rows):
                trained = unit_ids[rows] > 0
                part["entropy"] = torch.where(trained, entropy, 0).sum() / max(tokens, 1.0)
                if row.source == "sample":  # how far sampler and learner are apart, in nats (F07)
                    part["sampler_gap"] = torch.where(
                        roll.mask[rows], logp.detach() - roll.logp[rows], 0
                    ).abs().sum() / max(tokens, 1.0)
            for k, v in part.items():
                sums[k] = sums.get(k, 0) + v.detach().double()
        norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), cfg.grad_clip or float("inf"))
        norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        applied = tokens > 0 and torch.isfinite(torch.tensor(norm)).item()
        if applied:  # without a token to learn from, momentum alone would move the weights (F22)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # the last epoch's, where the ratio has left 1 (F25); entropy and sampler_gap are measured in the first
        metrics |= {k: float(total(v)) for k, v in sums.items()} | {"grad_norm": norm, "skipped": float(not applied)}
    return metrics


def learning_rate(cfg: Config, step: int) -> float:
    """Rate of a step: linear warmup, then the schedule, down to min_lr at the last step."""
    if step < cfg.warmup:
        return cfg.lr * (step + 1) / cfg.warmup
    done = (step - cfg.warmup) / max(1, cfg.steps - 1 - cfg.warmup)
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + torch.cos(torch.tensor(done * torch.pi)).item())}
    return cfg.min_lr + (cfg.lr - cfg.min_lr) * shape[cfg.schedule]


def describe(scored: rewards.Scored, adv: torch.Tensor, roll: Rollout, world: int) -> dict[str, float]:
    """Means over the step's samples of every part of the reward, and the share of units without a signal (F21)."""
    sums = {k: sum(v) for k, v in scored.parts.items()} | {"zero_adv": float((adv == 0).double().mean(1).sum())}
    sums |= {"rows": float(len(adv)), "row_steps": float(roll.row_steps), "sampled_tokens": float(roll.mask.sum())}
    if world > 1:
        x = torch.tensor(list(sums.values()), dtype=torch.float64, device=adv.device)
        dist.all_reduce(x)
        sums = dict(zip(sums, x.tolist()))
    rows, steps, tokens = sums.pop("rows"), sums.pop("row_steps"), sums.pop("sampled_tokens")
    return {k: v / rows for k, v in sums.items()} | {"wasted": 1 - tokens / steps if steps else 0.0}


def usable(train: data.Split, policy: Policy, cfg: Config, row) -> tuple[list, list, list]:
    """Examples, prompt ids and (for methods that learn from demonstrations) demonstration ids with the stop token."""
    examples, prompts = data.fit(train, policy.tokenizer, cfg)
    if row.source == "sample":
        return examples, prompts, []
    eos = [policy.tokenizer.eos_token_id]
    demos = [policy.tokenizer(e.demo, add_special_tokens=False)["input_ids"] + eos if e.demo else [] for e in examples]
    keep = [i for i, d in enumerate(demos) if 0 < len(d) <= cfg.max_new_tokens]
    if not keep:
        fail(
            f"--method {cfg.method}: no example of {cfg.data} has a demonstration of at most --max_new_tokens {cfg.max_new_tokens}"
        )
    if len(keep) < len(demos):
        train.dropped["no demonstration, or longer than --max_new_tokens"] = len(demos) - len(keep)
    return [examples[i] for i in keep], [prompts[i] for i in keep], [demos[i] for i in keep]


# ---------------------------------------------------------------------------------------------------------------------
# Processes and signals


def peak_memory() -> float:
    """Highest memory of this process so far in GB: of the GPU, or resident on a machine without one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def launch() -> tuple[int, int, torch.device]:
    """(rank, ranks, device); joins the process group under torchrun."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_RANK", 0))
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local)
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo")
    return int(os.environ.get("RANK", 0)), world, torch.device("cuda", local) if cuda else torch.device("cpu")


class Signals:
    """Ctrl-C and SIGTERM ask the loop to finish its step; a second Ctrl-C stops at once."""

    def __init__(self):
        self.asked = False
        self.before = {s: signal.signal(s, self.ask) for s in (signal.SIGINT, signal.SIGTERM)}

    def ask(self, number, frame):
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True
        print("\nfinishing this step, then saving (Ctrl-C again: stop at once)", file=sys.stderr)

    def restore(self) -> None:
        for s, handler in self.before.items():
            signal.signal(s, handler)


def agreed(asked: bool, world: int, device) -> bool:
    """True on all ranks if any was asked to stop."""
    if world == 1:
        return asked
    flag = torch.tensor(int(asked), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


# ---------------------------------------------------------------------------------------------------------------------
# The run folder


class Run:
    """RUN_DIR: config.yaml, log.jsonl (a line per step), samples.jsonl (some decoded rollouts), checkpoints/step-N.

    A checkpoint is a Hugging Face folder plus trainer.pt (optimiser, step, RNG, best metric) and config.yaml. It is
    written aside, synced and renamed, so a crash leaves the last one whole (F50); checkpoints/best points at the best.
    """

    MAY_CHANGE = ("config", "steps", "run_dir", "resume", "report", "data_dir", "init", "micro_tokens", "kv_tokens",
                  "eval_every", "save_every", "keep", "log_samples", "attention", "checkpointing", "split", "against",
                  "baseline")  # fmt: skip

    def __init__(self, cfg: Config, rank: int):
        self.cfg, self.main, self.best, self.checkpoint, self.step = cfg, rank == 0, None, "", 0
        self.folder = os.path.join(cfg.run_dir, "checkpoints")
        old = os.path.join(cfg.run_dir, "config.yaml")
        if cfg.resume:
            self.checkpoint = self.latest()
            self.compare(old)
        elif os.path.exists(old):
            fail(f"--run_dir {cfg.run_dir} holds a run already: continue it with --resume, or choose another folder")

    def say(self, text: str) -> None:
        if self.main:
            tqdm.write(text, file=sys.stderr)

    def steps(self) -> list[str]:
        return sorted(n for n in os.listdir(self.folder) if n.startswith("step-")) if os.path.isdir(self.folder) else []

    def latest(self) -> str:
        if not self.steps():
            fail(f"--resume: {self.cfg.run_dir} holds no checkpoint; start it anew in another --run_dir")
        return os.path.join(self.folder, self.steps()[-1])

    def compare(self, path: str) -> None:
        """A resumed run must be the same experiment."""
        was = parse(["--config", path])
        for key, value in asdict(was).items():
            if key not in self.MAY_CHANGE and getattr(self.cfg, key) != value:
                fail(
                    f"--resume: --{key} was {value!r} in {path} and is {getattr(self.cfg, key)!r} now; start a new run for that"
                )
        self.cfg.init = was.init

    def open(self, optimizer) -> int:
        """Claim the folder, now that everything is loaded: a start that failed before leaves no run behind. On resume
        load optimiser and step of the checkpoint and drop log lines behind it. Returns the first step to do."""
        if dist.is_initialized():
            dist.barrier()  # every rank has seen the folder free before the first one writes
        try:
            os.makedirs(self.folder, exist_ok=True)
            self.writer = reporter(self.cfg) if self.main else None
            if self.main:
                write(os.path.join(self.cfg.run_dir, "config.yaml"), dump(replace(self.cfg, resume=False)))
        except OSError as e:
            fail(f"--run_dir {self.cfg.run_dir} cannot be written: {e}")
        if not self.checkpoint:
            return 0
        state = torch.load(os.path.join(self.checkpoint, "trainer.pt"), map_location="cpu", weights_only=True)
        load_optimizer(optimizer, state["optimizer"])
        torch.set_rng_state(state["rng"])
        self.best = state["best"]
        for name in ("log.jsonl", "samples.jsonl"):
            path = os.path.join(self.cfg.run_dir, name)
            if self.main and os.path.exists(path):
                with open(path, encoding="utf-8") as f:
                    lines = [line for line in f if line.endswith("\n")]  # a crash may leave half a line
                write(path, "".join(line for line in lines if json.loads(line)["step"] <= state["step"]))
        return state["step"]

    def log(
        self, step: int, metrics: dict, timing: dict, examples: list, roll: Rollout, scored: rewards.Scored
    ) -> None:
        if not self.main:
            return
        self.append("log.jsonl", [{"step": step, **metrics, **timing}])
        shown = range(0, min(len(scored.texts), self.cfg.log_samples))
        self.append("samples.jsonl", [
            {"step": step, "id": examples[int(roll.group[b])].id, "text": scored.texts[b], "rewards": scored.reward[b].tolist(),
             **{k: v[b] for k, v in scored.parts.items()}} for b in shown])  # fmt: skip
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

    def save(self, step: int, policy: Policy, optimizer, better: bool) -> None:
        weights, state = lm.full_state(policy.model), optimizer_state(optimizer)  # collectives: on every rank
        if self.main:
            name = f"step-{step:06d}"
            aside, final = os.path.join(self.folder, f".{name}"), os.path.join(self.folder, name)
            shutil.rmtree(aside, ignore_errors=True)
            lm.save(policy.model, policy.tokenizer, aside, weights)
            write(os.path.join(aside, "config.yaml"), dump(replace(self.cfg, resume=False)))
            torch.save({"optimizer": state, "step": step, "rng": torch.get_rng_state(), "best": self.best},
                       os.path.join(aside, "trainer.pt"))  # fmt: skip
            for file in os.listdir(aside):
                sync(os.path.join(aside, file))
            shutil.rmtree(final, ignore_errors=True)
            os.rename(aside, final)
            sync(self.folder)
            if better:
                link = os.path.join(self.folder, ".best")
                if os.path.lexists(link):
                    os.remove(link)
                os.symlink(name, link)
                os.replace(link, os.path.join(self.folder, "best"))
            best = os.path.realpath(os.path.join(self.folder, "best"))
            for old in self.steps()[: -self.cfg.keep]:
                if os.path.join(os.path.realpath(self.folder), old) != best:
                    shutil.rmtree(os.path.join(self.folder, old))

    def close(self) -> None:
        if self.writer:
            self.writer(None, {})


def sync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def optimizer_state(optimizer) -> dict:
    """The optimiser's state with whole tensors on the CPU, in the order of the parameters: the same on any number of ranks."""
    state = optimizer.state_dict()
    whole = lambda v: (v.full_tensor() if hasattr(v, "full_tensor") else v).cpu()  # noqa: E731
    state["state"] = {
        i: {k: whole(v) if torch.is_tensor(v) else v for k, v in s.items()} for i, s in state["state"].items()
    }
    return state


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


if __name__ == "__main__":
    main(parse(world_size=int(os.environ.get("WORLD_SIZE", 1))))
