"""train.py: the loop on tiny models. What a step may depend on, what it must do, and what a run leaves on disk."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import data
import eval as evaluation
import model
import train
from config import parse
from losses import AGGREGATES, METHODS, advantages, credit, resolve
from rewards import Scored
from rollout import Rollout

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CPU = torch.device("cpu")
TINY = """--show_pool false --demo_order chain --history 3 --slate_size 4 --rank_size 2 --max_prompt 32
--max_new_tokens 24 --tokenizer line --layers 1 --width 32 --world_clusters 3 --world_items 5 --world_gold 2
--world_examples 64 --ndcg_k 2 --eval_k 1 2 --best_metric ndcg@2 --batch_size 4 --group_size 4
--eval_examples 4""".split()
TIMES = ("seconds", "seconds_sample", "memory_gb")


@pytest.fixture(scope="module", autouse=True)
def on_cpu():
    """These tests compare numbers: on a GPU machine too they run on the CPU, child processes included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


def settings(run, text: str) -> list[str]:
    """Flags of a tiny run in the folder `run`; later ones win."""
    return [*TINY, *text.split(), "--run_dir", str(run)]


def go(run, text: str) -> dict[str, float]:
    return train.main(parse(settings(run, text)))


def lines(run, name="log.jsonl", times=False) -> list[dict]:
    """Lines of a log; without the timing fields, which no two runs share."""
    rows = [json.loads(line) for line in open(os.path.join(run, name), encoding="utf-8")]
    return rows if times else [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def weights(run, step: int | str = "best") -> dict[str, torch.Tensor]:
    name = step if isinstance(step, str) else f"step-{step:06d}"
    return load_file(os.path.join(run, "checkpoints", name, "model.safetensors"))


def same(a: dict, b: dict, tolerance=0.0) -> bool:
    return a.keys() == b.keys() and all(
        (a[k] - b[k]).abs().max() <= tolerance * a[k].abs().max().clamp(min=1) for k in a
    )


def contents(folder) -> dict[str, bytes]:
    paths = [os.path.join(top, name) for top, _, names in os.walk(folder) for name in names]
    return {os.path.relpath(p, folder): open(p, "rb").read() for p in paths}


WARM: list[str] = []


def warm(factory) -> str:
    """A run folder whose model was taught the form of an answer: half of its samples are well-formed. Made once."""
    if not WARM:
        run = str(factory.mktemp("warm") / "sft")
        go(run, "--method sft --steps 60 --lr 1e-2 --schedule linear --batch_size 16 --eval_examples 8")
        WARM.append(run)
    return WARM[0]


@pytest.fixture(scope="module")
def sft(tmp_path_factory) -> str:
    return warm(tmp_path_factory)


# ---------------------------------------------------------------------------------------------------------------------
# A run and what it leaves


def test_sft_then_fgrpo_writes_logs_samples_settings_and_checkpoints(sft, tmp_path):
    """The two commands of the README, small: SFT teaches the form, F-GRPO starts from its folder."""
    run = tmp_path / "rl"
    text = f"--method fgrpo --init {sft} --steps 3 --lr 1e-3 --eval_every 2 --save_every 1 --keep 5"
    last = go(run, text)
    log = lines(run, times=True)
    assert [row["step"] for row in log] == [1, 2, 3]
    for row in log:
        assert {*"reward grad_norm loss_pos loss_neg entropy length invalid lr".split(), *TIMES} <= row.keys()
        assert all(math.isfinite(v) for v in row.values())
        assert row["sampler_gap"] < 1e-5 and 0 < row["invalid"] < 1 and row["grad_norm"] > 0
    assert [any(k.startswith("valid/") for k in row) for row in log] == [False, True, True]
    assert last == {k[6:]: v for k, v in log[-1].items() if k.startswith("valid/")}
    samples = lines(run, "samples.jsonl")
    assert [s["step"] for s in samples] == [1, 1, 2, 2, 3, 3]  # log_samples = 2
    for s in samples:
        assert isinstance(s["text"], str) and sum(s["rewards"]) == s["reward"] and s["id"].startswith("train-")
    assert samples[0]["id"] == samples[1]["id"] and samples[0]["text"] != samples[1]["text"]

    cfg = parse(["--config", str(run / "config.yaml")])
    assert replace(cfg, config="") == parse(settings(run, text))
    for step in (1, 2, 3):
        folder = run / "checkpoints" / f"step-{step:06d}"
        names = {"model.safetensors", "config.json", "tokenizer.json", "trainer.pt", "config.yaml"}
        assert names <= set(os.listdir(folder))
        assert replace(parse(["--config", str(folder / "config.yaml")]), config="") == replace(cfg, config="")
        assert all(w.dtype == torch.float32 for w in weights(run, step).values())
    assert not [n for n in os.listdir(run / "checkpoints") if n.startswith(".")]
    assert not same(weights(run, 1), weights(sft, "best"))
    from transformers import AutoModelForCausalLM, AutoTokenizer  # a checkpoint is a folder that others can read

    other = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(other[k], v) for k, v in weights(run, 3).items())
    assert AutoTokenizer.from_pretrained(folder).decode([1]) == "<eos>"


