"""The decoding paths against each other: prompts' caches kept once against copies of them, generate, and a float64 forward."""

import copy

import pytest
import torch
from test_logprobs import family
from test_sampling import PROMPTS, rows, same

import model as lm
import rollout as ro
from rollout import rollout, sample

STOP = list(range(12))  # of 61 words: rows end early and at very different lengths
SIZES = {  # query heads per key-value head: 1, 2 and 4
    "smollm2": dict(initializer_range=0.05),
    "qwen2": dict(initializer_range=0.05),
    "qwen3": dict(initializer_range=0.05, num_key_value_heads=1),
    "llama": dict(initializer_range=0.05),
    "gpt2": dict(initializer_range=0.05),
    "hybrid": dict(initializer_range=0.05),
}


def precise(name: str) -> torch.nn.Module:
    return family(name, **SIZES[name]).double()


@pytest.fixture(autouse=True)
def empty_memory_is_nan():
    """Memory that nobody wrote must not reach a result: it is filled with nan."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Watch:
    """What the pool of rows did: sizes of its caches, rows and prompts, whether counts were even and columns late."""

    def __init__(self, monkeypatch):
        self.seen, real = [], ro.Shared.step

        def step(pool, token):
            halves = [x for x in pool.layers if isinstance(x, ro.Halves)]
            self.seen.append(dict(
                rows=len(token), prompts=len(pool.lengths), even=pool.even, late=pool.joined_late, width=max(pool.lengths),
                prompt_numbers=sum(t.numel() for x in halves for t in x.prompt),
                said_numbers=sum(t.numel() for x in halves for t in x.said)))  # fmt: skip
            return real(pool, token)

        monkeypatch.setattr(ro.Shared, "step", step)


# ---------------------------------------------------------------------------------------------------------------------
# Equality


@pytest.mark.parametrize("samples", (1, 3, 8))
@pytest.mark.parametrize("name", SIZES)
def test_shared_prompts_give_the_tokens_of_copied_ones(name, samples, monkeypatch):
    """Ragged prompts, ragged ends, groups of 1, 3 and 8, all places refilled or none: same keys, same tokens."""
    watch = Watch(monkeypatch)
    model = precise(name)
    settings = dict(samples=samples, stop=STOP, max_new_tokens=14, temperature=0.8)
    plain = rollout(model, PROMPTS, shared=False, **settings)
    assert not watch.seen and plain.mask.sum(1).unique().numel() > 2
    for budget in (10**6, 150, 40):
        shared = rollout(model, PROMPTS, shared=True, kv_tokens=budget, **settings)
        same(plain, shared)
        torch.testing.assert_close(plain.logp, shared.logp, atol=1e-6, rtol=0)
    again = lm.completion_logp(model, plain.prompt_ids, shared.tokens, shared.mask, shared.group, temperature=0.8)[0]
    torch.testing.assert_close(shared.logp.double(), again, atol=1e-6, rtol=0)
    ragged = [w for w in watch.seen if not w["even"]]
    assert bool(ragged) == (samples > 1) and any(w["late"] for w in watch.seen)


@pytest.mark.parametrize("name", SIZES)
def test_greedy_tokens_equal_those_of_generate(name):
    """Eight rows a prompt of which all must say what generate says."""
    from transformers import GenerationConfig

    model = precise(name)
    model.generation_config = GenerationConfig()
    ids, seen = lm.left_pad(PROMPTS, "cpu")
    want = model.generate(
        input_ids=ids, attention_mask=seen, do_sample=False, max_new_tokens=10, pad_token_id=0, eos_token_id=60
    )
    for shared in (True, False):
        roll = rollout(model, PROMPTS, 8, [60], max_new_tokens=10, temperature=0, shared=shared)
        for own, g in zip(rows(roll), roll.group.tolist()):
            assert own == want[g, ids.shape[1] :][: len(own)].tolist()


@pytest.mark.parametrize("shared", (True, False))
def test_a_prefix_and_top_p_do_not_care_where_the_cache_lies(shared):
    model = precise("qwen3")
    settings = dict(samples=3, stop=STOP, max_new_tokens=8, top_p=0.3)
    forced = rollout(model, PROMPTS, prefix=[33, 34], shared=shared, **settings)
    same(forced, rollout(model, [[*p, 33, 34] for p in PROMPTS], kv_tokens=1, shared=not shared, **settings))
    free = lm.completion_logp(model, forced.prompt_ids, forced.tokens, forced.mask, forced.group)[0]
    assert ((forced.logp - free)[forced.mask] > 1).all(), "log-probs are those of the nucleus"


def test_half_precision_stays_near_and_its_cache_is_of_half_size(monkeypatch):
    """Autocast: the caches are kept in bfloat16; log-probs of the same tokens stay within its rounding."""
    kept, real = [], ro.Shared.step
    monkeypatch.setattr(
        ro.Shared, "step", lambda p, t: kept.extend(x.dtype for h in p.layers for x in h.prompt + h.said) or real(p, t)
    )
    model = family("qwen3", initializer_range=0.05)
    roll = rollout(model, PROMPTS, 4, STOP, max_new_tokens=12, dtype=torch.bfloat16)
    assert set(kept) == {torch.bfloat16}
    again = lm.completion_logp(model, roll.prompt_ids, roll.tokens, roll.mask, roll.group)[0]
    gap = (roll.logp - again)[roll.mask].abs()
    assert 1e-6 < gap.mean() < 0.01 and gap.max() < 0.1


# ---------------------------------------------------------------------------------------------------------------------
# Work and memory


def test_the_cache_of_a_prompt_is_kept_once_and_leaves_with_its_last_row(monkeypatch):
    """Numbers in the caches: N x P for the prompts, whatever the group, and B x T for what the rows say; both shrink."""
    watch = Watch(monkeypatch)
    model = family("qwen3", initializer_range=0.05)  # 2 layers, 2 key-value heads of size 8, keys and values
    one, samples, limit = 2 * 2 * 2 * 8, 8, 16
    roll = rollout(model, PROMPTS, samples, STOP, max_new_tokens=limit)
    first, last = watch.seen[0], watch.seen[-1]
    assert first["prompt_numbers"] == one * len(PROMPTS) * 9 and first["width"] == 9
    for w in watch.seen:
        assert w["prompt_numbers"] == one * w["prompts"] * w["width"] and w["said_numbers"] == one * w["rows"] * limit
    assert last["rows"] < 3 and last["prompts"] <= last["rows"]
    assert roll.row_steps - len(roll.group) <= sum(w["rows"] for w in watch.seen) + len(roll.group)


def test_places_of_finished_rows_are_refilled(monkeypatch):
    """With room for two groups of four, waiting prompts start beside rows that are still at work: fewer, fuller steps."""
    watch = Watch(monkeypatch)
    model, prompts = family("qwen3", initializer_range=0.05), [[5 + i, 7] for i in range(12)]
    settings = dict(samples=4, stop=STOP, max_new_tokens=20)
    free = rollout(model, prompts, **settings)
    steps = len(watch.seen)
    watch.seen.clear()
    tight = rollout(model, prompts, kv_tokens=2 * 2 + 8 * 20, **settings)
    same(free, tight)
    assert max(w["rows"] for w in watch.seen) <= 8 and any(w["late"] for w in watch.seen)
    alone = sum(
        int(tight.mask[i : i + 8].sum(1).max()) - 1 for i in range(0, 48, 8)
    )  # two groups at a time, to their end
    assert steps < len(watch.seen) < 0.8 * alone
    assert tight.row_steps == int(tight.mask.sum())


def test_columns_are_reused_when_the_oldest_rows_reach_the_limit(monkeypatch):
    """Rows that join late outlive the columns of the first: the window must move, for any number of generations."""
    watch = Watch(monkeypatch)
    model = precise("llama")
    prompts = [[i, i + 1] for i in range(20, 50)]
    settings = dict(samples=1, stop=STOP, max_new_tokens=6)
    tight = rollout(model, prompts, kv_tokens=5 * 8, **settings)
    assert (tight.mask.sum(1) == 6).sum() > 3 and sum(w["late"] for w in watch.seen) > 10
    same(rollout(model, prompts, shared=False, **settings), tight)


def test_changed_weights_change_what_shared_prompts_say():
    """F08: a prompt's cache must not outlive its rollout."""
    model = family("llama")
    before = rollout(model, PROMPTS, 2, [], max_new_tokens=8, temperature=0, shared=True)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.neg_()
    after = rollout(model, PROMPTS, 2, [], max_new_tokens=8, temperature=0, shared=True)
    assert rows(after) != rows(before)
    same(after, rollout(copy.deepcopy(model), PROMPTS, 2, [], max_new_tokens=8, temperature=0, shared=False))


