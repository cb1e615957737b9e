"""Log-probs of completions: every model family against an unpadded float64 forward (faults F01 F04 F07 F13 F37 F39-F41)."""

import copy

import pytest
import torch
from torch import nn

import model as lm
from config import Config
from rollout import rollout

CPU = torch.device("cpu")
WORDS = 61
FAMILIES = ("qwen2", "qwen3", "hybrid", "llama", "smollm2", "gpt2")


def configuration(name: str, **changes):
    """A tiny member of a family; weights are large enough for sharp distributions and visible mistakes."""
    import transformers as t

    size = dict(vocab_size=WORDS, bos_token_id=None, eos_token_id=1, pad_token_id=None, initializer_range=0.15)
    common = size | dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=128)  # fmt: skip
    if name == "qwen2":  # the architecture of Qwen2.5: biases, untied
        return t.Qwen2Config(**common | dict(tie_word_embeddings=False) | changes)
    if name == "qwen3":
        return t.Qwen3Config(**common | dict(head_dim=8, tie_word_embeddings=True) | changes)
    if name == "hybrid":  # Qwen3.5: three recurrent layers, then one of attention
        return t.Qwen3_5TextConfig(**common | dict(
            num_hidden_layers=4, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
            linear_value_head_dim=8, layer_types=["linear_attention"] * 3 + ["full_attention"],
            tie_word_embeddings=True) | changes)  # fmt: skip
    if name == "llama":
        return t.LlamaConfig(**common | dict(tie_word_embeddings=False) | changes)
    if name == "smollm2":  # a tied Llama with an attention head per key-value head
        return t.LlamaConfig(**common | dict(num_key_value_heads=4, tie_word_embeddings=True) | changes)
    return t.GPT2Config(**size | dict(n_embd=32, n_layer=2, n_head=4, n_positions=128) | changes)


def family(name: str, seed=0, **changes) -> nn.Module:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(configuration(name, **changes)).eval()


def ragged(seed=0):
    """Three prompts and five completions of different lengths, two of one prompt; what stands in the padding is absurd."""
    rng = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(2, WORDS, (n,), generator=rng)  # noqa: E731
    prompts = [draw(n).tolist() for n in (4, 9, 1)]
    group = torch.tensor([1, 0, 2, 1, 0])
    lengths = torch.tensor([3, 7, 1, 5, 6])
    mask = torch.arange(10) < lengths[:, None]
    tokens = torch.where(mask, draw(50).view(5, 10), 10**9)
    return prompts, tokens, mask, group


def by_hand(model, prompts, tokens, mask, group, temperature):
    """The definition: each row alone, no padding, float64, log softmax(logits / T) of the next token."""
    model = copy.deepcopy(model).double()
    logp, entropy = torch.zeros(tokens.shape, dtype=torch.float64), torch.zeros(tokens.shape, dtype=torch.float64)
    for b, row in enumerate(tokens):
        prompt, own = prompts[group[b]], row[mask[b]].tolist()
        with torch.no_grad():
            z = model(input_ids=torch.tensor([prompt + own]), use_cache=False).logits[0].double() / temperature
        all_logp = (z - z.logsumexp(-1, keepdim=True))[len(prompt) - 1 : -1]
        for t, token in enumerate(own):
            logp[b, t] = all_logp[t, token]
            entropy[b, t] = -(all_logp[t].exp() * all_logp[t]).sum()
    return logp, entropy


class Recorder:
    """Stands before a model's forward and notes the width of every input."""

    def __init__(self, model):
        self.widths = []
        model.register_forward_pre_hook(lambda m, a, k: self.widths.append(k["input_ids"].shape[1]), with_kwargs=True)


class PlusOne(nn.Module):
    """A model that is sure that the next token is the last one plus 1."""

    def __init__(self, words=WORDS):
        super().__init__()
        self.words, self.weight = words, nn.Parameter(torch.tensor(60.0))

    def forward(self, input_ids, logits_to_keep=0, **kwargs):
        from types import SimpleNamespace

        logits = nn.functional.one_hot((input_ids + 1) % self.words, self.words) * self.weight
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])


# ---------------------------------------------------------------------------------------------------------------------
# The numbers


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_and_entropies_equal_an_unpadded_float64_forward_of_each_row(name):
    """F13, F01: padding, batching and positions leave no trace; GPT-2 is off by nats without position ids."""
    model, data = family(name), ragged()
    logp, entropy = lm.completion_logp(model, *data, temperature=0.7, entropy=True)
    want, want_entropy = by_hand(model, *data, temperature=0.7)
    assert logp.dtype == torch.float32 and logp.shape == data[1].shape
    torch.testing.assert_close(logp.double(), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), want_entropy, atol=1e-5, rtol=0)
    assert (logp[~data[2]] == 0).all() and (entropy[~data[2]] == 0).all()


