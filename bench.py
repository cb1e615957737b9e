"""Where a training step's time and memory go, and how it compares; figures are for one machine, ratios carry further.

    make bench                                        every case: parts of a step, tokens/s, peak memory, ratio to a floor
    make bench-trl                                    the same step by TRL's GRPOTrainer, in an environment of its own
    python bench.py S M --sides ours trl --pairs 5    paired in one run, order reversed every other pair
    python bench.py R --sides rollout generate        sampling alone, beside Hugging Face generate
    python bench.py M --sides ours:G=16 ours          growth: a side may change a case (N, P, R, G, lengths)

A case is a random Qwen3, N prompts of P random tokens and G samples of R tokens each: rollout, scoring, advantages, loss, one
AdamW step. Lengths are forced and the same on every side (lognormal: mean about 0.42 R, some at R); rewards are random, so
that every row counts. Each side is a process of its own that steps when told; time is CPU time of the process (wall time on
a GPU), memory the highest resident size within a step above that behind loading. Left out: learning curves; other devices.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

EOS = 1  # of the random models


@dataclass(frozen=True)
class Case:
    """Sizes: vocabulary V, hidden, layers, heads (kv_heads of size head), feed-forward; and the step. micro, trl_micro: prompts
    with their samples in one forward of the update, here and in TRL; 0: all (what TRL does unless asked)."""

    what: str
    V: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    N: int
    P: int
    R: int
    G: int = 8
    lengths: str = "full"
    micro: int = 1
    trl_micro: int = 0


SMALL = dict(V=2048, hidden=192, layers=4, heads=6, kv_heads=3, head=32, ffn=576)
MIDDLE = dict(V=16384, hidden=384, layers=8, heads=6, kv_heads=2, head=64, ffn=1536)
CASES = {
    "S": Case("2M parameters", **SMALL, N=8, P=128, R=64),
    "M": Case("24M parameters", **MIDDLE, N=2, P=512, R=48),
    "V": Case("vocabulary of 151,936", 151936, 256, 4, 4, 2, 64, 768, N=2, P=128, R=64),
    "L": Case("a question with 20 passages", **SMALL, N=2, P=2048, R=40),
    "R": Case("reasoning-like", **SMALL, N=8, P=64, R=256),
    "Sv": Case("S, lognormal lengths", **SMALL, N=8, P=128, R=128, lengths="lognormal"),
    "Mv": Case("M, lognormal lengths", **MIDDLE, N=2, P=512, R=128, lengths="lognormal"),
}
PARTS = ("prefill", "decode", "reward", "forward", "backward", "optimizer", "other")


def lengths_of(case: Case, step: int) -> list[int]:
    """Tokens of every completion of a step, stop token included."""
    n = case.N * case.G
    if case.lengths == "full":
        return [case.R] * n
    drawn = np.random.default_rng([7, step]).lognormal(np.log(0.33 * case.R), 0.7, n)
    return np.clip(drawn, 2, case.R).astype(int).tolist()


def prompts_of(case: Case) -> list[list[int]]:
    return np.random.default_rng(3).integers(3, case.V, (case.N, case.P)).tolist()


def config_of(case: Case):
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=case.V, hidden_size=case.hidden, intermediate_size=case.ffn, num_hidden_layers=case.layers,
        num_attention_heads=case.heads, num_key_value_heads=case.kv_heads, head_dim=case.head, tie_word_embeddings=True,
        max_position_embeddings=case.P + case.R, bos_token_id=None, eos_token_id=EOS, pad_token_id=0,
    )  # fmt: skip


def build(case: Case) -> nn.Module:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(case))


# ---------------------------------------------------------------------------------------------------------------------
# Clock and memory of a process


def clock() -> float:
    """Seconds of CPU time of this process; of the wall, the device's queue empty, where there is a GPU."""
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


