"""Factorized GRPO: each phase's advantage reaches its own tokens and no others; what that does to the expected gradient.

A language model in double precision for what must hold on any batch, and a policy of nine outcomes, whose groups are
all enumerated, for what holds in expectation.
"""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import rewards
from config import Config
from eval import ranking_metrics
from losses import METHODS, advantages, denominators, policy_loss, spread, unit_weights
from model import build_tokenizer, completion_logp

ROW = METHODS["fgrpo"]
F64 = torch.float64


def normal(*shape, seed) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


# ---------------------------------------------------------------------------------------------------------------------
# A language model: what holds on every batch


PROMPTS = [[5, 6, 7], [8, 9]]
GROUP = torch.tensor([0, 0, 0, 1, 1, 1])
IDS = torch.tensor([  # 0: delimiters and padding
    [0, 1, 1, 0, 2, 2, 0, 0], [0, 1, 0, 2, 0, 0, 0, 0], [0, 1, 1, 1, 0, 0, 2, 0],
    [0, 1, 1, 0, 2, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 0, 2, 2, 0],
])  # fmt: skip
MASK = torch.arange(8) < torch.tensor([7, 5, 8, 6, 4, 8])[:, None]  # sampled tokens, delimiters included
TOKENS = torch.randint(2, 40, IDS.shape, generator=torch.Generator().manual_seed(0))
REWARD = torch.rand(6, 2, generator=torch.Generator().manual_seed(1), dtype=F64)


@pytest.fixture(scope="module")
def double_model():
    """A random GPT-2 in float64: its norms stay in double precision, those of the Llama family drop to single."""
    from transformers import AutoModelForCausalLM, GPT2Config

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(GPT2Config(
        vocab_size=40, n_embd=32, n_layer=2, n_head=2, n_positions=32, initializer_range=0.2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=1,
    )).double().eval()  # fmt: skip


class Batch:
    """One forward of the model and losses of its log-probs; off: how far the old policy is away (0: on policy)."""

    def __init__(self, model, off=0.3):
        self.model, self.logits = model, None
        handle = self.model.register_forward_hook(self.keep)
        self.logp = completion_logp(self.model, PROMPTS, TOKENS, MASK, GROUP)[0]
        handle.remove()
        self.old = self.logp.detach() + off * normal(6, 8, seed=2)
        self.ref = self.logp.detach() + 0.5 * normal(6, 8, seed=3)

    def keep(self, module, args, out):
        self.logits = out.logits

    def loss(self, reward=REWARD, lam=1.0, beta=0.0, weights=None, credit="own", row=ROW):
        adv = advantages(reward, torch.ones_like(reward, dtype=torch.bool), GROUP, row.baseline, row.scale)
        return self.loss_of(unit_weights(adv, weights or [1.0, lam], credit), IDS, beta, row)

    def loss_of(self, adv, ids, beta=0.0, row=ROW):
        denom = denominators(ids, row.aggregate, adv.shape[1], 8, GROUP, apart=True)
        kl_denom = denominators(MASK.long(), row.aggregate, 1, 8, GROUP)
        return policy_loss(
            self.logp, self.old, spread(adv, ids), ids, denom, row, 1.0, self.ref, MASK.long(), kl_denom, beta
        )[0]

    def grad(self, loss, by="weights") -> torch.Tensor:
        wanted = list(self.model.parameters()) if by == "weights" else [getattr(self, by)]
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, wanted, retain_graph=True)])


@pytest.mark.parametrize("ratio", ["token", "unit"])
@pytest.mark.parametrize("aggregate", ["const_len", "seq_mean", "token_mean"])
def test_the_gradient_is_the_sum_of_slate_rank_and_kl(double_model, aggregate, ratio):
    """Section 8, 1: grad L = grad L_slate + lambda grad L_rank + beta grad KL, clipped tokens included."""
    batch, row = Batch(double_model), replace(ROW, aggregate=aggregate, ratio=ratio)
    slate, rank = batch.loss(weights=[1.0, 0.0], row=row), batch.loss(weights=[0.0, 1.0], row=row)
    kl = batch.loss(weights=[0.0, 0.0], beta=1.0, row=row)
    parts = [batch.grad(x) for x in (slate, rank, kl)]
    whole = batch.grad(batch.loss(lam=0.7, beta=0.1, row=row))
    assert all(p.norm() > 1e-3 for p in parts)
    torch.testing.assert_close(whole, parts[0] + 0.7 * parts[1] + 0.1 * parts[2], rtol=0, atol=1e-10)