def test_sft_learns(sft):
    """The mean loss of a demonstrated token falls, and the greedy answers become well-formed."""
    log = lines(sft)
    assert log[-1]["loss"] < 0.4 * log[0]["loss"]
    assert log[-1]["valid/invalid"] < 1 and {row["entropy"] for row in log}.isdisjoint({0.0})
    assert lines(sft, "samples.jsonl") == []  # nothing was sampled


@pytest.mark.parametrize("method", METHODS)
def test_every_method_moves_the_weights(method, sft, tmp_path):
    """A method may be dead for a mode that nobody looked at (F26): every row learns from one step."""
    go(tmp_path / "a", f"--method {method} --init {sft} --steps 1 --lr 1e-4")
    (row,) = lines(tmp_path / "a")
    assert row["grad_norm"] > 1e-3 and row["skipped"] == 0
    assert not same(weights(tmp_path / "a"), weights(sft))


def test_a_run_folder_that_holds_a_run_is_refused_and_left_as_it_is(sft, tmp_path, capsys):
    before = contents(sft)
    with pytest.raises(SystemExit) as stop:
        go(sft, "--method fgrpo --steps 1")
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and "--run_dir" in error and "--resume" in error
    assert contents(sft) == before


BAD = ["--world_clusters 2 --world_items 3 --data_seed 5 --world_noise 0", "--max_prompt 2", "--init nowhere", "--max_new_tokens 2",
       "--batch_size 65"]  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_a_run_that_cannot_start_leaves_no_run_behind(bad, tmp_path, capsys, monkeypatch):
    """Fixing the flag and pressing return again must work: the failed start may not count as a run."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit) as stop:
        go(tmp_path / "a", f"--method sft --steps 1 {bad}")
    assert stop.value.code == 2 and bad.split()[-2] in capsys.readouterr().err.splitlines()[-1]
    go(tmp_path / "a", "--method sft --steps 1")
    assert len(lines(tmp_path / "a")) == 1


def test_a_run_folder_that_cannot_be_made_ends_in_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stop:
        go(tmp_path / "file" / "run", "--method sft --steps 1")
    assert stop.value.code == 2 and "--run_dir" in capsys.readouterr().err.splitlines()[-1]


def test_after_a_run_ctrl_c_means_what_it_meant_before(tmp_path):
    """repro.py calls main() many times; between two runs an interrupt must not be swallowed by the last run's."""
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    go(tmp_path / "a", "--method sft --steps 1")
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


# ---------------------------------------------------------------------------------------------------------------------
# The update


@pytest.fixture(scope="module")
def policy():
    """A random model, and the settings it was made with."""
    cfg = parse([*TINY, "--temperature", "0.7"])
    policy = evaluation.open_policy(cfg, data.load(cfg, "train"), CPU)
    with torch.no_grad():  # small weights: gradients are read off differences of weights, which float32 must resolve
        for p in policy.model.parameters():
            p.mul_(0.1 if p.ndim > 1 else 1.0)
    return policy


