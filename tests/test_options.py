"""Every option on top of a row of METHODS, and the worked examples of the papers: exact numbers, or an exact relation
between two gradients. Each test fails when the option's code is taken out.
"""

import math
from dataclasses import replace

import pytest
import torch
from test_methods import PROMPTS, Step, close, gradient, nets
from test_train import go, lines, on_cpu, sft, weights  # noqa: F401

import data
import model as lm
import rewards
import train
from config import parse
from losses import (
    METHODS,
    Cap,
    Look,
    advantages,
    credit,
    denominators,
    lambda_at,
    length_control,
    log_ratio,
    low_rate,
    policy_loss,
    resolve,
    tail_miss,
    unit_weights,
    value_loss,
    whiten,
)
from rewards import Scored
from rollout import Rollout

F64 = torch.float64


def tensor(*x) -> torch.Tensor:
    return torch.tensor(x, dtype=F64)


def normal(*shape, seed=0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def settings(name: str, options=""):
    return parse(["--method", name, *f"--group_size 8 --slate_size 3 --rank_size 2 {options}".split()])


def scores(reward, ids=None, lengths=None, high=None) -> Scored:
    """reward (B,) or (B,U); nan: cannot be scored."""
    reward = torch.as_tensor(reward, dtype=F64)
    reward = reward[:, None] if reward.ndim == 1 else reward
    ids = torch.ones(len(reward), 2, dtype=torch.long) if ids is None else torch.as_tensor(ids)
    parts = {"length": [float(n) for n in (lengths or [2] * len(reward))], "reward": reward.sum(1).tolist(),
             "overlong": [0.0] * len(reward)}  # fmt: skip
    return Scored(ids, reward, ~reward.isnan(), parts, [""] * len(reward), [([], [])] * len(reward),
                  high or [1.0] * reward.shape[1])  # fmt: skip


def rolled(ids, group=None, logp=None, finished=True, mask=None, prompts=None) -> Rollout:
    ids = torch.as_tensor(ids)
    group = torch.zeros(len(ids), dtype=torch.long) if group is None else torch.tensor(group)
    return Rollout(prompts or [[5]] * (int(group.max()) + 1), torch.zeros_like(ids), torch.zeros(ids.shape) if logp is None else logp,
                   ids > 0 if mask is None else mask, group, torch.full((len(ids),), finished))  # fmt: skip


def credited(name, options, scored, group=None, look=None, ema=None, step=0, **kwargs):
    """credit() of some scores under a row of METHODS with options."""
    cfg = settings(name, options)
    roll, row = rolled(scored.unit_ids, group, **kwargs), resolve(cfg)
    look = look or Look(roll.logp, None, torch.zeros(roll.logp.shape) if row.baseline == "critic" else None)
    return credit(scored, roll, look, row, cfg, train.unit_weights_at(cfg, row, step, scored, roll), ema)


def mean_only(reward, group=None) -> torch.Tensor:
    group = torch.zeros(len(reward), dtype=torch.long) if group is None else torch.tensor(group)
    return advantages(reward, torch.ones_like(reward, dtype=torch.bool), group)


# ---------------------------------------------------------------------------------------------------------------------
# Focal weight


FOCAL = """1 .9354 .875 .7656 2.4749 -.3536 2.3150 -.3307
           2 .8660 .750 .5625 1.5000 -.5000 1.2990 -.4330
           3 .7906 .625 .3906 1.0206 -.6124 .8069 -.4841
           4 .7071 .500 .2500 .7071 -.7071 .5000 -.5000
           5 .6124 .375 .1406 .4743 -.7906 .2905 -.4841
           6 .5000 .250 .0625 .2887 -.8660 .1443 -.4330
           7 .3536 .125 .0156 .1336 -.9354 .0472 -.3307"""


@pytest.mark.parametrize("line", [[float(x) for x in line.split()] for line in FOCAL.splitlines()], ids=str)
def test_focal_weights_of_a_group_of_eight(line):
    """focal.md section 5: right answers, then the weight at gamma .5, 1, 2, then advantages of right and wrong ones."""
    right, half, one, two, *adv = line
    scored = scores([1.0] * int(right) + [0.0] * (8 - int(right)))
    plain = credited("grpo", "--ddof 0 --adv_eps 0", scored).adv[:, 0]
    got = {g: credited("focal_grpo", f"--focal_gamma {g} --ddof 0 --adv_eps 0", scored).adv[:, 0] for g in (0.5, 1, 2)}
    for g, weight in ((0.5, half), (1, one), (2, two)):
        assert (got[g] / plain).tolist() == pytest.approx([weight] * 8, abs=6e-5)
    assert [float(got[g][i]) for g in (0.5, 1) for i in (0, -1)] == pytest.approx(adv, abs=6e-5)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_focal_weight_of_nothing_is_nothing(value):
    """All right or all wrong: exactly 0, also at gamma 0 where the weight is 0^0 = 1."""
    for gamma in (0, 0.5):
        assert (credited("focal_grpo", f"--focal_gamma {gamma}", scores([value] * 8)).adv == 0).all()


def test_a_group_without_anything_scorable_has_no_success_and_no_weight():
    """F22: 0 of 0 is no success, not nan: the advantages of units are logged too."""
    got = credited("focal_grpo", "", scores([1.0, 0.0, math.nan, math.nan]), [0, 0, 1, 1])
    assert got.rate[:, 0].tolist() == [0.5, 0.5, 0, 0] and (got.adv[2:] == 0).all() and got.adv.isfinite().all()


def test_a_success_is_a_share_of_the_largest_reward():
    """Rewards of 2 and 0 weigh like 1 and 0; a negative mean counts as no success, not as a weight above 1."""
    ones, twos = scores([1.0, 0.0, 0.0, 0.0]), scores([2.0, 0.0, 0.0, 0.0], high=[2.0])
    for scored in (ones, twos):
        assert credited("focal_grpo", "", scored).rate.tolist() == [[0.25]] * 4
    assert credited("focal_grpo", "", scores([-1.0, -1.0, -1.0, 0.0])).rate.max() == 0


@pytest.mark.parametrize("name", ["reinforce", "rloo", "ppo", "dr_grpo"])
def test_the_focal_weight_works_on_every_method_that_samples(name):
    """Two prompts, solved in one and in three of four samples: weights 3/4 and 1/4 on all their tokens."""
    scored = scores([1.0, 0, 0, 0, 1, 1, 1, 0], [[1, 1]] * 8)
    group = [0] * 4 + [1] * 4
    plain, focal = (credited(name, f"--focal_gamma {g}", scored, group).token_adv for g in (0, 1))
    assert (
        (plain != 0).any()
        and torch.allclose(focal[:4], plain[:4] * 0.75)
        and torch.allclose(focal[4:], plain[4:] * 0.25)
    )


def test_each_prompt_has_its_own_gamma_from_its_running_success():
    """focal_ema: the first visit counts as it is, later ones decay; gamma = 2 s focal_gamma."""
    cfg = settings("focal_grpo", "--focal_ema 0.75")
    memory, group = train.Memory(torch.full((9,), math.nan)), [0] * 4 + [1] * 4
    scored = scores([2.0, 2, 0, 0, 2, 2, 2, 0], high=[2.0])
    first = memory.gamma_of([7, 2], scored, rolled(scored.unit_ids, group), cfg)
    assert first.tolist() == [0.5] * 4 + [0.75] * 4
    assert memory.success[[7, 2]].tolist() == [0.5, 0.75] and memory.success.isnan().sum() == 7
    second = memory.gamma_of([2, 5], scored, rolled(scored.unit_ids, group), cfg)
    assert second.tolist() == [0.75 * 0.75 + 0.25 * 0.5] * 4 + [0.75] * 4
    assert memory.success[[7, 2, 5]].tolist() == [0.5, 0.6875, 0.75]
    plain = credited("grpo", "", scored, group).adv[:, 0]
    adv = credited("focal_grpo", "--focal_gamma 0.5", scored, group, ema=second).adv[:, 0]
    expected = [(1 - rate) ** (2 * 0.5 * s) for rate, s in ((0.5, 0.6875), (0.75, 0.75)) for _ in range(4)]
    assert (adv / plain).tolist() == pytest.approx(expected)
    assert memory.gamma_of([7, 2], scored, rolled(scored.unit_ids, group), settings("focal_grpo")) is None


def test_the_running_success_stays_between_0_and_1():
    """Penalties below 0 are no success less than none, and what cannot be scored leaves no nan behind."""
    cfg, memory = settings("focal_grpo", "--focal_ema 0.5"), train.Memory(torch.full((2,), math.nan))
    scored = scores([-1.0, -1.0, 0.0, 1.0, 1.0, math.nan])
    got = memory.gamma_of([0, 1], scored, rolled(scored.unit_ids, [0, 0, 0, 1, 1, 1]), cfg)
    assert (got[:3] == 0).all() and (got[3:] > 0.6).all() and memory.success.isfinite().all()


def test_the_low_learning_rate_control():
    """focal.md section 6: m_gamma, the mean the focal weight takes away; the policy's rate is multiplied by it."""
    assert [low_rate(g) for g in (0, 0.5, 1, 2)] == pytest.approx([1, 0.679061, 0.5, 0.3125], abs=1e-6)
    policy, _, critic = nets()
    groups = train.optimizer_for(policy.model, critic, settings("grpo_low_lr", "--critic_lr 3")).param_groups
    assert [g["factor"] for g in groups] == pytest.approx([0.679061, 3], abs=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Filters of samples and of groups


REWARD, LENGTHS = [1.0, 0.0, 0.5, 0.25, 1.0, 0.0], [3, 1, 9, 2, 7, 5]


def test_the_shortest_samples_are_kept_and_compared_with_each_other():
    """GFPO: statistics over the kept; the rejected have advantage 0, and their tokens count in the divisor or not."""
    scored = scores(REWARD, lengths=LENGTHS)
    kept = [0, 1, 3]
    expected = mean_only(tensor(1.0, 0.0, 0.25)[:, None])[:, 0]
    for rejected in ("count", "drop"):
        got = credited("gfpo", f"--keep_samples 3 --ddof 0 --rejected {rejected}", scored)
        assert (got.adv[[2, 4, 5]] == 0).all() and (got.token_adv[[2, 4, 5]] == 0).all()
        assert torch.allclose(got.adv[kept, 0], expected / (expected.pow(2).mean().sqrt() + 1e-4))
        trained = (got.unit_ids > 0).any(1)
        assert trained.all() if rejected == "count" else trained.tolist() == [i in kept for i in range(6)]
    longest = credited("gfpo", "--keep_samples 3 --keep_by=-length --rejected drop", scored)
    assert (longest.unit_ids > 0).any(1).tolist() == [False, False, True, False, True, True]


def test_rejected_samples_in_the_divisor_or_not():
    """Token mean: without the rejected tokens the same gradient is divided by fewer."""
    count, drop = (gradient(Step("gfpo", f"--rejected {how}"))[0] for how in ("count", "drop"))
    step = Step("gfpo", "--rejected drop")
    kept = int((step.credit(step.look()).unit_ids > 0).sum())
    assert close(drop, count * int(step.roll.mask.sum()) / kept) and kept < 40


def test_harder_prompts_keep_more_samples():
    """keep_by_difficulty: four groups of four, from always right to never right, keep 2, 2, 3 and 4."""
    right = [2, 4, 0, 3]  # of each group
    scored = scores([float(i < n) for n in right for i in range(4)], lengths=list(range(16)))
    got = credited(
        "gfpo", "--keep_by_difficulty 2 2 3 4 --rejected drop", scored, [g for g in range(4) for _ in range(4)]
    )
    assert (got.unit_ids > 0).any(1).view(4, 4).sum(1).tolist() == [3, 2, 4, 2]


class Prompts:
    """train.sample() of prompts whose two samples earn 0 and 1, or both 0 if the prompt is dull."""

    def __init__(self, dull):
        self.dull, self.calls = dull, []

    def __call__(self, task, policy, batch, keys, cfg, method):
        self.calls.append((list(batch), list(keys)))
        ids = torch.ones(2 * len(batch), 2 + len(self.calls), dtype=torch.long)  # later ones are longer
        group = [g for g in range(len(batch)) for _ in range(2)]
        reward = [0.0 if self.dull(i) else float(j) for i in batch for j in range(2)]
        return rolled(ids, group, prompts=[[i] for i in batch]), scores(reward, ids)

    def run(self, monkeypatch, n: int, refill: int, step=0):
        monkeypatch.setattr(train, "sample", self)
        cfg = settings("dapo", f"--refill {refill} --batch_size 4 --overlong 0")
        start = data.order(n, cfg.seed, step, 4)
        task = train.Task(list(range(n)), [], [], {})
        batch, roll, scored = train.sampled(task, nets()[0], start, step, cfg, resolve(cfg))
        assert roll.prompt_ids == [[i] for i in batch] and roll.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert roll.tokens.shape == scored.unit_ids.shape == roll.mask.shape and len(scored.texts) == 8
        return start, batch, scored


def test_refilling_ends_after_the_cap(monkeypatch):
    """F54: with a constant reward the step would sample for ever; it goes on without a signal instead."""
    prompts = Prompts(lambda i: True)
    _, batch, scored = prompts.run(monkeypatch, 1000, 3)
    assert len(prompts.calls) == 4 and len(batch) == 4 and (scored.reward == 0).all()
    none = Prompts(lambda i: True)
    none.run(monkeypatch, 1000, 0)
    assert len(none.calls) == 1


def test_refilling_from_few_prompts_keeps_the_size_of_the_step(monkeypatch):
    """Where fewer others are left than groups are dull, the dull ones stay: the step must not shrink."""
    _, batch, _ = Prompts(lambda i: True).run(monkeypatch, 10, 3)
    assert len(set(batch)) == 4


def test_refilling_keeps_live_groups_and_draws_others_for_dull_ones(monkeypatch):
    """DAPO: every third prompt is solved; the step still ends with four prompts that tell samples apart."""
    prompts = Prompts(lambda i: i % 3 == 0)
    start, batch, scored = prompts.run(monkeypatch, 1000, 8, step=1)
    live = [i for i in start if i % 3]
    assert 0 < len(live) < 4 and all(i % 3 for i in batch)
    kept = [a == b for a, b in zip(start, batch)]  # what is live keeps its place
    assert [i for i, k in zip(start, kept) if k] == live
    assert not {i for i, k in zip(batch, kept) if not k} & set(start)
    assert scored.reward[:, 0].tolist() == [0, 1] * 4
    keys = [k for _, some in prompts.calls for k in some]
    assert len(set(keys)) == len(keys) and len(prompts.calls[1][0]) == 4 - len(live)
    quiet = Prompts(lambda i: False)
    assert quiet.run(monkeypatch, 1000, 8)[:1] == (quiet.calls[0][0],) and len(quiet.calls) == 1


@pytest.mark.parametrize("step", range(4))
def test_refilled_prompts_are_new_to_the_step(monkeypatch, step):
    """A prompt twice in one step would count twice, and one just found dull would be drawn for itself."""
    prompts = Prompts(lambda i: i % 2 == 0)
    _, batch, _ = prompts.run(monkeypatch, 16, 2, step)
    seen = [i for some, _ in prompts.calls for i in some]
    assert len(set(batch)) == 4 and len(set(seen)) == len(seen)


# ---------------------------------------------------------------------------------------------------------------------
# Weights of units


def test_lambda_over_the_steps():
    assert [lambda_at(0.5, "constant", 2.0, d) for d in (0, 0.3, 1)] == [0.5] * 3
    assert [lambda_at(0.5, "linear", 2.0, d) for d in (0, 0.25, 1)] == [0.5, 0.875, 2.0]
    quarter = 0.5 + 1.5 * 0.5 * (1 - math.sqrt(0.5))
    assert [lambda_at(0.5, "cosine", 2.0, d) for d in (0, 0.25, 0.5, 1)] == pytest.approx([0.5, quarter, 1.25, 2.0])
    cfg, scored = settings("fgrpo", "--lam 0.5 --lam_end 2 --lam_schedule linear --steps 11"), scores(normal(8, 2))
    at = [train.unit_weights_at(cfg, METHODS["fgrpo"], s, scored, rolled(scored.unit_ids)) for s in (0, 5, 10)]
    assert at == [[1.0, 0.5], [1.0, 1.25], [1.0, 2.0]]


@pytest.mark.parametrize(
    ("slate", "rank", "factor"), [(0.1, 0.2, 2), (0.1, 0.05, 0.5), (0.1, 0, 0.25), (0, 0.3, 4), (0, 0, 0.25)]
)
def test_an_adaptive_lambda_follows_the_remaining_spread(slate, rank, factor):
    """A phase with nothing left to tell apart leaves the step to the others, within a factor of 4."""
    reward = torch.stack([slate * tensor(1, -1, 1, -1), rank * tensor(1, -1, -1, 1)], 1) + 3
    cfg, scored = settings("fgrpo", "--lam 0.6 --lam_schedule adaptive"), scores(reward)
    got = train.unit_weights_at(cfg, METHODS["fgrpo"], 0, scored, rolled(scored.unit_ids))
    assert got == pytest.approx([1.0, 0.6 * factor])


def test_weights_take_the_place_of_one_and_lambda():
    scored = scores(normal(8, 2), [[1, 2]] * 8)
    plain = mean_only(scored.reward)
    for a, b in ((1.0, 0.0), (0.25, 3.0)):
        got = credited("fgrpo", f"--lam 7 --weights {a} {b}", scored)
        assert torch.allclose(got.adv, plain * tensor(a, b))
        assert torch.allclose(got.token_adv.double(), plain * tensor(a, b), atol=1e-6)


def test_three_phases():
    """A plan before slate and ranking: three units, each with its own mean, weight, tokens and divisor."""
    ids = torch.tensor([[1, 1, 0, 2, 3, 3], [1, 2, 2, 2, 3, 0], [1, 0, 2, 0, 0, 0], [1, 1, 2, 3, 3, 3]])
    scored, options = scores(normal(4, 3), ids), "--phases plan slate rank --tags <P> </P> <S> </S> <R> </R> --lam 0.5"
    assert train.count_units(METHODS["fgrpo"], settings("fgrpo", options)) == 3
    adv = mean_only(scored.reward) * tensor(1.0, 1.0, 0.5)  # lambda is the weight of the ranking alone
    own = credited("fgrpo", options, scored)
    assert torch.allclose(own.adv, adv)
    causal = unit_weights(mean_only(scored.reward), [1.0, 1.0, 0.5], "causal")
    assert torch.allclose(causal, torch.stack([adv.sum(1), adv[:, 1:].sum(1), adv[:, 2]], 1))
    for u in range(3):
        for b in range(4):
            assert torch.allclose(own.token_adv[b][ids[b] == u + 1].double(), adv[b, u], atol=1e-6)
    assert (own.token_adv[ids == 0] == 0).all()
    denom = denominators(ids, "token_mean", 3, 6, torch.zeros(4, dtype=torch.long), apart=True)
    assert [denom[ids == u].unique().tolist() for u in (1, 2, 3)] == [[6.0], [6.0], [6.0]]
    denom = denominators(ids, "seq_mean", 3, 6, torch.zeros(4, dtype=torch.long), apart=True)
    assert denom[1].tolist() == [4, 12, 12, 12, 4, 1]


# ---------------------------------------------------------------------------------------------------------------------
# KL, fuse, entropy


@pytest.mark.parametrize("name", ["dr_grpo", "fgrpo", "ppo"])
def test_the_kl_in_the_reward(name):
    """The penalty of a unit is that of its own tokens; with a critic every token pays for itself. Padding may hold nan."""
    ids = torch.tensor([[1, 1, 2, 2, 0], [1, 0, 2, 2, 2], [1, 1, 1, 2, 0], [1, 2, 0, 0, 0]])
    ids, units = (ids, 2) if name == "fgrpo" else ((ids > 0).long(), 1)
    old, ref = -normal(4, 5).abs(), -normal(4, 5, seed=1).abs()
    kl = torch.where(ids > 0, old - ref, 0)
    old[ids == 0] = math.nan
    scored = scores(normal(4, units, seed=2), ids)
    got = credited(name, "--beta 0.5 --kl_in reward --kl k1 --gae_lam 1", scored, mask=torch.arange(5) < tensor(4, 5, 4, 2)[:, None],
                   look=Look(old, ref, torch.zeros(4, 5)))  # fmt: skip
    if name == "ppo":
        later = (0.5 * kl).flip(1).cumsum(1).flip(1)
        assert torch.allclose(got.returns.double(), torch.where(ids > 0, scored.reward - later, 0), atol=1e-6)
    else:
        per_unit = torch.stack([(kl * (ids == u + 1)).sum(1) for u in range(units)], 1)
        assert torch.allclose(got.adv, mean_only(scored.reward - 0.5 * per_unit))


def test_the_kl_is_in_the_reward_or_in_the_loss_and_never_in_both():
    """The gradient with kl_in reward is that of a reward less the penalty; the one with kl_in loss is another."""
    taken = Step("dr_grpo", "--beta 0.5 --kl_in reward --kl k1")
    look, by_hand = taken.look(), Step("dr_grpo")
    by_hand.scored.reward -= 0.5 * torch.where(taken.roll.mask, look.logp_old - look.logp_ref, 0).sum(1, keepdim=True)
    in_loss = gradient(Step("dr_grpo", "--beta 0.5 --kl k2"))[0]
    assert close(gradient(taken)[0], gradient(by_hand)[0]) and not close(gradient(taken)[0], in_loss, 0.1)


def test_a_blown_fuse_halves_the_rate_and_holds_the_update_back():
    """kl_fuse: beyond it nothing is applied and the rate is halved for good; three in a row are counted."""
    cfg, memory = settings("grpo", "--kl_fuse 0.1"), train.Memory(torch.zeros(1))
    assert [memory.fuse(kl, cfg) for kl in (0.05, 0.2, 0.3, 0.1)] == [False, True, True, False]
    assert float(memory.rate) == 0.25 and int(memory.blown) == 0
    assert [memory.fuse(9.0, cfg) for _ in range(3)] == [True] * 3 and int(memory.blown) == 3
    assert not memory.fuse(9.0, settings("grpo")) and float(memory.rate) == 0.25 / 8
    blown, whole = (gradient(Step("grpo", f"--kl_fuse {limit}")) for limit in (1e-6, 1e6))
    assert (blown[0] == 0).all() and blown[1]["fused"] == blown[1]["skipped"] == 1 and blown[1]["kl_token"] > 1e-3
    assert close(whole[0], gradient(Step("grpo"))[0], 1e-6) and whole[1]["fused"] == 0


def test_a_run_with_a_blown_fuse_goes_back_to_its_best_checkpoint(sft, tmp_path, monkeypatch):  # noqa: F811
    """The first step is at the start weights; then every one is beyond the limit, and the third puts the best back."""
    called, restore = [], train.Run.restore

    def spy(run, policy, *rest, **kwargs):
        with torch.no_grad():  # something to be put back
            next(policy.model.parameters()).add_(1.0)
        called.append(1)
        restore(run, policy, *rest, **kwargs)

    monkeypatch.setattr(train.Run, "restore", spy)
    run = tmp_path / "a"
    go(run, f"--method fgrpo --init {sft} --steps 5 --lr 1e-3 --kl_fuse 1e-9 --save_every 1 --keep 9")
    log = lines(run)
    assert [row["fused"] for row in log] == [0, 1, 1, 1, 1] and len(called) == 1
    assert [row["lr"] for row in log] == pytest.approx([1e-3, 1e-3, 5e-4, 2.5e-4, 1.25e-4])
    first = weights(run, 1)
    assert all(torch.equal(first[k], v) for step in (2, 3, 4, 5) for k, v in weights(run, step).items())


def test_the_entropy_bonus_is_the_gradient_of_the_entropy():
    """GRPO-H: without a signal in the rewards the bonus alone pushes, by the mean of rows of the entropy."""
    step, (policy, *_) = Step("grpo_h", "--entropy 0.3").silent(), nets()
    mask, group = step.roll.mask, step.roll.group
    got, metrics = gradient(step)
    _, entropy = lm.completion_logp(policy.model, PROMPTS, step.roll.tokens, mask, group, 0.7, entropy="grad")
    loss = -0.3 * (torch.where(mask, entropy, 0).sum(1) / mask.sum(1)).mean()
    by_hand = torch.autograd.grad(loss, list(policy.model.parameters()))
    assert close(got, torch.cat([g.flatten() for g in by_hand])) and metrics["entropy"] > 1


# ---------------------------------------------------------------------------------------------------------------------
# Ratios


def shifted(name: str, options: str, nats: float) -> Step:
    """A step whose sampler gave every token exp(-nats) times the probability that the policy gives it: ratio exp(nats)."""
    step = Step(name, options)
    step.roll.logp = torch.where(step.roll.mask, step.own - nats, 0)
    return step


def test_dual_clip_lets_go_of_a_bad_sample_the_policy_likes_far_better():
    """Ratio 7: where A > 0 the first bound has taken the gradient, where A < 0 the second one (3) does."""
    plain, dual = (gradient(shifted("grpo", f"--dual_clip {c}", 2.0)) for c in (0, 3))
    assert plain[0].norm() > 1 and (dual[0] == 0).all()
    assert 0.2 < dual[1]["clip_dual"] < 0.8 and dual[1]["clip_dual"] + dual[1]["clip_high"] == pytest.approx(1)
    assert close(gradient(shifted("grpo", "--dual_clip 8", 2.0))[0], plain[0])


def test_truncated_weights_correct_the_sampler_up_to_their_cap():
    """TIS: old log-probs are recomputed, and the surrogate is multiplied by min(pi_old / pi_sampler, cap)."""
    plain = gradient(shifted("dr_grpo", "--old_logp recompute", math.log(2)))[0]
    for cap, factor in ((1.5, 1.5), (10, 2)):
        assert close(gradient(shifted("dr_grpo", f"--tis {cap}", math.log(2)))[0], factor * plain)


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_clipped_sequences_are_counted_as_sequences(name):
    """F31: a share of rows, so that a long one weighs no more than a short one."""
    step = Step(name)
    gap = torch.where(step.roll.mask, step.own - step.roll.logp, 0).sum(1) / step.roll.mask.sum(1)
    adv, ratio = step.credit(step.look()).adv[:, 0], gap.exp()
    metrics = gradient(step)[1]
    assert (
        metrics["clip_low"] == pytest.approx(((adv < 0) & (ratio < 1 - 3e-4)).double().mean().item())
        and 0 < metrics["clip_low"] < 1
    )
    assert metrics["clip_high"] == pytest.approx(((adv > 0) & (ratio > 1 + 4e-4)).double().mean().item())


def test_the_kl_of_the_fuse_is_a_mean_over_trained_tokens():
    """Delimiters are sampled and not trained: they do not count."""
    step = Step("fgrpo", "--kl_fuse 9")
    d = (step.look().logp_ref - step.own)[step.scored.unit_ids > 0].double()
    assert gradient(step)[1]["kl_token"] == pytest.approx((d.exp() - d - 1).mean().item(), rel=1e-4)


def test_options_bear_nan_in_padding():
    """F22: what a sampler or a reference left at untrained places reaches neither weights nor penalties."""
    for name, options in (("grpo", "--tis 2"), ("grpo_h", "--entropy 0.1"), ("dr_grpo", "--beta 0.5 --kl_in reward --kl k1"),
                          ("ppo", "--beta 0.5 --kl_in reward --kl k1"), ("grpo_kl", "--kl_ratio true")):  # fmt: skip
        assert close(gradient(Step(name, options).widen(3))[0], gradient(Step(name, options))[0])


def test_the_share_of_capped_weights():
    """F23 for a Cap: its bounds are of the weight itself, not offsets from 1."""
    ids, denom, row = torch.ones(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=F64), METHODS["cispo"]
    logp, zero = tensor([5.9, 6.1, 6.1, 0.01]).log(), torch.zeros(1, 4, dtype=F64)
    _, metrics = policy_loss(logp, zero, tensor([1.0, 1.0, -1.0, -1.0]), ids, denom, row, 4)
    assert metrics["clip_high"] == 0.25 and metrics["clip_low"] == 0
    _, metrics = policy_loss(logp, zero, -denom, ids, denom, replace(row, clip=Cap(0.5, 6)), 4)
    assert metrics["clip_high"] == 0 and metrics["clip_low"] == 0.25


def test_the_cap_of_cispo_is_absolute_and_keeps_the_gradient():
    """F33: ratio 10 and cap 2 weigh a token 2, not 0 and not 3."""
    plain = gradient(shifted("cispo", "", 0.0))[0]
    for cap, factor in ((2, 2), (20, 10)):
        assert close(gradient(shifted("cispo", f"--cispo_cap {cap}", math.log(10)))[0], factor * plain)


def test_differential_smoothing_by_hand():
    """MaxRL's form: after normalisation, minus .05 x mean log-prob on right answers, plus on wrong ones, equal groups too."""
    logp = tensor([-1.0, -3.0, 0.0], [-0.5, -0.5, -0.8], [-2.0, 0.0, 0.0], [-1.0, 0.0, 0.0], [-4.0, 0.0, 0.0])
    ids = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 0, 0], [1, 0, 0]])
    logp[ids == 0] = math.nan
    scored, group = scores([1.0, 0.0, 0.5, 0.0, math.nan], ids), [0, 0, 0, 1, 1]
    plain = credited("grpo", "", scored, group, logp=logp).adv[:, 0]
    got = credited("ds_grpo", "--smoothing 0.05", scored, group, logp=logp).adv[:, 0]
    assert (got - plain).tolist() == pytest.approx([0.05 * 2, -0.05 * 0.6, 0.05 * 2, -0.05 * 1, 0], abs=1e-12)