@pytest.mark.parametrize("implementation", ("sdpa", "eager"))
def test_the_attention_function_is_put_back(implementation, monkeypatch):
    """After the rollout, and after an error inside it; the result can be trained on."""
    model = family("qwen2")
    model.set_attn_implementation(implementation)
    roll = rollout(model, PROMPTS, 2, [], max_new_tokens=3, shared=True)
    assert model.config._attn_implementation == implementation
    logp = lm.completion_logp(model, roll.prompt_ids, roll.tokens, roll.mask, roll.group)[0]
    ((logp - roll.logp) * roll.logp).sum().backward()
    monkeypatch.setattr(ro, "sample", lambda *a: 1 / 0)
    model.train()
    with pytest.raises(ZeroDivisionError):
        rollout(model, PROMPTS, 2, [], max_new_tokens=3, shared=True)
    assert model.config._attn_implementation == implementation and model.training


def test_models_that_cannot_share_keep_copies(monkeypatch, capsys):
    """A sliding window that bites, capped logits, sinks, or an attention of the model's own: chosen without being asked."""
    import transformers as t

    watch = Watch(monkeypatch)
    small = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=8)  # fmt: skip
    torch.manual_seed(0)
    sliding = t.MistralForCausalLM(t.MistralConfig(**small, sliding_window=8)).eval()
    assert ro.shares(sliding, 8) and not ro.shares(sliding, 9)
    short = [p[:4] for p in PROMPTS]
    for prompts, new, uses in ((short, 4, True), (PROMPTS, 4, False)):
        watch.seen.clear()
        roll = rollout(sliding, prompts, 2, [], max_new_tokens=new)
        assert bool(watch.seen) == uses
        again = lm.completion_logp(sliding, roll.prompt_ids, roll.tokens, roll.mask, roll.group)[0]
        torch.testing.assert_close(roll.logp, again, atol=1e-5, rtol=0)
    assert not ro.shares(t.Gemma2ForCausalLM(t.Gemma2Config(**small, sliding_window=4096)), 20)
    old = family("qwen2")
    assert ro.shares(old, 20) and ro.shares(family("hybrid"), 20)
    monkeypatch.setattr(type(old), "_can_set_attn_implementation", classmethod(lambda cls: False))
    assert not ro.shares(old, 20)
    ro.tell_once.cache_clear()
    for _ in range(2):
        rollout(old, PROMPTS, 2, [], max_new_tokens=2)
    assert capsys.readouterr().err.count("Qwen2ForCausalLM: every sample gets a copy") == 1


