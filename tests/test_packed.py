"""The packed path against the plain one: each prompt once, no padding, head and loss in one pass over chunks of logits.

Values are compared in double precision (with norms that keep it), so what differs is a mistake and not rounding. Left out:
FSDP2 (tests/test_dist.py runs packed on two ranks), flash-attn and everything else that needs a GPU.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from test_logprobs import WORDS, family
from test_methods import GROUP, Step, gradient, nets
from test_train import CPU, go, lines, on_cpu, same, weights  # noqa: F401
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import model as lm
import train
from config import Config
from losses import METHODS
from rollout import Rollout

SHARED = ("qwen2", "qwen3", "llama", "smollm2", "gpt2")
LIMITS = dict(max_prompt=64, max_new_tokens=32)


def exact(name: str, **changes) -> nn.Module:
    """A model of a family in float64; Hugging Face's RMS norms compute in float32, so these get a forward of their own."""
    model = lm.no_dropout(family(name, **changes)).double().train()
    for m in model.modules():
        if type(m).__name__ in ("Qwen2RMSNorm", "Qwen3RMSNorm", "LlamaRMSNorm"):
            m.forward = lambda x, m=m: m.weight * x * (x.pow(2).mean(-1, keepdim=True) + m.variance_epsilon).rsqrt()
    assert lm.share_prefix(model, Config(**LIMITS)) == ""
    return model


def ragged():
    """Four prompts, two of one length; nine completions in any order, of 1 to 7 tokens; absurd numbers in the padding."""
    g = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, WORDS, (n,), generator=g).tolist() for n in (4, 9, 1, 4)]
    group, lengths = torch.tensor([1, 0, 2, 1, 0, 3, 1, 1, 3]), torch.tensor([3, 7, 1, 5, 6, 1, 5, 1, 2])
    mask = torch.arange(10) < lengths[:, None]
    return prompts, torch.where(mask, torch.randint(2, WORDS, mask.shape, generator=g), 10**9), mask, group


def loss_and_gradient(model: nn.Module, data, packed: bool, entropy="grad", temperature=0.7):
    """A curved function of log-probs and entropies that ties the tokens of a row together, and its gradient."""
    weight = torch.randn(2, *data[1].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss_fn(rows, logp, h):
        seen.extend(rows.tolist())
        loss = (weight[0, rows] * logp).sum(1).sin().sum() + (logp**2).sum()
        return loss if h is None else loss + (weight[1, rows] * h).sum(1).tanh().sum()

    seen, model.packed = [], packed
    model.zero_grad()
    loss = lm.completion_loss(model, *data, loss_fn, temperature, torch.float32, entropy)
    (3 * loss).backward()
    assert sorted(seen) == list(range(len(data[1])))
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


def agree(a, b, tolerance=1e-11) -> None:
    torch.testing.assert_close(a[0], b[0], atol=tolerance, rtol=tolerance)
    assert max(float(x.abs().max()) for x in a[1]) > 0.1
    for x, y in zip(a[1], b[1]):
        torch.testing.assert_close(x, y, atol=tolerance, rtol=tolerance)


class Live(TorchDispatchMode):
    """Bytes of the storages made inside that are alive, and their highest sum."""

    def __init__(self):
        super().__init__()
        self.most, self.known = 0, {}

    def now(self) -> int:
        self.known = {k: v for k, v in self.known.items() if not v[0].expired()}
        return sum(size for _, size in self.known.values())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        mine = {x.untyped_storage()._cdata for x in args if isinstance(x, torch.Tensor)}
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor) and (s := x.untyped_storage())._cdata not in mine:
                self.known[s._cdata] = StorageWeakRef(s), s.nbytes()
        self.most = max(self.most, self.now())
        return out


# ---------------------------------------------------------------------------------------------------------------------
# The numbers