@pytest.mark.parametrize("name", ("qwen3", "hybrid", "gpt2"))
def test_a_row_alone_equals_the_row_in_a_batch_and_wider_padding_changes_nothing(name):
    """F13, F30: neither neighbours nor the width of the batch reach a row; gradients agree too."""
    model = family(name)
    prompts, tokens, mask, group = ragged()
    logp = lm.completion_logp(model, prompts, tokens, mask, group)[0]
    for b in range(len(tokens)):
        alone = lm.completion_logp(
            model, [prompts[group[b]]], tokens[b : b + 1], mask[b : b + 1], torch.zeros(1).long()
        )[0]
        torch.testing.assert_close(alone[0], logp[b], atol=1e-5, rtol=0)
    wide = nn.functional.pad(tokens, (0, 10), value=-5), nn.functional.pad(mask, (0, 10))
    again = lm.completion_logp(model, prompts, *wide, group)[0]
    assert torch.equal(again[:, :10], logp) and (again[:, 10:] == 0).all()

    def gradient(*part):
        model.zero_grad()
        lm.completion_logp(model, *part)[0].sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    whole = gradient(prompts, tokens, mask, group)
    parts = sum(gradient(prompts, tokens[i], mask[i], group[i]).clone() for i in (slice(0, 2), slice(2, 5)))
    torch.testing.assert_close(whole, parts, atol=1e-4, rtol=1e-4)


