"""Rollouts: the sampler, its caches, its randomness and its budget (faults F02 F03 F05 F08 F10-F12 F18 F45 F59 F61)."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from test_logprobs import FAMILIES, WORDS, Recorder, family
from torch import nn

import model as lm
import rollout as ro
from rollout import admit, demonstrations, rollout, sample, uniforms

PROMPTS = [[5, 6, 7], [8, 30, 9, 11, 2, 40, 13, 60, 3], [17], [21, 22, 23, 24, 25, 26]]


class Mock(nn.Module):
    """A model that is a function from the last token to logits; its cache stays empty."""

    def __init__(self, logits_of):
        from transformers import GenerationConfig, Qwen3Config

        super().__init__()
        self.logits_of, self.weight = logits_of, nn.Parameter(torch.zeros(()))
        self.config, self.generation_config = Qwen3Config(num_hidden_layers=1), GenerationConfig()

    def forward(self, input_ids, attention_mask, position_ids, cache, use_cache, logits_to_keep=1):
        from types import SimpleNamespace

        assert use_cache and attention_mask.shape[0] == input_ids.shape[0] == position_ids.shape[0]
        return SimpleNamespace(logits=self.logits_of(input_ids[:, -1:]))


def uniform(words: int) -> Mock:
    return Mock(lambda last: torch.zeros(*last.shape, words))


def counter(words: int) -> Mock:
    """Says last + 1, modulo the vocabulary, and is sure of it."""
    return Mock(lambda last: 50.0 * nn.functional.one_hot((last + 1) % words, words))


def rows(roll) -> list[list[int]]:
    return [t[m].tolist() for t, m in zip(roll.tokens, roll.mask)]


def same(a, b):
    """Two rollouts agree on everything but the number of row-steps and rounding of log-probs."""
    assert a.prompt_ids == b.prompt_ids and rows(a) == rows(b)
    for f in ("mask", "group", "finished"):
        assert torch.equal(getattr(a, f), getattr(b, f)), f
    torch.testing.assert_close(a.logp, b.logp, atol=1e-5, rtol=0)


def lively(**settings):
    """Rollout of a model whose rows end at very different lengths: 4 prompts x 6 samples, 12 stop words of 61."""
    kwargs = dict(samples=6, stop=list(range(12)), max_new_tokens=16) | settings
    return rollout(family("qwen3", initializer_range=0.05), PROMPTS, **kwargs)


# ---------------------------------------------------------------------------------------------------------------------
# Against the model


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_decoding_equals_generate_for_ragged_prompts(name):
    """F13, F59: left padding, cache copies and compaction change no token; some rows stop early, and once."""
    from transformers import GenerationConfig

    model = family(name, seed=1)
    ids, seen = lm.left_pad(PROMPTS, "cpu")
    model.generation_config = GenerationConfig()
    settings = dict(do_sample=False, max_new_tokens=14, pad_token_id=0)
    free = model.generate(input_ids=ids, attention_mask=seen, eos_token_id=WORDS - 1, **settings)[:, ids.shape[1] :]
    stop = [int(free[1, 3]), int(free[2, 5]), WORDS - 1]  # words that these rows say: they will end there
    want = model.generate(input_ids=ids, attention_mask=seen, eos_token_id=stop, **settings)[:, ids.shape[1] :]
    roll = rollout(model, PROMPTS, 1, stop, max_new_tokens=14, temperature=0)
    lengths = roll.mask.sum(1)
    assert lengths[1] <= 4 and lengths[2] <= 6
    for b, own in enumerate(rows(roll)):
        assert own == want[b, : len(own)].tolist()
        assert (own[-1] in stop) == bool(roll.finished[b]) and not set(own[:-1]) & set(stop)
        assert (want[b, len(own) :] == 0).all() and (roll.finished[b] or len(own) == 14)
    alone = [rollout(model, [p], 1, stop, max_new_tokens=14, temperature=0) for p in PROMPTS]
    assert rows(roll) == [rows(r)[0] for r in alone]


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_of_the_sampler_equal_teacher_forced_ones(name):
    """F01, F06, F13: at 0.7, prompts shared by samples, rows dropped on the way; token by token to 1e-5."""
    model = family(name, initializer_range=0.05)
    roll = rollout(model, PROMPTS, 4, list(range(1, 12)), max_new_tokens=12, temperature=0.7)
    again = lm.completion_logp(model, roll.prompt_ids, roll.tokens, roll.mask, roll.group, temperature=0.7)[0]
    assert roll.mask.sum(1).unique().numel() > 2 and roll.finished.any(), "rows of many lengths are needed"
    torch.testing.assert_close(roll.logp, again, atol=1e-5, rtol=0)
    assert (roll.logp[roll.mask] < 0).all() and (roll.logp[~roll.mask] == 0).all()
    assert not roll.logp.requires_grad


def test_greedy_log_probs_are_those_of_temperature_1():
    model = family("qwen3")
    roll = rollout(model, PROMPTS, 1, [1], max_new_tokens=6, temperature=0)
    again = lm.completion_logp(model, roll.prompt_ids, roll.tokens, roll.mask, roll.group)[0]
    torch.testing.assert_close(roll.logp, again, atol=1e-5, rtol=0)
    assert torch.equal(
        again, lm.completion_logp(model, roll.prompt_ids, roll.tokens, roll.mask, roll.group, temperature=0)[0]
    )


@pytest.mark.parametrize("name", ("qwen3", "hybrid", "gpt2"))
def test_a_prompt_is_prefilled_once_however_many_samples_it_gets(name):
    """The widths and heights of the forwards: all prompts once, those of nearly one length together, then one token per row."""
    model = family(name)
    recorder, heights = Recorder(model), []
    model.register_forward_pre_hook(lambda m, a, k: heights.append(len(k["input_ids"])), with_kwargs=True)
    rollout(model, [*PROMPTS, [30] * 8], 5, [], max_new_tokens=3)
    assert recorder.widths == [9, 6, 3, 1, 1, 1] and heights == [2, 1, 1, 1, 25, 25]
    recorder.widths.clear(), heights.clear()
    rollout(model, PROMPTS, 5, [], max_new_tokens=3, shared=False)
    assert recorder.widths == [9, 1, 1] and heights == [4, 20, 20]


def test_changed_weights_change_the_samples():
    """F08: a cache that outlives a call would sample from the model before the update."""
    model = family("qwen3")
    before = rollout(model, PROMPTS, 1, [], max_new_tokens=8, temperature=0)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.neg_()
    after = rollout(model, PROMPTS, 1, [], max_new_tokens=8, temperature=0)
    fresh = copy.deepcopy(model)
    assert rows(after) != rows(before)
    same(after, rollout(fresh, PROMPTS, 1, [], max_new_tokens=8, temperature=0))


@pytest.mark.parametrize("training", (True, False))
def test_a_rollout_leaves_the_model_and_its_arguments_as_they_were(training):
    """F37, F39: eval mode inside only; no gradient, no weight, no prompt and no stop list is touched."""
    model = family("qwen2").train(training)
    weights, prompts, stop = copy.deepcopy(model.state_dict()), copy.deepcopy(PROMPTS), [1, 2]
    rollout(model, prompts, 2, stop, max_new_tokens=4, prefix=[9])
    assert model.training == training and prompts == PROMPTS and stop == [1, 2]
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# The distribution


def test_nothing_but_the_temperature_shapes_the_distribution():
    """F02: a fresh GenerationConfig means top_k 50 to transformers, and a model may bring its own top_k and penalties."""
    model = uniform(200)
    roll = rollout(model, [[3]], 50, [], max_new_tokens=100)
    counts = torch.bincount(roll.tokens.flatten(), minlength=200)
    assert roll.tokens.numel() == 5000 and (counts > 0).sum() > 195
    assert ((counts - 25.0) ** 2 / 25).sum() < 267  # chi-squared with 199 degrees of freedom: 999 in 1000
    torch.testing.assert_close(roll.logp, torch.full_like(roll.logp, -np.log(200)))
    for key, value in dict(
        do_sample=False, top_k=5, top_p=0.1, temperature=0.1, repetition_penalty=3.0, min_p=0.5
    ).items():
        setattr(model.generation_config, key, value)
    assert torch.equal(rollout(model, [[3]], 50, [], max_new_tokens=100).tokens, roll.tokens)
    real = family("qwen3", initializer_range=0.05)
    plain = rollout(real, PROMPTS, 4, [], max_new_tokens=8)
    for key, value in dict(top_k=2, top_p=0.2, repetition_penalty=2.0).items():
        setattr(real.generation_config, key, value)
    same(plain, rollout(real, PROMPTS, 4, [], max_new_tokens=8))


@pytest.mark.parametrize("temperature, bound", ((1.0, 36.1), (0.7, 36.1), (2.0, 36.1)))
def test_draws_follow_the_softmax_of_logits_over_temperature(temperature, bound):
    """Chi-squared with 14 degrees of freedom, 999 in 1000; log-probs are exact."""
    z = torch.randn(15, generator=torch.Generator().manual_seed(3)) * 1.5
    u = torch.rand(40_000, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    token, logp = sample(z.expand(40_000, 15), u, temperature)
    p = (z.double() / temperature).softmax(-1)
    expected = p * 40_000
    assert expected.min() > 5
    assert ((torch.bincount(token, minlength=15) - expected) ** 2 / expected).sum() < bound
    torch.testing.assert_close(logp.double(), p.log()[token], atol=1e-5, rtol=0)


def test_every_word_of_a_large_vocabulary_owns_its_share_of_the_unit_interval():
    """A float32 cumulative sum over 150,000 words skips some of them; the middle of each share must give the word."""
    words = 150_000
    u = (torch.arange(0, words, 997, dtype=torch.float64) + 0.5) / words
    token, _ = sample(torch.zeros(1, words).expand(len(u), words), u, 1.0)
    assert token.tolist() == list(range(0, words, 997))
    z = torch.zeros(1, words)
    z[:, 0] = 20.0  # half of the mass and more on one word: rare words of 1e-9 keep their places behind it
    p = z[0].double().softmax(-1)
    at = torch.tensor([1, 75_000, words - 1])
    token, _ = sample(z.expand(3, words), p.cumsum(-1)[at] - p[at] / 2, 1.0)
    assert (token - at).abs().max() <= 1


def test_words_of_probability_zero_are_never_drawn():
    """At both ends of the unit interval too: u = 0 and the largest number below 1."""
    z = torch.randn(500, 9, generator=torch.Generator().manual_seed(0)) * 4
    z[:, [0, 4, 8]] = -torch.inf
    for u in (0.0, 5e-324, 0.5, 1 - 2.0**-53):
        token, logp = sample(z, torch.full((500,), u, dtype=torch.float64), 1.0)
        assert not torch.isin(token, torch.tensor([0, 4, 8])).any() and torch.isfinite(logp).all()
        assert u != 0.0 or (token == 1).all()
        assert u < 0.9 or (token == 7).float().mean() > 0.99


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_logits_of_ten_thousand_and_temperature_zero_are_fine(dtype):
    """F61: half-precision softmax gave nan, division by T = 0 inf."""
    z = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 1e4]], dtype=dtype)
    u = torch.tensor([0.9, 0.9], dtype=torch.float64)
    for temperature in (1.0, 0.7, 1e-3):
        token, logp = sample(z, u, temperature)
        assert token.tolist() == [0, 2] and torch.isfinite(logp).all()
        torch.testing.assert_close(logp, torch.tensor([0.0, -np.log(2)], dtype=torch.float32))
    wide = (torch.randn(64, 500, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    token, logp = sample(wide, torch.linspace(0, 0.999, 64, dtype=torch.float64), 0.7)
    exact = (wide.double() / 0.7).log_softmax(-1).gather(1, token[:, None]).squeeze(1)
    torch.testing.assert_close(logp.double(), exact, atol=1e-5, rtol=0)  # widened before the division, not after it
    greedy = sample(z, u, 0)
    assert greedy[0].tolist() == [0, 1] and all(torch.equal(a, b) for a, b in zip(greedy, sample(z, u * 0, 0)))


def test_top_p_keeps_the_smallest_set_that_reaches_p_and_training_refuses_it(capsys):
    """F03: for evaluation only; a loss over the whole vocabulary would be of another distribution."""
    from config import parse

    z = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()[:, [2, 0, 3, 1]]
    kept = {p: (ro.nucleus(z, p) > -torch.inf)[0].tolist() for p in (0.4, 0.6, 0.9, 0.999)}
    assert kept == {0.4: [0, 1, 0, 0], 0.6: [0, 1, 0, 1], 0.9: [1, 1, 0, 1], 0.999: [1, 1, 1, 1]}
    u = torch.rand(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    token, logp = sample(z.expand(2000, 4), u, 1.0, top_p=0.6)
    assert set(token.tolist()) == {1, 3} and abs((token == 1).double().mean() - 5 / 8) < 0.04
    torch.testing.assert_close(logp.exp(), torch.where(token == 1, 5 / 8, 3 / 8))
    with pytest.raises(SystemExit) as stop:
        parse(["--top_p", "0.9"])
    assert stop.value.code == 2 and "--top_p" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Randomness


@pytest.mark.parametrize("name", ("qwen3", "hybrid", "gpt2"))
def test_samples_depend_on_their_keys_alone(name):
    """F45: neither the budget nor the neighbours, nor the order of prompts, nor their share of a rank matter."""
    model = family(name, initializer_range=0.05)
    keys = [(3, 7, i) for i in (40, 2, 11, 5)]
    settings = dict(samples=5, stop=list(range(9)), max_new_tokens=10)
    whole = rollout(model, PROMPTS, keys=keys, **settings)
    for budget in (1, 45, 70, 200):
        same(whole, rollout(model, PROMPTS, keys=keys, kv_tokens=budget, **settings))
    turned = rollout(model, PROMPTS[::-1], keys=keys[::-1], **settings)
    assert [rows(turned)[i * 5 : i * 5 + 5] for i in (3, 2, 1, 0)] == [rows(whole)[i * 5 : i * 5 + 5] for i in range(4)]
    for rank in (0, 1):
        part = rollout(model, PROMPTS[rank::2], keys=keys[rank::2], **settings)
        assert rows(part) == [r for i in (rank, rank + 2) for r in rows(whole)[i * 5 : i * 5 + 5]]
    for other in ((4, 7), (3, 8)):  # another seed, another step
        assert rows(rollout(model, PROMPTS, keys=[(*other, k[2]) for k in keys], **settings)) != rows(whole)


def test_samples_of_one_prompt_differ_from_their_first_token_on():
    """F45, and a story: the first token was drawn once per prompt and shared by its whole group."""
    roll = rollout(uniform(200), [[3], [3, 4]], 64, [], max_new_tokens=5)
    first = roll.tokens[:, 0].view(2, 64)
    assert all(len(set(row.tolist())) > 40 for row in first)
    assert first[0].tolist() != first[1].tolist()
    assert len({tuple(r) for r in rows(roll)}) == 128
    alive = rollout(family("qwen3", initializer_range=0.05), PROMPTS, 16, [], max_new_tokens=4).tokens[:, 0].view(4, 16)
    assert all(len(set(row.tolist())) > 6 for row in alive)
    equal = rollout(uniform(200), [[3], [3]], 2, [], max_new_tokens=5)  # the same prompt twice in a batch
    assert len({tuple(r) for r in rows(equal)}) == 4


def test_the_random_stream_of_a_row_is_uniform_and_starts_the_same_at_any_length():
    """A longer limit continues the samples it had; keys that differ in any place give other streams."""
    keys = [(s, t, p, j) for s in range(2) for t in range(5) for p in range(10) for j in range(10)]
    u = uniforms(keys, 20)
    assert u.dtype == np.float64 and u.min() >= 0 and u.max() < 1
    assert len(np.unique(u)) == u.size
    assert np.array_equal(u[:, :7], uniforms(keys, 7)) and np.array_equal(u[300:302], uniforms(keys[300:302], 20))
    counts = np.bincount((u * 20).astype(int).ravel(), minlength=20)
    assert ((counts - 1000.0) ** 2 / 1000).sum() < 43.9  # chi-squared, 19 degrees of freedom, 999 in 1000
    first = u[:, 0].reshape(2, 5, 10, 10)
    for axis in range(4):  # neighbours in seed, step, prompt and sample are not correlated
        a, b = np.delete(first, 0, axis).ravel(), np.delete(first, -1, axis).ravel()
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(len(a))
    short, long = (rollout(uniform(50), [[3]], 4, [], max_new_tokens=n).tokens for n in (4, 9))
    assert torch.equal(short, long[:, :4])


# ---------------------------------------------------------------------------------------------------------------------
# Where a completion ends


def test_either_stop_id_ends_a_row_and_is_part_of_it():
    """F10, F11, F12: the mask holds the stop token and nothing behind it; a row cut by the limit is not finished."""
    roll = rollout(counter(30), [[2], [2, 17], [26], [9]], 2, [6, 20], max_new_tokens=5, temperature=0)
    assert rows(roll) == [[3, 4, 5, 6]] * 2 + [[18, 19, 20]] * 2 + [[27, 28, 29, 0, 1]] * 2 + [[10, 11, 12, 13, 14]] * 2
    assert roll.finished.tolist() == [True] * 4 + [False] * 4
    assert roll.mask.sum(1).tolist() == [4, 4, 3, 3, 5, 5, 5, 5] and roll.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (roll.tokens[~roll.mask] == 0).all() and (roll.logp[~roll.mask] == 0).all()
    last = rollout(counter(30), [[2]], 1, [7], max_new_tokens=5, temperature=0)  # stop token at the very limit
    assert rows(last) == [[3, 4, 5, 6, 7]] and last.finished.tolist() == [True]
    at_once = rollout(counter(30), [[6], [2]], 1, [7], max_new_tokens=9, temperature=0)
    assert rows(at_once) == [[7], [3, 4, 5, 6, 7]] and at_once.finished.all()
    endless = rollout(counter(30), [[6]], 2, [], max_new_tokens=4, temperature=0)
    assert endless.tokens.shape == (2, 4) and not endless.finished.any()


def test_a_stop_id_that_is_also_the_padding_id_is_kept_once():
    """F10: masks come from lengths; with `ids != pad` the model never learns to stop."""
    roll = rollout(counter(30), [[27], [25]], 1, [0], max_new_tokens=8, temperature=0)
    assert rows(roll) == [[28, 29, 0], [26, 27, 28, 29, 0]]
    assert roll.mask.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]] and roll.finished.all()
    assert (roll.tokens[0, 3:] == 0).all()  # the filler looks the same and is out


def test_the_width_of_a_rollout_is_its_longest_completion():
    roll = rollout(counter(30), [[2], [4]], 2, [6], max_new_tokens=20, temperature=0)
    assert roll.tokens.shape == roll.logp.shape == roll.mask.shape == (4, 4)
    assert (roll.tokens.dtype, roll.logp.dtype, roll.mask.dtype) == (torch.int64, torch.float32, torch.bool)


def test_ids_that_do_not_survive_decoding_and_encoding_stay_as_they_were_sampled():
    """F05: text is for rewards; log-probs are of the very ids, and so is every mask."""
    tokenizer = lm.build_tokenizer("byte", [])
    model = family("qwen2", vocab_size=len(tokenizer), initializer_range=0.02)
    roll = rollout(model, [[70, 71]], 6, [1], max_new_tokens=12)
    text = [tokenizer.decode(r) for r in rows(roll)]
    assert any(tokenizer(t)["input_ids"] != r for t, r in zip(text, rows(roll))), "the ids must not survive"
    again = lm.completion_logp(model, roll.prompt_ids, roll.tokens, roll.mask, roll.group)[0]
    torch.testing.assert_close(roll.logp, again, atol=1e-5, rtol=0)


def test_a_forced_prefix_is_context_and_no_part_of_the_completion():
    """F18: forced tokens are never trained on: they belong to the prompt, and log-probs are given them."""
    model = family("qwen3", initializer_range=0.05)
    forced = rollout(model, PROMPTS, 3, [1], max_new_tokens=6, prefix=[33, 34])
    assert forced.prompt_ids == [[*p, 33, 34] for p in PROMPTS]
    same(forced, rollout(model, forced.prompt_ids, 3, [1], max_new_tokens=6))
    again = lm.completion_logp(model, forced.prompt_ids, forced.tokens, forced.mask, forced.group)[0]
    torch.testing.assert_close(forced.logp, again, atol=1e-5, rtol=0)
    assert rows(rollout(counter(30), [[2]], 1, [12], max_new_tokens=6, temperature=0, prefix=[9])) == [[10, 11, 12]]


# ---------------------------------------------------------------------------------------------------------------------
# Work


def test_finished_rows_are_dropped_and_no_token_changes():
    """F59: row-steps stay below the sum of lengths / 0.9, and equal it where ten rows or fewer are decoded."""
    roll = lively()
    tokens = int(roll.mask.sum())
    assert tokens < 0.6 * 24 * int(roll.mask.sum(1).max()), "most rows must end early"
    assert tokens <= roll.row_steps < tokens / 0.9
    for budget in (1, 60, 150):  # up to ten rows at once: every row that ends is dropped at once
        cut = lively(kv_tokens=budget)
        same(roll, cut)
        assert cut.row_steps == tokens
    starts = [[9 - n] for n in range(9)]  # lengths 1 .. 9
    exact = rollout(counter(30), starts, 1, [10], max_new_tokens=20, temperature=0)
    assert exact.mask.sum(1).tolist() == list(range(1, 10)) and exact.row_steps == 45


@pytest.mark.parametrize("name", ("hybrid", "gpt2"))
def test_dropping_rows_keeps_recurrent_states_and_positions_with_their_rows(name):
    """F59: a recurrent layer's state must move with its row; a mistake shows only after the first row has ended."""
    model = family(name, initializer_range=0.05)
    settings = dict(samples=6, stop=list(range(12)), max_new_tokens=16)
    roll = rollout(model, PROMPTS, **settings)
    assert roll.mask.sum(1).unique().numel() > 4
    same(roll, rollout(model, PROMPTS, kv_tokens=1, **settings))


