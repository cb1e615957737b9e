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
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from tqdm import tqdm

import data
import files
import model as lm
import optim
import passk
import plan
import rewards
from config import Config, fail, parse
from eval import Policy, evaluate, means, open_policy
from losses import (
    Credit,
    Look,
    Method,
    advantages,
    count_units,
    credit,
    denominators,
    group_sum,
    informative,
    kl_estimate,
    lambda_at,
    low_rate,
    numbered,
    policy_loss,
    resolve,
    spread,
    success_of,
    success_rate,
    tail_miss,
    truncated_weight,
    value_loss,
)  # fmt: skip
from model import environment, gather, launch, place
from rollout import Rollout, demonstrations, join, take
from run import Run, continued, fingerprint

WATCH = (
    "reward",
    "correct",
    "slate_recall",
    "rank_ndcg",
    "invalid",
    "loss",
    "entropy",
    "grad_norm",
)  # in the progress bar


def main(cfg: Config) -> dict[str, float]:
    """Run the experiment; returns the last evaluation on the valid split."""
    if cfg.deterministic:
        repeatable()
    rank, world, device = launch(cfg.rank_timeout)
    cfg = continued(cfg)
    method, run = resolve(cfg), Run(cfg, rank)
    train, valid = data.load(cfg, "train"), data.load(cfg, "valid")
    policy = open_policy(replace(cfg, init=run.checkpoint or cfg.init), train, device)
    task = usable(train, policy, cfg, method)
    held_out = [x[: cfg.eval_examples or None] for x in data.fit(valid, policy.tokenizer, cfg)]
    plain = lm.share_prefix(policy.model, cfg)
    reference = start_model(policy, cfg, device).requires_grad_(False) if cfg.beta or cfg.kl_fuse else None
    critic = lm.Critic(start_model(policy, cfg, device)) if method.baseline == "critic" else None
    if world > 1:
        policy.model, reference, critic = (m and lm.shard(m, policy.dtype) for m in (policy.model, reference, critic))
    optimizer = optimizer_for(policy.model, critic, cfg)
    memory = Memory(torch.full((len(task.examples),), math.nan))
    start = run.open(optimizer, critic, memory.state(), fingerprint(task.examples, task.prompts, task.demos))
    run.say(f"{cfg.method} on {cfg.data}: {len(task.examples)} examples, left out: {dict(train.dropped) or 'none'}; "
            f"{sum(p.numel() for p in policy.model.parameters()):,} parameters on {world} x {device.type}; steps {start}..{cfg.steps}")  # fmt: skip
    if plain:
        run.say(f"forwards of the update repeat the prompt for every sample: {plain}")
    bar = tqdm(total=cfg.steps, initial=start, desc=cfg.method, disable=rank > 0 or not sys.stderr.isatty())
    stop, latest, applied = Signals(), {}, 0

    for step in range(start, cfg.steps):
        began = time.perf_counter()
        batch = data.order(len(task.examples), cfg.seed, step, cfg.batch_size)[rank::world]
        batch, roll, scored = SOURCES[method.source](task, policy, batch, step, cfg, method)
        sampled = time.perf_counter()

        look = measure(policy, reference, critic, roll, cfg, method)
        ema = memory.gamma_of(batch, scored, roll, cfg)
        got = credit(
            scored, roll, look, method, cfg, unit_weights_at(cfg, method, step, scored, roll), ema, all_sum, all_gather
        )
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(cfg, step) * float(memory.rate) * group["factor"]
        due = lambda every, done=step + 1: done == cfg.steps or (every > 0 and done % every == 0)  # noqa: E731
        extra = diagnose(policy, roll, look, got, cfg, method) if cfg.diagnose_every and due(cfg.diagnose_every) else {}
        metrics = update(policy, critic, optimizer, roll, look, got, cfg, method, memory) | extra
        if metrics.get("fused") and int(memory.blown) % 3 == 0:
            run.restore(policy, reference, best=int(memory.blown) == 3)
        if metrics["bad"]:
            run.set_aside(step + 1, vars(roll) | vars(look) | vars(got) | {"metrics": metrics, "reward": scored.reward})
        metrics |= describe(scored, got, roll, cfg) | {
            "lr": optimizer.param_groups[0]["lr"],
            "padding": padding(roll, cfg, lm.packs(policy.model)),
        }

        done, applied = step + 1, applied + 1 - metrics["skipped"]
        if due(cfg.eval_every):
            latest = means(evaluate(policy, *held_out, cfg))
            if cfg.k:
                found = passk.counted(policy, *held_out, replace(cfg, keep_answers=False))
                latest |= {k: v for k, v in means(passk.rows_at(found, cfg.k)).items() if "@" in k}
            metrics |= {f"valid/{k}": v for k, v in latest.items()}
        timing = {"seconds_sample": sampled - began, "seconds": time.perf_counter() - began, "memory_gb": peak_memory()}
        run.log(done, metrics, timing, first_samples([task.examples[i].id for i in batch], roll, scored, cfg))
        bar.set_postfix({k: f"{metrics[k]:.3f}" for k in WATCH if k in metrics}, refresh=False)
        bar.update()
        leaving = bool(all_sum(torch.tensor(float(stop.asked), device=device)))
        better = run.improves(metrics.get(f"valid/{cfg.best_metric}"))
        if 0 < cfg.max_bad_steps <= int(memory.bad):
            run.give_up(done, int(memory.bad))
        # bad steps in a row must not push the good checkpoints out
        if better or leaving or (due(cfg.save_every) and (done == cfg.steps or not memory.bad)):
            run.save(done, policy, optimizer, better, critic, memory.state())
        if leaving:
            run.say(f"stopped after step {done}; to go on: python train.py --run_dir {cfg.run_dir} --resume")
            break
    if start < cfg.steps and not applied:
        run.say(
            f"warning: none of the steps from {start + 1} on changed the weights (skipped, reward and zero_adv in log.jsonl)"
        )
    stop.restore()
    bar.close()
    run.close()
    return latest


