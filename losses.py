"""Every algorithm is one row of METHODS; this file has one of each mechanism, as pure functions of tensors.

    reward (B,U) -> advantages (B,U) -> spread over tokens (B,T) -> surrogate (B,T) -> sum of loss / denom

`unit_ids` (B,T) ties units to tokens: 0 = not trained (padding, delimiters, ...), u > 0 = unit u of its row. Every token
has its own divisor `denom` (B,T), counted once over the whole optimiser step (all micro-batches, all ranks), so a loss
is a plain sum and cannot depend on how the step was cut (F27-F31).
Left out: tokenizers, models, configuration parsing. Two rows side by side show in what two methods differ:

    python losses.py
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

UNITS = {"sequence": 1, "phase": 2}  # how many units a sample has


@dataclass(frozen=True)
class Method:
    """Answers of one algorithm.

    source     what a step trains on: sample (rollouts of the model) or demo (demonstrations, every token's advantage 1)
    unit       smallest thing with its own reward: sequence (R_joint, all tokens) or phase (slate 1, rank 2)
    baseline   the reward is compared with: mean (of the group), loo (the other samples), none
    scale      and divided by: none, std (of the group), batch_std (of the batch)
    ratio      importance ratio over: token, unit, sequence (geometric means), none (score function: -log-prob)
    clip       (low, high): the ratio is held inside [1 - low, 1 + high]; None: not clipped
    aggregate  tokens -> one number, a row of AGGREGATES; with unit = phase each phase has its own normaliser
    """

    source: str
    unit: str
    baseline: str
    scale: str
    ratio: str
    clip: tuple[float, float] | None
    aggregate: str

    @property
    def units(self) -> int:
        """U, the number of units of a sample."""
        return UNITS[self.unit]

    def weights(self, lam: float) -> list[float]:
        """Weight of each unit: 1 for the first, lambda for those after it."""
        return [1.0] + [lam] * (self.units - 1)

    @property
    def apart(self) -> bool:
        """Has each unit its own normaliser?"""
        return self.unit == "phase"


METHODS = {
    # name              source    unit        baseline scale   ratio    clip        aggregate
    "sft":       Method("demo",   "sequence", "none", "none",  "none",  None,       "token_mean"),
    "rloo":      Method("sample", "sequence", "loo",  "none",  "none",  None,       "seq_sum"),
    "grpo":      Method("sample", "sequence", "mean", "std",   "token", (0.2, 0.2), "seq_mean"),
    "dr_grpo":   Method("sample", "sequence", "mean", "none",  "token", (0.2, 0.2), "const_len"),
    "fgrpo":     Method("sample", "phase",    "mean", "none",  "token", (0.2, 0.2), "const_len"),
}  # fmt: skip


def resolve(cfg) -> Method:
    """The row of cfg.method with the columns that the configuration overrides."""
    row = METHODS[cfg.method]
    low, high = row.clip or (0.2, 0.2)
    clip = (low if cfg.clip_low < 0 else cfg.clip_low, high if cfg.clip_high < 0 else cfg.clip_high)
    overridden = row.clip is not None or cfg.clip_low >= 0 or cfg.clip_high >= 0
    return replace(row, ratio=cfg.ratio or row.ratio, aggregate=cfg.aggregate or row.aggregate,
                   clip=clip if overridden else None)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Rewards -> advantages


def advantages(reward: Tensor, valid: Tensor, group: Tensor, baseline="mean", scale="none", eps=1e-4, ddof=1) -> Tensor:
    """Group-relative advantage of each unit, (B,U) -> (B,U); units are normalised apart.

    reward (B,U); valid (B,U) bool, False = cannot be scored; group (B,) int, rows of one prompt share it, in any order.
    mean: r - group mean. loo: r - mean of the others (RLOO, 2402.14740). none: r. std: divided by the group's standard
    deviation + eps (GRPO, 2402.03300); batch_std: by that of these rows (one rank's); none: not divided (Dr.GRPO, 2503.20783).
    Exactly 0: unscorable units, groups with fewer than 2 scorable members, groups whose rewards are all equal (F21).
    """
    reward = torch.where(valid, reward, 0)
    if baseline == "none":
        return reward
    _, index = group.unique(return_inverse=True)
    n_groups = int(index.max()) + 1 if len(index) else 0
    index = index[:, None].expand_as(reward)

    def total(x: Tensor) -> Tensor:  # (B,U) -> sum over the row's group, back on rows
        return x.new_zeros(n_groups, x.shape[1]).scatter_add(0, index, x).gather(0, index)

    def extreme(fill: float, how: str) -> Tensor:
        out = reward.new_full((n_groups, reward.shape[1]), fill)
        return out.scatter_reduce(0, index, torch.where(valid, reward, fill), how).gather(0, index)

    n = total(valid.to(reward.dtype))
    gap = torch.where(valid, reward - total(reward) / n.clamp(min=1), 0)
    adv = gap * n / (n - 1).clamp(min=1) if baseline == "loo" else gap
    if scale == "std":
        adv = adv / ((total(gap**2) / (n - ddof).clamp(min=1)).sqrt() + eps)
    elif scale == "batch_std":
        count = valid.sum(0)
        centred = torch.where(valid, reward - reward.sum(0) / count.clamp(min=1), 0)
        adv = adv / (((centred**2).sum(0) / (count - ddof).clamp(min=1)).sqrt() + eps)
    # equal rewards: their mean may differ from them in the last bit, so compare the extremes
    spread_out = extreme(float("inf"), "amin") < extreme(float("-inf"), "amax")
    return torch.where(valid & (n >= 2) & spread_out, adv, 0)


def unit_weights(adv: Tensor, weights: list[float], credit: str = "own") -> Tensor:
    """Weight the units' advantages (B,U). own: weight u times A_u (F-GRPO: 1 and lambda).

    causal: a unit is credited with what follows it too, sum over v >= u of weight v times A_v. For phases this adds
    lambda A_rank to the slate tokens, which makes the on-policy gradient that of E[R_slate + lambda R_rank] again:
    E[A_rank grad log pi(slate)] is not 0, while the dropped A_slate grad log pi(rank) has mean 0.
    """
    adv = adv * adv.new_tensor(weights)
    return adv.flip(1).cumsum(1).flip(1) if credit == "causal" else adv


def spread(per_unit: Tensor, unit_ids: Tensor) -> Tensor:
    """Put a number per unit (B,U) on the tokens of the units (B,T); 0 where unit_ids is 0."""
    return torch.where(unit_ids > 0, per_unit.gather(1, (unit_ids - 1).clamp(min=0)), 0)


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
    units: int  # U
    length: float  # constant L


AGGREGATES: dict[str, Callable[[Counts], Tensor]] = {
    "token_mean": lambda c: c.tokens,  # DAPO: every token the same weight
    "seq_mean": lambda c: c.rows * c.row,  # GRPO: mean of a row, then of rows; an empty row counts
    "seq_mean_nonempty": lambda c: c.nonempty * c.row,
    "seq_sum": lambda c: c.rows,  # REINFORCE, RLOO: log-prob of the whole sequence
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
    """
    mask = (unit_ids > 0).double()
    per_unit = mask.new_zeros(len(unit_ids), units + 1).scatter_add(1, unit_ids, mask)[:, 1:]  # (B,U)
    _, index = group.unique(return_inverse=True)
    n_groups = int(index.max()) + 1 if len(index) else 0
    per_group = mask.new_zeros(n_groups, units).index_add(0, index, per_unit)[index]  # (B,U)
    step = total(per_unit.sum(0)).expand_as(per_unit)

    def on_tokens(x: Tensor) -> Tensor:  # (B,U) -> (B,T)
        return spread(x if apart else x.sum(1, keepdim=True).expand_as(x), unit_ids)

    counts = Counts(
        rows=total(mask.new_tensor(len(unit_ids))),
        nonempty=total((per_unit.sum(1) > 0).double().sum()),
        tokens=on_tokens(step),
        row=on_tokens(per_unit),
        unit=spread(per_unit, unit_ids),
        present=(per_unit > 0).double().sum(1, keepdim=True),
        group=on_tokens(per_group),
        groups=total(mask.new_tensor(n_groups)),
        units=units,
        length=length,
    )
    return torch.where(unit_ids > 0, AGGREGATES[aggregate](counts), 1)


# ---------------------------------------------------------------------------------------------------------------------
# Surrogate and KL, per token


def log_ratio(logp: Tensor, logp_old: Tensor, unit_ids: Tensor, level: str) -> Tensor:
    """log of the importance ratio, (B,T): per token, or the mean over the tokens of a unit or of the row.

    Means, not sums: a sum over 500 tokens with a gap of 0.01 would be a ratio of 148 (F32). Clamped at +-20 so that exp
    stays finite; no honest ratio comes near.
    """
    mask = unit_ids > 0
    gap = torch.where(mask, logp - logp_old, 0).clamp(-20, 20)
    if level == "token":
        return gap
    ids = unit_ids if level == "unit" else mask.long()
    sums = gap.new_zeros(len(ids), int(ids.max()) + 1 if ids.numel() else 1)
    count = sums.scatter_add(1, ids, mask.to(gap.dtype))
    mean = sums.scatter_add(1, ids, gap) / count.clamp(min=1)
    return torch.where(mask, mean.gather(1, ids), 0)


def surrogate(
    logp: Tensor, logp_old: Tensor, adv: Tensor, unit_ids: Tensor, ratio="token", clip: tuple | None = (0.2, 0.2)
) -> tuple[Tensor, Tensor]:
    """Per-token loss and ratio, both (B,T); loss 0 and ratio 1 where unit_ids is 0, whatever stands there.

    -min(r A, clip(r, 1 - low, 1 + high) A) (PPO, 1707.06347); without a ratio -A log pi (REINFORCE).
    """
    mask = unit_ids > 0
    logp = torch.where(mask, logp, 0)  # before any arithmetic: nan * 0 is nan
    adv = torch.where(mask, adv, 0)
    if ratio == "none":
        return -adv * logp, torch.ones_like(logp)
    r = log_ratio(logp, torch.where(mask, logp_old, 0), unit_ids, ratio).exp()
    objective = r * adv
    if clip is not None:
        objective = torch.minimum(objective, r.clamp(1 - clip[0], 1 + clip[1]) * adv)
    return -objective, r


def kl_estimate(logp: Tensor, logp_ref: Tensor, kind: str) -> Tensor:
    """Estimate of KL(pi || ref) from a token drawn from pi, elementwise (Schulman 2020).

    k1 = log pi - log ref: unbiased value, zero expected gradient. k2 = k1^2 / 2: right expected gradient on policy.
    k3 = exp(-k1) + k1 - 1: unbiased, never negative; its plain gradient is that of the forward KL (F35).
    The log-ratio is clamped before exp: after it, the gradient would already be inf * 0 (F34).
    """
    d = (logp_ref - logp).clamp(-20, 20)
    return {"k1": -d, "k2": d**2 / 2, "k3": torch.expm1(d) - d}[kind]


def policy_loss(
    logp: Tensor, logp_old: Tensor, adv: Tensor, unit_ids: Tensor, denom: Tensor, row: Method, tokens: float,
    logp_ref: Tensor | None = None, kl_ids: Tensor | None = None, kl_denom: Tensor | None = None,
    beta=0.0, kl="k3", kl_ratio=False,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Loss of one micro-batch and what to log of it; both are shares of the step and are summed by the caller.

    logp (B,T) with gradient; logp_old, logp_ref (B,T) constants; adv (B,T); denom, kl_denom from denominators(); tokens:
    trained tokens of the whole step, for the means below. With beta: + beta * sum of KL / kl_denom where kl_ids > 0.
    clip_low / clip_high: share of tokens whose gradient the clip removed, by the sign of the advantage (F23).
    """
    mask = unit_ids > 0
    per_token, r = surrogate(logp, logp_old, adv, unit_ids, row.ratio, row.clip)
    loss = (per_token / denom).sum()
    with torch.no_grad():
        gap = torch.where(mask, r - 1, 0)
        low, high = row.clip or (float("inf"), float("inf"))
        metrics = {
            "loss_pos": (
                torch.where(adv > 0, per_token, 0) / denom
            ).sum(),  # by sign: at mu = 1 they all but cancel (F24)
            "loss_neg": (torch.where(adv < 0, per_token, 0) / denom).sum(),
            "clip_low": (mask & (adv < 0) & (gap < -low)).double().sum() / tokens,
            "clip_high": (mask & (adv > 0) & (gap > high)).double().sum() / tokens,
            "ratio_gap": gap.abs().sum() / tokens,
        }
    if beta:
        kl_mask = kl_ids > 0
        logp = torch.where(kl_mask, logp, 0)
        k = kl_estimate(logp, torch.where(kl_mask, logp_ref, 0), kl)
        if kl_ratio:
            k = k * log_ratio(logp, torch.where(kl_mask, logp_old, 0), kl_ids, "token").exp()
        k = (torch.where(kl_mask, k, 0) / kl_denom).sum()
        loss, metrics["kl"] = loss + beta * k, k.detach()
    metrics["loss"] = loss.detach()
    return loss, metrics


if __name__ == "__main__":
    names = [f.name for f in fields(Method)]
    print(f"{'method':12}" + "".join(f"{n:12}" for n in names))
    for name, row in METHODS.items():
        print(f"{name:12}" + "".join(f"{getattr(row, n)!s:12}" for n in names))