def test_the_reward_of_one_phase_never_enters_the_loss_of_the_other(double_model):
    """Section 8, 2: with another R_rank the gradient of L_slate is the same to the bit, and the reverse."""
    batch = Batch(double_model)
    for phase, weights in enumerate(([1.0, 0.0], [0.0, 1.0])):
        other = REWARD.clone()
        other[:, 1 - phase] = 100 * normal(6, seed=5)
        before, after = (batch.grad(batch.loss(r, weights=weights)) for r in (REWARD, other))
        assert torch.equal(before, after) and before.norm() > 0


def test_logits_of_a_phase_see_the_advantage_of_that_phase_only(double_model):
    """Section 8, 3: at slate places the gradient ignores R_rank; at delimiters, padding and the prompt it is exactly 0."""
    batch, other = Batch(double_model), REWARD.clone()
    other[:, 1] = 100 * normal(6, seed=5)
    own, changed, causal = (
        batch.grad(batch.loss(r, credit=c), "logits").view(6, 9, 40)
        for r, c in ((REWARD, "own"), (other, "own"), (other, "causal"))
    )
    slate, rank, rest = ((IDS == u) for u in (1, 2, 0))
    at = own[:, :-1].abs().sum(-1)  # logits t predict token t; the last ones predict nothing
    assert torch.equal(own[:, :-1][slate], changed[:, :-1][slate])
    assert not torch.equal(own[:, :-1][rank], changed[:, :-1][rank])
    assert (at[rest] == 0).all() and (at[rank] > 0).any() and (own[:, -1] == 0).all()
    assert not torch.allclose(causal[:, :-1][slate], own[:, :-1][slate]), "causal credit is what lets R_rank in"
    assert torch.equal(causal[:, :-1][rank], changed[:, :-1][rank])


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_grpo_is_fgrpo_plus_two_cross_terms(double_model, lam):
    """Section 8, 5: on policy, one advantage for all tokens = each to its own + A_rank on slate + A_slate on rank tokens."""
    batch = Batch(double_model, off=0.0)
    everyone = torch.ones(6, 2, dtype=torch.bool)
    a_slate, a_rank = advantages(REWARD, everyone, GROUP).T
    joint = advantages(REWARD @ torch.tensor([[1.0], [lam]], dtype=F64), everyone[:, :1], GROUP)
    grpo = batch.grad(batch.loss_of(joint, (IDS > 0).long()))
    own, causal = (batch.grad(batch.loss(lam=lam, credit=c)) for c in ("own", "causal"))
    zero = torch.zeros_like(a_slate)
    on_slate = batch.grad(batch.loss_of(torch.stack([lam * a_rank, zero], 1), IDS))
    on_rank = batch.grad(batch.loss_of(torch.stack([zero, a_slate], 1), IDS))
    torch.testing.assert_close(grpo, own + on_slate + on_rank, rtol=0, atol=1e-12)
    torch.testing.assert_close(grpo, causal + on_rank, rtol=0, atol=1e-12)
    assert on_rank.norm() > 1e-3 and (on_slate.norm() > 1e-3) == (lam > 0)


def test_lambda_zero_leaves_ranking_tokens_alone(double_model):
    """Section 8, 6: with lambda = 0 and no KL nothing pulls at ranking tokens."""
    batch = Batch(double_model)
    grad = batch.grad(batch.loss(lam=0.0), "logp").view(6, 8)
    assert (grad[IDS == 2] == 0).all() and (grad[IDS == 1] != 0).any()