# ---------------------------------------------------------------------------------------------------------------------
# The sampler


def inverse_cdf(z, u):
    """The definition, in float64."""
    cdf = z.double().softmax(-1).cumsum(-1)
    return torch.searchsorted(cdf, (u * cdf[:, -1])[:, None], right=True).squeeze(1), cdf


@pytest.mark.parametrize("words", (2, 511, 512, 513, 2048, 5000))
def test_tokens_are_those_of_the_inverse_cdf(words):
    """Around the width of a block, more rows than a pass holds; a draw that differs lies on the edge of its neighbour."""
    rng = torch.Generator().manual_seed(words)
    n = 1000
    z = torch.randn(n, words, generator=rng) * 3
    z[:, words // 2 :: 3] = -torch.inf
    u = torch.rand(n, generator=rng, dtype=torch.float64)
    token, logp = sample(z, u, 1.0)
    want, cdf = inverse_cdf(z, u)
    other = token != want
    assert other.sum() <= 1
    edge = cdf.gather(1, torch.minimum(token, want)[:, None]).squeeze(1)
    assert ((edge - u).abs()[other] < 1e-6).all()
    torch.testing.assert_close(
        logp.double(), z.double().log_softmax(-1).gather(1, token[:, None]).squeeze(1), atol=2e-6, rtol=0
    )


def test_splitting_rows_over_passes_changes_nothing(monkeypatch):
    z = torch.randn(50, 700, generator=torch.Generator().manual_seed(0))
    u = torch.linspace(0, 1 - 1e-9, 50, dtype=torch.float64)
    whole = sample(z, u, 0.7)
    monkeypatch.setattr(ro, "CHUNK", 1500)
    assert all(torch.equal(a, b) for a, b in zip(whole, sample(z, u, 0.7)))


def test_no_border_of_a_block_gives_a_word_of_probability_zero():
    """Rounding puts what is left of a target below 0 or at the end of its block: there, words without mass were chosen."""
    rng = torch.Generator().manual_seed(1)
    mass = (12 * torch.randn(4000, 6, generator=rng)).exp()  # so uneven that float64 sums round
    cdf = mass.cumsum(-1, dtype=torch.float64)
    lone = torch.tensor([0, 0, 1.0, 0]).expand(4000, 4)
    below = 0
    for k in range(5):  # the target is the very border of blocks k and k + 1
        block, rest = ro.inverse_cdf(mass, cdf[:, k : k + 1])
        below += int((rest < 0).sum())
        assert (ro.inverse_cdf(lone * mass.gather(1, block), rest)[0] == 2).all()
    assert below > 10
    for target in (-1.0, 0.0, 1.0, 2.0):
        assert (ro.inverse_cdf(lone, torch.full((4000, 1), target, dtype=torch.float64))[0] == 2).all()
    z = torch.full((500, 2000), -torch.inf)
    z[:, [600, 1100, 1700]] = torch.randn(500, 3, generator=rng) * 5
    for u in (0.0, 5e-324, 0.5, 1 - 2.0**-53):
        token, logp = sample(z, torch.full((500,), u, dtype=torch.float64), 1.0)
        assert torch.isfinite(logp).all() and torch.isin(token, torch.tensor([600, 1100, 1700])).all()
        assert token.unique().tolist() == {0.0: [600], 5e-324: [600], 0.5: [600, 1100, 1700]}.get(u, [1700])


def test_rare_words_of_a_real_vocabulary_get_their_share():
    """151,936 words: evenly spaced draws fall into every 32nd of them as often as the probabilities say, to one draw."""
    words, n = 151_936, 2000
    z = -torch.arange(words).float() / 30_000  # falls by a factor of 160 from the first word to the last
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    token = torch.cat([sample(z.expand(len(part), words), part, 1.0)[0] for part in u.split(13)])
    assert (token[1:] >= token[:-1]).all() and token.max() > 0.95 * words
    share = z.double().softmax(-1).view(32, -1).sum(1) * n
    assert ((torch.bincount(token // (words // 32), minlength=32) - share).abs() <= 1.01).all()