# ---------------------------------------------------------------------------------------------------------------------
# What a step trains on: (prompts, rollout, scores), one function per source


@dataclass
class Task:
    """Training examples with their prompt ids, demonstration ids (stop token included) where a method needs them, and how
    often training users took an item."""

    examples: Sequence
    prompts: Sequence[list[int]]
    demos: Sequence[list[int]]
    popularity: dict[str, int]


def sample(task: Task, policy: Policy, batch: list[int], keys: list[tuple], cfg: Config, method: Method):
    """group_size completions of every prompt, scored."""
    roll = policy.rollout([task.prompts[i] for i in batch], cfg.group_size, cfg.temperature, keys, cfg)
    picked = [task.examples[i] for i in batch]
    return roll, rewards.score(roll, picked, policy.pieces, cfg, method.unit, popularity=task.popularity)


def sampled(task: Task, policy: Policy, batch: list[int], step: int, cfg: Config, method: Method):
    """Rollouts of the policy. With refill (dynamic sampling), prompts whose samples all earn the same give way to others,
    at most refill times; what is left then stays, without a signal (F54). A replacement takes over the place in the batch
    (and so the rank) of the prompt that it replaces: which prompt goes where is a function of the whole batch."""
    rank, world = place()  # group g of a rank is prompt g * world + rank of the batch
    roll, scored = sample(task, policy, batch, [(cfg.seed, step, i) for i in batch], cfg, method)
    for attempt in range(1, cfg.refill + 1):
        rows = lively(scored, roll)
        index, n = numbered(roll.group)
        dull = (~rows).new_ones(n).scatter(0, index, ~rows).long()
        dull = all_gather(dull).view(world, n).T.flatten().nonzero()[:, 0].tolist()  # places in the batch of all ranks
        fresh = others(len(task.examples), step, attempt, cfg)[: len(dull)]  # with too few of them the rest stays
        if not fresh:
            break
        mine = {at // world: i for at, i in zip(dull, fresh) if at % world == rank}  # own group -> its new prompt
        if not mine:
            with lm.gathered(policy.model):  # other ranks draw, and gathering the weights is collective
                continue
        keys = [(cfg.seed, step, i, attempt) for i in mine.values()]
        new, new_scored = sample(task, policy, list(mine.values()), keys, cfg, method)
        live = [g for g in range(n) if g not in mine]
        keep = torch.isin(roll.group, torch.tensor(live, dtype=torch.long, device=roll.group.device))
        scored = rewards.concat(rewards.pick(scored, keep), new_scored)
        roll = join(take(roll, keep, live), new)
        at = live + list(mine)
        rows = torch.tensor(at, device=roll.group.device)[roll.group].argsort(stable=True)
        roll, scored = take(roll, rows, sorted(range(n), key=at.__getitem__)), rewards.pick(scored, rows)
        batch = [mine.get(g, i) for g, i in enumerate(batch)]
    return batch, roll, scored


def lively(scored: rewards.Scored, roll: Rollout) -> torch.Tensor:
    """Has the row's group a signal (B,)? The punishment of length is no signal: DAPO asks for right and wrong answers."""
    late = scored.reward.new_tensor(scored.parts["overlong"])[:, None]
    return informative((scored.reward - late).round(decimals=9), scored.valid, roll.group).any(1)


def others(n: int, step: int, attempt: int, cfg: Config) -> list[int]:
    """Prompts to put in the place of dull ones, for all ranks: an order of its own for every attempt, without those that the
    step, or an earlier attempt, has on any rank."""
    used = set(data.order(n, cfg.seed, step, cfg.batch_size))
    rest = [int(i) for i in np.random.default_rng([cfg.seed, step, 1]).permutation(n) if int(i) not in used]
    return rest[(attempt - 1) * cfg.batch_size : attempt * cfg.batch_size]  # as many as the batch has, if all are dull


def demonstrated(task: Task, policy: Policy, batch: list[int], step: int, cfg: Config, method: Method):
    """Demonstrations, one per prompt."""
    device = next(policy.model.parameters()).device
    roll = demonstrations([task.prompts[i] for i in batch], [[task.demos[i]] for i in batch], device)
    return batch, roll, rewards.demonstrated(roll, policy.pieces, cfg, method.unit)


def contrasted(task: Task, policy: Policy, batch: list[int], step: int, cfg: Config, method: Method):
    """Good and bad answers: made from gold and candidates, or the best and worst of group_size samples (pair_source)."""
    if cfg.pair_source == "model":
        batch, roll, scored = sampled(task, policy, batch, step, cfg, method)
        joint = torch.tensor(scored.parts["reward"], device=roll.group.device)
        return batch, roll, rewards.contrasted(roll, scored, joint, cfg.good_answers, cfg.bad_answers)
    device = next(policy.model.parameters()).device
    answers = [contrast_ids(policy, task.examples[i], cfg) for i in batch]
    roll = demonstrations([task.prompts[i] for i in batch], [good + bad for good, bad in answers], device)
    flags = [float(k < len(good)) for good, bad in answers for k in range(len(good) + len(bad))]
    scored = rewards.demonstrated(roll, policy.pieces, cfg)
    scored.reward = torch.tensor(flags, dtype=torch.float64, device=device)[:, None]
    return batch, roll, scored


SOURCES = {"sample": sampled, "demo": demonstrated, "pairs": contrasted}


# ---------------------------------------------------------------------------------------------------------------------
# Parts of a step


def all_sum(x: torch.Tensor, op=dist.ReduceOp.SUM) -> torch.Tensor:
    """x summed over ranks; itself where there is one."""
    if not dist.is_initialized():
        return x
    x = x.clone()
    dist.all_reduce(x, op)
    return x


def all_gather(x: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape on every rank, one behind the other; itself where there is one."""
    if not dist.is_initialized():
        return x
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def micro_batches(roll: Rollout, budget: int, packed: bool = False) -> list[torch.Tensor]:
    """Rows of each forward, of at most budget tokens (see padded, side_by_side), at least one row; every rank makes the
    same number."""
    out = (side_by_side if packed else padded)(roll, budget)
    # collectives inside a forward must meet: ranks with fewer get empty ones
    most = int(all_sum(torch.tensor(len(out), device=roll.group.device), dist.ReduceOp.MAX))
    out += [[]] * (most - len(out))
    return [torch.tensor(rows, dtype=torch.long, device=roll.group.device) for rows in out]


def padded(roll: Rollout, budget: int) -> list[list[int]]:
    """Rows sorted by length; a forward holds rows x (longest prompt + longest completion) tokens."""
    prompt = [len(roll.prompt_ids[g]) for g in roll.group.tolist()]
    length = roll.mask.sum(1).tolist()
    out, now, p, n = [], [], 0, 0
    for i in sorted(range(len(length)), key=lambda i: -(prompt[i] + length[i])):
        if now and (len(now) + 1) * (max(p, prompt[i]) + max(n, length[i])) > budget:
            out.append(now)
            now, p, n = [], 0, 0
        now.append(i)
        p, n = max(p, prompt[i]), max(n, length[i])
    return [*out, now]


def side_by_side(roll: Rollout, budget: int) -> list[list[int]]:
    """Rows of a prompt together, longest prompts first; a forward holds each of its prompts once, and no padding. A group is
    split only where it exceeds a whole forward."""
    length, rows_of = roll.mask.sum(1).tolist(), {}
    for i, g in enumerate(roll.group.tolist()):
        rows_of.setdefault(g, []).append(i)
    out, now, used = [], [], 0
    for g in sorted(rows_of, key=lambda g: (-len(roll.prompt_ids[g]), g)):
        prompt = len(roll.prompt_ids[g])
        if now and used + prompt + sum(length[i] for i in rows_of[g]) > budget:
            out.append(now)
            now, used = [], 0
        used += prompt
        for k, i in enumerate(sorted(rows_of[g], key=lambda i: -length[i])):
            if k and used + length[i] > budget:
                out.append(now)
                now, used = [], prompt
            now.append(i)
            used += length[i]
    return [*out, now]


def padding(roll: Rollout, cfg: Config, packed: bool) -> float:
    """Share of the tokens in forwards of the update that are padding."""
    device, real, held = roll.group.device, 0, 0
    for rows in () if packed else (torch.tensor(r, device=device) for r in padded(roll, cfg.micro_tokens)):
        prompt, length = [len(roll.prompt_ids[g]) for g in roll.group[rows].tolist()], roll.mask[rows].sum(1)
        real += sum(prompt) + int(length.sum())
        held += len(rows) * (max(prompt) + int(length.max()))
    real, held = all_sum(torch.tensor([real, held], device=device)).tolist()
    return 1 - real / held if held else 0.0


def forward(model, roll: Rollout, rows: torch.Tensor, function, loss_fn=None, **kwargs):
    """function (log-probs, values, or the sum of loss_fn) of some rows; loss_fn gets them as rows of the rollout. An empty
    micro-batch still takes part in the collectives of a sharded model: one token goes through, nothing comes back."""
    n, some = len(rows), rows if len(rows) else roll.group.new_zeros(1)
    if loss_fn is not None:
        kwargs["loss_fn"] = lambda at, logp, h: loss_fn(some[at][:n], logp[:n], None if h is None else h[:n])
    mask = roll.mask[some] if n else roll.mask[:1, :1]
    out = function(model, roll.prompt_ids, roll.tokens[some][:, : mask.shape[1]], mask, roll.group[some], **kwargs)
    return out if loss_fn is not None else out[:n]


def measure(policy: Policy, reference, critic, roll: Rollout, cfg: Config, method: Method) -> Look:
    """Old and reference log-probs and values of a rollout, without gradient. The sampler's log-probs are the old ones where
    that is exact enough (old_logp) and where there was a sampler; else those of the first pass of the update, unless
    something needs them before it."""
    micro = micro_batches(roll, cfg.micro_tokens, lm.packs(policy.model))

    def constant(model, function, **kwargs) -> torch.Tensor:
        out = torch.zeros_like(roll.logp)
        with torch.no_grad():
            for rows in micro:
                out[rows] = forward(model, roll, rows, function, dtype=policy.dtype, **kwargs)
        return out

    policy.model.train()
    recompute = cfg.old_logp == "recompute" or cfg.tis > 0 or (
        cfg.old_logp == "auto" and cfg.mu > 1 and policy.dtype != torch.float32)  # fmt: skip
    look = Look(roll.logp)
    if method.source == "pairs" or (method.ratio != "none" and recompute):
        early = method.source == "pairs" or cfg.tis or cfg.smoothing or cfg.kl_in == "reward"
        look.logp_old = constant(policy.model, lm.constant_logp, temperature=cfg.temperature) if early else None
    if reference is not None:
        look.logp_ref = constant(reference, lm.constant_logp, temperature=cfg.temperature)
    if critic is not None:
        look.values = constant(critic, lm.completion_values)
    return look


def update(
    policy: Policy, critic, optimizer, roll: Rollout, look: Look, got: Credit, cfg: Config, method: Method, memory
) -> dict[str, float]:
    """mu optimiser updates on one rollout; the loss of every token is divided by a count over the whole step.

    -> metrics of the last pass (entropy and sampler_gap: of the first). An update without a gradient or with one that is not
    finite (bad) is skipped, and one whose KL to the reference is beyond kl_fuse.
    """
    _, world = place()
    unit_ids, units, length = got.unit_ids, count_units(method, cfg), cfg.max_new_tokens
    kl_ids = unit_ids if cfg.kl_mask == "loss" else roll.mask.long()

    def divisor(ids, aggregate, units=1, apart=False):
        return denominators(ids, aggregate, units, length, roll.group, apart, all_sum)

    denom = divisor(unit_ids, method.aggregate, units, method.apart)
    kl_denom = divisor((kl_ids > 0).long(), method.aggregate)
    each = divisor((unit_ids > 0).long(), "token_mean")
    share = divisor((unit_ids > 0).long(), "seq_mean") if method.ratio.startswith("sequence") else each
    weight = truncated_weight(look.logp_old, roll.logp, cfg.tis) if cfg.tis else None
    beta = cfg.beta if cfg.kl_in == "loss" and method.source == "sample" else 0.0
    logp_ref = look.logp_ref if method.source == "sample" else None
    drawn = float(all_sum(roll.mask.double().sum()))
    micro = micro_batches(roll, cfg.micro_tokens, lm.packs(policy.model))
    parts = [p for p in (policy.model, critic) if p is not None]
    logp_old = torch.zeros_like(roll.logp) if look.logp_old is None else look.logp_old

    def loss_of(rows, logp, entropy, sums: dict[str, torch.Tensor], first: bool) -> torch.Tensor:
        """Loss of some rows; what to log of them is added to sums."""
        if first and look.logp_old is None:  # nothing has moved yet: these are the old policy's
            logp_old[rows] = logp.detach()
        loss, part = policy_loss(
            logp, logp_old[rows], got.token_adv[rows], unit_ids[rows], denom[rows], method, share[rows],
            None if logp_ref is None else logp_ref[rows], kl_ids[rows], kl_denom[rows], beta, cfg.kl, cfg.kl_ratio,
            cfg.dual_clip, None if weight is None else weight[rows], entropy, cfg.entropy,
        )  # fmt: skip
        if first and len(rows):
            trained = unit_ids[rows] > 0
            part["entropy"] = (torch.where(trained, entropy.detach(), 0) / each[rows]).sum()
            if logp_ref is not None:
                k3 = kl_estimate(logp.detach(), logp_ref[rows], "k3")
                part["kl_token"] = (torch.where(trained, k3, 0) / each[rows]).sum()
            if method.source == "sample":  # how far sampler and learner are apart, in nats (F07)
                gap = torch.where(roll.mask[rows], logp.detach() - roll.logp[rows], 0)
                part["sampler_gap"] = gap.abs().sum() / drawn
        add(sums, part)
        return loss * world  # FSDP averages over ranks, the denominators already count them all

    metrics: dict[str, float] = {}
    blown = False
    for epoch in range(cfg.mu):
        sums: dict[str, torch.Tensor] = {}
        for rows in micro:
            forward(policy.model, roll, rows, lm.completion_loss, partial(loss_of, sums=sums, first=epoch == 0),
                    temperature=cfg.temperature, dtype=policy.dtype, entropy="grad" if cfg.entropy else epoch == 0,
                    ).backward()  # fmt: skip
            if critic is not None:
                values = forward(critic, roll, rows, lm.completion_values, dtype=policy.dtype)
                error = value_loss(
                    values, look.values[rows], got.returns[rows], unit_ids[rows], each[rows], cfg.value_clip
                )
                (cfg.value_coef * error * world).backward()
                add(sums, {"value_loss": error})
        found = {k: float(all_sum(v)) for k, v in sums.items()}
        blown = memory.fuse(found.get("kl_token", 0.0), cfg) if epoch == 0 else blown
        norms = []
        for part in parts:
            norm = torch.nn.utils.clip_grad_norm_(part.parameters(), cfg.grad_clip or math.inf)
            norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        found |= dict(zip(("grad_norm", "grad_norm_critic"), norms))
        # sums over all ranks, so all ranks see the same
        bad = not all(map(math.isfinite, (*norms, found["loss"], found.get("value_loss", 0.0))))
        for part, norm in zip(parts, norms):
            if blown or bad or not norm:  # without a gradient momentum alone would move the weights (F21, F22)
                part.zero_grad(set_to_none=True)
        applied = not (blown or bad) and any(norms)
        if applied:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # the last epoch's, where the ratio has left 1 (F25); entropy, KL per token and gaps are measured in the first
        metrics |= found | {"skipped": float(not applied), "bad": float(bad or metrics.get("bad", 0.0))}
        metrics |= {"fused": float(blown)} if cfg.kl_fuse else {}
    memory.bad.copy_(memory.bad + 1 if metrics["bad"] else torch.tensor(0))
    return metrics


def add(sums: dict[str, torch.Tensor], part: dict[str, torch.Tensor]) -> None:
    """Add to running sums, in double precision and without gradient."""
    for k, v in part.items():
        sums[k] = sums.get(k, 0) + v.detach().double()


def diagnose(policy: Policy, roll: Rollout, look: Look, got: Credit, cfg: Config, method: Method) -> dict[str, float]:
    """How the phases' gradients get along (no update). cosine: between the slate's gradient and the ranking's; cross: the
    part of a joint advantage's gradient that crosses phases, |cross| / (|own| + |cross|), where own is what F-GRPO keeps and
    cross what the other phases' advantages would add on a phase's tokens."""
    if method.unit != "phase":
        return {}
    ids, units = got.unit_ids, count_units(method, cfg)
    denom = denominators(ids, method.aggregate, units, cfg.max_new_tokens, roll.group, method.apart, all_sum)
    model = policy.model

    def gradient(token_adv: torch.Tensor) -> list[torch.Tensor]:
        def loss_of(rows, logp, _):
            old = logp.detach() if look.logp_old is None else look.logp_old[rows]
            return policy_loss(logp, old, token_adv[rows], ids[rows], denom[rows], method, 1.0)[0]

        for rows in micro_batches(roll, cfg.micro_tokens, lm.packs(model)):
            forward(model, roll, rows, lm.completion_loss, loss_of, temperature=cfg.temperature,
                    dtype=policy.dtype).backward()  # fmt: skip
        grads = [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        return [torch.zeros_like(p) if g is None else g for g, p in zip(grads, model.parameters())]

    def dot(a: list, b: list) -> float:
        total = sum((x * y).sum() for x, y in zip(a, b))
        return float(total.full_tensor() if hasattr(total, "full_tensor") else total)

    token_adv = spread(got.adv, ids).float()
    slate, ranking = (gradient(torch.where(ids == cfg.phases.index(p) + 1, token_adv, 0)) for p in ("slate", "rank"))
    own, cross = gradient(token_adv), gradient(spread(got.adv.sum(1, keepdim=True) - got.adv, ids).float())
    size = [math.sqrt(dot(g, g)) for g in (slate, ranking, own, cross)]
    return {"cosine": dot(slate, ranking) / max(1e-30, size[0] * size[1]),
            "cross": size[3] / max(1e-30, size[2] + size[3])}  # fmt: skip


@dataclass
class Memory:
    """What steps remember besides weights, saved with a checkpoint. success (examples,): running success rate of every
    prompt, nan before its first visit; rate: factor on the learning rate; blown: KL fuses blown in a row; bad: steps in a row
    whose loss or gradient was not finite."""

    success: torch.Tensor
    rate: torch.Tensor = field(default_factory=lambda: torch.tensor(1.0))
    blown: torch.Tensor = field(default_factory=lambda: torch.tensor(0))
    bad: torch.Tensor = field(default_factory=lambda: torch.tensor(0))

    def state(self) -> dict[str, torch.Tensor]:
        return {"success": self.success, "rate": self.rate, "blown": self.blown, "bad": self.bad}

    def fuse(self, kl: float, cfg: Config) -> bool:
        """Is the KL to the reference (nats per token) beyond kl_fuse? Then the learning rate is halved for good."""
        blown = 0 < cfg.kl_fuse < kl
        self.blown.copy_(self.blown + 1 if blown else torch.tensor(0))
        self.rate.mul_(0.5 if blown else 1.0)
        return blown

    def gamma_of(self, batch: list[int], scored: rewards.Scored, roll: Rollout, cfg: Config) -> torch.Tensor | None:
        """Running success rate of every row's prompt (B,), this step's included; None without focal_ema."""
        if not cfg.focal_ema:
            return None
        index = roll.group.cpu()
        units = count_units(resolve(cfg), cfg)  # without what follows a list
        rate = success_rate(success_of(scored), scored.valid, roll.group)[:, :units]
        now = rate.mean(1).float().cpu()
        seen = torch.tensor(batch)[index]
        was = self.success[seen]
        ema = torch.where(was.isnan(), now, cfg.focal_ema * was + (1 - cfg.focal_ema) * now)
        scorable = group_sum(scored.valid.double(), roll.group).sum(1).cpu() > 0
        ema = torch.where(scorable, ema, was.nan_to_num())
        # ranks see different prompts: sum what each has learnt, so that all hold, and save, the same
        new, hit = torch.zeros_like(self.success), torch.zeros_like(self.success)
        new[seen], hit[seen] = ema, 1.0
        device = roll.group.device
        new, hit = all_sum(new.to(device)).cpu(), all_sum(hit.to(device)).cpu()
        self.success.copy_(torch.where(hit > 0, new / hit.clamp(min=1), self.success))
        return ema.to(device)


def unit_weights_at(cfg: Config, method: Method, step: int, scored: rewards.Scored, roll: Rollout) -> list[float]:
    """Weights of the units at a step: --weights, or lambda (on its schedule) for the ranking and 1 for other phases."""
    units = scored.reward.shape[1]
    if cfg.weights or method.unit != "phase":
        return list(cfg.weights) or [1.0] * units
    later, remaining = cfg.phases.index("rank"), None
    if cfg.lam_schedule == "adaptive":
        adv = advantages(scored.reward, scored.valid, roll.group, "mean")
        count = all_sum(scored.valid.double().sum(0)).clamp(min=1)
        remaining = (all_sum((adv**2).sum(0)) / count).sqrt()[[cfg.phases.index("slate"), later]]
    lam = lambda_at(cfg.lam, cfg.lam_schedule, cfg.lam_end, step / max(1, cfg.steps - 1), remaining)
    return [lam if u == later else 1.0 for u in range(units)]


def start_model(policy: Policy, cfg: Config, device: torch.device):
    """The weights that training starts with, once more: for a reference, or for the body of a critic."""
    model = lm.load(cfg, policy.tokenizer, device)
    lm.share_prefix(model, cfg)
    return model


def optimizer_for(model, critic, cfg: Config) -> torch.optim.Optimizer:
    """AdamW over the policy and, in a group of its own, the critic; factor: of the learning rate."""
    groups = [{"params": list(model.parameters()), "factor": low_rate(cfg.low_lr_gamma)}]
    if critic is not None:
        groups.append({"params": list(critic.parameters()), "factor": cfg.critic_lr})
    how = {"lr": cfg.lr, "betas": (0.9, cfg.adam_beta2), "weight_decay": cfg.weight_decay}
    if cfg.optimizer_dtype == "bfloat16":
        return optim.AdamW(groups, seed=cfg.seed, **how)
    return torch.optim.AdamW(groups, fused=True, **how)


def learning_rate(cfg: Config, step: int) -> float:
    """Rate of a step: linear warmup, then the schedule, down to min_lr behind the last step."""
    if step < cfg.warmup:
        return cfg.lr * (step + 1) / cfg.warmup
    done = (step - cfg.warmup) / max(1, cfg.steps - cfg.warmup)
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    return cfg.min_lr + (cfg.lr - cfg.min_lr) * shape[cfg.schedule]


def describe(scored: rewards.Scored, got: Credit, roll: Rollout, cfg: Config) -> dict[str, float]:
    """Means over the step's samples of every part of the reward, the share of units without a signal (F21) and the chance
    that a group as hard as these misses a right answer ten times rarer than all right ones (tail_miss)."""
    n = group_sum(torch.ones_like(got.adv), roll.group)[:, 0].tolist()
    adv = got.adv[:, : count_units(resolve(cfg), cfg)]  # without what follows a list: it has no advantage of its own
    sums = {k: sum(v) for k, v in scored.parts.items()} | {"zero_adv": float((adv == 0).double().mean(1).sum())}
    if "overlong" in scored.parts:
        sums["dull"] = float((~lively(scored, roll)).sum())
    sums["tail_miss"] = sum(tail_miss(mu, 0.1 * mu, int(g)) for mu, g in zip(got.rate[:, 0].tolist(), n))
    sums |= {"rows": float(len(adv)), "row_steps": float(roll.row_steps), "sampled_tokens": float(roll.mask.sum())}
    sums = dict(zip(sums, all_sum(torch.tensor(list(sums.values()), dtype=torch.float64, device=adv.device)).tolist()))
    rows, steps, tokens = sums.pop("rows"), sums.pop("row_steps"), sums.pop("sampled_tokens")
    out = {k: v / rows for k, v in sums.items()} | {"wasted": 1 - tokens / steps if steps else 0.0}
    return out if got.preference is None else out | {"preference_loss": float(got.preference)}


def first_samples(ids: list[str], roll: Rollout, scored: rewards.Scored, cfg: Config) -> list[dict]:
    """Lines of samples.jsonl: the first log_samples samples of the step in the order of the batch, whichever ranks have
    them. ids: of the examples of this rank's groups. Nothing where nothing was sampled."""
    if not scored.texts or not cfg.log_samples:
        return []
    rank, world = place()
    rows = [
        (int(roll.group[b]) * world + rank,
         {"id": ids[int(roll.group[b])], "text": scored.texts[b], "rewards": scored.reward[b].tolist(),
          **{k: v[b] for k, v in scored.parts.items()}})
        for b in range(min(len(scored.texts), cfg.log_samples))
    ]  # fmt: skip
    rows = sorted((row for part in gather(rows) for row in part), key=lambda row: row[0])
    return [row for _, row in rows[: cfg.log_samples]]


def contrast_ids(policy: Policy, example, cfg: Config) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of the good and of the bad answers made for a request."""
    good, bad = data.contrast(cfg, example)
    return tuple([data.encode_answer(policy.tokenizer, text, cfg.tags) for text in texts] for texts in (good, bad))


def usable(train: data.Split, policy: Policy, cfg: Config, method: Method) -> Task:
    """Examples, prompt ids and (for methods that learn from demonstrations) demonstration ids with the stop token."""
    examples, prompts = data.fit(train, policy.tokenizer, cfg)
    demos: Sequence[list[int]] = []
    if method.source == "demo" and isinstance(examples, files.Lazy):  # each has one that fits
        demos = files.each(lambda e: data.encode_answer(policy.tokenizer, e.demo, cfg.tags), examples)
    elif method.source == "demo":
        ids = [data.encode_answer(policy.tokenizer, e.demo, cfg.tags) if e.demo else [] for e in examples]
        keep = [i for i, d in enumerate(ids) if 0 < len(d) <= cfg.max_new_tokens]
        if len(keep) < len(ids):
            train.dropped["no demonstration, or longer than --max_new_tokens"] = len(ids) - len(keep)
        examples, prompts, demos = ([x[i] for i in keep] for x in (examples, prompts, ids))
    elif method.source == "pairs" and cfg.pair_source == "data":
        longest = [max(len(ids) for some in contrast_ids(policy, e, cfg) for ids in some) for e in examples]
        keep = [i for i, n in enumerate(longest) if n <= cfg.max_new_tokens]
        if len(keep) < len(longest):
            train.dropped["good or bad answer longer than --max_new_tokens"] = len(longest) - len(keep)
        examples, prompts = ([x[i] for i in keep] for x in (examples, prompts))
    if len(examples) < cfg.batch_size:
        fail(f"--batch_size {cfg.batch_size}: {cfg.data} has {len(examples)} usable training examples "
             f"(left out: {dict(train.dropped) or 'none'}); lower it")  # fmt: skip
    return Task(examples, prompts, demos, train.popularity)


# ---------------------------------------------------------------------------------------------------------------------
# Processes and signals


def peak_memory() -> float:
    """Highest memory of this process so far in GB: of the GPU, or resident on a machine without one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def repeatable() -> None:
    """Deterministic GPU kernels where there are some; torch warns of an operation without one (docs/scale.md)."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first matrix product
    os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"  # read by transformers
    torch.use_deterministic_algorithms(True, warn_only=True)


@record  # for torchrun's report of the rank that failed first
def command() -> None:
    """The process. A rank that fails leaves with its traceback at once, and torchrun stops the others. A rank that only
    misses another one says so in a line, and late: so the first traceback, and torchrun's report, are of the fault."""
    try:
        world = environment()[1]
        cfg = parse(world_size=world)
        plan.show(cfg, world) if cfg.plan else main(cfg)
    except KeyboardInterrupt:  # before the loop, or the second one: the last checkpoint stands
        sys.exit(130)
    except RuntimeError as e:
        if not dist.is_initialized() or not (isinstance(e, dist.DistError) or "gloo" in str(e)):
            raise
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(2)
        print(f"train.py: rank {dist.get_rank()} leaves: another rank is gone, or late by more than --rank_timeout "
              f"({' '.join(str(e).split())[:200]}); the last checkpoint stands", file=sys.stderr)  # fmt: skip
        os._exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()


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
    command()
