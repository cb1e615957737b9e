"""Parity with TRL: value and gradient of every loss that TRL has too, in double precision. Not collected by pytest.

    make parity

Both codes get the same weights, tokens and rewards; all else is computed twice. Theirs: a real GRPOTrainer, RLOOTrainer and
DPOTrainer on a tiny Llama, from _generate_and_score_completions (advantages, old and reference log-probs, importance
weights) to _compute_loss; a rollout_func hands out the completions. Ours: completion_logp, advantages, denominators,
policy_loss, preference. Gradients are by all weights of the model. Completions are ragged, masks have holes, one row has no
trained token, one group equal rewards; old, reference and sampler weights are so far off that clips and caps bind
(asserted). A reason stands where definitions differ; those rows must differ. Exit code 1 if any row is not as stated.

PARITY_BREAK=0.00001 multiplies our advantages by 1.00001: every row that uses them must then fail.
Left out: PPO (GAE, value clipping), which TRL has no longer (GSPO-token neither, but with one advantage per row it must equal
GSPO); prompts of unequal length, because left padding moves TRL's positions, and RoPE's float32 angles then differ by 1e-7.
"""

import logging
import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
sys.path.insert(0, str(Path(__file__).parent.parent))

import datasets
import torch
import transformers
import trl
from tokenizers import Tokenizer, models, pre_tokenizers
from trl.rewards import get_soft_overlong_punishment
from trl.trainer import utils as trl_utils

import losses
from losses import METHODS, Cap, Clip, advantages, denominators, policy_loss, spread, unit_sum
from model import completion_logp
from rewards import overlong

torch.set_default_dtype(torch.float64)
datasets.disable_progress_bars()
logging.disable(logging.WARNING)
warnings.filterwarnings("ignore")
TOLERANCE, FACTOR = 1e-6, 1 + float(os.environ.get("PARITY_BREAK", 0))
SEEDS, N, G, LENGTH, VOCAB, TEMPERATURE = 3, 5, 6, 9, 12, 0.8
B, SCALES = N * G, {"std": "group", "batch_std": "batch", "none": "none"}  # our name: TRL's
ENTROPY = "theirs is the token mean of the entropy for every loss; ours has the divisor of the loss"
MICRO = "theirs is a mean of the micro-batches' token means; ours counts tokens over the step (F27)"
RATIO = "their KL takes the ratio of the loss, here the sequence's; ours always the token's"
UNSCORABLE = "their tokens stay in TRL's normaliser; ours does not count what is not trained"
TABLE: dict[str, list] = {}  # name -> largest relative difference of value and of gradient, reason


def record(name: str, ours: tuple, theirs: tuple, reason=""):
    entry = TABLE.setdefault(name, [None, None, reason])
    for i, (a, b) in enumerate(zip(ours, theirs)):
        if a is not None and b is not None:
            assert a.shape == b.shape and a.isfinite().all() and b.isfinite().all(), f"{name}: {a}, {b}"
            entry[i] = max(entry[i] or 0.0, float((a - b).abs().max() / b.abs().max()))


def tiny(seed: int) -> transformers.LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "initializer_range": 0.3}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **special, num_attention_heads=2)).train()


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w3"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", eos_token="w1", unk_token="w3")


def exact_head(model, temperature: float):
    """In place of TRL's fused head, whose output is float32: the same from TRL's function for any precision."""

    def forward(*args, fused_lm_head=False, labels=None, **kwargs):
        out = type(model).forward(model, *args, **kwargs)
        if not fused_lm_head:
            return out
        z, at, mask = out.logits[:, :-1], labels[:, 1:].clamp(min=0), labels[:, 1:] >= 0
        logp, h = trl_utils.selective_log_softmax_and_entropy(z, at, temperature=temperature, row_mask=mask)
        return trl_utils.FusedCausalLMOutput(
            log_probs=logp, entropy=h, mean_logits=z.mean(-1), is_top1=z.argmax(-1) == at
        )

    model.forward = forward


def with_gradient(model, loss) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


