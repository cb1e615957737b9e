"""plan.py against what it predicts: parameters, caches, optimiser state and saved activations of real models on the CPU.

Bytes on the wire are counted on a process group of 8 ranks that sends nothing. Left out: the times, which rest on assumed
rates.
"""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from test_methods import Step, nets
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

import model as lm
import plan
import rollout as sampling
from config import Config, check, parse
from train import optimizer_for

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SIZES = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}  # fmt: skip
KINDS = {
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "qwen3 tied": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
}
PUBLISHED = {  # Qwen3: layers, hidden, ffn, heads, are embeddings tied
    "0.6b": (28, 1024, 3072, 16, True),
    "1.7b": (28, 2048, 6144, 16, True),
    "4b": (36, 2560, 9728, 32, True),
    "8b": (36, 4096, 12288, 32, False),
}
FIXTURES = os.path.join(ROOT, "tests", "fixtures")


def net_of(kind: str):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(KINDS[kind])


def settings(**kwargs) -> Config:
    """Checked settings; two prompts of 32 + 16 tokens, two samples each, all in one micro-batch."""
    base = dict(max_prompt=32, max_new_tokens=16, group_size=2, batch_size=2, micro_tokens=4 * 48, method="grpo")
    return check(Config(**(base | kwargs)))


def own(tensors) -> int:
    """Bytes of tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_state_equals_the_tensors_of_a_real_step(kind):
    """Parameters, gradients and AdamW's moments of a real update, byte for byte (but AdamW's step counts)."""
    cfg, net = settings(dtype="float32"), net_of(kind)
    s = plan.shape_of(KINDS[kind])
    assert s.params == sum(p.numel() for p in net.parameters())
    assert s.root + s.block * s.layers == s.params and s.qk_norm == ("qwen3" in kind)
    optimizer = optimizer_for(net, None, cfg)
    net(input_ids=torch.ones(1, 3, dtype=torch.long)).logits.logsumexp(-1).sum().backward()
    optimizer.step()
    got = plan.state(s, cfg, 1)
    assert got["master weights (fp32)"] == own(net.parameters())
    assert got["AdamW moments (fp32)"] == own(v for x in optimizer.state.values() for k, v in x.items() if k != "step")
    assert plan.gradients(s, cfg, 1) == own(p.grad for p in net.parameters())


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_cache_equals_a_real_one(kind):
    """Keys and values of a forward over 2 x 7 tokens."""
    cache = net_of(kind)(input_ids=torch.ones(2, 7, dtype=torch.long), use_cache=True)["cache"]
    assert own(x for layer in cache.layers for x in (layer.keys, layer.values)) == (
        2 * 7 * 4 * plan.shape_of(KINDS[kind]).kv_numbers
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_sizes_by_hand(name):
    """Embedding, q, k, v, o, gate, up, down, norms of blocks and of heads, against the count on the meta device."""
    layers, h, f, heads, tied = PUBLISHED[name]
    block = 128 * h * (2 * heads + 2 * 8) + 3 * h * f + 2 * h + 2 * 128
    s = plan.shape_of(AutoConfig.from_pretrained(os.path.join(FIXTURES, f"qwen3-{name}")))
    assert s.block == block and s.params == layers * block + h + (1 if tied else 2) * 151936 * h
    assert s.kv_numbers == layers * 2 * 8 * 128


def kept(net, forward) -> int:
    """Bytes that autograd keeps between a forward and its backward, weights and their copies left out."""
    weights = {p.untyped_storage().data_ptr() for p in net.parameters()}
    sizes = {tuple(p.shape) for p in net.parameters()} | {tuple(p.shape[::-1]) for p in net.parameters()}
    storages, alive = {}, []

    def pack(x):
        where = x.untyped_storage()
        if where.data_ptr() not in weights and not (x.dtype == torch.bfloat16 and tuple(x.shape) in sizes):
            storages[where.data_ptr()] = where.nbytes()
        alive.append(x)  # so that no later tensor takes its place
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        forward()
    return sum(storages.values())


@pytest.mark.parametrize("compute", ["float32", "autocast", "bf16 weights"])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen2"])
def test_activations_are_within_a_twentieth_of_what_autograd_keeps(kind, compute):
    """Without checkpointing; bf16 weights stand for FSDP2, which casts them. Of the logits 4 bytes are kept each."""
    cfg = settings(dtype="float32" if compute == "float32" else "bfloat16")
    ranks, net = 2 if compute == "bf16 weights" else 1, net_of(kind)
    net = net.bfloat16() if ranks == 2 else net
    s, tokens = plan.shape_of(KINDS[kind]), torch.full((4, 16), 7)
    for width in (32, 96):
        cfg.max_prompt = width
        args = (net, [[5] * width, [5] * (width - 8)], tokens, tokens > 0, torch.tensor([0, 0, 1, 1]))
        got = kept(net, lambda args=args: lm.completion_logp(*args, dtype=getattr(torch, cfg.dtype), entropy=True))
        expected = plan.activations(s, cfg, ranks, plan.Path(), 4) + 4 * 4 * 16 * s.vocab
        assert got == pytest.approx(expected, rel=0.05), (width, got / expected)


@pytest.mark.parametrize("compute", ["float32", "autocast", "bf16 weights"])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen2"])
def test_packed_activations_are_within_a_thirtieth(kind, compute):
    """The same of the packed path: each prompt once, no scores, no copies; without logits, which it does not keep."""
    cfg = settings(dtype="float32" if compute == "float32" else "bfloat16")
    ranks, net = 2 if compute == "bf16 weights" else 1, net_of(kind)
    assert lm.share_prefix(net, cfg) == ""
    net = net.bfloat16() if ranks == 2 else net
    s, tokens, path = plan.shape_of(KINDS[kind]), torch.full((4, 16), 7), plan.path_of(cfg)
    for width in (32, 96):
        cfg.max_prompt = width
        args = (
            net,
            [[5] * width] * 2,
            tokens,
            tokens > 0,
            torch.tensor([0, 0, 1, 1]),
            lambda rows, logp, h: logp.sum(),
        )
        assert lm.pack(*args[1:5]).ids.numel() == 2 * path.fed(cfg)
        got = kept(net, lambda args=args: lm.completion_loss(*args, dtype=getattr(torch, cfg.dtype), entropy=True))
        assert path.shared and got == pytest.approx(plan.activations(s, cfg, ranks, path, 2), rel=0.033), width


def allocated(work) -> int:
    """Highest bytes allocated inside, beyond those that were there."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watch:
        work()
    now = top = 0
    events = [e for e in watch.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        top = max(top, now)
    return top


@pytest.mark.parametrize("prompt, vocab, tie", [(96, 300, False), (256, 300, True), (96, 3000, True)])
@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_peak_of_a_packed_micro_batch_is_what_the_allocator_sees(checkpointing, flash, prompt, vocab, tie, monkeypatch):
    """Within 6 %, where the blocks are the most, or the scores of attention (256 tokens, without the flash attention of a CPU:
    as on a GPU), or the chunks of logits (3,000 words)."""
    config = LlamaConfig(**(SIZES | {"vocab_size": vocab}), tie_word_embeddings=tie)
    cfg = settings(dtype="float32", max_prompt=prompt, group_size=4, checkpointing=checkpointing)
    s, tokens, group = plan.shape_of(config), torch.full((8, 16), 7), torch.arange(2).repeat_interleave(4)
    monkeypatch.setattr(lm, "FLASH", flash)
    if flash:
        monkeypatch.setattr(plan, "attention", lambda *_: 0.0)
    if vocab == 3000 and checkpointing:
        monkeypatch.setattr(lm, "CHUNK", 2**19)
    torch.manual_seed(0)
    net = AutoModelForCausalLM.from_config(config).train()
    assert lm.share_prefix(net, cfg) == "" and s.tied == tie
    if checkpointing:
        net.gradient_checkpointing_enable({"use_reentrant": False})
    for p in net.parameters():
        p.grad = torch.zeros_like(p)  # allocated before, so that only the micro-batch is measured
    args = (net, [[5] * prompt] * 2, tokens, tokens > 0, group, lambda rows, logp, h: logp.sum())
    top = allocated(lambda: lm.completion_loss(*args, entropy=True).backward())
    assert top == pytest.approx(plan.micro_batch(s, cfg, 1, plan.path_of(cfg), 2), rel=0.06)


@pytest.mark.parametrize("prompt, new, rows, vocab", [(96, 8, 4, 300), (32, 64, 8, 300), (32, 64, 8, 3000)])
def test_peak_of_a_rollout_is_what_the_allocator_sees(prompt, new, rows, vocab):
    """Where the prefill is the most, the cache, and the logits: within a tenth, without the layer that is copied
    where rows join late."""
    config = LlamaConfig(**(SIZES | {"vocab_size": vocab}))
    cfg = settings(dtype="float32", max_prompt=prompt, max_new_tokens=new, group_size=rows, batch_size=8)
    net, s, texts = (
        AutoModelForCausalLM.from_config(config),
        plan.shape_of(config),
        [[5 + i] * prompt for i in range(8)],
    )
    top = allocated(lambda: sampling.rollout(net, texts, rows, [], max_new_tokens=new, kv_tokens=10**6))
    first = (parts := plan.rollout(s, cfg, 1, 8 * rows)).pop("prefill")
    parts["KV cache"] *= s.kv_layers / (s.kv_layers + 1)
    assert top == pytest.approx(max(first, sum(parts.values())), rel=0.1)
    assert max(first, sum(parts.values())) <= plan.decoding(s, cfg, 1, 8 * rows)


@pytest.mark.parametrize("kv_tokens", [1, 50, 99, 1000, 1100, 1400, 3000, 10**6])
def test_rows_in_flight_are_those_that_the_rollout_lets_in(kv_tokens):
    """8 prompts of 100 tokens, 16 samples of 20 each: whole groups, parts of one where none fits, one row at least."""
    cfg = settings(max_prompt=100, max_new_tokens=20, group_size=16, batch_size=8, kv_tokens=kv_tokens)
    pieces = sampling.admit([(i, 0, 16) for i in range(8)], [[5] * 100] * 8, 20, kv_tokens, shared=True)
    assert plan.in_flight(cfg, 1) == sum(end - first for _, first, end in pieces)


@pytest.mark.parametrize("vocab", [300, 3000])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_peak_of_a_micro_batch_is_what_the_allocator_sees(checkpointing, vocab):
    """Forward and backward by the profiler's allocations: within 5 % (10 % with checkpointing), where the blocks are the
    most (300 words) and where the logits are (3,000)."""
    config = LlamaConfig(**(SIZES | {"vocab_size": vocab}))
    cfg, s, tokens = settings(dtype="float32", max_prompt=96), plan.shape_of(config), torch.full((8, 16), 7)
    path, group = plan.Path(checkpointing=checkpointing), torch.arange(2).repeat_interleave(4)
    torch.manual_seed(0)
    net = AutoModelForCausalLM.from_config(config).train()
    if checkpointing:
        net.gradient_checkpointing_enable({"use_reentrant": False})
    for p in net.parameters():
        p.grad = torch.zeros_like(p)  # allocated before, so that only the micro-batch is measured
    args = (net, [[5] * 96, [5] * 88], tokens, tokens > 0, group)
    top = allocated(lambda: lm.completion_logp(*args, entropy=True)[0].sum().backward())
    expected = plan.micro_batch(s, cfg, 1, path, 8)
    assert top == pytest.approx(expected, rel=0.1 if checkpointing else 0.05), top / expected


class Wire(TorchDispatchMode):
    """Counts the collectives inside, and the bytes of their whole tensors."""

    def __init__(self):
        super().__init__()
        self.bytes, self.calls = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            name = function.name().split("::")[1]
            self.bytes[name] = self.bytes.get(name, 0) + max(own([x]) for x in args if isinstance(x, torch.Tensor))
            self.calls += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def eight_ranks():
    """A process group of 8 ranks of which only this process exists: collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3 tied"])
@pytest.mark.parametrize("shared", [False, True])
def test_bytes_and_collectives_of_a_step(shared, kind, dtype, eight_ranks):
    """A rollout, a reference pass and two micro-batches under FSDP2, after a step of warming up: within 1 % (FSDP2 pads
    what 8 ranks do not divide), and the number of collectives to the last one."""
    cfg, compute = settings(dtype=dtype, batch_size=16, micro_tokens=48 * 2, beta=0.1), getattr(torch, dtype)
    s, path, nets = plan.shape_of(KINDS[kind]), plan.Path(shared), [net_of(kind) for _ in range(2)]
    assert path.micro(cfg, 8) == (2, 1 if shared else 2)
    assert not shared or [lm.share_prefix(net, cfg) for net in nets] == ["", ""]
    net, reference = (lm.shard(net, compute) for net in nets)
    tokens, group = torch.full((2, 16), 7), torch.arange(2)
    args = ([[5] * 32, [5] * 24], tokens, tokens > 0, group)
    for _ in range(2):
        wires = {name: Wire() for name in ("rollout", "no grad", "forward", "backward")}
        with wires["rollout"], lm.gathered(net), torch.no_grad():
            for _ in range(3):
                net(input_ids=tokens)
        for _ in range(2):
            with wires["no grad"], torch.no_grad():
                lm.constant_logp(reference, *args, dtype=compute)
        for _ in range(2):
            with wires["forward"]:
                loss = lm.completion_loss(net, *args, lambda rows, logp, h: logp.sum(), dtype=compute)
            with wires["backward"]:
                loss.backward()
    counted = {k: w.bytes["_allgather_base_"] * 7 / 8 for k, w in wires.items()}
    counted["gradients"] = wires["backward"].bytes["_reduce_scatter_base_"] * 7 / 8
    assert counted == pytest.approx(plan.received(s, cfg, 8, path), rel=0.01)
    assert sum(w.calls for w in wires.values()) == plan.collectives(s, cfg, 8, path)


def test_largest_batch_fits_and_one_more_does_not():
    """The printed kv_tokens and micro_tokens stay within the memory, and another group or row would not."""
    s = plan.shape_of(AutoConfig.from_pretrained(os.path.join(FIXTURES, "qwen3-1.7b")))
    for path in (
        plan.Path(),
        plan.Path(checkpointing=True),
        plan.Path(True, lm.CHUNK),
        plan.Path(True, lm.CHUNK, True),
    ):
        cfg = settings(max_prompt=1000, max_new_tokens=24, group_size=8, batch_size=8 * 10**6)
        kv, micro = plan.largest(s, cfg, 8, path, 60e9)
        for more in (0, 1):
            cfg.kv_tokens, cfg.micro_tokens = kv + more * 8 * 1024, micro + more * path.unit(cfg)[0]
            top = plan.peaks(s, cfg, 8, path)
            assert (top["rollout"] > 60e9) == (top["update"] > 60e9) == bool(more), (path, more, top)
    assert plan.largest(s, cfg, 1, plan.Path(), 20e9) == (0, 0)


def test_shared_prefix_counts_each_prompt_once():
    cfg, path = (
        settings(max_prompt=100, max_new_tokens=10, group_size=8, batch_size=6, micro_tokens=400),
        plan.Path(True),
    )
    assert path.unit(cfg) == (100 + 80, 80) and path.micro(cfg, 2) == (2, 2)
    assert plan.Path().unit(cfg) == (110, 11) and plan.Path().micro(cfg, 2) == (8, 3)


def test_methods_pay_for_their_models():
    """A reference with beta, a critic with ppo, no cache without sampling, a second policy pass for old log-probs that
    something needs before the update, half the moments in bfloat16."""
    s, plain = plan.shape_of(KINDS["llama"]), settings()
    beta, ppo = settings(beta=0.1), settings(method="ppo", group_size=1)
    assert plan.state(s, beta, 1)["reference"] == 4 * s.params and not plan.state(s, plain, 1)["reference"]
    assert plan.state(s, ppo, 1)["critic and its moments"] == 12 * (s.params - 300 * 64 + 65)
    sft = settings(method="sft")
    assert plan.in_flight(sft, 1) == 0 and plan.seconds(s, sft, 1, plan.Path(), plan.Machine())["decode"] == 0
    late, early = settings(old_logp="recompute", mu=2), settings(tis=2.0)
    got = [plan.received(s, c, 4, plan.Path())["no grad"] for c in (plain, late, early, beta)]
    assert got[0] == got[1] == 0 < got[2] == got[3]
    small = settings(optimizer_dtype="bfloat16")
    assert (
        plan.state(s, small, 1)["AdamW moments (bf16)"]
        == 4 * s.params
        == plan.state(s, plain, 1)["AdamW moments (fp32)"] / 2
    )


@pytest.mark.parametrize("text, passes", [
    ("", 0), ("--old_logp recompute", 0), ("--old_logp recompute --mu 2", 0), ("--mu 2 --dtype bfloat16", 0), ("--tis 2", 1),
    ("--old_logp recompute --smoothing 0.1", 1), ("--smoothing 0.1", 0), ("--beta 0.1", 1), ("--method ppo", 1),
    ("--old_logp recompute --beta 0.1 --kl k1 --kl_in reward", 2), ("--method dpo", 2),
])  # fmt: skip
def test_passes_are_those_that_a_step_makes(text, passes, monkeypatch):
    step, calls = Step("grpo", f"--micro_tokens 100000 {text}"), []
    monkeypatch.setattr(lm, "constant_logp", lambda *a, **k: calls.append(1) or torch.zeros(12, 9))
    monkeypatch.setattr(lm, "completion_values", lambda *a, **k: calls.append(1) or torch.zeros(12, 9))
    step.look(
        policy=SimpleNamespace(model=nets()[0].model, dtype=getattr(torch, step.cfg.dtype.replace("auto", "float32")))
    )
    step.cfg.dtype = step.cfg.dtype.replace("auto", "float32")
    assert sum(plan.passes(step.cfg).values()) == len(calls) == passes


def test_plan_prints_and_touches_nothing(tmp_path):
    """The command itself, on a folder that holds a config and no weights, within 100 columns."""
    out = str(tmp_path / "run")
    command = (
        f"train.py --plan --method ppo --init {FIXTURES}/qwen3-0.6b --run_dir {out} --plan_ranks 8 512 --plan_gb 40"
    )
    done = subprocess.run([sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for text in ("596,049,920", "KV cache", "critic", "40 GB per rank (--plan_gb)", "limit", "Computed, not measured"):
        assert text in done.stdout
    assert max(map(len, done.stdout.splitlines()[1:])) <= 100
    assert not os.path.exists(out)


@pytest.mark.parametrize("flags, text", [
    ("--plan_ranks 8 0", "--plan_ranks 8 0"),
    ("--plan_gb -1", "--plan_gb -1"),
    ("--init no/such/folder", "no/such/folder"),
    (f"--init {FIXTURES}/qwen3-4b --max_prompt 50000", "positions"),
])  # fmt: skip
def test_bad_input_ends_in_one_line(flags, text, capsys):
    with pytest.raises(SystemExit) as stop:
        plan.show(parse(["--plan", *flags.split()]), 1)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and text in error


@pytest.mark.parametrize("config", [{"model_type": "mamba"}, {"model_type": "qwen3", "num_attention_heads": 0},
                                    {"model_type": "qwen3", "num_hidden_layers": 0}])  # fmt: skip
def test_a_model_of_another_kind_or_a_damaged_config_ends_in_one_line(config, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit) as stop:
        plan.show(parse(["--plan", "--init", str(tmp_path)]), 1)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and str(tmp_path) in error and "no decoder" in error


def test_the_tiny_model_needs_no_init(capsys):
    """The vocabulary comes from the data, as in training."""
    plan.show(parse(["--plan", "--method", "sft", "--world_examples", "50"]), 1)
    assert "the tiny model (qwen3)" in capsys.readouterr().out


def rows_of(cfg) -> list[str]:
    """Rows of the page's table, one per number of ranks."""
    s, path, m, out = plan.shape_of(plan.model_config(cfg)), plan.path_of(cfg), plan.Machine(), []
    for w in cfg.plan_ranks:
        top, (kv, micro) = plan.peaks(s, cfg, w, path), plan.largest(s, cfg, w, path, 80e9)
        held = sum(plan.state(s, cfg, w).values()) + plan.gradients(s, cfg, w)
        seconds = plan.step_seconds(plan.seconds(s, cfg, w, path, m))
        cells = [cfg.init.split("-")[-1].upper(), w, plan.gb(held), plan.gb(top["rollout"]), plan.gb(top["update"]), f"{kv:,}",
                 f"{micro:,}", plan.gb(sum(plan.received(s, cfg, w, path).values())), f"{seconds:.1f}",
                 plan.limit(s, cfg, w, path, 80e9, m)]  # fmt: skip
        out.append(f"| {' | '.join(map(str, cells))} |")
    return out


def test_page_shows_what_the_command_prints(monkeypatch):
    """docs/scale.md: the printed plan, the row of every size and number of ranks, and what fits where."""
    monkeypatch.chdir(ROOT)
    page = open(os.path.join(ROOT, "docs", "scale.md"), encoding="utf-8").read()
    command, shown = page.split("\n$ python train.py ")[1].split("\n", 1)
    folders = [f"tests/fixtures/qwen3-{name}" for name in PUBLISHED]
    for folder in folders:
        cfg = parse([*command.split(), "--init", folder])
        if folder.endswith("4b"):
            assert shown.startswith(plan.report(cfg) + "\n```")
        assert all(line in page for line in rows_of(cfg))
    assert plan.fits(parse(["--method", "fgrpo", "--checkpointing"]), folders) in page


def test_deterministic_sets_the_switches_before_anything_is_loaded(monkeypatch):
    import train

    def stop(*_):
        raise InterruptedError

    monkeypatch.setattr(train, "launch", stop)
    for name in ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for flag, on in (("false", False), ("true", True)):
        with pytest.raises(InterruptedError):
            train.main(parse(["--deterministic", flag]))
        assert torch.are_deterministic_algorithms_enabled() == on
        assert (os.environ.get("CUBLAS_WORKSPACE_CONFIG"), os.environ.get("FLASH_ATTENTION_DETERMINISTIC")) == (
            (":4096:8", "1") if on else (None, None)
        )
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