def test_a_model_that_predicts_the_next_number_is_right_at_every_position_the_first_included():
    """F04: the logits before the first completion token predict it; one step off and all of it is wrong."""
    prompts = [[3, 9], [20, 21, 22, 30]]
    tokens, mask = torch.tensor([[10, 11, 12], [31, 32, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    logp = lm.completion_logp(PlusOne(), prompts, tokens, mask, torch.tensor([0, 1]))[0]
    assert logp.abs().max() < 1e-6
    for shift in (1, -1):
        wrong = lm.completion_logp(PlusOne(), prompts, tokens + shift, mask, torch.tensor([0, 1]))[0]
        assert wrong[:, 0].max() < -50
    logp = lm.completion_logp(PlusOne(), prompts, tokens, mask, torch.tensor([0, 1]), temperature=100.0)[0]
    assert logp[mask].unique().numel() == 1 and logp[mask].max() < -3  # 60 / T = 0.6: nearly uniform


def test_forgetting_the_temperature_would_be_seen():
    """F01: samples at 0.7 agree with log-probs at 0.7 to 1e-5, and differ from those at 1 a thousand times more."""
    model = family("qwen3")
    roll = rollout(model, [[5, 6, 7], [8]], 8, [1], max_new_tokens=8, temperature=0.7)
    part = (model, roll.prompt_ids, roll.tokens, roll.mask, roll.group)
    assert (lm.completion_logp(*part, 0.7)[0] - roll.logp).abs().max() < 1e-5
    assert (lm.completion_logp(*part)[0] - roll.logp)[roll.mask].abs().mean() > 0.01


def test_half_precision_logits_are_widened_before_the_softmax():
    """F07: a bfloat16 log_softmax over 150,000 words is off by 0.07 nats; ours equals float64 of the same logits."""
    z = (torch.randn(3, 150_000, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
    tokens = torch.tensor([0, 77, 149_999])
    logp, entropy = lm.token_logp(z, tokens, 0.7, entropy=True)
    want = (z.double() / 0.7).log_softmax(-1)
    torch.testing.assert_close(logp.double(), want.gather(1, tokens[:, None]).squeeze(1), atol=1e-4, rtol=0)
    torch.testing.assert_close(entropy.double(), -(want.exp() * want).sum(-1), atol=1e-3, rtol=0)
    assert (z.log_softmax(-1).double() - z.double().log_softmax(-1)).abs().max() > 0.01, "the fault this guards against"


def test_impossible_words_and_huge_logits_stay_finite():
    """F61: -inf and 1e4 among the logits give no nan in log-prob, entropy or gradient."""
    z = torch.tensor([[0.0, 1e4, -torch.inf, -1e4], [1.0, 2.0, -torch.inf, 0.0]], requires_grad=True)
    logp, entropy = lm.token_logp(z, torch.tensor([1, 0]), 1.0, entropy=True)
    logp.sum().backward()
    assert logp[0] == 0 and entropy[0] == 0 and torch.isfinite(logp).all() and torch.isfinite(entropy).all()
    assert torch.isfinite(z.grad).all() and not entropy.requires_grad


def test_bfloat16_compute_returns_float32_log_probs_near_the_exact_ones():
    """F07: autocast rounds the hidden states, not the softmax; mean gap below 0.02 nats."""
    model, data = family("qwen3"), ragged()
    exact, rough = (lm.completion_logp(model, *data, dtype=d)[0] for d in (torch.float32, torch.bfloat16))
    assert rough.dtype == torch.float32
    gap = (rough - exact)[data[2]].abs()
    assert 0 < gap.mean() < 0.02


def test_logits_exist_for_completion_positions_only():
    """F41: the head sees the longest completion plus one position, not the prompts, not the padding of the batch."""
    model, (prompts, tokens, mask, group) = family("qwen3"), ragged()
    seen = []
    model.lm_head.register_forward_pre_hook(lambda m, a: seen.append(tuple(a[0].shape[:2])))
    lm.completion_logp(model, prompts, tokens, mask, group)
    assert seen == [(5, 8)]  # longest of 7; the batch is 10 wide, prompts up to 9


def test_the_stop_token_has_a_gradient_like_any_other():
    """F10: a mask that ends before the stop token would never teach the model to stop."""
    model = family("qwen2")
    tokens, mask = torch.tensor([[7, 1, 0]]), torch.tensor([[True, True, False]])
    lm.completion_logp(model, [[4, 5]], tokens, mask, torch.tensor([0]))[0][0, 1].backward()
    assert model.lm_head.weight.grad[1].norm() > 0.01


def test_no_input_is_changed():
    """F37: an in-place mask or division would reach the next user of the tensor."""
    model, data = family("qwen3"), ragged()
    before = copy.deepcopy(data)
    lm.completion_logp(model, *data, temperature=0.7, entropy=True)
    assert data[0] == before[0] and all(torch.equal(a, b) for a, b in zip(data[1:], before[1:]))
    z, tokens = torch.randn(2, 9), torch.tensor([3, 4])
    kept = z.clone()
    lm.token_logp(z, tokens, 0.5, entropy=True)
    assert torch.equal(z, kept)


# ---------------------------------------------------------------------------------------------------------------------
# Modes of the model


@pytest.mark.parametrize("name", ("qwen3", "hybrid", "llama", "gpt2"))
def test_dropout_in_a_checkpoint_is_gone_after_loading(name, tmp_path):
    """F39: dropout 0.5 in the config; in train mode two passes are equal to the bit, and equal to eval mode."""
    rates = dict(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5) if name == "gpt2" else dict(attention_dropout=0.5)
    noisy, data = family(name, **rates).train(), ragged()
    noisy.save_pretrained(tmp_path)
    assert not torch.equal(*(lm.completion_logp(noisy, *data)[0] for _ in "ab")), "the fault this guards against"
    model = lm.load(Config(init=str(tmp_path), max_prompt=64, max_new_tokens=32), None, CPU)
    train = [lm.completion_logp(model.train(), *data)[0] for _ in "ab"]
    assert torch.equal(*train)
    assert torch.equal(train[0], lm.completion_logp(model.eval(), *data)[0])


@pytest.mark.parametrize("name", ("qwen3", "hybrid", "gpt2"))
def test_with_gradient_checkpointing_on_a_rollout_still_decodes_with_its_cache(name, tmp_path):
    """F40: after the prefills (prompts of unlike length apart) every forward gets one token; the mode is restored and gradients are the same."""
    family(name).save_pretrained(tmp_path)
    plain, thrifty = (
        lm.load(Config(init=str(tmp_path), max_prompt=64, max_new_tokens=32, checkpointing=c), None, CPU).train()
        for c in (False, True)
    )
    assert thrifty.is_gradient_checkpointing
    recorder, modes = Recorder(thrifty), set()
    thrifty.register_forward_pre_hook(lambda m, a: modes.add((m.training, torch.is_grad_enabled())))
    roll = rollout(thrifty, [[5, 6, 7], [8]], 2, [], max_new_tokens=5)
    assert recorder.widths == [3, 1] + [1] * 4
    assert modes == {(False, False)} and thrifty.training and thrifty.is_gradient_checkpointing
    assert torch.equal(roll.tokens, rollout(plain, [[5, 6, 7], [8]], 2, [], max_new_tokens=5).tokens)
    for model in (plain, thrifty):
        lm.completion_logp(model, *ragged())[0].sum().backward()
    for a, b in zip(plain.parameters(), thrifty.parameters()):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-4)