def test_smoothing_leaves_out_rejected_samples_and_empty_units():
    """A sample that the filter rejected gains nothing from being rare, and a unit without tokens has no mean."""
    ids, logp = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 0]]), torch.full((4, 2), -3.0)
    got = credited("ds_grpo", "--keep_samples 2", scores([1.0, 0.0, 1.0, 0.0], ids, [1, 2, 3, 4]), logp=logp)
    assert (got.adv[2:] == 0).all() and (got.token_adv[2:] == 0).all() and got.adv[0] > 0
    got = credited("ds_grpo", "", scores([1.0, 0.0, 1.0, 0.0], ids), logp=logp)
    assert got.adv.isfinite().all() and (got.token_adv[3] == 0).all()


# ---------------------------------------------------------------------------------------------------------------------
# Preferences, critic


def textbook(policy, reference, good: list[bool], beta: float) -> torch.Tensor:
    """DPO, and S-DPO where there are several bad answers, of sequence log-probs (B,); mean over the good ones."""
    r = beta * (policy - reference)
    bad = [r[i] for i in range(len(r)) if not good[i]]
    out = []
    for w in (r[i] for i in range(len(r)) if good[i]):
        if len(bad) == 1:
            out.append(-torch.nn.functional.logsigmoid(w - bad[0]))
        else:
            out.append(-torch.nn.functional.logsigmoid(-torch.log(sum((x - w).exp() for x in bad))))
    return sum(out) / len(out)