@pytest.mark.parametrize("shared", (True, False))
def test_every_sample_is_admitted_once_within_the_budget(shared):
    """Random sizes: no row is lost or decoded twice, the cache stays in the budget, groups stay whole if they can."""
    rng = np.random.default_rng(0)

    def used(batch, prompts, new) -> tuple[int, int]:
        rows, width = sum(b - a for _, a, b in batch), max(len(prompts[i]) for i, _, _ in batch)
        return rows, len(batch) * width + rows * new if shared else rows * (width + new)

    for _ in range(300):
        n, samples, new, budget = (int(rng.integers(1, k)) for k in (12, 20, 30, 1500))
        prompts = sorted(([0] * int(rng.integers(1, 40)) for _ in range(n)), key=lambda p: -len(p))
        waiting, cut = [(i, 0, samples) for i in range(n)], []
        while waiting:
            batch = admit(waiting, prompts, new, budget, shared)
            rows, cost = used(batch, prompts, new)
            assert rows == 1 or cost <= budget
            stays = batch[: int(rng.integers(0, len(batch) + 1))]  # the others have ended: their places are refilled
            rows = sum(b - a for _, a, b in stays)
            if stays and shared:
                more = admit(waiting, prompts, new, budget, shared, rows, [len(prompts[i]) for i, _, _ in stays])
                assert not more or used(stays + more, prompts, new)[1] <= budget
                batch = batch + more
            cut.append(batch)
        assert sorted((i, j) for b in cut for i, a, z in b for j in range(a, z)) == [
            (i, j) for i in range(n) for j in range(samples)
        ]
        for i, p in enumerate(prompts):
            pieces = sum(j == i for b in cut for j, _, _ in b)
            whole = (budget - len(p)) // new if shared else budget // (len(p) + new)
            assert pieces == 1 or samples > whole
    for budget, rows in ((20 * 32, 32), (4 * 10 + 32 * 10, 32 if shared else 16)):
        batch = admit([(i, 0, 8) for i in range(4)], [[0] * 10] * 4, 10, budget, shared)
        assert sum(b - a for _, a, b in batch) == rows


def test_demonstrations_have_the_shape_of_a_rollout_stop_token_included():
    """SFT reads the same dataclass: one row per prompt, masks from lengths, an id 0 inside a demonstration stays in."""
    roll = demonstrations([[4], [5, 6]], [[[7, 0, 1]], [[8, 1]]], "cpu")
    assert rows(roll) == [[7, 0, 1], [8, 1]] and roll.mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert roll.group.tolist() == [0, 1] and roll.finished.all() and (roll.logp == 0).all()
    assert {f.name for f in dataclasses.fields(roll)} >= {"prompt_ids", "tokens", "logp", "mask", "group", "finished"}