class Sides:
    """What both codes are given: prompts, completions, masks, rewards, weights; and the trainers of TRL."""

    def __init__(self, seed: int):
        self.model, self.ref, self.sampler = tiny(seed), tiny(seed), tiny(seed)
        moved = lambda by: {k: v + by * torch.randn_like(v) for k, v in self.model.state_dict().items()}  # noqa: E731
        self.old, self.new = moved(0), moved(0.03)
        self.ref.load_state_dict(moved(0.03))
        self.sampler.load_state_dict(moved(0.03))
        self.prompt = torch.randint(4, VOCAB, (N, 3))
        self.group = torch.arange(N).repeat_interleave(G)
        self.length = torch.randint(1, LENGTH + 1, (B,)).index_fill(0, torch.tensor(0), LENGTH)
        self.mask = torch.arange(LENGTH) < self.length[:, None]
        self.tokens = torch.where(self.mask, torch.randint(4, VOCAB, self.mask.shape), 0)
        self.ids = (self.mask & (torch.rand(self.mask.shape) < 0.8)).long().index_fill(0, torch.tensor(1), 0)
        self.reward = torch.randint(-8, 9, (B, 1)) / 8  # exact in TRL's float32
        self.reward[self.group == N - 1] = 0.5
        self.valid = self.reward < 2

        common = {"output_dir": "runs/parity", "report_to": "none", "use_cpu": True, "bf16": False}
        common |= {"per_device_train_batch_size": B, "gradient_checkpointing": False}
        sampling = {"num_generations": G, "max_completion_length": LENGTH, "temperature": TEMPERATURE}
        prompts = datasets.Dataset.from_list([{"prompt": "w5"}] * B)
        pairs = datasets.Dataset.from_list([{"prompt": "w5", "chosen": "w6", "rejected": "w7"}] * N)
        args = trl.GRPOConfig(**common, **sampling, vllm_importance_sampling_mode="token_truncate")
        out = {"processing_class": tokenizer()}
        self.grpo = trl.GRPOTrainer(self.model, self.score, args, prompts, rollout_func=self.rollout, **out)
        args = trl.RLOOConfig(**common, **sampling, beta=0.0)
        self.rloo = trl.RLOOTrainer(tiny(seed), self.score, args, prompts, **out)
        self.rloo._generate = lambda _: (*list(self.rollout(None, None).values())[:2], [""] * B)
        args = trl.DPOConfig(**common, beta=0.3)
        self.dpo = trl.DPOTrainer(tiny(seed), tiny(seed), args, train_dataset=pairs, **out)
        self.grpo.ref_model = self.rloo.ref_model = self.ref
        for model in (self.model, self.ref, self.rloo.model):
            exact_head(model, TEMPERATURE)
        for model in (self.dpo.model, self.dpo.ref_model):
            exact_head(model, 1.0)

    def score(self, completion_ids, **_):
        return [float(r) if v else None for r, v in zip(self.reward[:, 0], self.valid[:, 0])]

    def rollout(self, prompts, trainer):
        rows = lambda x: [row[:n].tolist() for row, n in zip(x, self.length)]  # noqa: E731
        return {"prompt_ids": self.prompt[self.group].tolist(), "completion_ids": rows(self.tokens),
                "logprobs": rows(self.logp(self.sampler)[0]), "env_mask": rows(self.ids)}  # fmt: skip

    def roll(self, trainer, **settings):
        """The completions through a trainer of TRL: advantages, log-probs of old and reference weights, importance weights."""
        vars(trainer).update(settings)
        trainer.model.load_state_dict(self.old)
        return trainer._generate_and_score_completions([{"prompt": "w5"}] * B)

    def at(self, weights: dict):
        self.model.load_state_dict(weights)
        return self.model

    def logp(self, model, rows=slice(None), temperature=TEMPERATURE):
        args = self.prompt.tolist(), self.tokens[rows], self.mask[rows], self.group[rows]
        return completion_logp(model, *args, temperature, entropy="grad")

    def logp_of(self, *weights) -> list[torch.Tensor]:
        with torch.no_grad():
            return [self.logp(self.at(w))[0] for w in weights]

    def inputs(self, rows, ids) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Prompt and completion side by side: tokens, which are real, which are trained."""
        prompt = self.prompt[self.group[rows]]
        parts = (prompt, self.tokens[rows]), (prompt > 0, self.mask[rows]), (0 * prompt, ids)
        return tuple(torch.cat([a.long(), b.long()], 1) for a, b in parts)


def loss_of(s: Sides, name, row, kind, level="token", reason="", micro=1, beta=0.0, kl_ratio=False, dual=0.0, tis=0.0,
            bonus=0.0):  # fmt: skip
    """A loss of GRPOTrainer beside policy_loss with a row of METHODS."""
    t, cap = s.grpo, isinstance(row.clip, Cap)
    inputs = s.roll(t, scale_rewards=SCALES[row.scale], use_vllm=True, _last_loaded_step=t.state.global_step, beta=1.0,
                    vllm_importance_sampling_clip_max=tis or 3.0)  # fmt: skip
    vars(t).update(
        loss_type=kind, importance_sampling_level=level, epsilon_low=None if cap else row.clip.low, epsilon_high=row.clip.high,
        beta=beta, use_vllm=tis > 0, entropy_coef=bonus, _entropy_bonus_enabled=bonus > 0,
        current_gradient_accumulation_steps=micro,
    )  # fmt: skip
    vars(t.args).update(delta=dual or None, use_bias_correction_kl=kl_ratio, steps_per_generation=micro)
    s.at(s.new)
    loss = sum(t._compute_loss(s.model, part) for part in trl_utils.split_tensor_dict(inputs, micro))
    theirs = with_gradient(s.model, loss)

    old, ref, sampler = s.logp_of(s.old, s.ref.state_dict(), s.sampler.state_dict())
    ids = s.ids * s.valid  # as losses.credit does
    adv = FACTOR * advantages(s.reward, s.valid, s.group, row.baseline, row.scale, 1e-4, 1)
    denom = denominators(ids, row.aggregate, 1, LENGTH, s.group)
    weight = losses.truncated_weight(old, sampler, tis) if tis else None
    logp, entropy = s.logp(s.at(s.new))
    loss, metrics = policy_loss(logp, old, spread(adv, ids), ids, denom, row, 1.0, ref, ids, denom, beta, "k3", kl_ratio,
                                dual, weight, entropy, bonus)  # fmt: skip
    assert metrics["clip_high"] > 0 and (cap or metrics["clip_low"] > 0), f"{name}: no clip binds"
    assert metrics.get("clip_dual", 1) > 0 and (not tis or (weight == tis).any()), f"{name}: no bound binds"
    record(name, with_gradient(s.model, loss), theirs, reason)


def trained(s: Sides, logp, adv, ids, row, rows=slice(None)):
    """Value and gradient of a loss of ours without a ratio."""
    denom = denominators(ids, row.aggregate, 1, LENGTH, s.group[rows])
    return with_gradient(s.model, policy_loss(logp, logp.detach(), FACTOR * adv, ids, denom, row, 1.0)[0])


def rloo(s: Sides, beta=0.1):
    row, ids, t = METHODS["rloo"], s.mask.long(), s.rloo
    old, ref = s.logp_of(s.old, s.ref.state_dict())
    inputs = s.roll(t, beta=beta)
    reward = s.reward - unit_sum(beta * losses.kl_estimate(old, ref, "k1"), ids, 1)  # as losses.credit does
    adv = advantages(reward, s.valid, s.group, row.baseline, row.scale)
    record("rloo advantages, k1 in the reward", (FACTOR * adv[:, 0],), (inputs["advantages"],))
    ours, theirs = {}, {}
    for name, weights in (("old", s.old), ("new", s.new)):
        t.model.load_state_dict(weights)
        theirs[name] = with_gradient(t.model, t._compute_loss(t.model, inputs))
        ours[name] = trained(s, s.logp(s.at(weights))[0], spread(adv, ids), ids, row)
    record("rloo, on policy, gradient", (None, ours["old"][1]), theirs["old"])
    record("rloo, on policy, value", ours["old"][:1], theirs["old"], "theirs is -A ratio, 0 at ratio 1; ours -A log pi")
    record("rloo, off policy", ours["new"], theirs["new"], "theirs clips a ratio of the whole sequence; ours has none")


def dpo(s: Sides, beta=0.3):
    rows = torch.cat([torch.arange(0, B, G), torch.arange(1, B, G)])  # chosen, then rejected
    row, ids, t = METHODS["dpo"], s.mask[rows].long(), s.dpo
    t.model.load_state_dict(s.new)
    t.ref_model.load_state_dict(s.ref.state_dict())
    inputs = dict(zip(("input_ids", "attention_mask", "completion_mask"), s.inputs(rows, ids)))
    theirs = with_gradient(t.model, t._compute_loss(t.model, inputs, False))
    logp, ref = s.logp(s.at(s.new), rows, 1.0)[0], s.logp(s.ref, rows, 1.0)[0].detach()
    good = (torch.arange(2 * N) < N)[:, None]
    adv, value = losses.preference(beta * unit_sum(logp.detach() - ref, ids, 1), good, good | True, s.group[rows])
    record("dpo (sigmoid)", (value.mean(), trained(s, logp, spread(beta * adv, ids), ids, row, rows)[1]), theirs)


def sft(s: Sides):
    """Through TRL's fused head itself."""
    row, model = METHODS["sft"], tiny(0)
    trl_utils.add_fused_lm_head(model)
    model.load_state_dict(s.new)
    tokens, seen, ids = s.inputs(slice(None), s.ids)
    labels = torch.where(ids > 0, tokens, -100)
    theirs = with_gradient(model, model(tokens, attention_mask=seen, labels=labels, fused_lm_head=True).loss)
    logp = s.logp(s.at(s.new), temperature=1.0)[0]
    record("sft (fused head: float32)", trained(s, logp, s.ids.double(), s.ids, row), theirs)