def ragged(policy, unit: str) -> tuple[Rollout, Scored]:
    """12 completions of 3 prompts, of 1 to 20 tokens, old log-probs near the model's own; one row cannot be scored."""
    g = torch.Generator().manual_seed(0)
    group, length = torch.arange(3).repeat_interleave(4), torch.tensor([20, 1, 7, 3, 12, 2, 2, 19, 5, 9, 1, 4])
    prompts = [torch.randint(3, 20, (n,), generator=g).tolist() for n in (3, 9, 5)]
    mask = torch.arange(20) < length[:, None]
    tokens = torch.where(mask, torch.randint(3, 20, (12, 20), generator=g), 0)
    roll = Rollout(prompts, tokens, torch.zeros(12, 20), mask, group, torch.ones(12, dtype=torch.bool))
    with torch.no_grad():
        own = model.completion_logp(policy.model, prompts, tokens, mask, group, 0.7)[0]
    roll.logp = torch.where(mask, own + 0.3 * torch.randn(own.shape, generator=g), 0)
    phases = torch.where(torch.arange(20) % 7 == 3, 0, 1 + (torch.arange(20) > 4).long()) * mask
    reward = torch.randn(12, 2 if unit == "phase" else 1, generator=g, dtype=torch.float64)
    valid = torch.ones_like(reward, dtype=torch.bool)
    valid[4] = False
    return roll, Scored(phases if unit == "phase" else mask.long(), reward, valid, {}, [], [], [1.0] * reward.shape[1])