@pytest.mark.parametrize(("name", "good"), [("dpo", [1, 0]), ("s_dpo", [0, 0, 1, 0]), ("mult_dpo", [1, 1, 0, 0, 1, 0])])
def test_preference_losses_are_those_of_the_textbook(name, good):
    """Value, and gradient by every token's log-prob, of two groups whose rows are not side by side."""
    n = len(good)
    group, flags = [0, 1] * n, [float(f) for f in good for _ in range(2)]
    ids = (torch.arange(5) < torch.randint(1, 6, (2 * n, 1), generator=torch.Generator().manual_seed(3))).long()
    logp, ref = normal(2 * n, 5).requires_grad_(), normal(2 * n, 5, seed=1)
    scored = scores(flags, ids)
    got = credited(name, "--beta 0.7", scored, group, look=Look(logp.detach(), ref))
    row, every = METHODS[name], torch.tensor(group)
    denom = denominators(got.unit_ids, row.aggregate, 1, 1, every)
    ours = torch.autograd.grad(policy_loss(logp, logp.detach(), got.token_adv, ids, denom, row, 1.0)[0], logp)[0]
    sums = [torch.where(ids > 0, x, 0).sum(1) for x in (logp, ref)]
    loss = sum(textbook(*(x[every == g] for x in sums), good, 0.7) for g in (0, 1)) / 2
    assert float(got.preference) == pytest.approx(loss.item(), abs=1e-12)
    assert torch.allclose(ours, torch.autograd.grad(loss, logp)[0], atol=1e-7)