@pytest.mark.parametrize("chunk", ["all", "some rows", "inside a row"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", SHARED)
def test_loss_and_gradient_equal_the_plain_path(name, checkpointing, chunk, monkeypatch):
    """Ragged prompts and completions, tied and untied heads, grouped keys, positions learnt and rotated; temperature and
    entropy have their gradient; chunks may hold everything, a few rows, or less than a row."""
    model, data = exact(name), ragged()
    plain = loss_and_gradient(model, data, packed=False)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    monkeypatch.setattr(lm, "CHUNK", {"all": 2**26, "some rows": 9, "inside a row": 2}[chunk] * 8 * WORDS)
    agree(loss_and_gradient(model, data, packed=True), plain)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_hybrid_model_carries_its_states_from_the_prompt_to_every_sample(checkpointing):
    """Qwen3.5: recurrent layers go on from the prompt's end. They compute in float32 whatever the weights are, so the paths
    differ by its rounding; a state that is lost, or another prompt's, moves log-probs by nats."""
    model, data = exact("hybrid"), ragged()
    plain = loss_and_gradient(model, data, packed=False)
    model.packed = False
    logp = lm.constant_logp(model, *data)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    packed = loss_and_gradient(model, data, packed=True)
    torch.testing.assert_close(lm.constant_logp(model, *data), logp, atol=1e-4, rtol=0)
    torch.testing.assert_close(packed[0], plain[0], atol=1e-4, rtol=1e-5)
    for a, b in zip(packed[1], plain[1]):
        assert float((a - b).norm()) <= 1e-4 * float(b.norm())


@pytest.mark.parametrize("entropy", [False, True])
def test_without_flash_attention_and_without_the_entropys_gradient(entropy, monkeypatch):
    """The attention that other devices than a CPU get; entropy to look at, or none."""
    model, data = exact("qwen3"), ragged()
    plain = loss_and_gradient(model, data, packed=False, entropy=entropy, temperature=1.0)
    flash = loss_and_gradient(model, data, packed=True, entropy=entropy, temperature=1.0)
    monkeypatch.setattr(lm, "FLASH", False)
    written_out = loss_and_gradient(model, data, packed=True, entropy=entropy, temperature=1.0)
    agree(flash, plain)
    agree(written_out, plain)
    assert not torch.equal(written_out[1][0], flash[1][0]), "both were the same code"


def test_impossible_words_have_no_part_in_entropy_and_gradient():
    """F61: logits of -inf and -1e4 among the words give no nan."""
    weight = torch.tensor([[0.0], [1.0], [-torch.inf], [-1e4]], dtype=torch.float64, requires_grad=True)
    hidden = torch.tensor([[1.0], [2.0]], dtype=torch.float64, requires_grad=True)
    none, targets = torch.zeros(0, dtype=torch.long), torch.tensor([1, 0])
    layout = lm.Layout(none, none, [], [], [], [], none, targets, torch.arange(1), [2])
    seen = []

    def loss_fn(rows, logp, h):
        seen.extend((logp.detach()[0], h.detach()[0]))
        return (logp + h).sum()

    lm.FusedLoss.apply(hidden, weight, layout, loss_fn, 2, 1.0, "grad").backward()
    z = (hidden.detach() @ weight.detach().t()).requires_grad_()
    logp, h = lm.token_logp(z, targets, 1.0, "grad")
    (logp + h).sum().backward()
    torch.testing.assert_close(seen, [logp.detach(), h.detach()])
    torch.testing.assert_close(weight.grad, z.grad.t() @ hidden.detach())


def test_log_probs_and_values_without_gradient_equal_the_plain_ones():
    """For old log-probs, a reference and a critic; in the order of the call, 0 behind the end."""
    model, data = exact("qwen2"), ragged()
    critic = lm.Critic(exact("qwen2")).double()
    critic.head.float()  # values are float32 by contract
    nn.init.normal_(critic.head.weight)
    for packed in (True, False):
        model.packed = critic.packed = packed
        logp = lm.constant_logp(model, *data, 0.7)
        values = lm.completion_values(critic, *data)
        values.square().sum().backward()
        grad = [p.grad.clone() for p in critic.parameters()]
        critic.zero_grad()
        if packed:
            kept = logp, values.detach(), grad
    torch.testing.assert_close(kept[0], logp, atol=1e-12, rtol=0)
    torch.testing.assert_close(kept[1], values.detach(), atol=1e-5, rtol=0)
    assert (values[data[2]] != 0).all() and (kept[1][~data[2]] == 0).all() and not kept[0].requires_grad
    for a, b in zip(kept[2], grad):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_bfloat16_compute_stays_near_the_exact_log_probs():
    """As near as the plain path does; the log-probs themselves are float32."""
    model, data = family("qwen3"), ragged()
    exact_logp = lm.completion_logp(model, *data)[0].detach()
    rough = lm.completion_logp(model, *data, dtype=torch.bfloat16)[0].detach()
    assert lm.share_prefix(model, Config(**LIMITS)) == ""
    got, seen = lm.constant_logp(model, *data, dtype=torch.bfloat16), []
    gaps = [float((x - exact_logp)[data[2]].abs().mean()) for x in (got, rough)]
    assert got.dtype == torch.float32 and 0 < gaps[0] < 1.5 * gaps[1]

    def loss_fn(rows, logp, h):
        seen.append(logp.dtype)
        return logp.sum()

    lm.completion_loss(model, *data, loss_fn, dtype=torch.bfloat16).backward()
    assert seen == [torch.float32] and all(p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("budget", [1, 28, 100000])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns_the_same_on_both_paths(name, budget):
    """Ratios of tokens, units and sequences, KL, entropy, a critic, pairs; groups whole, split, and rows alone."""
    models = (nets()[0].model, nets()[1], nets()[2])
    plain, expected = gradient(Step(name, "--micro_tokens 100000"))
    try:
        assert [lm.share_prefix(m, Config(max_prompt=32, max_new_tokens=32)) for m in models[:2]] == ["", ""]
        models[2].packed = True
        packed, metrics = gradient(Step(name, f"--micro_tokens {budget}"))
    finally:
        for m in models:
            m.packed = False
    assert float((packed - plain).norm()) <= 2e-5 * float(plain.norm())
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_run_is_the_same_with_and_without_sharing_also_with_a_critic(tmp_path):
    """share_prefix changes the cost of a run, not its course; the log tells of the padding."""
    text = "--method ppo --steps 3 --lr 1e-3 --overlong 0.5 --tokenizer byte --max_prompt 160 --micro_tokens 900"
    for name, more in (("a", "--share_prefix true"), ("b", "--share_prefix false"), ("c", "--checkpointing true")):
        go(tmp_path / name, f"{text} {more}")
    logs = [lines(tmp_path / name) for name in "abc"]
    shares = [[row.pop("padding") for row in log] for log in logs]
    assert max(shares[0] + shares[2]) == 0 < min(shares[1]) < 1
    for other in (1, 2):
        assert same(weights(tmp_path / "a"), weights(tmp_path / "abc"[other]), 2e-6)
        for a, b in zip(logs[0], logs[other]):
            assert b == pytest.approx(a, abs=2e-4, rel=2e-4)
    assert logs[0][0]["grad_norm"] > 1e-3 and logs[0][0]["grad_norm_critic"] > 1e-3


@pytest.mark.parametrize("mu", [1, 3])
def test_recomputed_old_log_probs_cost_no_forward(mu, monkeypatch):
    """They are those of the update's first pass, and later passes keep them (F25): the same weights come out as with measured
    ones. Whatever needs them before the update still measures them."""
    calls, constant = [], lm.constant_logp
    monkeypatch.setattr(lm, "constant_logp", lambda *a, **k: calls.append(1) or constant(*a, **k))

    def measured(text: str, name="grpo") -> tuple:
        calls.clear()
        step = Step(name, f"--old_logp recompute --micro_tokens 40 --mu {mu} {text}")
        return step, step.look(), len(calls)

    def moved(look) -> tuple[torch.Tensor, dict]:
        policy = SimpleNamespace(model=copy.deepcopy(nets()[0].model), dtype=torch.float32)
        optimizer = torch.optim.SGD(policy.model.parameters(), 0.5)
        memory = train.Memory(torch.zeros(3))
        out = train.update(policy, None, optimizer, step.roll, look, step.credit(look), step.cfg, step.row, memory)
        start = nn.utils.parameters_to_vector(nets()[0].model.parameters())
        return (nn.utils.parameters_to_vector(policy.model.parameters()) - start).detach(), out

    assert all(measured(*more)[2] for more in (["--tis 2"], ["--smoothing 0.1"], ["--mu 1", "dpo"]))
    step, look, n = measured("")
    assert n == 0 and look.logp_old is None
    free, metrics = moved(look)
    look.logp_old = constant(nets()[0].model, step.roll.prompt_ids, step.roll.tokens, step.roll.mask, GROUP, 0.7)
    slow, expected = moved(look)
    assert (free - slow).norm() < 1e-4 * slow.norm() and metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert (metrics["ratio_gap"] > 0.01) == (mu > 1)
    look.logp_old = step.roll.logp  # the sampler's are others
    assert (moved(look)[0] - free).norm() > 0.01 * free.norm()


def test_an_empty_micro_batch_has_gradient_zero_and_no_rows():
    """A rank that has run out of rows still takes part in every collective."""
    model, (prompts, tokens, mask, group) = exact("qwen3"), ragged()
    roll, seen = Rollout(prompts, tokens, torch.zeros(mask.shape), mask, group, mask[:, 0]), []

    def loss_fn(rows, logp, h):
        seen.append((len(rows), len(logp), len(h)))
        return (logp + h).sum()

    rows = torch.zeros(0, dtype=torch.long)
    train.forward(model, roll, rows, lm.completion_loss, loss_fn, entropy="grad").backward()
    assert seen == [(0, 0, 0)] and all(p.grad is not None and (p.grad == 0).all() for p in model.parameters())
    assert train.forward(model, roll, rows, lm.constant_logp).shape == (0, 1)


# ---------------------------------------------------------------------------------------------------------------------
# What it costs


def test_a_packed_forward_holds_each_prompt_once_and_no_padding():
    """The layout of the docstring, by hand."""
    mask = torch.arange(4) < torch.tensor([2, 4, 2])[:, None]
    tokens = torch.tensor([[21, 22, 99, 99], [31, 32, 33, 34], [41, 42, 99, 99]])
    layout = lm.pack([[1, 2, 3], [4, 5, 6]], tokens, mask, torch.tensor([1, 0, 1]))
    assert layout.ids.tolist() == [[1, 2, 3, 4, 5, 6, 31, 32, 33, 21, 41]]
    assert layout.at.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 3]]
    assert (layout.prompts, layout.rows) == ([(0, 2, 3)], [(6, 1, 3), (9, 2, 1)])
    assert layout.groups == [(0, 3, 6, 3), (3, 3, 9, 2)] and layout.owners == [0, 1, 1]
    assert layout.scored.tolist() == [2, 6, 7, 8, 5, 9, 5, 10]
    assert layout.targets.tolist() == [31, 32, 33, 34, 21, 22, 41, 42]
    assert layout.order.tolist() == [1, 0, 2] and layout.counts == [4, 2, 2]


@pytest.mark.parametrize("budget", [1, 12, 25, 40, 1000])
def test_micro_batches_keep_groups_together_and_count_a_prompt_once(budget):
    prompts, tokens, mask, group = ragged()
    roll = Rollout(prompts, tokens, torch.zeros(mask.shape), mask, group, mask[:, 0])
    out = [rows.tolist() for rows in train.micro_batches(roll, budget, packed=True)]
    assert sorted(i for rows in out for i in rows) == list(range(9))

    def size(rows: list[int]) -> int:
        return sum(len(prompts[g]) for g in {int(group[i]) for i in rows}) + int(mask[rows].sum())

    assert all(size(rows) <= budget or len(rows) == 1 for rows in out)
    for g in range(4):
        mine = (group == g).nonzero()[:, 0].tolist()
        assert size(mine) > budget or sum(bool({*mine} & {*rows}) for rows in out) == 1
    assert len(out) == {1: 9, 1000: 1}.get(budget, len(out))


def test_the_head_holds_less_than_two_chunks_whatever_the_vocabulary(monkeypatch):
    """F41: logits of all 400 positions would be 13 chunks; besides a chunk there are the gradients that it returns."""
    words, positions, width = 5_000, 400, 8
    chunk = 32 * words * 4
    monkeypatch.setattr(lm, "CHUNK", chunk)
    h, weight = torch.randn(positions, width, requires_grad=True), torch.randn(words, width, requires_grad=True)
    targets, counts = torch.randint(0, words, (positions,)), [20] * 16 + [80]
    none = torch.zeros(0, dtype=torch.long)
    layout = lm.Layout(none, none, [], [], [], [], none, targets, torch.arange(17), counts)
    with Live() as live:
        lm.FusedLoss.apply(h, weight, layout, lambda rows, lp, e: (lp.exp() + e).sum(), 80, 0.7, "grad").backward()
    returned = (h.numel() + weight.numel()) * 4
    assert chunk < live.most - returned < 2 * chunk
    with Live() as live:
        logp, e = lm.token_logp(h @ weight.t(), targets, 0.7, "grad")
        (logp.exp() + e).sum().backward()
    assert live.most > 5 * 13 * chunk, "the measure sees nothing"


def test_the_prefix_is_not_copied_for_each_sample_and_no_scores_are_kept(monkeypatch):
    """A prompt of 512 tokens and 8 samples of 4: what the forward keeps is q, k, v, the output and a number per query."""
    prompt, tokens = torch.randint(2, WORDS, (512,)).tolist(), torch.randint(2, WORDS, (8, 4))
    layout = lm.pack([prompt], tokens, tokens > 0, torch.zeros(8, dtype=torch.long))
    n = layout.ids.shape[1]
    assert n == 512 + 8 * 3
    q, k, v = (torch.randn(n, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    with Live() as live:
        out = lm.SharedPrefix.apply(q, k, v, layout, 0.25)
        kept = live.now()
        out.sum().backward()
    assert kept <= 4 * (n * 4 * 16 + n * 4) * 1.1
    assert live.most < 4 * (512 + 8 * 512) * 4 * 16, "as much as eight copies of the prefix"


# ---------------------------------------------------------------------------------------------------------------------
# Models that cannot


def odd_model(name: str) -> nn.Module:
    import transformers as t

    size = dict(vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, head_dim=8, pad_token_id=0, initializer_range=0.3)  # fmt: skip
    torch.manual_seed(0)
    return t.AutoModelForCausalLM.from_config({
        "window": lambda: t.MistralConfig(**size, sliding_window=40),
        "alibi": lambda: t.BloomConfig(vocab_size=WORDS, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3),
        "softcap": lambda: t.Gemma2Config(**size, final_logit_softcapping=0.5, attn_logit_softcapping=None),
        "scaled": lambda: t.GraniteConfig(**size, logits_scaling=4.0),
        "sinks": lambda: t.GptOssConfig(**size, num_local_experts=2, num_experts_per_tok=1),
    }[name]()).eval()  # fmt: skip


@pytest.mark.parametrize("name, why", [
    ("window", "window of 40 tokens"), ("alibi", "cannot be replaced"),
    ("softcap", "would be off by"), ("scaled", "would be off by"), ("sinks", "refuses it: its attention has s_aux"),
])  # fmt: skip
def test_a_model_that_cannot_share_stays_on_the_plain_path_as_it_was(name, why):
    """Windows that bite, attention or a head that does more than ours: told by the configuration, by the
    model's own refusal, or by the log-probs of a few tokens."""
    model, data = odd_model(name), ragged()
    before, implementation = lm.completion_logp(model, *data)[0].detach(), model.config._attn_implementation
    assert why in lm.share_prefix(model, Config(**LIMITS)) and not lm.packs(model)
    assert model.config._attn_implementation == implementation
    assert torch.equal(lm.constant_logp(model, *data), before)
    lm.completion_loss(model, *data, lambda rows, logp, h: logp.sum()).backward()


def test_kernels_for_half_precision_are_no_obstacle():
    """The check runs on fp32 weights, which flash-attn refuses: it must not ask the model's own kernel."""

    def half_only(module, query, *args, **kwargs):
        raise ValueError(f"no kernel for {query.dtype}")

    lm.ALL_ATTENTION_FUNCTIONS.register("half_only", half_only)
    lm.ALL_MASK_ATTENTION_FUNCTIONS.register("half_only", lm.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model = family("qwen3")
    model.set_attn_implementation("half_only")
    assert lm.share_prefix(model, Config(**LIMITS)) == ""


def test_a_window_that_never_bites_is_no_obstacle():
    model, data = odd_model("window"), ragged()
    before = lm.completion_logp(model, *data)[0].detach()
    assert lm.share_prefix(model, Config(max_prompt=30, max_new_tokens=10)) == ""
    torch.testing.assert_close(lm.constant_logp(model, *data), before, atol=1e-5, rtol=0)


def test_the_plain_path_is_said_once(tmp_path, capsys):
    """With its reason, also where a reference is loaded beside the policy; a run that shares says nothing."""
    for name, text in (("a", "--attention eager"), ("b", "")):
        go(tmp_path / name, f"--method grpo --beta 0.1 --steps 1 {text}")
    said = [line for line in capsys.readouterr().err.splitlines() if "repeat the prompt" in line]
    assert len(said) == 1 and said[0].endswith("--attention eager")
