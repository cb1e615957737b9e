"""The loop: sample -> score -> advantages -> update -> log -> evaluate -> save.

    python train.py --config configs/demo.yaml --method sft --run_dir runs/sft
    python train.py --config configs/demo.yaml --method fgrpo --init runs/sft --run_dir runs/fgrpo
    torchrun --nproc_per_node 8 train.py --config configs/demo.yaml --method fgrpo --init runs/sft --run_dir runs/fgrpo
    python train.py --run_dir runs/fgrpo --resume

Read main() first: it is the whole system. At mu = 1 the ratio is 1 and a group's advantages sum to 0, so the loss is near
0 (exactly so for seq_mean): watch the reward, the gradient norm, and loss_pos / loss_neg (F24). Everything random is a
pure function of (seed, step, prompt, sample), so a resumed run equals an uninterrupted one. Left out: asynchronous
rollouts, several reward models, pipeline and tensor parallelism.
"""

import math
import os
import resource
import signal
import sys
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from tqdm import tqdm

import data
import model as lm
import rewards
from config import Config, fail, parse
from eval import Policy, evaluate, means, open_policy
from losses import Method, advantages, denominators, policy_loss, resolve, spread, unit_weights
from rollout import Rollout, demonstrations
from run import Run

WATCH = ("reward", "slate_recall", "rank_ndcg", "invalid", "loss", "entropy", "grad_norm")  # in the progress bar


def main(cfg: Config) -> dict[str, float]:
    """Run the experiment; returns the last evaluation on the valid split."""
    rank, world, device = launch()
    method, run = resolve(cfg), Run(cfg, rank)
    train, valid = data.load(cfg, "train"), data.load(cfg, "valid")
    policy = open_policy(replace(cfg, init=run.checkpoint or cfg.init), train, device)
    examples, prompts, demos = usable(train, policy, cfg, method)
    held_out = [x[: cfg.eval_examples or None] for x in data.fit(valid, policy.tokenizer, cfg)]
    if world > 1:
        policy.model = lm.shard(policy.model, policy.dtype)
    reference = lm.load(cfg, policy.tokenizer, device).requires_grad_(False) if cfg.beta else None
    if world > 1 and reference is not None:
        reference = lm.shard(reference, policy.dtype)
    optimizer = torch.optim.AdamW(policy.model.parameters(), cfg.lr, (0.9, cfg.adam_beta2), weight_decay=cfg.weight_decay)  # fmt: skip
    start = run.open(optimizer)
    run.say(f"{cfg.method} on {cfg.data}: {len(examples)} examples, left out: {dict(train.dropped) or 'none'}; "
            f"{sum(p.numel() for p in policy.model.parameters()):,} parameters on {world} x {device.type}; steps {start}..{cfg.steps}")  # fmt: skip
    bar = tqdm(total=cfg.steps, initial=start, desc=cfg.method, disable=rank > 0 or not sys.stderr.isatty())
    stop, latest = Signals(), {}

    for step in range(start, cfg.steps):
        began = time.perf_counter()
        batch = data.order(len(examples), cfg.seed, step, cfg.batch_size)[rank::world]
        picked, questions = [examples[i] for i in batch], [prompts[i] for i in batch]

        if method.source == "sample":
            keys = [(cfg.seed, step, i) for i in batch]
            roll = policy.rollout(questions, cfg.group_size, cfg.temperature, keys, cfg)
            scored = rewards.score(roll, picked, policy.pieces, cfg, method.unit)
        else:
            roll = demonstrations(questions, [demos[i] for i in batch], device)
            scored = rewards.demonstrated(roll)
        sampled = time.perf_counter()

        adv = advantages(scored.reward, scored.valid, roll.group, method.baseline, method.scale, cfg.adv_eps, cfg.ddof)
        adv = unit_weights(adv, method.weights(cfg.lam), cfg.credit)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(cfg, step)
        metrics = update(policy, reference, optimizer, roll, scored, adv, cfg, method)
        metrics |= describe(scored, adv, roll) | {"lr": learning_rate(cfg, step)}

        done, leaving = step + 1, bool(all_sum(torch.tensor(float(stop.asked), device=device)))
        due = lambda every, done=done: done == cfg.steps or (every > 0 and done % every == 0)  # noqa: E731
        if due(cfg.eval_every):
            latest = means(evaluate(policy, *held_out, cfg))
            metrics |= {f"valid/{k}": v for k, v in latest.items()}
        timing = {"seconds_sample": sampled - began, "seconds": time.perf_counter() - began, "memory_gb": peak_memory()}
        run.log(done, metrics, timing, picked, roll, scored)
        bar.set_postfix({k: f"{metrics[k]:.3f}" for k in WATCH if k in metrics}, refresh=False)
        bar.update()
        better = run.improves(metrics.get(f"valid/{cfg.best_metric}"))
        if due(cfg.save_every) or better or leaving:
            run.save(done, policy, optimizer, better)
        if leaving:
            run.say(f"stopped after step {done}; to go on: python train.py --run_dir {cfg.run_dir} --resume")
            break
    stop.restore()
    bar.close()
    run.close()
    return latest