def test_answers_left_out_of_the_pairs_change_nothing():
    """An answer that is neither the best nor the worst has reward 0 and is no bad answer for that."""
    look = Look(normal(3, 2), normal(3, 2, seed=1))
    scored = scores([1.0, 0.0, 0.0])
    three = credited("dpo", "", scored, look=look)
    scored.valid[2] = False
    pair = credited("dpo", "", scored, look=look)
    alone = credited("dpo", "", scores([1.0, 0.0]), look=Look(look.logp_old[:2], look.logp_ref[:2]))
    assert pair.preference == alone.preference != three.preference and torch.equal(pair.token_adv[:2], alone.token_adv)
    assert (pair.token_adv[2] == 0).all()


def test_a_group_without_a_good_or_a_bad_answer_prefers_nothing():
    look = Look(normal(6, 2), normal(6, 2, seed=1))
    got = credited("dpo", "", scores([1.0, 1.0, 0.0, 0.0, 1.0, math.nan]), [0, 0, 1, 1, 2, 2], look=look)
    assert (got.token_adv == 0).all() and got.preference == 0


def test_the_best_and_the_worst_samples_make_pairs():
    """pair_source model: one good and two bad of four; a group whose samples earn the same makes none."""
    scored, roll = (
        scores([0.2, 0.9, 0.5, 0.1] + [0.3] * 4),
        rolled(torch.ones(8, 2, dtype=torch.long), [0] * 4 + [1] * 4),
    )
    got = rewards.contrasted(roll, scored, scored.reward[:, 0], 1, 2)
    assert got.reward[:, 0].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    assert got.valid[:, 0].tolist() == [True, True, False, True] + [False] * 4