def compare(s: Sides):
    grpo, dapo, gspo = METHODS["grpo"], METHODS["dapo"], METHODS["gspo"]
    bnpo, wide = replace(grpo, aggregate="token_mean"), replace(gspo, clip=Clip(0.05, 0.05))
    cispo, floor = (replace(METHODS["cispo"], clip=Cap(low, 1.2)) for low in (0, 0.9))
    loss_of(s, "grpo", grpo, "grpo")
    loss_of(s, "grpo, 5 micro-batches", grpo, "grpo", micro=5)
    loss_of(s, "grpo, scale batch", replace(grpo, scale="batch_std"), "grpo")
    loss_of(s, "grpo, scale none", replace(grpo, scale="none"), "grpo")
    loss_of(s, "grpo, dual clip 1.3", grpo, "grpo", dual=1.3)
    loss_of(s, "grpo, k3", grpo, "grpo", beta=0.1)
    loss_of(s, "grpo, k3 with ratio", grpo, "grpo", beta=0.1, kl_ratio=True)
    loss_of(s, "grpo, k3, truncated weights 1.2", grpo, "grpo", tis=1.2, beta=0.1)
    loss_of(s, "grpo, entropy bonus", grpo, "grpo", bonus=0.01, reason=ENTROPY)
    loss_of(s, "bnpo (token mean)", bnpo, "bnpo")
    loss_of(s, "bnpo, entropy bonus", bnpo, "bnpo", bonus=0.01)
    loss_of(s, "bnpo, 5 micro-batches", bnpo, "bnpo", micro=5, reason=MICRO)
    loss_of(s, "dr_grpo", METHODS["dr_grpo"], "dr_grpo")
    loss_of(s, "dapo", dapo, "dapo")
    loss_of(s, "dapo, 5 micro-batches", dapo, "dapo", micro=5)
    loss_of(s, "dapo, k3", dapo, "dapo", beta=0.1)
    loss_of(s, "gspo", gspo, "grpo", "sequence")
    loss_of(s, "gspo_token beside gspo", METHODS["gspo_token"], "grpo", "sequence")
    loss_of(s, "gspo, clip 0.05, k3", wide, "grpo", "sequence", beta=0.1)
    loss_of(s, "gspo, k3 with ratio", wide, "grpo", "sequence", beta=0.1, kl_ratio=True, reason=RATIO)
    loss_of(s, "luspo (gspo, seq_sum)", replace(wide, aggregate="seq_sum"), "luspo", "sequence")
    loss_of(s, "cispo, cap 1.2", cispo, "cispo")
    loss_of(s, "cispo, cap 1.2, floor 0.9", floor, "cispo", reason="theirs has no floor; ours is 0 in METHODS")
    rloo(s)
    dpo(s)
    sft(s)
    ours, theirs = (
        [overlong(n, 20, 8) for n in range(30)],
        get_soft_overlong_punishment(20, 8)([[0] * n for n in range(30)]),
    )
    record("overlong punishment", (torch.tensor(ours),), (torch.tensor(theirs),))
    s.valid[[2, *range(G, 2 * G - 1)]] = False  # one sample of a group; all but one of another
    for scale, name in SCALES.items():
        ours = FACTOR * advantages(s.reward, s.valid, s.group, "mean", scale, 1e-4, 1)[:, 0]
        theirs = s.roll(s.grpo, scale_rewards=name, use_vllm=False, beta=0.0)["advantages"]
        record(f"advantages, scale {name}, unscorable samples", (ours,), (theirs,))
    loss_of(s, "grpo, unscorable samples", grpo, "grpo")
    loss_of(s, "dapo, unscorable samples", dapo, "dapo", reason=UNSCORABLE)


if __name__ == "__main__":
    for seed in range(SEEDS):
        compare(Sides(seed))
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, trl {trl.__version__}; {SEEDS} seeds\n")
    print("| loss | value | gradient | why they differ |\n|---|---|---|---|")
    failed = []
    for name, (*gaps, reason) in TABLE.items():
        print(f"| {name} | {' | '.join('' if g is None else f'{g:.0e}' for g in gaps)} | {reason} |")
        if any(g is not None and (g > TOLERANCE) != bool(reason) for g in gaps):
            failed.append(f"{name}: " + ("does not differ, its reason is stale" if reason else "differs"))
    print("\n" + ("\n".join(failed) or f"All as stated: at most {TOLERANCE:g} wherever no reason is given."))
    sys.exit(bool(failed))