# ---------------------------------------------------------------------------------------------------------------------
# Parts of a step


def all_sum(x: torch.Tensor, op=dist.ReduceOp.SUM) -> torch.Tensor:
    """x summed over ranks; itself where there is one."""
    if not dist.is_initialized():
        return x
    x = x.clone()
    dist.all_reduce(x, op)
    return x


def micro_batches(roll: Rollout, budget: int) -> list[torch.Tensor]:
    """Rows of each forward: sorted by length, rows x (longest prompt + longest completion) <= budget tokens, at least one
    row; every rank makes the same number."""
    prompt = [len(roll.prompt_ids[g]) for g in roll.group.tolist()]
    length = roll.mask.sum(1).tolist()
    out, now, p, n = [], [], 0, 0
    for i in sorted(range(len(length)), key=lambda i: -(prompt[i] + length[i])):
        if now and (len(now) + 1) * (max(p, prompt[i]) + max(n, length[i])) > budget:
            out.append(now)
            now, p, n = [], 0, 0
        now.append(i)
        p, n = max(p, prompt[i]), max(n, length[i])
    out.append(now)
    # collectives inside a forward must meet: ranks with fewer get empty ones
    most = int(all_sum(torch.tensor(len(out), device=roll.group.device), dist.ReduceOp.MAX))
    out += [[]] * (most - len(out))
    return [torch.tensor(rows, dtype=torch.long, device=roll.group.device) for rows in out]