@pytest.mark.parametrize(("options", "bad"), [
    ("dpo", 1), ("s_dpo", 3), ("mult_dpo --good_answers 2", 3), ("dpo --pair_source model --bad_answers 2", 2),
])  # fmt: skip
def test_a_run_on_pairs_starts_at_the_logarithm_of_the_answers(sft, tmp_path, options, bad):  # noqa: F811
    """At the start weights every implicit reward is 0: the loss is log(1 + bad answers), whatever they are."""
    go(tmp_path / "a", f"--method {options} --init {sft} --steps 2 --lr 1e-3")
    log = lines(tmp_path / "a")
    assert log[0]["preference_loss"] == pytest.approx(math.log(1 + bad), abs=1e-6) and log[0]["grad_norm"] > 0
    assert log[1]["preference_loss"] != log[0]["preference_loss"] > 0


def test_values_are_of_the_states_before_the_tokens():
    """F04 for the critic: the value beside a token must not know it. Row by row, without padding, it is the same."""
    step, critic = Step("ppo"), nets()[2]
    with torch.no_grad():
        got = lm.completion_values(critic, PROMPTS, step.roll.tokens, step.roll.mask, step.roll.group)
        for b in range(12):
            prompt, n = PROMPTS[int(step.roll.group[b])], int(step.roll.mask[b].sum())
            ids = torch.tensor([prompt + step.roll.tokens[b, :n].tolist()])
            hidden = critic.body(input_ids=ids).last_hidden_state[0]
            values = critic.head(hidden)[len(prompt) - 1 : -1, 0]
            assert torch.allclose(got[b, :n], values, atol=1e-5) and (got[b, n:] == 0).all()
    assert got.abs().max() > 0.1


