"""Every row of METHODS as a whole: what its gradient may depend on, and that it learns.

First a step of a tiny language model through train.measure, losses.credit and train.update; then a bandit, a policy of
independent categorical places whose expected reward is known exactly.
"""

import copy
import functools
import math
from types import SimpleNamespace

import pytest
import torch

import model as lm
import rewards
import train
from config import parse
from losses import METHODS, Look, credit, denominators, policy_loss, resolve, value_loss
from rewards import Scored
from rollout import Rollout

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13, 14]]
GROUP = torch.arange(3).repeat_interleave(4)
LENGTH = torch.tensor([7, 4, 9, 5, 6, 3, 8, 2, 9, 7, 1, 5])
EXTRA = {"gfpo": "--keep_samples 2"}  # the row's own 4 would keep every sample of a group of 4
SILENT = {  # what pushes without a signal in the rewards, switched off
    "grpo_h": "--entropy 0", "ds_grpo": "--smoothing 0",
    **dict.fromkeys(("rank_grpo", "remark"), "--end_value 0 --early_value 0 --overflow_value 0"),
}  # fmt: skip
SAMPLED = [name for name, row in METHODS.items() if row.source == "sample"]


@functools.cache
def nets():
    """Policy, reference and critic: random Qwen3 models of 2 layers, width 32, 40 words."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    out = []
    for seed in range(3):
        torch.manual_seed(seed)
        out.append(AutoModelForCausalLM.from_config(Qwen3Config(
            vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, max_position_embeddings=64, initializer_range=0.2, bos_token_id=None,
            eos_token_id=1, pad_token_id=0)))  # fmt: skip
    out[2] = lm.Critic(out[2])
    torch.nn.init.normal_(out[2].head.weight, 0, 0.2)
    return SimpleNamespace(model=out[0], dtype=torch.float32), out[1], out[2]


class Step:
    """12 completions of 3 prompts, 1 to 9 tokens, off policy by 0.3 nats, and their scores under a row of METHODS."""

    def __init__(self, name: str, options="", seed=0):
        self.cfg = parse(["--method", name, *f"--group_size 4 --slate_size 3 --rank_size 2 --temperature 0.7 --grad_clip 0 "
                          f"--max_new_tokens 9 {EXTRA.get(name, '')} {options}".split()])  # fmt: skip
        self.row, g, at = resolve(self.cfg), torch.Generator().manual_seed(seed), torch.arange(9)
        mask = at < LENGTH[:, None]
        tokens = torch.where(mask, torch.randint(3, 40, mask.shape, generator=g), 0)
        with torch.no_grad():
            own = lm.completion_logp(nets()[0].model, PROMPTS, tokens, mask, GROUP, 0.7)[0]
        logp = torch.where(mask, own + 0.3 * torch.randn(own.shape, generator=g), 0)
        self.own, self.far = own, 0.0  # far: added to the reference's log-probs
        self.roll = Rollout([*PROMPTS], tokens, logp, mask, GROUP.clone(), torch.rand(12, generator=g) < 0.5)
        ids, units = {
            "phase": (torch.where(at % 4 == 2, 0, 1 + (at > 3).long()), 2),
            "rank": ((at // 2 + 1).clamp(max=4), 4),
        }.get(self.row.unit, (torch.ones_like(at), 1))
        reward = torch.rand(12, units, generator=g, dtype=torch.float64)
        valid = torch.ones(12, units, dtype=torch.bool)
        if self.row.source == "demo":
            reward[:] = 1
        if self.row.source == "pairs":
            place, good, bad = torch.arange(12) % 4, min(2, self.cfg.good_answers), self.cfg.bad_answers
            reward[:, 0], valid[:, 0] = (place < good).double(), place < good + bad
        parts = {"length": LENGTH.double().tolist(), "reward": reward.sum(1).tolist()}
        self.scored = Scored(ids * mask, reward, valid, parts, [], [], [1.0] * units)

    def silent(self) -> "Step":
        """The same without a signal: nothing to imitate, no bad answers, nothing earned, nothing to tell apart."""
        if self.row.source == "demo":
            self.scored.unit_ids[:] = 0
        elif self.row.baseline in ("none", "critic"):
            self.scored.reward[:] = 0
        else:
            self.scored.reward = torch.where(self.scored.valid, torch.ones(12, 1, dtype=torch.float64), 0)
        return self

    def pick(self, rows) -> "Step":
        """The same rows in another order."""
        r, s = self.roll, self.scored
        for x, names in ((r, "tokens logp mask group finished"), (s, "unit_ids reward valid")):
            for name in names.split():
                setattr(x, name, getattr(x, name)[rows])
        s.parts = {k: [v[i] for i in rows] for k, v in s.parts.items()}
        return self

    def widen(self, columns: int) -> "Step":
        """More padding, with numbers that would spoil everything."""
        for x, name, fill in ((self.roll, "tokens", 0), (self.roll, "logp", math.nan), (self.roll, "mask", False),
                              (self.scored, "unit_ids", 0)):  # fmt: skip
            setattr(x, name, torch.nn.functional.pad(getattr(x, name), (0, columns), value=fill))
        return self

    def look(self, policy=None, reference=None, critic=None) -> Look:
        a, b, c = nets()
        reference = (reference or b) if self.cfg.beta or self.cfg.kl_fuse else None
        critic = (critic or c) if self.row.baseline == "critic" else None
        look = train.measure(policy or a, reference, critic, self.roll, self.cfg, self.row)
        if look.logp_ref is not None:
            look.logp_ref = look.logp_ref + self.far
        return look

    def credit(self, look: Look):
        weights = train.unit_weights_at(self.cfg, self.row, 0, self.scored, self.roll)
        return credit(self.scored, self.roll, look, self.row, self.cfg, weights)


class Recorder:
    """An optimiser that keeps the gradient of its one step and moves nothing."""

    def __init__(self, *models):
        self.parts, self.grad = models, torch.zeros(sum(p.numel() for m in models for p in m.parameters()))

    def step(self):
        one = [torch.zeros_like(p) if p.grad is None else p.grad for m in self.parts for p in m.parameters()]
        self.grad = torch.cat([g.flatten() for g in one])

    def zero_grad(self, set_to_none=True):
        for m in self.parts:
            m.zero_grad()


def gradient(
    step: Step, look: Look | None = None, reference=None, critic=None
) -> tuple[torch.Tensor, dict[str, float]]:
    """Gradient of one update by all weights (policy, then critic), and its metrics."""
    policy = nets()[0]
    look = look or step.look(reference=reference, critic=critic)
    critic = (critic or nets()[2]) if step.row.baseline == "critic" else None
    recorder = Recorder(*(m for m in (policy.model, critic) if m is not None))
    metrics = train.update(policy, critic, recorder, step.roll, look, step.credit(look), step.cfg, step.row,
                           train.Memory(torch.zeros(3)))  # fmt: skip
    assert all(math.isfinite(v) for v in metrics.values())
    return recorder.grad, metrics


def close(a: torch.Tensor, b: torch.Tensor, tolerance=2e-5) -> bool:
    return float((a - b).norm()) <= tolerance * float(b.norm())


# ---------------------------------------------------------------------------------------------------------------------
# A step of a language model


@pytest.mark.parametrize("name", METHODS)
def test_a_gradient_with_a_signal_and_none_without(name):
    """F21, F26: what has no signal moves nothing, not even by a rounding; entropy, smoothing and length control are off
    for that, and a KL to the weights themselves is 0."""
    assert gradient(Step(name))[0].norm() > 1e-3
    same = copy.deepcopy(nets()[0].model)
    zero = copy.deepcopy(nets()[2])
    torch.nn.init.zeros_(zero.head.weight)
    grad, metrics = gradient(Step(name, SILENT.get(name, "")).silent(), reference=same, critic=zero)
    assert (grad == 0).all() and metrics["skipped"] == 1


@pytest.mark.parametrize("name", METHODS)
def test_the_cut_into_micro_batches_changes_nothing(name):
    """F27: one row at a time, two, all."""
    whole, metrics = gradient(Step(name, "--micro_tokens 100000"))
    for budget in (1, 28):
        part, others = gradient(Step(name, f"--micro_tokens {budget}"))
        assert close(part, whole) and others == pytest.approx(metrics, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_padding_and_the_order_of_rows_change_nothing(name):
    """F19, F30: five more columns of padding (nan in what is not an id), and rows of a group not side by side."""
    plain, metrics = gradient(Step(name))
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1)).tolist()
    for other in (Step(name).widen(5), Step(name).pick(order)):
        grad, others = gradient(other)
        assert close(grad, plain) and others == pytest.approx(metrics, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_a_step_leaves_its_inputs_alone(name):
    """F37: rollout, scores and what was measured are the same to the bit afterwards."""
    step = Step(name)
    step.scored.reward[3], step.scored.valid[3] = math.nan, False
    look = step.look()
    kept = copy.deepcopy((vars(step.roll), vars(step.scored), vars(look)))
    gradient(step, look)
    for was, now in zip(kept, (vars(step.roll), vars(step.scored), vars(look))):
        for k, v in was.items():
            same = torch.equal(v.nan_to_num(7.0), now[k].nan_to_num(7.0)) if torch.is_tensor(v) else v == now[k]
            assert same, k


def far(step: Step) -> None:
    """Sampler and reference 100 nats away, in both directions: more than exp can hold in single precision."""
    step.far = torch.tensor([100.0, -100.0, 0.0]).repeat(12, 3)
    step.roll.logp = torch.where(step.roll.mask, step.roll.logp - step.far, 0)


def empty_units(step: Step) -> None:
    step.scored.unit_ids[:2] = 0
    step.scored.unit_ids[2:5] = (step.scored.unit_ids[2:5] > 0).long()


def group_of_one(step: Step) -> None:
    step.roll.group[4:11], step.roll.group[11] = 1, 2


def unscorable(step: Step) -> None:
    step.scored.reward[:], step.scored.valid[:] = math.nan, False


@pytest.mark.parametrize("trouble", [far, empty_units, group_of_one, unscorable])
@pytest.mark.parametrize("name", METHODS)
def test_trouble_gives_finite_numbers(name, trouble):
    """F22, F32, F34: no nan or infinity in a gradient or a metric; nothing scorable means no step at all."""
    step = Step(name)
    trouble(step)
    grad, metrics = gradient(step)
    assert torch.isfinite(grad).all() and grad.norm() < 1e12
    if trouble is unscorable:
        assert (grad == 0).all() and metrics["skipped"] == 1
    elif trouble is not far:
        assert grad.norm() > 1e-4


# ---------------------------------------------------------------------------------------------------------------------
# A bandit: 4 prompts, answers of 4 independent tokens out of 6, one right token at every place


class Bandit:
    """One row of METHODS on the bandit, step by step; sign -1 turns the advantages round."""

    def __init__(self, name: str, options="", sign=1.0):
        self.cfg = parse(
            ["--method", name, *f"--group_size 8 --slate_size 4 --rank_size 2 --max_new_tokens 4 {options}".split()]
        )
        self.row, self.sign, self.noise = resolve(self.cfg), sign, torch.Generator().manual_seed(0)
        self.right = torch.randint(0, 6, (4, 4), generator=self.noise)
        self.logits = (0.1 * torch.randn(4, 4, 6, generator=self.noise)).requires_grad_()
        self.start, self.values = self.logits.detach().clone(), torch.zeros(4, 4, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.logits, self.values], 0.1)
        self.losses: list[float] = []

    def hits(self, units=(0, 1, 2, 3)) -> float:
        """Expected share of right tokens, exactly."""
        p = self.logits.detach().softmax(-1).gather(-1, self.right[..., None])[..., 0]
        return float(p[:, list(units)].mean())

    def logp(self, logits, group, tokens):
        return logits.log_softmax(-1)[group].gather(-1, tokens[..., None])[..., 0]

    def draw(self) -> tuple[Rollout, Scored]:
        """Samples, demonstrations or pairs of every prompt; pairs may be chosen among samples."""
        good, bad = self.cfg.good_answers, self.cfg.bad_answers
        source = "sample" if self.cfg.pair_source == "model" else self.row.source
        n = {"sample": 8, "demo": 1, "pairs": good + bad}[source]
        group = torch.arange(4).repeat_interleave(n)
        p = self.logits.detach().softmax(-1)[group].flatten(0, 1)
        tokens = torch.multinomial(p, 1, generator=self.noise).view(-1, 4)
        right = self.right[group]
        flags = torch.ones(len(group), dtype=torch.bool)
        if source == "pairs":
            flags = torch.arange(len(group)) % n < good
            off = torch.randint(1, 6, tokens.shape, generator=self.noise)
            tokens = torch.where(flags[:, None], right, (right + off) % 6)
        elif source == "demo":
            tokens = right
        hit = (tokens == right).double()
        mask = torch.ones_like(tokens, dtype=torch.bool)
        reward, ids = {
            "phase": (torch.stack([hit[:, :2].mean(1), hit[:, 2:].mean(1)], 1), torch.tensor([1, 1, 2, 2])),
            "rank": (torch.nn.functional.pad(hit, (0, 1)), torch.tensor([1, 2, 3, 4])),
        }.get(self.row.unit, (hit.mean(1, keepdim=True), torch.ones(4, dtype=torch.long)))
        reward = flags.double()[:, None] if source == "pairs" else reward
        parts = {"length": [4.0] * len(group), "reward": hit.mean(1).tolist()}
        with torch.no_grad():
            logp = self.logp(self.logits, group, tokens)
        roll = Rollout([[0]] * 4, tokens, logp, mask, group, torch.zeros(len(group), dtype=torch.bool))
        scored = Scored(ids.expand(len(group), 4), reward, torch.ones_like(reward, dtype=torch.bool), parts, [], [],
                        [1.0] * reward.shape[1])  # fmt: skip
        if source == "sample" and self.row.source == "pairs":
            scored = rewards.contrasted(roll, scored, hit.mean(1), good, bad)
        return roll, scored

    def step(self) -> None:
        cfg, row, (roll, scored) = self.cfg, self.row, self.draw()
        look = Look(roll.logp)
        if cfg.beta:
            look.logp_ref = self.logp(self.start, roll.group, roll.tokens)
        if row.baseline == "critic":
            look.values = self.values.detach()[roll.group]
        got = credit(scored, roll, look, row, cfg, train.unit_weights_at(cfg, row, 0, scored, roll))
        ids, units = got.unit_ids, train.count_units(row, cfg)
        denom = denominators(ids, row.aggregate, units, 4, roll.group, row.apart)
        for _ in range(1 if row.ratio == "none" else 2):  # twice: the second is off policy
            entropy = -(self.logits.softmax(-1) * self.logits.log_softmax(-1)).sum(-1)[roll.group]
            loss, _ = policy_loss(self.logp(self.logits, roll.group, roll.tokens), roll.logp, self.sign * got.token_adv, ids,
                                  denom, row, 1.0, look.logp_ref if row.source == "sample" else None, ids, denom,
                                  cfg.beta if row.source == "sample" else 0.0, entropy=entropy, bonus=cfg.entropy)  # fmt: skip
            if row.baseline == "critic":
                loss = loss + value_loss(self.values[roll.group], look.values, got.returns, ids, denom, cfg.value_clip)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self.losses.append(float(got.preference if got.preference is not None else loss.detach()))

    def run(self, steps=40) -> "Bandit":
        for _ in range(steps):
            self.step()
        return self


@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns_a_bandit(name):
    """From one token in six being right to more than twice as many; decoupled_sft learns its first phase alone."""
    bandit = Bandit(name)
    places = (0, 1) if name == "decoupled_sft" else (0, 1, 2, 3)
    before = bandit.hits(places), bandit.hits((2, 3))
    assert bandit.run().hits(places) > 2 * before[0] and before[0] < 0.2
    if name == "decoupled_sft":
        assert bandit.hits((2, 3)) == pytest.approx(before[1], abs=1e-6)
    if METHODS[name].source != "sample":  # what the loss measures halves too
        assert bandit.losses[-1] < 0.5 * bandit.losses[0]
    if METHODS[name].baseline == "critic":  # the critic has learnt what the last place still earns
        assert abs(bandit.values.detach().mean().item() - bandit.hits()) < 0.15


@pytest.mark.parametrize("name", ["dpo", "s_dpo", "mult_dpo"])
def test_preferences_among_own_samples_learn_the_bandit(name):
    """pair_source model: the best and the worst of a group's samples; groups whose samples earn the same are left out."""
    bandit = Bandit(name, "--pair_source model --beta 0.5")
    assert bandit.run().hits() > 2 / 6


@pytest.mark.parametrize("name", METHODS)
def test_turning_the_advantages_round_unlearns_the_bandit(name):
    """The test above must be able to fail: with the other sign the right tokens become rarer."""
    bandit = Bandit(name, sign=-1.0)
    before = bandit.hits()
    assert bandit.run(15).hits() < 0.8 * before