def test_equal_shifted_and_scaled_rewards(double_model):
    """Section 8, 6: equal rewards give 0, a constant changes nothing, and without a deviation the gradient scales along."""
    batch = Batch(double_model)
    plain = batch.grad(batch.loss(), "logp").view(6, 8)
    shift, scale = torch.tensor([5.0, -3.0], dtype=F64), torch.tensor([10.0, 0.5], dtype=F64)
    shifted = batch.grad(batch.loss(REWARD + shift), "logp").view(6, 8)
    scaled = batch.grad(batch.loss(REWARD * scale), "logp").view(6, 8)
    torch.testing.assert_close(shifted, plain, rtol=0, atol=1e-12)
    torch.testing.assert_close(scaled, plain * spread(scale.expand(6, 2), IDS), rtol=0, atol=1e-12)
    equal = REWARD.clone()
    equal[:3, 0] = 0.1
    grad = batch.grad(batch.loss(equal), "logp").view(6, 8)
    assert (grad[:3][IDS[:3] == 1] == 0).all() and torch.equal(grad[3:], plain[3:])
    assert (batch.grad(batch.loss(torch.full_like(REWARD, 0.1))) == 0).all()


# ---------------------------------------------------------------------------------------------------------------------
# Nine outcomes, every group enumerated: what holds in expectation


class Tabular:
    """One slate token among 3, then one ranking token among 3 whose distribution depends on the slate."""

    def __init__(self):
        self.z_slate = torch.tensor([0.2, 0.0, -0.3], dtype=F64, requires_grad=True)
        self.z_rank = normal(3, 3, seed=1).requires_grad_()
        slate, rank = torch.tensor(list(itertools.product(range(3), range(3)))).T
        self.logp = torch.stack(
            [self.z_slate.log_softmax(0)[slate], self.z_rank.log_softmax(1)[slate, rank]], 1
        )  # (9,2)
        r_slate = torch.tensor([0.0, 0.5, 1.0], dtype=F64)  # the best slate is hard to rank
        r_rank = torch.tensor([[1.0, 0.7, 0.9], [0.2, 0.8, 0.4], [0.0, 0.3, 0.1]], dtype=F64)
        self.reward = torch.stack([r_slate[slate], r_rank[slate, rank]], 1)
        self.prob = self.logp.sum(1).exp()

    def grad(self, x) -> list[torch.Tensor]:
        """Gradient by the logits of the slate, (3,), and of the ranking, (3,3)."""
        return list(torch.autograd.grad(x, [self.z_slate, self.z_rank], retain_graph=True, materialize_grads=True))

    def exact(self, *weights) -> list[torch.Tensor]:
        """Gradient of E[w_slate R_slate + w_rank R_rank]."""
        return self.grad(self.prob @ self.reward @ torch.tensor(weights, dtype=F64))

    def expected(self, size: int, weigh, joint=False, baseline="mean", lam=1.0) -> list[torch.Tensor]:
        """Minus the gradient of the on-policy loss, in expectation over every group of `size` samples.

        weigh: advantages (B,U) -> weighted ones. joint: one unit with R_slate + lam R_rank, as GRPO has it.
        """
        groups = torch.tensor(list(itertools.product(range(9), repeat=size)))  # (N,size)
        rows, group = groups.flatten(), torch.arange(len(groups)).repeat_interleave(size)
        reward = self.reward[rows]
        if joint:
            reward = reward @ torch.tensor([[1.0], [lam]], dtype=F64)
        adv = weigh(advantages(reward, torch.ones_like(reward, dtype=torch.bool), group, baseline, "none"))
        ids = torch.tensor([[1, 1 if joint else 2]]).expand(len(rows), 2)
        denom = denominators(ids[:size], "const_len", reward.shape[1], 1, group[:size], apart=not joint)
        chance = self.prob.detach()[groups].prod(1)  # a loss divided by 1 / chance is weighted by the chance
        logp = self.logp[rows]
        loss, _ = policy_loss(
            logp, logp.detach(), spread(adv, ids), ids, denom.repeat(len(groups), 1) / chance[group, None], ROW, 1.0
        )
        return [-g for g in self.grad(loss)]


def same(got, expected) -> None:
    for g, e in zip(got, expected):
        torch.testing.assert_close(g, e, rtol=0, atol=1e-10)


def times(factor, grads):
    return [factor * g for g in grads]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("lam", [0.5, 1.0])