def test_the_reward_of_ppo_is_earned_by_the_last_token():
    """lambda 1: every token's return is the reward; lambda 0: one-step errors. An unscorable row is not trained."""
    ids = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]])
    scored, values = scores([2.0, -1.0, math.nan], ids), tensor([0.5, 1.0, 1.5], [0.0, 3.0, 9.0], [1.0, 9.0, 9.0])
    look = Look(torch.zeros(3, 3), None, values)
    full = credited("ppo", "--gae_lam 1", scored, look=look)
    assert full.returns.tolist() == [[2, 2, 2], [-1, -1, 0], [0, 0, 0]] and (full.unit_ids[2] == 0).all()
    steps = credited("ppo", "--gae_lam 0", scored, look=look)
    nothing = credited("ppo", "", scored, look=look, mask=torch.zeros(3, 3, dtype=torch.bool))  # rows without a token
    assert nothing.token_adv.isfinite().all()
    raw = tensor(0.5, 0.5, 0.5, 3.0, -4.0)  # V' - V, and R - V at the end
    white = (raw - raw.mean()) / raw.std(correction=0)
    got = steps.token_adv[steps.unit_ids > 0].double()
    assert torch.allclose(got, white, atol=1e-6) and (steps.token_adv[steps.unit_ids == 0] == 0).all()