def update(
    policy: Policy, reference, optimizer, roll: Rollout, scored: rewards.Scored, adv, cfg: Config, method: Method
):
    """mu optimiser updates on one rollout; the loss of every token is divided by a count over the whole step.

    adv (B,U) weighted advantages. -> metrics of the last pass (entropy and sampler_gap: of the first).
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    unit_ids = scored.unit_ids * spread(scored.valid.long(), scored.unit_ids)  # unscorable units are not trained on
    kl_ids = unit_ids if cfg.kl_mask == "loss" else roll.mask.long()
    token_adv = spread(adv.float(), unit_ids)
    length, aggregate = cfg.max_new_tokens, method.aggregate
    denom = denominators(unit_ids, aggregate, method.units, length, roll.group, method.apart, all_sum)
    kl_denom = denominators((kl_ids > 0).long(), aggregate, 1, length, roll.group, False, all_sum)
    tokens = float(all_sum((unit_ids > 0).double().sum()))
    sampled = float(all_sum(roll.mask.double().sum()))
    micro = micro_batches(roll, cfg.micro_tokens)

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
    if method.ratio != "none" and (
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
                logp, logp_old[rows], token_adv[rows], unit_ids[rows], denom[rows], method, max(tokens, 1.0),
                None if logp_ref is None else logp_ref[rows], kl_ids[rows], kl_denom[rows], cfg.beta, cfg.kl, cfg.kl_ratio,
            )  # fmt: skip
            (loss * world).backward()  # FSDP averages over ranks, the denominators already count them all
            if epoch == 0 and len(rows):
                trained = unit_ids[rows] > 0
                part["entropy"] = torch.where(trained, entropy, 0).sum() / max(tokens, 1.0)
                if method.source == "sample":  # how far sampler and learner are apart, in nats (F07)
                    part["sampler_gap"] = (
                        torch.where(roll.mask[rows], logp.detach() - roll.logp[rows], 0).abs().sum() / sampled
                    )
            for k, v in part.items():
                sums[k] = sums.get(k, 0) + v.detach().double()
        norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), cfg.grad_clip or float("inf"))
        norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        applied = 0 < norm < math.inf  # with nothing to learn from, momentum alone would move the weights (F21, F22)
        if applied:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # the last epoch's, where the ratio has left 1 (F25); entropy and sampler_gap are measured in the first
        metrics |= {k: float(all_sum(v)) for k, v in sums.items()} | {"grad_norm": norm, "skipped": float(not applied)}
    return metrics


def learning_rate(cfg: Config, step: int) -> float:
    """Rate of a step: linear warmup, then the schedule, down to min_lr behind the last step."""
    if step < cfg.warmup:
        return cfg.lr * (step + 1) / cfg.warmup
    done = (step - cfg.warmup) / max(1, cfg.steps - cfg.warmup)
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    return cfg.min_lr + (cfg.lr - cfg.min_lr) * shape[cfg.schedule]


def describe(scored: rewards.Scored, adv: torch.Tensor, roll: Rollout) -> dict[str, float]:
    """Means over the step's samples of every part of the reward, and the share of units without a signal (F21)."""
    sums = {k: sum(v) for k, v in scored.parts.items()} | {"zero_adv": float((adv == 0).double().mean(1).sum())}
    sums |= {"rows": float(len(adv)), "row_steps": float(roll.row_steps), "sampled_tokens": float(roll.mask.sum())}
    sums = dict(zip(sums, all_sum(torch.tensor(list(sums.values()), dtype=torch.float64, device=adv.device)).tolist()))
    rows, steps, tokens = sums.pop("rows"), sums.pop("row_steps"), sums.pop("sampled_tokens")
    return {k: v / rows for k, v in sums.items()} | {"wasted": 1 - tokens / steps if steps else 0.0}


def usable(train: data.Split, policy: Policy, cfg: Config, method: Method) -> tuple[list, list, list]:
    """Examples, prompt ids and (for methods that learn from demonstrations) demonstration ids with the stop token."""
    examples, prompts = data.fit(train, policy.tokenizer, cfg)
    demos: list[list[int]] = []
    if method.source == "demo":
        end = [policy.tokenizer.eos_token_id]
        ids = [
            policy.tokenizer(e.demo, add_special_tokens=False)["input_ids"] + end if e.demo else [] for e in examples
        ]
        keep = [i for i, d in enumerate(ids) if 0 < len(d) <= cfg.max_new_tokens]
        if len(keep) < len(ids):
            train.dropped["no demonstration, or longer than --max_new_tokens"] = len(ids) - len(keep)
        examples, prompts, demos = ([x[i] for i in keep] for x in (examples, prompts, ids))
    if len(examples) < cfg.batch_size:
        fail(f"--batch_size {cfg.batch_size}: {cfg.data} has {len(examples)} usable training examples "
             f"(left out: {dict(train.dropped) or 'none'}); lower it")  # fmt: skip
    return examples, prompts, demos


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


if __name__ == "__main__":
    try:
        main(parse(world_size=int(os.environ.get("WORLD_SIZE", 1))))
    except KeyboardInterrupt:  # before the loop, or the second one: the last checkpoint stands
        sys.exit(130)