class Watch:
    """Seconds inside functions, by the name of a part; a part inside another counts for itself alone."""

    def __init__(self):
        self.seconds, self.open = {}, []

    def __call__(self, part: str, function):
        def timed(*args, **kwargs):
            start = clock()
            self.open.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                took, inner = clock() - start, self.open.pop()
                self.seconds[part] = self.seconds.get(part, 0.0) + took - inner
                if self.open:
                    self.open[-1] += took

        return timed


def memory(key: str) -> float:
    """VmRSS (now) or VmHWM (highest) of this process in MB; of the GPU where there is one."""
    if torch.cuda.is_available():
        return (torch.cuda.memory_allocated() if key == "VmRSS" else torch.cuda.max_memory_allocated()) / 1e6
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(key)) * 1024 / 1e6


def forget_peak() -> None:
    """Let the highest size start anew from the present one."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")


# ---------------------------------------------------------------------------------------------------------------------
# Sides: a function that takes a case and returns step(i) -> dict of figures


def force(u_of, eos=EOS):
    """Our sampler with forced lengths: where the uniform number is above 1 the row ends, elsewhere it must not."""

    def sample(logits, u, temperature, top_p=1.0):
        token, logp = u_of(logits, u.clamp(max=1 - 2**-53), temperature, top_p)
        return torch.where(u > 1, eos, torch.where(token == eos, eos + 1, token)), logp

    return sample


def ours(case: Case, share: bool = True, only_rollout: bool = False):
    """A step of train.py. share: the paths with shared prompts; without, the plain ones."""
    import data
    import model as lm
    import rollout
    import train
    from config import parse
    from eval import Policy
    from losses import credit, resolve

    cfg = parse(f"--method dr_grpo --group_size {case.G} --batch_size {case.N} --max_prompt {case.P} --max_new_tokens {case.R} "
                f"--micro_tokens {(case.micro or case.N) * (case.P + case.G * case.R)} --lr 1e-6 --share_prefix {str(share).lower()} --report none --run_dir unused".split())  # fmt: skip
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build(case).to(device)
    model.set_attn_implementation("sdpa")
    why = lm.share_prefix(model, cfg)
    assert not share or not why, why
    policy = Policy(model, None, [b"w%d " % i for i in range(case.V)], [EOS], lm.compute_dtype(cfg, device))
    method, optimizer, prompts = resolve(cfg), train.optimizer_for(model, None, cfg), prompts_of(case)
    items = [f"w{i}" for i in range(20)]
    task = train.Task([data.Example(str(i), "", items, {items[0]: 1.0}) for i in range(case.N)], prompts, [], {})
    watch = Watch()
    inner, score = rollout.uniforms, train.rewards.score

    def uniforms(keys, length):
        u = inner(keys, length)
        u[np.arange(len(u)), np.array(lengths_of(case, keys[0][1])) - 1] = 2.0
        return u

    def scored(*args, **kwargs):
        out = score(*args, **kwargs)
        out.reward = torch.rand(out.reward.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).to(
            device
        )
        return out

    rollout.uniforms, rollout.sample = uniforms, force(rollout.sample)
    rollout.prefill = watch("prefill", rollout.prefill)
    train.rewards.score = watch("reward", scored)
    lm.completion_loss = watch("forward", lm.completion_loss)
    torch.Tensor.backward = watch("backward", torch.Tensor.backward)
    optimizer.step = watch("optimizer", optimizer.step)
    policy.rollout = watch("decode", policy.rollout)
    memory_of = train.Memory(torch.full((case.N,), float("nan")))

    def step(i: int) -> dict:
        watch.seconds.clear()
        if only_rollout:
            roll = policy.rollout(prompts, case.G, 1.0, [(0, i, k) for k in range(case.N)], cfg)
        else:
            _, roll, got = train.sampled(task, policy, list(range(case.N)), i, cfg, method)
            look = train.measure(policy, None, None, roll, cfg, method)
            weights = train.unit_weights_at(cfg, method, i, got, roll)
            parts = credit(got, roll, look, method, cfg, weights, None, train.all_sum, train.all_gather)
            metrics = train.update(policy, None, optimizer, roll, look, parts, cfg, method, memory_of)
            assert not metrics["skipped"]
        assert roll.mask.sum(1).tolist() == lengths_of(case, i)
        real = float(roll.mask.sum())
        return {"parts": dict(watch.seconds), "tokens": real, "wasted": 1 - real / roll.row_steps,
                "padding": 0.0 if only_rollout else train.padding(roll, cfg, lm.packs(model))}  # fmt: skip

    return step


def forced_lengths(case: Case, now: dict):
    """A logits processor of Hugging Face generate that does what force() does."""

    def process(ids, scores):
        t = ids.shape[1] - case.P
        ends = torch.tensor(lengths_of(case, now["step"]), device=ids.device) == t + 1
        scores = scores.clone()
        scores[:, EOS] = -torch.inf
        scores[ends] = -torch.inf
        scores[ends, EOS] = 0.0
        return scores

    return process


def generate(case: Case):
    """Hugging Face generate on every prompt G times."""
    model, now = build(case).eval(), {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    ids = torch.tensor(prompts_of(case), device=device).repeat_interleave(case.G, 0)

    def step(i: int) -> dict:
        now["step"] = i
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
                             max_new_tokens=case.R, logits_processor=[forced_lengths(case, now)])  # fmt: skip
        assert out.shape[1] - case.P == max(lengths_of(case, i))
        return {"tokens": sum(lengths_of(case, i))}

    return step


def trl(case: Case):
    """A step of TRL's GRPOTrainer, held between two steps by a callback that waits for the next order."""
    import logging

    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    import datasets
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    logging.disable(logging.WARNING)
    raw = Tokenizer(models.WordLevel({f"w{i}": i for i in range(case.V)}, unk_token="w2"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="w0", eos_token=f"w{EOS}", unk_token="w2")
    model, now = build(case), {"step": 0}
    inner = model.generate
    model.generate = lambda *args, **kwargs: inner(*args, logits_processor=[forced_lengths(case, now)], **kwargs)
    generator = np.random.default_rng(5)
    cuda, prompts = torch.cuda.is_available(), case.trl_micro or case.N
    settings = GRPOConfig(
        output_dir="unused", use_cpu=not cuda, bf16=cuda, gradient_checkpointing=False, report_to="none", save_strategy="no",
        per_device_train_batch_size=prompts * case.G, gradient_accumulation_steps=case.N // prompts, num_generations=case.G, max_completion_length=case.R, beta=0.0,
        loss_type="dr_grpo", scale_rewards="none", temperature=1.0, top_p=1.0, top_k=0, learning_rate=1e-6, max_steps=10**6,
        logging_steps=10**6, disable_tqdm=True, max_grad_norm=1.0, shuffle_dataset=False,
    )  # fmt: skip

    def reward(completions, **kwargs):
        return generator.random(len(completions)).tolist()

    class Gate(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            order(now)

        def on_step_end(self, *args, **kwargs):
            answer(now, {"tokens": sum(lengths_of(case, now["step"]))})

    texts = [{"prompt": " ".join(f"w{i}" for i in p)} for p in prompts_of(case)]
    trainer = GRPOTrainer(model, reward, settings, datasets.Dataset.from_list(texts), processing_class=tokenizer,
                          callbacks=[Gate()])  # fmt: skip
    ready(now)
    trainer.train()


SIDES = {
    "ours": ours,
    "plain": lambda case: ours(case, share=False),
    "rollout": lambda case: ours(case, only_rollout=True),
    "generate": generate,
    "trl": trl,
}


# ---------------------------------------------------------------------------------------------------------------------
# The process of a side: "step" comes in, a line of JSON goes out


def ready(now: dict) -> None:
    now["base"] = memory("VmRSS")
    print(json.dumps({"ready": now["base"]}), file=OUT, flush=True)


def order(now: dict) -> None:
    """Wait for the next step's number, then start the clock."""
    line = sys.stdin.readline()
    if not line.strip():
        os._exit(0)
    now["step"] = int(line)
    forget_peak()
    now["clock"], now["wall"] = clock(), time.perf_counter()


def answer(now: dict, figures: dict) -> None:
    """Stop the clock and send what was measured."""
    took, wall = clock() - now["clock"], time.perf_counter() - now["wall"]
    peak = memory("VmHWM") - now["base"]
    print(json.dumps({"seconds": took, "wall": wall, "peak": peak, **figures}), file=OUT, flush=True)


def serve(side: str, case: Case) -> None:
    """Life of a side's process; what libraries print goes to stderr."""
    now: dict = {}
    step = SIDES[side](case)
    ready(now)
    while True:
        order(now)
        answer(now, step(now["step"]))


class Side:
    """A side's process, seen from outside. text: a name of SIDES, with changes to the case behind a colon."""

    def __init__(self, text: str, case: Case):
        self.text = text
        name, _, changes = text.partition(":")
        if name not in SIDES:
            sys.exit(f"bench.py: --sides {text}: {name!r} is not one of {', '.join(SIDES)}")
        try:
            pairs = [c.split("=") for c in filter(None, changes.split(","))]
            self.case = replace(case, **{k: v if k == "lengths" else int(v) for k, v in pairs})
        except (TypeError, ValueError):
            sys.exit(f"bench.py: --sides {text}: changes are of the form G=16,R=64 (fields of Case)")
        self.process = subprocess.Popen([sys.executable, __file__, "--serve", name, json.dumps(vars(self.case))],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
        self.rows: list[dict] = []
        self.read()

    def read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"bench.py: the process of side {self.text} ended; its message stands above")
        return json.loads(line)

    def step(self, i: int, keep: bool = True) -> None:
        print(i, file=self.process.stdin, flush=True)
        row = self.read()
        self.rows += [row] if keep else []

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()

    def median(self, key: str) -> float:
        return statistics.median(row[key] for row in self.rows)


# ---------------------------------------------------------------------------------------------------------------------
# The floor


def rates() -> tuple[float, float]:
    """(FLOP/s of fp32 products, bf16 on a GPU, bytes/s read) of this machine, the best of several tries."""
    cuda = torch.cuda.is_available()
    device, dtype, n = ("cuda", torch.bfloat16, 4096) if cuda else ("cpu", torch.float32, 1024)
    a, b = torch.randn(n, n, device=device, dtype=dtype), torch.randn(n, n, device=device, dtype=dtype)
    big = torch.randn(2**28 if cuda else 2**25, device=device)

    def best(function) -> float:
        function()
        took = []
        for _ in range(7):
            start = clock()
            function()
            took.append(clock() - start)
        return min(took)

    return 2 * n**3 / best(lambda: a @ b), big.numel() * 4 / best(lambda: big.sum())


def floor(case: Case, lengths: list[int], flops: float, bandwidth: float) -> dict[str, float]:
    """Seconds that no code of this design can beat: prompts once, no padding, every product at the measured rate, weights and
    caches read once per decoding step. Forward FLOPs as in plan.forward_flops; backward is twice the forward."""
    import plan

    s = plan.shape_of(config_of(case))
    wide = 2 if torch.cuda.is_available() else 4
    said, p = sum(lengths), case.N * case.P
    prefill = plan.forward_flops(s, p, 0, case.P, 0) / flops
    decode = 0.0
    for t in range(1, max(lengths)):
        rows = sum(n > t for n in lengths)
        product = plan.forward_flops(s, 0, rows, case.P, 2 * t) / flops
        read = wide * (s.params + (p + rows * t) * s.kv_numbers) / bandwidth
        decode += max(product, read)
    forward = plan.forward_flops(s, p, said, case.P, said / len(lengths)) / flops
    return {"prefill": prefill, "decode": decode, "forward": forward, "backward": 2 * forward,
            "optimizer": 28 * s.params / bandwidth}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# The report


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def run(name: str, sides: list[str], pairs: int) -> list[Side]:
    """Steps of all sides, in turn; the first of each is not counted."""
    every = [Side(text, CASES[name]) for text in sides]
    for side in every:
        side.step(0, keep=False)
    for i in range(1, pairs + 1):
        for side in every if i % 2 else every[::-1]:
            side.step(i)
            print(f"{name} {side.text} {i}/{pairs}: {side.rows[-1]['seconds']:.2f} s", file=sys.stderr)
    for side in every:
        side.close()
    return every


def compare(names: list[str], sides: list[str], pairs: int) -> None:
    """Per case: seconds and MB of each side (medians), and the ratio of the others to the first (median and range of pairs)."""
    print(f"{'case':6}{'side':16}{'seconds':>9}{'wall':>9}{'peak MB':>9}  time, peak: times those of {sides[0]}")
    for name in names:
        every = run(name, sides, pairs)
        for side in every:
            line = f"{name:6}{side.text:16}" + "".join(f"{side.median(k):9.2f}" for k in ("seconds", "wall"))
            line += f"{side.median('peak'):9.0f}"
            if side is not every[0]:
                both = list(zip(side.rows, every[0].rows))
                line += "  " + ", ".join(spread([a[k] / b[k] for a, b in both]) for k in ("seconds", "peak"))
            print(line, flush=True)


def breakdown(names: list[str], steps: int) -> None:
    """Per case: seconds of each part, tokens per second, wasted row-steps, padding, peak memory, and times the floor."""
    flops, bandwidth = rates()
    print(
        f"{flops / 1e9:.0f} GFLOP/s of products, {bandwidth / 1e9:.0f} GB/s read; medians of {steps} steps; x: times the floor"
    )
    print(
        f"{'case':6}"
        + "".join(f"{p:>12}" for p in PARTS)
        + f"{'step':>12}{'tok/s':>8}{'wasted':>8}{'padding':>8}{'peak MB':>9}"
    )
    for name in names:
        (side,) = run(name, ["ours"], steps)
        rows = side.rows
        for row in rows:
            row["parts"]["other"] = row["seconds"] - sum(row["parts"].values())
        part = {p: statistics.median(r["parts"].get(p, 0.0) for r in rows) for p in PARTS}
        least = floor(CASES[name], lengths_of(CASES[name], 1), flops, bandwidth)
        cells = [f"{part[p]:.3f}" + (f" {part[p] / least[p]:4.1f}x" if p in least else " " * 6) for p in PARTS]
        took = side.median("seconds")
        cells.append(f"{took:.3f} {took / sum(least.values()):4.1f}x")
        print(f"{name:6}" + "".join(f"{c:>12}" for c in cells) + f"{side.median('tokens') / took:8.0f}{side.median('wasted'):8.1%}"
              f"{side.median('padding'):8.1%}{side.median('peak'):9.0f}", flush=True)  # fmt: skip


def main(argv: list[str]) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; none: all")
    p.add_argument("--sides", nargs="+", default=["ours"], help=f"of {', '.join(SIDES)}; one: its parts; more: ratios")
    p.add_argument("--pairs", type=int, default=5, help="steps of each side that count")
    args = p.parse_args(argv)
    if wrong := [c for c in args.cases if c not in CASES]:
        p.error(f"{wrong[0]!r} is not a case: {', '.join(CASES)}")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    names = args.cases or list(CASES)
    if args.sides == ["ours"]:
        breakdown(names, args.pairs)
    else:
        compare(names, args.sides, args.pairs)


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    if sys.argv[1:2] == ["--serve"]:
        OUT = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        serve(sys.argv[2], Case(**json.loads(sys.argv[3])))
    else:
        main(sys.argv[1:])