def test_whitening_is_over_the_trained_tokens():
    """Mean 0 and standard deviation 1 there, whatever stands elsewhere; tokens that are all alike are no signal."""
    adv, mask = tensor([1.0, 2.0, math.nan], [6.0, math.inf, 9.0]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    got = whiten(adv, mask)
    assert (got[mask == 0] == 0).all() and got[mask > 0].tolist() == pytest.approx(
        [-0.925820, -0.462910, 1.388730], abs=1e-6
    )
    assert (whiten(torch.full((2, 3), 3.0), mask) == 0).all() and (whiten(adv, 0 * mask) == 0).all()


def test_value_clipping_by_hand():
    """The larger of the error and that of the value held near the old one; untrained places count for nothing."""
    values = tensor([1.0, 0.0, 0.15, 7.0]).requires_grad_()
    old, returns = tensor([0.0, 1.0, 0.1, 7.0]), tensor([0.1, 0.1, 0.1, 9.0])
    ids, denom = torch.tensor([[1, 1, 1, 0]]), torch.full((1, 4), 3.0, dtype=F64)
    clipped, plain = (value_loss(values, old, returns, ids, denom, c) for c in (0.2, 0.0))
    assert clipped.item() == pytest.approx(0.5 * (0.81 + 0.49 + 0.0025) / 3)  # .8 is held, too far from .1
    assert plain.item() == pytest.approx(0.5 * (0.81 + 0.01 + 0.0025) / 3)
    assert torch.autograd.grad(clipped, values)[0][0].tolist() == pytest.approx([0.3, 0, 0.05 / 3, 0])


def test_nan_at_untrained_places_does_not_reach_the_critic():
    """F22: a mask after the arithmetic saves the value and not the gradient."""
    ids, ones = torch.tensor([[1, 0]]), torch.ones(1, 2, dtype=F64)
    values = tensor([1.0, math.nan]).requires_grad_()
    loss = value_loss(values, tensor([1.0, math.nan]), tensor([0.0, math.nan]), ids, ones, 0.2)
    assert loss == 0.5 and torch.autograd.grad(loss, values)[0].tolist() == [[1.0, 0.0]]


# ---------------------------------------------------------------------------------------------------------------------
# Lists: worked examples of Rank-GRPO and ReMaRk


CONTROL = {  # pieces of an answer with three lines asked for -> shaping of each token; E is the stop token
    "A|, (1999)\n|B|, (2000)\n|C|, (2001)|E": [0, 0, 0, 0, 0, 0, 0.1],
    "A|, (1999)\n|B|, (2000)\n|C|, (2001)\n|E": [0, 0, 0, 0, 0, 0, 0.1],  # a line break ends line 3: no line 4 (D10)
    "A|, (1999)\n|B|, (2000)|E": [0, 0, 0, 0, -0.1],
    "A|, (1999)\n|B|, (2000)\n|E": [0, 0, 0, 0, -0.1],  # two lines, whatever follows the second (D11)
    "A|, (1999)\n\n|B|, (2000)\n|C|, (2001)|E": [0, 0, 0, 0, 0, 0, 0.1],  # a blank line takes no rank
    "A|, (1999)\n|B|, (2000)\n|C|, (2001)\n|D|, (2002)|E": [0, 0, 0, 0, 0, 0, -0.1, -0.1, -0.1],
    "A|, (1999)\n|B": [0, 0, 0],
}


@pytest.mark.parametrize("name", ["rank_grpo", "remark"])
@pytest.mark.parametrize("text", CONTROL)
def test_the_length_of_a_list_is_controlled(text, name):
    """rank_grpo.md 13.6, with ReMaRk's rule for line breaks: equal rewards, so the shaping is all there is."""
    pieces = [b"" if p == "E" else p.encode() for p in text.split("|")]
    units, _ = rewards.rank_units(pieces, 3)
    scored = scores(torch.zeros(2, 4), [units] * 2)
    got = credited(name, "", scored, finished=text.endswith("E"))
    assert got.token_adv[0].tolist() == pytest.approx(CONTROL[text])
    off = credited(name, "--end_value 0 --early_value 0 --overflow_value 0", scored, finished=text.endswith("E"))
    assert (off.token_adv == 0).all()


def test_the_stop_token_takes_no_part_in_the_advantage_of_its_line():
    scored = scores([[1.0, 0, 0.5, 0], [0.0, 0, 0, 0]], [[1, 2, 3, 3], [1, 2, 3, 3]])
    got = credited("rank_grpo", "", scored).token_adv
    assert got[:, 3].tolist() == pytest.approx([0.1, 0.1]) and got[0, 0] == -got[1, 0] > 0.7
    cut = credited(
        "rank_grpo", "", scored, finished=False
    ).token_adv  # no stop token: the last token is one of the line's
    assert torch.equal(cut[:, :3], got[:, :3]) and torch.equal(cut[:, 3], cut[:, 2]) and cut[0, 2] > 0.7
    blind = credited("rank_grpo", "", scores([[math.nan] * 4, [0.0, 0, 0, 0]], scored.unit_ids)).token_adv
    assert (blind[0] == 0).all()


def test_length_control_keeps_double_precision():
    adv, end = torch.zeros(1, 2, dtype=F64), torch.tensor([[False, True]])
    got = length_control(adv, torch.tensor([[1, 1]]), end, 1, (0.1, -0.1, -0.1))
    assert got.dtype == F64 and got[0, 1].item() == 0.1


def of_eight(values) -> torch.Tensor:
    """Advantages of one position over a group of eight lists, under Rank-GRPO."""
    reward = torch.nn.functional.pad(tensor(*values)[:, None], (0, 3))
    return credited("rank_grpo", "", scores(reward, [[1, 1]] * 8), finished=False).adv[:, 0]


@pytest.mark.parametrize(("m", "hit", "miss"), [
    (1, 2.474174, -0.353453), (2, 1.619835, -0.539945), (3, 1.207381, -0.724429), (4, 0.935239, -0.935239),
    (5, 0.724429, -1.207381), (6, 0.539945, -1.619835), (7, 0.353453, -2.474174), (0, 0, 0), (8, 0, 0),
])  # fmt: skip
def test_a_position_of_eight_lists(m, hit, miss):
    """rank_grpo.md 13.3."""
    assert of_eight([1.0] * m + [0.0] * (8 - m)).tolist() == pytest.approx([hit] * m + [miss] * (8 - m), abs=1e-6)


def test_ratios_and_sums_of_one_list():
    """rank_grpo.md 13.4: three ranks of 3, 2 and 1 tokens; a rank counts once whatever its number of tokens."""
    old = tensor([-1.0, -0.5, -0.2, -2.0, -0.4, -0.7])
    new = tensor([-0.9, -0.6, -0.1, -1.7, -0.3, -0.9])
    ids, group, row = torch.tensor([[1, 1, 1, 2, 2, 3]]), torch.zeros(1, dtype=torch.long), METHODS["rank_grpo"]
    adv = tensor(2.474174, -0.353453, -0.353453)[ids - 1]
    ratio = log_ratio(new, old, ids, "unit").exp()
    assert ratio[0, [0, 3, 5]].tolist() == pytest.approx([1.033895, 1.221403, 0.818731], abs=1e-6)
    assert log_ratio(new, old, ids, "sequence").exp()[0, 0].item() == pytest.approx(1.051271, abs=1e-6)
    for aggregate, objective in ((row.aggregate, 0.598027), ("token_mean", 1.079741)):
        loss, _ = policy_loss(new, old, adv, ids, denominators(ids, aggregate, 3, 6, group), row, 6)
        assert loss.item() == pytest.approx(-objective, abs=1e-6)


AMPLIFIED = {1: (2.474174, -0.353453), 2: (2.473475, -0.353354), 3: (2.472776, -0.353254), 5: (2.471379, -0.353054),
             10: (2.467893, -0.352556), 40: (2.447187, -0.349598), 100: (2.406799, -0.343828)}  # fmt: skip


@pytest.mark.parametrize("n", AMPLIFIED)
def test_dividing_by_the_spread_amplifies_small_rewards(n):
    """remark.md 11.1: one list with 1/n among seven with 0 has nearly the advantage of a full hit."""
    high, rest = AMPLIFIED[n]
    assert of_eight([1 / n] + [0.0] * 7).tolist() == pytest.approx([high] + [rest] * 7, abs=1e-6)
    unscaled = mean_only(tensor(1 / n, *[0.0] * 7)[:, None])[:, 0]
    assert unscaled.tolist() == pytest.approx([7 / 8 / n] + [-1 / 8 / n] * 7)
    assert high / unscaled[0].item() / (2.474174 / 0.875) == pytest.approx(high * n / 2.474174, rel=1e-9)


def test_amplification_knows_no_offset_and_is_bounded():
    """remark.md 11.1 and 11.2: the spread of m hits of eight lies between .353553 and .534522, a factor of 1.511713."""
    assert of_eight([0.6] + [0.4] * 7).tolist() == pytest.approx([2.471379] + [-0.353054] * 7, abs=1e-6)
    scale = []
    for m in range(1, 8):
        hits = [1.0] * m + [0.0] * (8 - m)
        scale.append(float(mean_only(tensor(*hits)[:, None])[0, 0] / of_eight(hits)[0]))
    assert [min(scale), max(scale)] == pytest.approx([0.353653, 0.534622], abs=1e-6)
    assert max(scale) / min(scale) == pytest.approx(1.511713, abs=1e-6)


def test_responders_one_by_one_their_mean_and_their_union():
    """remark.md 11.4: one position over eight lists, items a c f a e f b f, five responders."""
    items, responders = "acfaefbf", ["ab", "a", "c", "ad", "e"]
    each = [of_eight([float(i in r) for i in items]) for r in responders]
    table = {
        0: "1.2074 -.7244 -.7244 1.2074 -.7244 -.7244 1.2074 -.7244", 1: "1.6198 -.5399 -.5399 1.6198 -.5399 -.5399 -.5399 -.5399",
        2: "-.3535 2.4742 -.3535 -.3535 -.3535 -.3535 -.3535 -.3535", 4: "-.3535 -.3535 -.3535 -.3535 2.4742 -.3535 -.3535 -.3535",
    }  # fmt: skip

    def expect(got, text):
        assert got.tolist() == pytest.approx([float(x) for x in text.split()], abs=6e-5)

    for r, text in table.items():
        expect(each[r], text)
    expect(each[3], table[1])
    count = [sum(i in r for r in responders) / 5 for i in items]
    expect(of_eight(count), "1.5037 -.1002 -.9022 1.5037 -.1002 -.9022 -.1002 -.9022")
    expect(of_eight([float(c > 0) for c in count]), ".7244 .7244 -1.2074 .7244 .7244 -1.2074 .7244 -1.2074")
    together = torch.stack(each)
    expect(together.mean(0), ".7480 .0633 -.5022 .7480 .0633 -.5022 -.1159 -.5022")
    total, lists = together.var(correction=0).item(), together.mean(0).var(correction=0).item()
    assert [total, lists, 1 - lists / total] == pytest.approx([0.874583, 0.237160, 0.728830], abs=2e-6)


def test_a_chance_is_never_negative():
    """A single sample cannot be both right and wrong: 0, where rounding would leave -1e-16."""
    assert {tail_miss(mu / 40, tau * mu / 400, 1) >= 0 for mu in range(41) for tau in range(11)} == {True}


def test_the_log_of_a_step_says_how_much_had_a_signal():
    """zero_adv: share of units without a signal (F21); tail_miss: of a group as hard as this one; both plain means."""
    scored = scores([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    group = [0] * 4 + [1] * 4
    got = credited("grpo", "", scored, group)
    log = train.describe(scored, got, rolled(scored.unit_ids, group), settings("grpo"))
    assert log["zero_adv"] == 0.5 and log["reward"] == 0.625
    assert log["tail_miss"] == pytest.approx(0.5 * (0.975**4 - 0.225**4 - 0.75**4))