def test_plain_fgrpo_follows_another_gradient_than_that_of_its_rewards(size, lam):
    """Section 8, 7: own credit drops E[A_rank grad log pi(slate)], which is not 0: the slate never learns to be rankable.

    What is left is exactly the gradient of E[R_slate] by slate logits and of lambda E[R_rank] by ranking logits.
    """
    policy, shrink = Tabular(), (size - 1) / size
    got = policy.expected(size, lambda a: unit_weights(a, [1.0, lam], "own"))
    slate_only, rank_only, both = policy.exact(1.0, 0.0), policy.exact(0.0, lam), policy.exact(1.0, lam)
    same(got, times(shrink, [slate_only[0], rank_only[1]]))
    missing = shrink * both[0] - got[0]
    torch.testing.assert_close(missing, shrink * rank_only[0], rtol=0, atol=1e-10)
    assert missing.norm() > 0.2 * got[0].norm() > 0.01, "a sizeable part of the direction"


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("lam", [0.5, 1.0])
def test_causal_credit_follows_the_gradient_of_the_rewards(size, lam):
    """Section 8, 7: adding lambda A_rank to the slate tokens makes it that of E[R_slate + lambda R_rank] again.

    The mean of the group holds the sample itself: its advantage is (G-1)/G of its distance to the others' mean, which is
    independent of it. So the expectation carries exactly that factor; with the leave-one-out baseline there is none.
    """
    policy = Tabular()
    exact = policy.exact(1.0, lam)

    def weigh(a):
        return unit_weights(a, [1.0, lam], "causal")

    same(policy.expected(size, weigh), times((size - 1) / size, exact))
    same(policy.expected(size, weigh, baseline="loo"), exact)


@pytest.mark.parametrize("size", [2, 3])
def test_grpo_and_causal_credit_have_one_expectation(size):
    """Section 8, 7: one advantage for all tokens adds A_slate grad log pi(rank), which is noise of mean 0."""
    policy = Tabular()
    causal = policy.expected(size, lambda a: unit_weights(a, [1.0, 0.7], "causal"))
    same(policy.expected(size, lambda a: a, joint=True, lam=0.7), causal)


@pytest.mark.parametrize("size", [2, 3])
def test_the_two_cross_terms_one_by_one(size):
    """Section 8, 7: E[A_slate grad log pi(rank)] = 0, E[A_rank grad log pi(slate)] is a gradient of its own."""
    policy = Tabular()
    crossed = policy.expected(size, lambda a: a.flip(1))  # each phase's tokens carry the other's advantage
    same(crossed, [(size - 1) / size * policy.exact(0.0, 1.0)[0], torch.zeros(3, 3, dtype=F64)])
    assert crossed[0].norm() > 0.02


# ---------------------------------------------------------------------------------------------------------------------
# Text: one parse gives rewards and masks


TOKENIZER = build_tokenizer("byte", [])
POOL = ["Heat", "Alien", "Fargo", "Gilda", "Laura"]
SLATE, RANK = ("<SLATE>", "</SLATE>"), ("<RANK>", "</RANK>")


def answer(slate, rank) -> str:
    return "\n".join([SLATE[0], *slate, SLATE[1], RANK[0], *rank, RANK[1]])


