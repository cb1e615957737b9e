"""train.py on two processes (gloo, FSDP2) against one: the number of ranks must not be visible in the result.

The same runs are made once in this process and once under torchrun, which executes this file; every test below looks at
one aspect of the two sets. Single steps, faults and restarts: test_ranks.py. Left out: NCCL, more than one machine.
"""

import math
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from test_train import CPU, ROOT, go, lines, on_cpu, same, settings, warm, weights  # noqa: F401

import data
import eval as evaluation
import model
import train
from config import parse

RUNS = {  # tied embeddings start from the taught model, untied ones from scratch with demonstrations of unequal length
    "fgrpo": "--method fgrpo --lr 1e-4 --steps 2 --mu 2 --beta 0.1 --old_logp recompute --eval_every 1 --save_every 1 "
    "--keep 9 --eval_examples 5 --micro_tokens 70 --grad_clip 0.05 --log_samples 6 --init SFT",
    "sft": "--method sft --lr 1e-4 --steps 2 --tie false --tokenizer byte --max_prompt 160 --max_new_tokens 160 "
    "--layers 2 --micro_tokens 300 --batch_size 6 --eval_examples 3 --checkpointing true",
}
TIMEOUT = 200  # seconds for everything under torchrun: a hang is the usual failure


def record(folder, sft: str, rank: int, ranks: int) -> dict[str, dict]:
    """Make the runs in `folder`; what this rank saw of each: samples and rewards, micro-batches, evaluated rows."""
    seen = {}
    score, micro_batches = train.rewards.score, train.micro_batches
    evaluate, rollout = train.evaluate, evaluation.rollout
    for name, text in RUNS.items():
        now = seen[name] = {"samples": [], "micro": [], "rows": [], "asked": []}

        def scored(roll, examples, pieces, cfg, unit, now=now, **kwargs):
            out = score(roll, examples, pieces, cfg, unit, **kwargs)
            if unit == "phase" and len(roll.group) > len(examples):  # of the training step, not of an evaluation
                for b, g in enumerate(roll.group.tolist()):
                    tokens = roll.tokens[b][roll.mask[b]].tolist()
                    now["samples"].append((examples[g].id, tokens, out.reward[b].tolist()))
            return out

        def cut(roll, budget, packed, now=now):
            out = micro_batches(roll, budget, packed)
            now["micro"].append([len(rows) for rows in out])
            return out

        def asked(*args, now=now, **kwargs):
            if args[2] == 1:  # one sample each: of an evaluation, not of a training step
                now["asked"].append(len(args[1]))
            return rollout(*args, **kwargs)

        def looked(*args, now=now):
            now["rows"].append(evaluate(*args))
            return now["rows"][-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train.rewards, "score", scored)
            patch.setattr(train, "micro_batches", cut)
            patch.setattr(train, "evaluate", looked)
            patch.setattr(evaluation, "rollout", asked)
            train.main(parse(settings(os.path.join(folder, name), text.replace("SFT", sft)), ranks))
    return seen


def uneven() -> dict:
    """Inside gathered() ranks may forward a different number of times, and see the weights of the last update (F42)."""
    rank = dist.get_rank()
    cfg = parse(settings("unused", "--layers 2"))
    policy = evaluation.open_policy(cfg, data.load(cfg, "train"), CPU)
    net = model.shard(policy.model, torch.float32)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    ids = torch.arange(3, 11)[None]
    out = {}
    for step in range(2):
        net(input_ids=ids).logits.logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with model.gathered(net), torch.no_grad():
            for _ in range((4, 11)[rank]):
                out[step] = net(input_ids=ids).logits
    state = model.full_state(net)
    if rank == 0:
        plain = model.build(cfg, policy.tokenizer)
        plain.load_state_dict(state)
        with torch.no_grad():
            out["plain"] = plain(input_ids=ids).logits
    out["reshards"] = all(not hasattr(p, "full_tensor") or p.to_local().shape != p.shape for p in net.parameters())
    return out