def gradient(policy, text: str) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Gradient of one update(), read off a plain SGD step of rate 1, and its metrics. The model is left as it was."""
    cfg = parse([*TINY, "--temperature", "0.7", "--grad_clip", "0", *text.split()])
    row = resolve(cfg)
    roll, scored = ragged(policy, row.unit)
    reference = model.build(replace(cfg, seed=1), policy.tokenizer) if cfg.beta else None
    before = {k: v.clone() for k, v in policy.model.named_parameters()}
    optimizer = torch.optim.SGD(policy.model.parameters(), 1.0)
    look = train.measure(policy, reference, None, roll, cfg, row)
    got = credit(scored, roll, look, row, cfg, [1.0, cfg.lam][: scored.reward.shape[1]])
    memory = train.Memory(torch.zeros(3))
    metrics = train.update(policy, None, optimizer, roll, look, got, cfg, row, memory)
    moved = {k: before[k] - v.detach() for k, v in policy.model.named_parameters()}
    with torch.no_grad():
        for k, v in policy.model.named_parameters():
            v.copy_(before[k])
    return moved, metrics


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("method", ["grpo", "fgrpo"])
def test_the_gradient_does_not_depend_on_micro_batches(policy, method, aggregate):
    """A mean of means weights long answers down (F27): rows of one, a few and all give the same gradient."""
    text = f"--method {method} --aggregate {aggregate} --beta 0.3 --kl_mask completion"
    whole, metrics = gradient(policy, f"{text} --micro_tokens 100000")
    assert metrics["grad_norm"] > 0.01 and metrics["clip_high"] > 0 and metrics["kl"] > 0
    for micro_tokens in (1, 40, 90):
        part, others = gradient(policy, f"{text} --micro_tokens {micro_tokens}")
        assert same(part, whole, 1e-6)
        assert others == pytest.approx(metrics, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("budget", [1, 40, 90, 100000])
def test_micro_batches_hold_every_row_once_within_the_budget(policy, budget):
    """What a forward holds is rows x (longest prompt + longest completion), as it pads: one row always fits."""
    roll, _ = ragged(policy, "phase")
    batches = train.micro_batches(roll, budget)
    assert sorted(i for rows in batches for i in rows.tolist()) == list(range(12))
    for rows in batches:
        prompt = max(len(roll.prompt_ids[g]) for g in roll.group[rows])
        size = len(rows) * (prompt + int(roll.mask[rows].sum(1).max()))
        assert size <= budget or len(rows) == 1
    assert {1: 12, 100000: 1}.get(budget, len(batches)) == len(batches) and (budget != 90 or 2 < len(batches) < 6)


def test_the_gap_to_the_sampler_is_a_mean_over_sampled_tokens(policy):
    """Delimiters and rows that cannot be scored are sampled too: what is trained does not change the measure (F07)."""
    roll, _ = ragged(policy, "phase")
    with torch.no_grad():
        own = model.completion_logp(policy.model, roll.prompt_ids, roll.tokens, roll.mask, roll.group, 0.7)[0]
    gap = float((own - roll.logp)[roll.mask].abs().mean())
    for method in ("grpo", "fgrpo"):
        assert gradient(policy, f"--method {method} --micro_tokens 60")[1]["sampler_gap"] == pytest.approx(
            gap, rel=1e-5
        )


@pytest.mark.parametrize("method", ["grpo", "fgrpo", "rloo"])
def test_the_gradient_is_that_of_the_formula_written_by_hand(policy, method):
    """One place divides (F28): rows alone, without padding, batches or denominators, sum to the same gradient."""
    beta, lam, length = 0.3, 0.5, 24
    ours, metrics = gradient(policy, f"--method {method} --beta {beta} --lam {lam} --micro_tokens 60")
    cfg, net = parse([*TINY, "--method", method]), policy.model
    row = resolve(cfg)
    roll, scored = ragged(policy, row.unit)
    adv = advantages(scored.reward, scored.valid, roll.group, row.baseline, row.scale).float()
    ref = model.build(replace(cfg, seed=1), policy.tokenizer)
    loss = 0.0
    net.zero_grad()
    for b in range(12):
        n = int(roll.mask[b].sum())
        if not scored.valid[b, 0]:
            continue
        prompt, answer = roll.prompt_ids[int(roll.group[b])], roll.tokens[b, :n].tolist()

        def logp(net, prompt=prompt, answer=answer):
            logits = net(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1] / 0.7
            return logits.log_softmax(-1)[range(len(answer)), answer]

        new, old = logp(net), roll.logp[b, :n]
        gap = logp(ref).detach() - new
        kl = gap.exp() - 1 - gap
        for u in range(adv.shape[1]):
            on = scored.unit_ids[b, :n] == u + 1
            a = adv[b, u] * (lam if u else 1)
            ratio = (new - old).exp()
            objective = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a) if method != "rloo" else a * new
            divisor = {"grpo": 12 * n, "fgrpo": 12 * length, "rloo": 12}[method]
            loss = loss + (beta * kl - objective)[on].sum() / divisor
    loss.backward()
    assert all(torch.allclose(ours[k], p.grad, atol=2e-6) for k, p in net.named_parameters())
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    net.zero_grad()


def test_no_scorable_unit_means_no_step(sft, tmp_path, monkeypatch):
    """All rewards NaN (F22): loss 0, no nan, and the momentum of earlier steps may not move the weights."""
    score = train.rewards.score

    def blind(*args, **more):
        scored = score(*args, **more)
        calls.append(1)
        return replace(scored, valid=scored.valid & (len(calls) != 2))

    calls = []
    monkeypatch.setattr(train.rewards, "score", blind)
    go(tmp_path / "a", f"--method fgrpo --init {sft} --steps 3 --lr 1e-3 --save_every 1 --keep 9 --beta 0.1")
    log = lines(tmp_path / "a")
    assert [row["skipped"] for row in log] == [0, 1, 0]
    assert log[1]["loss"] == 0 and log[1]["grad_norm"] == 0 and log[1]["zero_adv"] == 1
    assert same(weights(tmp_path / "a", 2), weights(tmp_path / "a", 1))
    assert not same(weights(tmp_path / "a", 3), weights(tmp_path / "a", 2))


def test_equal_rewards_leave_the_weights_alone(tmp_path):
    """An untaught model writes nothing well-formed: all rewards are the penalty, all advantages exactly 0 (F21)."""
    go(tmp_path / "a", "--method fgrpo --steps 1 --lr 0.1")
    (row,) = lines(tmp_path / "a")
    assert row["invalid"] == 1 and row["zero_adv"] == 1 and row["grad_norm"] == 0 and row["skipped"] == 1
    cfg = parse(settings(tmp_path / "a", ""))
    start = evaluation.open_policy(cfg, data.load(cfg, "train"), CPU).model.state_dict()
    assert all(torch.equal(w, start[k]) for k, w in weights(tmp_path / "a").items())


def test_on_policy_the_loss_is_zero_and_the_gradient_is_not(sft, tmp_path):
    """Is a loss of 0 broken? No (F24): at mu = 1 the ratio is 1 and the advantages of a group sum to 0."""
    go(tmp_path / "a", f"--method grpo --init {sft} --steps 1")
    (row,) = lines(tmp_path / "a")
    assert abs(row["loss"]) < 1e-6 < 1e-2 < row["loss_neg"] == pytest.approx(-row["loss_pos"], abs=1e-6)
    assert row["grad_norm"] > 0.01 and row["ratio_gap"] < 1e-5 and row["clip_low"] == row["clip_high"] == 0


@pytest.mark.parametrize("old_logp", ["sampler", "recompute"])
def test_old_log_probs_stay_frozen_over_the_epochs_of_a_step(old_logp, sft, tmp_path, monkeypatch):
    """Old recomputed after an update would make every ratio 1 and the clip dead (F25)."""
    seen, rolls, loss, sample = [], [], train.policy_loss, evaluation.rollout

    def spy(logp, logp_old, *rest):
        seen.append((logp.detach().clone(), logp_old.clone()))
        return loss(logp, logp_old, *rest)

    monkeypatch.setattr(train, "policy_loss", spy)
    monkeypatch.setattr(evaluation, "rollout", lambda *a, **k: rolls.append(sample(*a, **k)) or rolls[-1])
    text = f"--method grpo --init {sft} --steps 2 --mu 3 --lr 1e-2 --micro_tokens 100000"
    go(tmp_path / "a", f"{text} --old_logp {old_logp}")
    assert len(seen) == 6
    for step in range(2):
        new, old = zip(*seen[3 * step : 3 * step + 3])
        assert torch.equal(old[0], old[1]) and torch.equal(old[0], old[2]) and not torch.equal(new[0], new[1])
        assert (new[0] - old[0]).abs().max() < 1e-5 < 1e-2 < (new[1] - old[1]).abs().max()
        by_length = train.micro_batches(rolls[step], 100000, packed=True)[0]
        assert (old[0] - rolls[step].logp[by_length]).abs().max() < 1e-5
    for row in lines(tmp_path / "a"):  # the log shows the last epoch, where clipping happens
        assert row["ratio_gap"] > 1e-3 and row["clip_low"] + row["clip_high"] > 0


def test_a_step_samples_once(sft, tmp_path, monkeypatch):
    """Sampling inside the micro-batch loop makes many small, slow generations (F58). (prompts, samples) of each call."""
    calls, forwards, sample, logp = [], [], evaluation.rollout, model.completion_loss
    monkeypatch.setattr(evaluation, "rollout", lambda *a, **k: calls.append((len(a[1]), a[2])) or sample(*a, **k))
    monkeypatch.setattr(model, "completion_loss", lambda *a, **k: forwards.append(1) or logp(*a, **k))
    go(tmp_path / "a", f"--method fgrpo --init {sft} --steps 2 --mu 2 --micro_tokens 60")
    assert calls == [(4, 4), (4, 4), (4, 1)] and len(forwards) > 12  # the last one: evaluation


def test_small_learning_rates_reach_the_weights(tmp_path):
    """bf16 master weights would swallow updates of 1e-6; in fp32 nearly every weight moves (F38)."""
    go(tmp_path / "a", "--method sft --steps 10 --lr 1e-6 --dtype bfloat16 --batch_size 16")
    cfg = parse(settings(tmp_path / "a", ""))
    start = evaluation.open_policy(cfg, data.load(cfg, "train"), CPU).model.state_dict()
    after = weights(tmp_path / "a")
    changed = sum(int((w != start[k]).sum()) for k, w in after.items())
    assert changed > 0.99 * sum(w.numel() for w in after.values())


def test_bfloat16_compute_keeps_fp32_weights_and_logs_the_gap_to_the_sampler(sft, tmp_path):
    """With mu > 1 the old log-probs come from the training forward, so the first ratio is 1 again (F07)."""
    go(tmp_path / "a", f"--method grpo --init {sft} --steps 2 --mu 1 --lr 1e-3 --dtype bfloat16 --old_logp recompute")
    for row in lines(tmp_path / "a"):
        assert 0 < row["sampler_gap"] < 0.05 and row["ratio_gap"] < 1e-6 and row["grad_norm"] > 0
    assert all(w.dtype == torch.float32 for w in weights(tmp_path / "a").values())


def test_gradient_checkpointing_changes_memory_only(sft, tmp_path):
    """Checkpointing drops the key-value cache in train mode (F40): decoding must still see one token at a time."""
    widths = []

    def look(module, args, kwargs):
        if kwargs.get("use_cache"):
            widths.append(kwargs["input_ids"].shape[1])

    load = model.load

    def watched(cfg, *rest):
        net = load(cfg, *rest)
        net.register_forward_pre_hook(look, with_kwargs=True)
        return net

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "load", watched)
        go(tmp_path / "a", f"--method fgrpo --init {sft} --steps 2 --lr 1e-3 --checkpointing true")
    assert widths.count(1) > 20 and widths[0] > 1 and set(widths[1:10]) == {1}
    go(tmp_path / "b", f"--method fgrpo --init {sft} --steps 2 --lr 1e-3")
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"), 1e-6)


def test_beta_loads_a_frozen_reference_and_logs_the_kl(sft, tmp_path, monkeypatch):
    loaded, load = [], model.load
    monkeypatch.setattr(model, "load", lambda *a: loaded.append(load(*a)) or loaded[-1])
    go(tmp_path / "a", f"--method fgrpo --init {sft} --steps 3 --lr 1e-3 --beta 0.1")
    kl = [row["kl"] for row in lines(tmp_path / "a")]
    assert abs(kl[0]) < 1e-6 < 1e-5 < kl[1]
    assert len(loaded) == 2 and same(dict(loaded[1].named_parameters()), dict(load_model(sft).named_parameters()))
    assert not any(p.requires_grad for p in loaded[1].parameters())
    go(tmp_path / "b", f"--method fgrpo --init {sft} --steps 1")
    assert len(loaded) == 3 and "kl" not in lines(tmp_path / "b")[0]


def load_model(run):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model.checkpoint_of(str(run)))


def test_learning_rates_follow_the_schedule(tmp_path):
    cfg = parse("--steps 11 --lr 1.0 --min_lr 0.2 --warmup 4".split())
    warmup = [0.25, 0.5, 0.75, 1.0]
    for schedule, after in {
        "constant": [1.0] * 7,
        "linear": [1 - 0.8 * i / 7 for i in range(7)],  # min_lr is reached behind the last step: none is for nothing
        "cosine": [0.2 + 0.4 * (1 + math.cos(math.pi * i / 7)) for i in range(7)],
    }.items():
        rates = [train.learning_rate(replace(cfg, schedule=schedule), step) for step in range(11)]
        assert rates == pytest.approx(warmup + after, abs=1e-6), schedule
    assert train.learning_rate(parse("--steps 1 --lr 1 --schedule linear".split()), 0) == 1.0
    go(tmp_path / "a", "--method sft --steps 3 --lr 0.01 --schedule linear")
    assert [row["lr"] for row in lines(tmp_path / "a")] == pytest.approx([0.01, 0.02 / 3, 0.01 / 3])
    state = torch.load(tmp_path / "a" / "checkpoints" / "step-000003" / "trainer.pt")["optimizer"]
    assert state["param_groups"][0]["lr"] == pytest.approx(0.01 / 3)


# ---------------------------------------------------------------------------------------------------------------------
# Signals


def test_a_second_ctrl_c_stops_at_once(capsys):
    signals = train.Signals()
    signals.ask(signal.SIGTERM, None)
    signals.ask(signal.SIGTERM, None)  # schedulers repeat themselves
    assert signals.asked and "Ctrl-C again" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        signals.ask(signal.SIGINT, None)
    signals.restore()


def test_a_signal_ends_the_step_saves_and_says_how_to_go_on(tmp_path):
    """Preempted (SIGTERM) or interrupted (Ctrl-C): the step is finished and saved, and the run continues from there."""
    started = {}
    for sig in (signal.SIGTERM, signal.SIGINT):
        run = tmp_path / sig.name
        flags = settings(run, "--method sft --steps 1000000 --lr 1e-3")
        command = [sys.executable, os.path.join(ROOT, "train.py"), *flags]
        started[sig] = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        for sig, process in started.items():
            log, until = tmp_path / sig.name / "log.jsonl", time.monotonic() + 60
            while not (log.exists() and log.read_text().count("\n") >= 3):
                assert process.poll() is None and time.monotonic() < until, process.stderr.read()
                time.sleep(0.05)
            process.send_signal(sig)
        for sig, process in started.items():
            error = process.communicate(timeout=60)[1]
            run = tmp_path / sig.name
            done = lines(run)[-1]["step"]
            assert process.returncode == 0 and "Traceback" not in error
            assert f"stopped after step {done}" in error and f"--run_dir {run} --resume" in error
            assert os.listdir(run / "checkpoints") == [f"step-{done:06d}"]
            train.main(parse(["--run_dir", str(run), "--resume", "--steps", str(done + 2)]))
            assert [row["step"] for row in lines(run)] == list(range(1, done + 3))
            assert "valid/ndcg@2" in lines(run)[-1]
    finally:
        for process in started.values():
            process.kill()
            process.wait()


# ---------------------------------------------------------------------------------------------------------------------
# How the phases' gradients get along


def test_a_diagnosis_changes_nothing_and_stays_in_its_range(sft, tmp_path):
    text = f"--method fgrpo --init {sft} --steps 2 --lr 3e-3 --train_delimiters true"
    go(tmp_path / "plain", text)
    go(tmp_path / "seen", f"{text} --diagnose_every 1")
    assert same(weights(tmp_path / "plain"), weights(tmp_path / "seen"))
    for row in lines(tmp_path / "seen"):
        assert -1 <= row["cosine"] <= 1 and 0 < row["cross"] < 1


def test_the_crossing_part_is_what_a_joint_advantage_adds(sft, tmp_path, monkeypatch):
    """With causal credit left out and lambda 0 nothing of the ranking's advantage reaches slate tokens: what crosses is the
    slate's advantage on ranking tokens alone, so without a slate signal nothing crosses."""
    score = train.rewards.score

    def no_slate_signal(*args, **kwargs):
        out = score(*args, **kwargs)
        out.reward[:, 0] = 1.0
        return out

    monkeypatch.setattr(train.rewards, "score", no_slate_signal)
    go(tmp_path / "zero", f"--method fgrpo --init {sft} --steps 1 --lam 0 --diagnose_every 1")
    assert lines(tmp_path / "zero")[0]["cross"] == 0
    go(tmp_path / "one", f"--method fgrpo --init {sft} --steps 1 --lam 1 --diagnose_every 1")
    assert lines(tmp_path / "one")[0]["cross"] > 0 and lines(tmp_path / "one")[0]["cosine"] == 0