def scored(texts, gold=("Heat", "Fargo"), unit="phase", **settings):
    """Texts as completions of one prompt, in bytes with a stop token -> Scored and their token ids."""
    rows = [[*TOKENIZER(t, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id] for t in texts]
    mask = torch.tensor([[i < len(r) for i in range(max(map(len, rows)))] for r in rows])
    tokens = torch.zeros(mask.shape, dtype=torch.int64)
    tokens[mask] = torch.tensor(list(itertools.chain(*rows)))
    roll = SimpleNamespace(
        tokens=tokens, mask=mask, group=torch.zeros(len(rows), dtype=torch.int64), finished=mask.any(1)
    )
    example = SimpleNamespace(candidates=POOL, gold=dict.fromkeys(gold, 1.0))
    cfg = Config(tags=[*SLATE, *RANK], **settings)
    return rewards.score(roll, [example], rewards.token_bytes(TOKENIZER), cfg, unit), tokens, mask


def test_masks_of_the_phases_are_disjoint_and_leave_out_delimiters():
    """Section 8, 4: slate tokens, ranking tokens and delimiters make up the completion; each token is in one of them."""
    text = "Well.\n" + answer(["Heat", "Alien"], ["Alien"]) + "\nDone."
    out, tokens, _ = scored([text])
    said = {u: TOKENIZER.decode(tokens[0][out.unit_ids[0] == u]) for u in (1, 2)}
    assert said == {1: "\nHeat\nAlien\n", 2: "\nAlien\n"}
    rest = TOKENIZER.decode(tokens[0][out.unit_ids[0] == 0], skip_special_tokens=True)
    assert rest == "Well.\n<SLATE></SLATE>\n<RANK></RANK>\nDone."
    one, _, mask = scored([text], unit="sequence")
    assert torch.equal(one.unit_ids, mask.long()), "GRPO trains every sampled token, delimiters too"


def test_a_token_that_shares_text_with_a_tag_belongs_to_no_phase():
    """Section 8, 4: BPE merges the end of a title with the start of a tag; such a token is a delimiter."""
    pieces = [b"<SLATE>", b"\nHe", b"at", b"\n</", b"SLATE", b">\n<", b"RANK>He", b"at", b"</RANK>", b""]
    text = rewards.join(pieces)
    parsed = rewards.parse(text, [*SLATE, *RANK])
    assert parsed.valid
    assert rewards.phase_units(pieces, text, [parsed.slate_span, parsed.rank_span]) == [0, 1, 1, 0, 0, 0, 0, 2, 0, 0]


def test_a_missing_tag_is_penalised_in_both_phases():
    """Section 8, 4 and 8: no partial credit; the penalty trains all sampled tokens, or none, as configured."""
    whole, cut = (
        answer(["Heat", "Fargo"], ["Heat", "Fargo"]),
        answer(["Heat", "Fargo"], ["Heat", "Fargo"])[: -len(RANK[1])],
    )
    for scope in ("all", "none"):
        out, _, mask = scored([whole, cut], format_penalty=-0.5, format_scope=scope)
        assert out.reward.tolist() == [[1.0, 1.0], [-0.5, -0.5]] and out.valid.all()
        assert torch.equal(out.unit_ids[1] > 0, mask[1].bool() & (scope == "all"))
    joint, _, _ = scored([whole, cut], unit="sequence", format_penalty=-0.5, lam=2.0)
    assert joint.reward.tolist() == [[3.0], [-1.5]]


@pytest.mark.parametrize("kind", ["recall", "f1"])
def test_a_repeated_item_counts_once_and_the_order_of_a_slate_does_not(kind):
    """Section 8, 8: R_slate is a function of the set; R_rank of the order."""
    slates = [["Heat", "Alien", "Fargo"], ["Fargo", "Heat", "Alien"], ["Heat", "Heat", "Alien", "Fargo", "heat"]]
    out, _, _ = scored([answer(s, ["Heat", "Alien"]) for s in slates], slate_reward=kind)
    assert out.reward[:, 0].tolist() == [out.reward[0, 0]] * 3 and out.reward[0, 0] == {"recall": 1.0, "f1": 0.8}[kind]
    ranks = [
        ["Heat", "Fargo", "Alien"],
        ["Heat", "Alien", "Fargo"],
        ["Alien", "Heat", "Fargo"],
        ["Heat", "Heat", "Fargo"],
    ]
    ndcg = scored([answer(slates[0], r) for r in ranks])[0].reward[:, 1].tolist()
    assert ndcg[0] == 1.0 > ndcg[1] > ndcg[2] and ndcg[3] == 1.0, "a repeated entry is skipped"


def test_an_item_outside_the_pool_gains_nothing():
    """Section 2: what is not in the gold set has utility 0; it takes a place, and F1 feels it."""
    out, _, _ = scored([answer(["Heat", "Casablanca"], ["Casablanca", "Heat"])], slate_reward="f1")
    assert out.reward[0].tolist() == pytest.approx([0.5, 0.6309297535714575 / 1.6309297535714575], abs=1e-12)
    assert out.parts["out_of_pool"] == [0.5]


def test_identities_with_one_gold_item():
    """Section 6: N@5 - N@3 is 0.387 to 0.431 times R@5 - R@3, and a slate of ten has a precision of a tenth of its recall."""
    items = [f"item {i}" for i in range(10)]
    for gold in (*items, "elsewhere"):
        m = ranking_metrics(items, {gold: 1.0}, [3, 5])
        step, gain = m["recall@5"] - m["recall@3"], m["ndcg@5"] - m["ndcg@3"]
        assert 0.386 * step <= gain <= 0.431 * step and (step > 0) == (gold in items[3:5])
        s = rewards.slate_scores(items, {gold: 1.0})
        assert s["precision"] == pytest.approx(s["recall"] / 10)