def under_torchrun(folder: str, one: str, sft: str) -> None:
    """What each of the two ranks does."""
    _, ranks, _ = train.launch()
    rank = dist.get_rank()
    resolve = train.resolve
    train.resolve = lambda cfg: time.sleep(0.5 * rank) or resolve(cfg)  # rank 1 comes late to the run folder
    seen = record(folder, sft, rank, ranks)
    train.resolve = resolve
    seen["uneven"] = uneven()
    try:
        go(os.path.join(folder, "fgrpo"), "--steps 9")
    except SystemExit as stop:
        seen["refused"] = stop.code
    train.main(parse(["--run_dir", os.path.join(one, "for two ranks"), "--resume", "--steps", "3"], ranks))

    order = data.order

    def interrupted(n, seed, step, batch_size):
        if rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return order(n, seed, step, batch_size)

    data.order = interrupted
    go(os.path.join(folder, "interrupted"), "--method sft --steps 50 --lr 0 --eval_every 1 --eval_examples 2")
    data.order, loss, step = order, model.completion_loss, [0]

    def broken(*args, loss_fn, **kwargs):
        wrong = math.nan if rank == 1 and step[0] in (1, 3, 4) else 1
        return loss(*args, loss_fn=lambda rows, logp, h: loss_fn(rows, logp * wrong, h), **kwargs)

    data.order = lambda *args: step.__setitem__(0, args[2]) or order(*args)
    model.completion_loss = broken
    try:
        go(os.path.join(folder, "bad"), "--method sft --steps 9 --save_every 1 --max_bad_steps 2")
    except SystemExit as stop:
        seen["bad"] = stop.code
    torch.save(seen, os.path.join(folder, f"rank{rank}.pt"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Folders and records of the runs on one rank and on two."""
    sft, root = warm(tmp_path_factory), tmp_path_factory.mktemp("dist")
    one, two = str(root / "one"), str(root / "two")
    alone = record(one, sft, 0, 1)
    shutil.copytree(os.path.join(one, "fgrpo"), os.path.join(one, "for two ranks"), symlinks=True)
    os.mkdir(two)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "GLOO_SOCKET_IFNAME": "lo"}
    env["PYTHONPATH"] = os.pathsep.join([ROOT, *filter(None, [env.get("PYTHONPATH")])])
    command = [
        sys.executable,
        *"-m torch.distributed.run --standalone --nproc_per_node 2".split(),
        __file__,
        two,
        one,
        sft,
    ]
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    try:
        error = process.communicate(timeout=TIMEOUT)[1]
    except subprocess.TimeoutExpired:
        pytest.fail(f"two ranks did not finish in {TIMEOUT} s: {lines_so_far(two)}")
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun asks its workers to stop, and kills them after half a minute
            process.communicate()
    assert process.returncode == 0, error[-4000:]
    ranks = [torch.load(os.path.join(two, f"rank{r}.pt"), weights_only=False) for r in range(2)]
    return one, two, alone, ranks, sft


def lines_so_far(two: str) -> dict[str, int]:
    logs = {name: os.path.join(two, name, "log.jsonl") for name in sorted(os.listdir(two))}
    return {name: len(open(path).readlines()) for name, path in logs.items() if os.path.exists(path)}


def test_two_ranks_draw_the_samples_of_one(both):
    """Seeds come from (seed, step, prompt, sample), never from the rank (F45): the union of the ranks' samples is the
    set that one rank draws, with the same rewards, and no two samples of a prompt share a stream."""
    _, _, alone, ranks, _ = both
    ours = alone["fgrpo"]["samples"]
    theirs = [s for r in ranks for s in r["fgrpo"]["samples"]]
    assert len(ours) == 2 * 16 and sorted(ours) == sorted(theirs)
    assert len({tuple(tokens) for _, tokens, _ in ours}) > 16
    assert {len(r["fgrpo"]["samples"]) for r in ranks} == {16}
    assert not {i for i, *_ in ranks[0]["fgrpo"]["samples"][:8]} & {i for i, *_ in ranks[1]["fgrpo"]["samples"][:8]}


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_learn_what_one_learns(name, both):
    """Losses are divided by counts over all ranks (F29), and the gradient norm is that of the whole gradient (F44),
    also where it is clipped: same logged numbers, same weights, for tied and untied embeddings; and samples.jsonl holds the
    first samples of the whole step, whichever rank drew them."""
    one, two, _, _, _ = both
    ours, theirs = lines(os.path.join(one, name)), lines(os.path.join(two, name))
    assert [row["step"] for row in theirs] == [1, 2]
    shown = [lines(os.path.join(run, name), "samples.jsonl") for run in (one, two)]
    assert shown[0] == shown[1] and len(shown[0]) == 2 * 6 * (name == "fgrpo")
    for a, b in zip(ours, theirs):
        assert a.pop("wasted") >= 0 and b.pop("wasted") >= 0  # how many decoded rows were idle depends on the batch
        assert b == pytest.approx(a, abs=1e-5, rel=1e-5)
        assert a["grad_norm"] > 0.05 and a["skipped"] == 0
    last = "step-000002"
    assert same(weights(os.path.join(one, name), last), weights(os.path.join(two, name), last), 1e-6)
    cfg = parse(["--config", os.path.join(two, name, "config.yaml")])
    start = evaluation.open_policy(cfg, data.load(cfg, "train"), CPU).model.state_dict()
    moved = {k: (w - start[k]).abs().max() for k, w in weights(os.path.join(two, name), last).items()}
    assert min(moved.values()) > 1e-5  # so the tolerance above means something
    assert ("lm_head.weight" in moved) == (name == "sft")


@pytest.mark.parametrize("name", RUNS)
def test_ranks_with_fewer_micro_batches_do_empty_ones(name, both):
    """Every forward and backward is a collective: a rank that has run out of rows must go on taking part."""
    _, _, _, ranks, _ = both
    counts = [r[name]["micro"] for r in ranks]
    assert list(map(len, counts[0])) == list(map(len, counts[1]))
    assert any(0 in step for rank in counts for step in rank), "no rank was short of rows: the test shows nothing"
    assert max(len(step) for step in counts[0]) > 2


def test_ranks_may_decode_for_a_different_time(both):
    """Rank 0 forwards 4 times, rank 1 11 times: in the plain form of FSDP the second waits for ever (F42)."""
    _, _, _, (first, second), _ = both
    a, b = first["uneven"], second["uneven"]
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
    assert (a[0] - a[1]).abs().max() > 1e-2 and torch.allclose(a[1], a["plain"], atol=1e-5)
    assert a["reshards"] and b["reshards"]
    lengths = [[len(tokens) for _, tokens, _ in r["fgrpo"]["samples"][:8]] for r in (first, second)]
    assert max(lengths[0]) != max(lengths[1]), "both ranks decoded equally long: the runs show nothing"


def test_two_ranks_evaluate_what_one_evaluates(both):
    """Examples are shared over the ranks and rows are gathered, in order (F47); every rank has the result, so all agree
    on whether a checkpoint is the best."""
    one, two, alone, ranks, _ = both
    ours = alone["fgrpo"]["rows"]
    assert [len(rows) for rows in ours] == [5, 5] and ours == ranks[0]["fgrpo"]["rows"] == ranks[1]["fgrpo"]["rows"]
    assert [row["id"] for row in ours[0]] == sorted((row["id"] for row in ours[0]), key=lambda i: int(i.split("-")[1]))
    assert ranks[0]["sft"]["rows"] == alone["sft"]["rows"]
    assert [r["fgrpo"]["asked"] for r in (alone, *ranks)] == [[5, 5], [3, 3], [2, 2]]
    values = [row["valid/ndcg@2"] for row in lines(os.path.join(two, "fgrpo"))]
    assert values[1] <= values[0], "the second evaluation was better: no disagreement was possible"
    for run in (one, two):
        assert os.readlink(os.path.join(run, "fgrpo", "checkpoints", "best")) == "step-000001"


def test_a_checkpoint_of_two_ranks_continues_on_one_and_the_other_way_round(both):
    """A checkpoint holds whole tensors, weights and optimiser state alike: it does not know how many ranks wrote it."""
    one, two, _, _, _ = both
    copy = shutil.copytree(os.path.join(two, "fgrpo"), os.path.join(two, "for one rank"), symlinks=True)
    for run in (copy, os.path.join(one, "fgrpo")):
        train.main(parse(["--run_dir", run, "--resume", "--steps", "3"]))
    runs = {"1, 1": os.path.join(one, "fgrpo"), "2, 1": copy, "1, 2": os.path.join(one, "for two ranks")}
    expected = weights(runs["1, 1"], 3)
    state = {k: torch.load(os.path.join(run, "checkpoints", "step-000003", "trainer.pt")) for k, run in runs.items()}
    for name, run in runs.items():
        assert [row["step"] for row in lines(run)] == [1, 2, 3]
        assert same(weights(run, 3), expected, 2e-6), name
        ours, theirs = state[name]["optimizer"]["state"], state["1, 1"]["optimizer"]["state"]
        assert ours.keys() == theirs.keys()
        for i in theirs:
            assert same(ours[i], theirs[i], 1e-5) and ours[i]["step"] == 6
    names = [sorted(os.listdir(os.path.join(run, "checkpoints", "step-000003"))) for run in runs.values()]
    assert names[0] == names[1] == names[2]
    from transformers import AutoConfig

    written = AutoConfig.from_pretrained(os.path.join(runs["1, 2"], "checkpoints", "step-000003"))
    assert written.architectures == ["Qwen3ForCausalLM"]


def test_a_signal_to_one_rank_stops_all(both):
    """Rank 1 alone was asked to stop, in its third step: both finish it, and rank 0 saves. The evaluation of the second
    step was no better than the first: had the ranks not agreed on that, one alone would have begun to save."""
    _, two, _, _, _ = both
    run = os.path.join(two, "interrupted")
    assert [row["step"] for row in lines(run)] == [1, 2, 3]
    assert sorted(os.listdir(os.path.join(run, "checkpoints"))) == ["best", "step-000001", "step-000003"]


def test_numbers_of_one_rank_that_are_not_finite_stop_all(both):
    """Rank 1 alone saw NaN, in steps 2, 4 and 5: both ranks skipped those, and both gave up after two in a row."""
    _, two, _, ranks, _ = both
    assert [r["bad"] for r in ranks] == [2, 2]
    run = os.path.join(two, "bad")
    assert [(row["bad"], row["skipped"]) for row in lines(run)] == [(0, 0), (1, 1), (0, 0), (1, 1), (1, 1)]
    assert sorted(os.listdir(os.path.join(run, "bad"))) == [f"step-{i:06d}" for i in (2, 4, 5)]
    assert sorted(os.listdir(os.path.join(run, "bad", "step-000002"))) == ["rank-0.pt", "rank-1.pt"]
    assert "step-000003" in os.listdir(os.path.join(run, "checkpoints"))


def test_a_run_folder_that_holds_a_run_is_refused_by_every_rank(both):
    """And a free one by none, though rank 1 looked at it half a second after rank 0."""
    _, two, _, ranks, _ = both
    assert [r["refused"] for r in ranks] == [2, 2] and len(lines(os.path.join(two, "fgrpo"))) == 2


if __name__ == "__main__":
    under_torchrun(*sys.argv[1:])
