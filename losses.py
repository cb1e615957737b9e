"""Every algorithm is one row of METHODS; this file has one of each mechanism, as pure functions of tensors.

    reward (B,U) -> advantages (B,U) -> spread over tokens (B,T) -> surrogate (B,T) -> sum of loss / denom

`unit_ids` (B,T) ties units to tokens: 0 = not trained (padding, delimiters, ...), u > 0 = unit u of its row. Every token
has its own divisor `denom` (B,T), counted once over the whole optimiser step (all micro-batches, all ranks), so a loss
is a plain sum and cannot depend on how the step was cut (F27-F31).
Left out: tokenizers, models, configuration parsing. Two rows side by side show in what two methods differ:

    python losses.py
"""

import math
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor


class Clip(NamedTuple):
    """The ratio is held inside [1 - low, 1 + high]; a clipped token has no gradient (PPO)."""

    low: float
    high: float


class Cap(NamedTuple):
    """The ratio is a constant weight on log pi, held inside [low, high]; every token keeps its gradient (CISPO)."""

    low: float
    high: float


@dataclass(frozen=True)
class Method:
    """Answers of one algorithm.

    source     what a step trains on: sample (rollouts of the model), demo (demonstrations, every advantage 1) or pairs
               (good and bad answers)
    unit       smallest thing with its own reward: sequence (R_joint, all tokens), phase (slate 1, ranking 2), rank (line k
               of a list) or token (what a critic expects from it)
    baseline   the reward is compared with: mean (of the group), loo (the other samples), critic (its values, GAE), pairs
               (the bad answers of the group, through implicit rewards), none
    scale      and divided by: none, std (of the group), batch_std (of the batch), whiten (mean and std of all tokens)
    ratio      importance ratio over: token, unit, sequence (geometric means), sequence_token (its value, with the gradient
               of the token alone), none (score function: -log-prob)
    clip       Clip(low, high), Cap(low, high), None: not clipped
    aggregate  tokens -> one number, a row of AGGREGATES; with unit = phase each phase has its own normaliser
    options    settings (fields of Config) that belong to the algorithm; a YAML file or a flag overrides them
    """

    source: str
    unit: str
    baseline: str
    scale: str
    ratio: str
    clip: Clip | Cap | None
    aggregate: str
    options: dict = field(default_factory=dict)

    @property
    def apart(self) -> bool:
        """Has each unit its own normaliser?"""
        return self.unit == "phase"


NARROW, WIDE = Clip(0.2, 0.2), Clip(0.2, 0.28)
METHODS = {
    # name                 source    unit        baseline  scale     ratio             clip      aggregate
    "sft":           Method("demo",   "sequence", "none",   "none",   "none",           None,     "token_mean"),
    "decoupled_sft": Method("demo",   "phase",    "none",   "none",   "none",           None,     "token_mean",
                            {"weights": [1.0, 0.0]}),
    "dpo":           Method("pairs",  "sequence", "pairs",  "none",   "none",           None,     "group_sum",
                            {"beta": 0.1, "good_answers": 1, "bad_answers": 1}),
    "s_dpo":         Method("pairs",  "sequence", "pairs",  "none",   "none",           None,     "group_sum",
                            {"beta": 0.1, "good_answers": 1, "bad_answers": 3}),
    "mult_dpo":      Method("pairs",  "sequence", "pairs",  "none",   "none",           None,     "group_sum",
                            {"beta": 0.1, "good_answers": 3, "bad_answers": 3}),
    "reinforce":     Method("sample", "sequence", "none",   "none",   "none",           None,     "seq_sum"),
    "rloo":          Method("sample", "sequence", "loo",    "none",   "none",           None,     "seq_sum"),
    "ppo":           Method("sample", "token",    "critic", "whiten", "token",          NARROW,   "token_mean"),
    "grpo":          Method("sample", "sequence", "mean",   "std",    "token",          NARROW,   "seq_mean"),
    "grpo_kl":       Method("sample", "sequence", "mean",   "std",    "token",          NARROW,   "seq_mean",
                            {"beta": 1e-3}),
    "grpo_h":        Method("sample", "sequence", "mean",   "std",    "token",          NARROW,   "seq_mean",
                            {"entropy": 1e-3}),
    "grpo_low_lr":   Method("sample", "sequence", "mean",   "std",    "token",          NARROW,   "seq_mean",
                            {"low_lr_gamma": 0.5}),
    "ds_grpo":       Method("sample", "sequence", "mean",   "std",    "token",          NARROW,   "seq_mean",
                            {"smoothing": 0.05}),
    "focal_grpo":    Method("sample", "sequence", "mean",   "std",    "token",          NARROW,   "seq_mean",
                            {"focal_gamma": 0.5}),
    "gfpo":          Method("sample", "sequence", "mean",   "std",    "token",          NARROW,   "token_mean",
                            {"keep_samples": 4}),
    "dr_grpo":       Method("sample", "sequence", "mean",   "none",   "token",          NARROW,   "const_len"),
    "fgrpo":         Method("sample", "phase",    "mean",   "none",   "token",          NARROW,   "const_len"),
    "dapo":          Method("sample", "sequence", "mean",   "std",    "token",          WIDE,     "token_mean",
                            {"refill": 3, "overlong": 0.2}),
    "focal_dapo":    Method("sample", "sequence", "mean",   "std",    "token",          WIDE,     "token_mean",
                            {"focal_gamma": 0.5}),
    "cispo":         Method("sample", "sequence", "mean",   "std",    "token",          Cap(0, 6), "token_mean"),
    "focal_cispo":   Method("sample", "sequence", "mean",   "std",    "token",          Cap(0, 6), "token_mean",
                            {"focal_gamma": 1.0}),
    "gspo":          Method("sample", "sequence", "mean",   "std",    "sequence",       Clip(3e-4, 4e-4), "seq_mean"),
    "gspo_token":    Method("sample", "sequence", "mean",   "std",    "sequence_token", Clip(3e-4, 4e-4), "seq_mean"),
    "rank_grpo":     Method("sample", "rank",     "mean",   "std",    "unit",           Clip(0.06, 0.08), "unit_mean",
                            {"draw": "row", "beta": 1e-3}),
    "remark":        Method("sample", "rank",     "mean",   "std",    "unit",           Clip(0.06, 0.08), "unit_mean",
                            {"draw": "request", "beta": 1e-3}),
}  # fmt: skip


def resolve(cfg) -> Method:
    """The row of cfg.method with the columns that the configuration overrides."""
    row = METHODS[cfg.method]
    clip = row.clip
    if isinstance(clip, Cap):
        clip = clip if cfg.cispo_cap < 0 else Cap(clip.low, cfg.cispo_cap)
    elif clip is not None or cfg.clip_low >= 0 or cfg.clip_high >= 0:
        low, high = clip or NARROW
        clip = Clip(low if cfg.clip_low < 0 else cfg.clip_low, high if cfg.clip_high < 0 else cfg.clip_high)
    return replace(row, scale=cfg.scale or row.scale, ratio=cfg.ratio or row.ratio, aggregate=cfg.aggregate or row.aggregate,
                   clip=clip)  # fmt: skip


def count_units(row: Method, cfg) -> int:
    """U, the number of units of a sample that carry a reward: 1, the phases, or the lines asked for."""
    return {"sequence": 1, "token": 1, "phase": len(cfg.tags) // 2, "rank": cfg.slate_size}[row.unit]


# ---------------------------------------------------------------------------------------------------------------------
# Rewards -> advantages


def numbered(group: Tensor) -> tuple[Tensor, int]:
    """Group ids -> (0, 1, ... in increasing order of id (B,), number of groups)."""
    _, index = group.unique(return_inverse=True)
    return index, int(index.max()) + 1 if len(index) else 0


def group_sum(x: Tensor, group: Tensor) -> Tensor:
    """(B,U) -> sum over the row's group, back on the rows."""
    index, n = numbered(group)
    return x.new_zeros(n, x.shape[1]).index_add(0, index, x)[index]


def informative(reward: Tensor, valid: Tensor, group: Tensor) -> Tensor:
    """Has the row's group two scorable members with different rewards? (B,U) bool. Groups without are no signal (F21), and
    dynamic sampling draws others in their place (DAPO, 2503.14476)."""
    index, n_groups = numbered(group)
    index = index[:, None].expand_as(reward)

    def extreme(fill: float, how: str) -> Tensor:
        out = reward.new_full((n_groups, reward.shape[1]), fill)
        return out.scatter_reduce(0, index, torch.where(valid, reward, fill), how).gather(0, index)

    # compared by their extremes: the mean of equal rewards may differ from them in the last bit
    return extreme(float("inf"), "amin") < extreme(float("-inf"), "amax")


def advantages(
    reward: Tensor, valid: Tensor, group: Tensor, baseline="mean", scale="none", eps=1e-4, ddof=1, total=lambda x: x
) -> Tensor:
    """Group-relative advantage of each unit, (B,U) -> (B,U); units are normalised apart.

    reward (B,U); valid (B,U) bool, False = cannot be scored; group (B,) int, rows of one prompt share it, in any order.
    mean: r - group mean. loo: r - mean of the others (RLOO, 2402.14740). none: r. std: divided by the group's standard
    deviation + eps (GRPO, 2402.03300); batch_std: by that of all rows (total sums over ranks); none: not divided (Dr.GRPO,
    2503.20783). Exactly 0: unscorable units, groups with fewer than 2 scorable members, groups of equal rewards (F21).
    """
    reward = torch.where(valid, reward, 0)
    if baseline == "none":
        return reward
    n = group_sum(valid.to(reward.dtype), group)
    gap = torch.where(valid, reward - group_sum(reward, group) / n.clamp(min=1), 0)
    adv = gap * n / (n - 1).clamp(min=1) if baseline == "loo" else gap
    if scale == "std":
        adv = adv / ((group_sum(gap**2, group) / (n - ddof).clamp(min=1)).sqrt() + eps)
    elif scale == "batch_std":
        count = total(valid.sum(0))
        centred = torch.where(valid, reward - total(reward.sum(0)) / count.clamp(min=1), 0)
        adv = adv / ((total((centred**2).sum(0)) / (count - ddof).clamp(min=1)).sqrt() + eps)
    return torch.where(valid & (n >= 2) & informative(reward, valid, group), adv, 0)


def preference(reward: Tensor, good: Tensor, valid: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Implicit rewards beta log(pi / ref) of good and bad answers -> (minus the derivative of the losses' sum by each (B,1),
    losses of the groups that have one).

    -log sigmoid(-log sum over the bad l of exp(r_l - r_w)), averaged over the good w of a group, then over groups. One good
    and one bad: DPO (2305.18290). One good, several bad: S-DPO (2406.09215). Several of both: set-level (Mult-DPO,
    2606.10078; its formula is not known to us, the average over the good is our reading). reward (B,1), differentiable
    through its copy here only; good (B,1) > 0. A group without a good or without a bad answer is no signal.
    """
    with torch.enable_grad():
        r = reward.detach().clone().requires_grad_()
        losses = []
        for g in group.unique():
            rows = (group == g) & valid[:, 0]
            w, bad = r[rows & (good[:, 0] > 0), 0], r[rows & (good[:, 0] <= 0), 0]
            if len(w) and len(bad):
                losses.append(torch.nn.functional.softplus(bad.logsumexp(0) - w).mean())
        losses = torch.stack(losses) if losses else r[:0, 0]
        return -torch.autograd.grad(losses.sum() + r.sum() * 0, r)[0], losses.detach()


def gae(
    reward: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, last: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (1506.02438): (B,T) -> advantages and returns (B,T), 0 where mask is 0.

    The tokens with mask 1 are one episode, whatever lies between them: delta = r + gamma V' - V, A = delta + gamma lam A'.
    last (B,): value behind the last token, 0 where the answer ended.
    """
    mask = mask > 0
    after = reward.new_zeros(len(reward)) if last is None else last.to(reward.dtype)  # value of the next token
    carry, adv = torch.zeros_like(after), torch.zeros_like(reward)
    for t in reversed(range(reward.shape[1])):
        now = reward[:, t] + gamma * after - values[:, t] + gamma * lam * carry
        adv[:, t] = torch.where(mask[:, t], now, 0)
        carry, after = torch.where(mask[:, t], now, carry), torch.where(mask[:, t], values[:, t], after)
    return adv, torch.where(mask, adv + values, 0)


def whiten(adv: Tensor, mask: Tensor, total=lambda x: x, eps=1e-8) -> Tensor:
    """Token advantages with mean 0 and standard deviation 1 over all trained tokens; 0 elsewhere."""
    mask = mask > 0
    n = total(mask.double().sum()).clamp(min=1)
    mean = total(torch.where(mask, adv, 0).sum()) / n
    var = total(torch.where(mask, (adv - mean) ** 2, 0).sum()) / n
    return torch.where(mask, (adv - mean) / (var + eps).sqrt(), 0)


def unit_weights(adv: Tensor, weights: list[float], credit: str = "own") -> Tensor:
    """Weight the units' advantages (B,U). own: weight u times A_u (F-GRPO: 1 and lambda).

    causal: a unit is credited with what follows it too, sum over v >= u of weight v times A_v. For phases this adds
    lambda A_rank to the slate tokens, which makes the on-policy gradient that of E[R_slate + lambda R_rank] again:
    E[A_rank grad log pi(slate)] is not 0, while the dropped A_slate grad log pi(rank) has mean 0.
    """
    adv = adv * adv.new_tensor(weights)
    return adv.flip(1).cumsum(1).flip(1) if credit == "causal" else adv


def success_of(scored) -> Tensor:
    """How far each unit succeeded, (B,U) in [0,1]: its reward over its largest one; a penalty is no success at all."""
    return (scored.reward / scored.reward.new_tensor(scored.high)).clamp(0, 1)


def success_rate(success: Tensor, valid: Tensor, group: Tensor) -> Tensor:
    """Mean success of the row's group, (B,U) in [0,1]; success: 0/1, or a reward divided by its largest value."""
    n = group_sum(valid.to(success.dtype), group).clamp(min=1)
    return (group_sum(torch.where(valid, success, 0), group) / n).clamp(0, 1)


def focal_weight(rate: Tensor, gamma: float | Tensor) -> Tensor:
    """(1 - success rate)^gamma, 0^0 = 1 (2602.06717 eq. 12): a prompt that is solved stops pushing its common answers."""
    return (1 - rate) ** gamma


def low_rate(gamma: float) -> float:
    """m_gamma: what the focal weight takes from the mean |advantage|; the low-learning-rate control multiplies by it."""
    return 4 / math.sqrt(math.pi) * math.gamma(gamma + 1.5) / math.gamma(gamma + 3)


def tail_miss(mu: float, tau: float, n: int) -> float:
    """Chance that a group of n has right and wrong answers, but none of a rare right set of mass tau (2602.06717 Lemma 3.1):
    (1-tau)^n - (mu-tau)^n - (1-mu)^n, right answers having mass mu >= tau. In logarithms, so that tiny masses count."""
    p = lambda x: math.expm1(n * math.log1p(-x)) if x < 1 else -1.0  # noqa: E731  (1 - x)^n - 1
    return max(0.0, p(tau) - p(1 - mu + tau) - p(mu) - 1)


def smooth(logp: Tensor, unit_ids: Tensor, right: Tensor, strength: float) -> Tensor:
    """Differential smoothing (2511.19942), (B,U), added to advantages: -strength x mean log pi of a right unit (rare right
    answers gain), +strength x mean log pi of a wrong one. right (B,U) bool."""
    mean = unit_sum(logp, unit_ids, right.shape[1]) / unit_sum(torch.ones_like(logp), unit_ids, right.shape[1]).clamp(
        min=1
    )
    return torch.where(right, -strength * mean, strength * mean)


def best_of(score: Tensor, group: Tensor, k: int | Tensor) -> Tensor:
    """The k rows of each group with the smallest score (GFPO, 2508.09726), (B,) bool; ties by place. k may be per row."""
    index, n = numbered(group)
    order = torch.argsort(score, stable=True)
    order = order[torch.argsort(index[order], stable=True)]  # by group, then score, then place
    start = torch.bincount(index, minlength=n).cumsum(0) - torch.bincount(index, minlength=n)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - start[index[order]]
    return rank < k


def by_difficulty(rate: Tensor, group: Tensor, counts: list[int], everywhere=lambda x: x) -> Tensor:
    """How many samples of a row's group to keep, (B,): counts[0] for the easiest share of the step's groups (by success
    rate (B,)), counts[-1] for the hardest; equally hard groups share a place. everywhere: gathers a number per group from all
    ranks. GFPO's adaptive variant, with the step's groups in place of a running sketch."""
    index, n = numbered(group)
    own = rate.new_zeros(n).index_copy(0, index, rate)
    every = everywhere(own)
    easier, equal = (every > own[:, None]).sum(1), (every == own[:, None]).sum(1)
    place = (2 * easier + equal - 1) * len(counts) // (2 * len(every))
    return torch.tensor(counts, device=rate.device)[place][index]


def length_control(
    adv: Tensor, unit_ids: Tensor, end: Tensor, lines: int, values: tuple[float, float, float]
) -> Tensor:
    """Rank-GRPO's control of a list's length on token advantages (B,T) (2510.20150, section 4): values = (end, early,
    overflow). Tokens of unit lines + 1, all that follows the list, get overflow; the stop token (end (B,T) bool) of a list of
    exactly `lines` lines gets end, of a shorter one early: it takes part in no line's advantage."""
    at_end, early, overflow = adv.new_tensor(values)
    over = unit_ids > lines
    emitted = unit_ids.amax(1, keepdim=True)
    stop = torch.where(emitted < lines, early, torch.where(over.any(1, keepdim=True), 0, at_end))
    return torch.where(over, overflow, torch.where(end, stop, adv))


def lambda_at(lam: float, kind: str, end: float, done: float, remaining: Tensor | None = None) -> float:
    """Weight of the ranking when a share `done` of the steps is over: constant, linear or cosine from lam to end.

    adaptive: lam times the ranking's remaining reward spread over the slate's (remaining (2,): slate, rank; root mean square
    of reward - group mean), within a factor of 4: a phase with nothing left to tell apart leaves the step to the other.
    """
    if kind == "adaptive":
        return lam * float((remaining[1] / remaining[0].clamp(min=1e-6)).clamp(0.25, 4))
    shape = {"constant": 0.0, "linear": done, "cosine": 0.5 * (1 - math.cos(math.pi * done))}[kind]
    return lam + (end - lam) * shape


def unit_sum(x: Tensor, unit_ids: Tensor, units: int) -> Tensor:
    """Sum over the tokens of each unit, (B,T) -> (B,units)."""
    return x.new_zeros(len(x), units + 1).scatter_add(1, unit_ids.clamp(max=units), torch.where(unit_ids > 0, x, 0))[
        :, 1:
    ]


def spread(per_unit: Tensor, unit_ids: Tensor) -> Tensor:
    """Put a number per unit (B,U) on the tokens of the units (B,T); 0 where unit_ids is 0."""
    return torch.where(unit_ids > 0, per_unit.gather(1, (unit_ids - 1).clamp(min=0)), 0)


@dataclass
class Look:
    """Constants of a step, (B,T): log-probs of its tokens under the weights it starts with and the reference, and the
    critic's values of the states before them; None where the method needs none. logp_old None: those of the step's one pass."""

    logp_old: Tensor | None
    logp_ref: Tensor | None = None
    values: Tensor | None = None


@dataclass
class Credit:
    """What a step trains on: advantages (B,T) on tokens, unit_ids (B,T) with what is left out set to 0, and for the log the
    weighted advantages (B,U) of units (before causal credit), success rates (B,U), returns (B,T) for a critic and the loss of preferences."""

    token_adv: Tensor
    unit_ids: Tensor
    adv: Tensor
    rate: Tensor
    returns: Tensor | None = None
    preference: Tensor | None = None


def credit(
    scored, roll, look: Look, row: Method, cfg, weights: list[float], ema: Tensor | None = None, total=lambda x: x,
    everywhere=lambda x: x,
) -> Credit:  # fmt: skip
    """Rewards (B,U) -> advantages on tokens, with everything the configuration puts on top of a row.

    scored, roll: Scored and Rollout of the step. weights: of the units. ema (B,): running success rates of the rows' prompts,
    for a gamma of each. Order: KL in the reward, sample filter, baseline and scale, smoothing, focal weight, unit weights,
    tokens, length control. The baseline is taken over the samples that the filter keeps (GFPO).
    """
    ids = scored.unit_ids * spread(scored.valid.long(), scored.unit_ids)  # unscorable units are not trained on
    reward, valid, group, units = scored.reward, scored.valid, roll.group, scored.reward.shape[1]
    success = success_of(scored)
    rate = success_rate(success, valid, group)
    kl = None
    if cfg.kl_in == "reward" and look.logp_ref is not None and row.baseline != "pairs":  # pairs: the reward is a label
        kl = torch.where(ids > 0, cfg.beta * kl_estimate(look.logp_old, look.logp_ref, cfg.kl), 0).to(reward.dtype)
        if row.unit != "token":
            reward = reward - unit_sum(kl, ids, units)
    if cfg.keep_samples or cfg.keep_by_difficulty:
        name = cfg.keep_by.removeprefix("-")
        score = torch.tensor(scored.parts[name], dtype=torch.float64, device=group.device)
        k = (
            by_difficulty(rate[:, 0], group, cfg.keep_by_difficulty, everywhere)
            if cfg.keep_by_difficulty
            else cfg.keep_samples
        )
        kept = best_of(-score if cfg.keep_by.startswith("-") else score, group, k)
        valid = valid & kept[:, None]
        if cfg.rejected == "drop":
            ids = ids * kept[:, None]
    gamma = cfg.focal_gamma if ema is None else 2 * cfg.focal_gamma * ema[:, None].to(reward.dtype)
    focal = focal_weight(rate, gamma) if cfg.focal_gamma else torch.ones_like(rate)
    out = Credit(ids.new_zeros(ids.shape, dtype=torch.float32), ids, reward, rate)
    if row.baseline == "critic":
        at_end = torch.zeros_like(ids).scatter(1, (roll.mask.sum(1, keepdim=True) - 1).clamp(min=0), 1)
        per_token = at_end * torch.where(valid, reward, 0) - (0 if kl is None else kl)
        adv, returns = gae(per_token, look.values.to(reward.dtype), ids, cfg.gae_gamma, cfg.gae_lam)
        out.returns = returns.float()
        adv = whiten(adv, ids, total) if row.scale == "whiten" else adv
        out.token_adv = (adv * spread(focal, ids)).float()
        out.adv = torch.where(valid, reward, 0)
        return out
    if row.baseline == "pairs":
        implicit = cfg.beta * unit_sum((look.logp_old - look.logp_ref).to(reward.dtype), ids, 1)
        adv, losses = preference(implicit, reward, valid, group)
        out.preference = total(losses.sum()) / total(torch.tensor(len(losses), device=losses.device)).clamp(min=1)
        adv = cfg.beta * adv
    else:
        adv = advantages(reward, valid, group, row.baseline, row.scale, cfg.adv_eps, cfg.ddof, total)
    if cfg.smoothing:
        extra = smooth(look.logp_old.to(adv.dtype), ids, success >= 0.5, cfg.smoothing)
        adv = torch.where(valid, adv + extra, adv)
    adv = adv * focal
    out.adv = unit_weights(adv, weights)
    out.token_adv = spread(unit_weights(adv, weights, cfg.credit), ids).float()
    if row.unit == "rank":
        last = roll.mask.sum(1, keepdim=True) - 1
        at = torch.arange(ids.shape[1], device=ids.device)
        end = (at == last) & roll.finished[:, None]
        control = (cfg.end_value, cfg.early_value, cfg.overflow_value)
        shaped = length_control(out.token_adv, ids, end, cfg.slate_size, control)
        out.token_adv = torch.where((ids > 0) & valid.any(1, keepdim=True), shaped, 0)  # not those a filter rejected
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Tokens -> one number


@dataclass
class Counts:
    """What a divisor may depend on; tensors are (B,T), of the token's row or unit; numbers are over the whole step."""

    rows: Tensor  # rows, empty ones included
    nonempty: Tensor  # rows with a trained token
    tokens: Tensor  # trained tokens of the step (of this token's unit, if units are normalised apart)
    row: Tensor  # trained tokens of this row (of this unit in it, if apart)
    unit: Tensor  # tokens of this token's unit in this row
    present: Tensor  # units that this row has
    group: Tensor  # trained tokens of this row's group (of this unit, if apart)
    groups: Tensor
    live: Tensor  # groups with a trained token
    units: int  # U
    length: float  # constant L


AGGREGATES: dict[str, Callable[[Counts], Tensor]] = {
    "token_mean": lambda c: c.tokens,  # DAPO: every token the same weight
    "seq_mean": lambda c: c.rows * c.row,  # GRPO: mean of a row, then of rows; an empty row counts
    "seq_mean_nonempty": lambda c: c.nonempty * c.row,
    "seq_sum": lambda c: c.rows,  # REINFORCE, RLOO: log-prob of the whole sequence
    "group_sum": lambda c: c.live,  # DPO: the same, averaged over prompts that have a pair
    "const_len": lambda c: c.rows * c.length,  # Dr.GRPO: a constant, never the padded width (F30)
    "unit_mean": lambda c: c.rows * c.units * c.unit,  # Rank-GRPO Eq. 6: absent units count as 0
    "unit_mean_present": lambda c: c.rows * c.present * c.unit,
    "group_token_mean": lambda c: c.groups * c.group,
}


def denominators(
    unit_ids: Tensor, aggregate: str, units: int, length: float, group: Tensor, apart=False, total=lambda x: x
) -> Tensor:
    """Divisor of every token, (B,T) float64: loss = sum of per-token loss / denom over trained tokens.

    unit_ids (B,T) of all rows this rank trains in the step; group (B,). apart: each unit has its own normaliser (the
    phases of F-GRPO). total: sums a tensor over ranks; groups never cross ranks. 1 where nothing is trained.
    Unit `units` + 1, what follows a list, has tokens like any other, but the divisor of unit_mean stays `units`.
    """
    mask = (unit_ids > 0).double()
    per_unit = mask.new_zeros(len(unit_ids), units + 2).scatter_add(1, unit_ids, mask)[:, 1:]  # (B,U+1)
    n_groups = numbered(group)[1]
    per_group = group_sum(per_unit, group)
    step = total(per_unit.sum(0)).expand_as(per_unit)

    def on_tokens(x: Tensor) -> Tensor:  # (B,U) -> (B,T)
        return spread(x if apart else x.sum(1, keepdim=True).expand_as(x), unit_ids)

    counts = Counts(
        rows=total(mask.new_tensor(len(unit_ids))),
        nonempty=total((per_unit.sum(1) > 0).double().sum()),
        tokens=on_tokens(step),
        row=on_tokens(per_unit),
        unit=spread(per_unit, unit_ids),
        present=(per_unit[:, :units] > 0).double().sum(1, keepdim=True),
        group=on_tokens(per_group),
        groups=total(mask.new_tensor(n_groups)),
        live=total(mask.new_tensor(len(group[per_unit.sum(1) > 0].unique()))),
        units=units,
        length=length,
    )
    return torch.where(unit_ids > 0, AGGREGATES[aggregate](counts), 1)


# ---------------------------------------------------------------------------------------------------------------------
# Surrogate and KL, per token


def log_ratio(logp: Tensor, logp_old: Tensor, unit_ids: Tensor, level: str) -> Tensor:
    """log of the importance ratio, (B,T): per token, or the mean over the tokens of a unit or of the row.

    Means, not sums: a sum over 500 tokens with a gap of 0.01 would be a ratio of 148 (F32). sequence_token: the value of
    the row's mean, the gradient of each token alone (GSPO-token, 2507.18071). Clamped at +-20 so that exp stays finite; no
    honest ratio comes near.
    """
    mask = unit_ids > 0
    gap = torch.where(mask, logp - logp_old, 0).clamp(-20, 20)
    if level == "token":
        return gap
    ids = unit_ids if level == "unit" else mask.long()
    sums = gap.new_zeros(len(ids), int(ids.max()) + 1 if ids.numel() else 1)
    count = sums.scatter_add(1, ids, mask.to(gap.dtype))
    mean = sums.scatter_add(1, ids, gap) / count.clamp(min=1)
    mean = torch.where(mask, mean.gather(1, ids), 0)
    return mean.detach() + gap - gap.detach() if level == "sequence_token" else mean


def surrogate(
    logp: Tensor, logp_old: Tensor, adv: Tensor, unit_ids: Tensor, ratio="token", clip: tuple | None = NARROW, dual=0.0
) -> tuple[Tensor, Tensor]:
    """Per-token loss and ratio, both (B,T); loss 0 and ratio 1 where unit_ids is 0, whatever stands there.

    -min(r A, clip(r, 1 - low, 1 + high) A) (PPO, 1707.06347); without a ratio -A log pi (REINFORCE). With a Cap
    -w A log pi, w = clip(r, low, high) a constant (CISPO, 2506.13585; bounds are absolute, F33). dual > 0: where A < 0 the
    objective is at least dual x A, so a sample the new policy likes far better cannot dominate (1912.09729).
    """
    mask = unit_ids > 0
    logp = torch.where(mask, logp, 0)  # before any arithmetic: nan * 0 is nan
    adv = torch.where(mask, adv, 0)
    if ratio == "none":
        return -adv * logp, torch.ones_like(logp)
    r = log_ratio(logp, torch.where(mask, logp_old, 0), unit_ids, ratio).exp()
    if isinstance(clip, Cap):
        return -r.detach().clamp(clip.low, clip.high) * adv * logp, r
    objective = r * adv
    if clip is not None:
        objective = torch.minimum(objective, r.clamp(1 - clip[0], 1 + clip[1]) * adv)
    if dual:
        objective = torch.where(adv < 0, torch.maximum(objective, dual * adv), objective)
    return -objective, r


def truncated_weight(logp_old: Tensor, logp_sampler: Tensor, cap: float) -> Tensor:
    """min(pi_old / pi_sampler, cap), (B,T) constant: corrects what a sampler of other precision draws differently (TIS)."""
    return (logp_old - logp_sampler).clamp(-20, 20).exp().clamp(max=cap).detach()


def value_loss(
    values: Tensor, values_old: Tensor, returns: Tensor, unit_ids: Tensor, denom: Tensor, clip: float
) -> Tensor:
    """Half the squared error of the critic, summed with denom; clip > 0: the larger of it and that of the value held within
    clip of the old one (PPO's value clipping)."""
    mask = unit_ids > 0
    values, values_old, returns = (torch.where(mask, x, 0) for x in (values, values_old, returns))
    error = (values - returns) ** 2
    if clip > 0:
        held = values_old + (values - values_old).clamp(-clip, clip)
        error = torch.maximum(error, (held - returns) ** 2)
    return (0.5 * error / denom).sum()


def kl_estimate(logp: Tensor, logp_ref: Tensor, kind: str) -> Tensor:
    """Estimate of KL(pi || ref) from a token drawn from pi, elementwise (Schulman 2020).

    k1 = log pi - log ref: unbiased value, zero expected gradient. k2 = k1^2 / 2: right expected gradient on policy.
    k3 = exp(-k1) + k1 - 1: unbiased, never negative; its plain gradient is that of the forward KL (F35).
    The log-ratio is clamped before exp: after it, the gradient would already be inf * 0 (F34).
    """
    d = (logp_ref - logp).clamp(-20, 20)
    return {"k1": -d, "k2": d**2 / 2, "k3": torch.expm1(d) - d}[kind]


def policy_loss(
    logp: Tensor, logp_old: Tensor, adv: Tensor, unit_ids: Tensor, denom: Tensor, row: Method, tokens: float | Tensor,
    logp_ref: Tensor | None = None, kl_ids: Tensor | None = None, kl_denom: Tensor | None = None,
    beta=0.0, kl="k3", kl_ratio=False, dual=0.0, weight: Tensor | None = None, entropy: Tensor | None = None, bonus=0.0,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Loss of one micro-batch and what to log of it; both are shares of the step and are summed by the caller.

    logp (B,T) with gradient; logp_old, logp_ref (B,T) constants; adv (B,T); denom, kl_denom from denominators(); tokens:
    divisor of the shares below, the step's trained tokens (or (B,T), so that each row counts once). With logp_ref:
    + beta * sum of KL / kl_denom where kl_ids > 0. weight (B,T): constant factor of the surrogate. bonus: minus bonus *
    sum of entropy / denom. clip_low / clip_high: share of tokens whose gradient the clip removed (a Cap: whose weight it
    held), by the sign of the advantage (F23); clip_dual: those the second bound removed.
    """
    mask = unit_ids > 0
    per_token, r = surrogate(logp, logp_old, adv, unit_ids, row.ratio, row.clip, dual)
    if weight is not None:
        per_token = per_token * torch.where(mask, weight, 0)
    loss = (per_token / denom).sum()
    with torch.no_grad():
        gap = torch.where(mask, r - 1, 0)
        low, high = row.clip or (math.inf, math.inf)
        if isinstance(row.clip, Cap):
            low, high = 1 - low, high - 1

        def share(x: Tensor) -> Tensor:
            return (torch.where(mask, x.double(), 0) / tokens).sum()

        metrics = {
            "loss_pos": (torch.where(adv > 0, per_token, 0) / denom).sum(),  # by sign: at mu = 1 they all but cancel (F24)
            "loss_neg": (torch.where(adv < 0, per_token, 0) / denom).sum(),
            "clip_low": share((adv < 0) & (gap < -low)),
            "clip_high": share((adv > 0) & (gap > high)),
            "ratio_gap": share(gap.abs()),
        }  # fmt: skip
        if dual:
            metrics["clip_dual"] = share((adv < 0) & (r > dual))
    if bonus:
        loss = loss - bonus * (torch.where(mask, entropy, 0) / denom).sum()
    if logp_ref is not None:
        kl_mask = kl_ids > 0
        logp = torch.where(kl_mask, logp, 0)
        k = kl_estimate(logp, torch.where(kl_mask, logp_ref, 0), kl)
        if kl_ratio:
            k = k * log_ratio(logp, torch.where(kl_mask, logp_old, 0), kl_ids, "token").exp()
        k = (torch.where(kl_mask, k, 0) / kl_denom).sum()
        metrics["kl"] = k.detach()
        loss = loss + beta * k if beta else loss
    metrics["loss"] = loss.detach()
    return loss, metrics


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # into head: no traceback
    names = [f.name for f in fields(Method)][:-1]
    shown = [["method", *names, "options"]]
    for name, row in METHODS.items():
        clip = f"{type(row.clip).__name__} {row.clip.low:g}, {row.clip.high:g}" if row.clip else "-"
        options = " ".join(f"{k}={v}" for k, v in row.options.items())
        shown.append([name, *(clip if n == "clip" else str(getattr(row, n)) for n in names), options])
    widths = [max(map(len, column)) + 2 for column in zip(*shown)]
    for line in shown:
        print("".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip())
