"""Mazes: the generator, the words, the two criteria, the splits, and training on them."""

import json
import os
import re
from collections import Counter, deque
from dataclasses import replace

import pytest
from test_train import CPU, lines, on_cpu  # noqa: F401

import data
import eval as evaluation
import files
import maze
import model as lm
import repro
import run as runs
import train
from config import Config, parse
from verify import VERIFIERS

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MAZE = """--data maze --maze_size 7 --maze_held_out 16 --maze_examples 64 --stop DONE --max_prompt 64 --max_new_tokens 18
--arch qwen2 --layers 1 --width 32 --batch_size 8 --eval_examples 8 --method grpo""".split()


def settings(*more: str) -> Config:
    return parse([*MAZE, *more])


def refused(capsys, *more: str) -> str:
    """The one line that settings, or loading with them, end in."""
    with pytest.raises(SystemExit) as e:
        for split in ("train", "valid", "test"):
            data.load(settings(*more), split)
    assert e.value.code == 2
    return capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# The generator


def distances(grid: list[str]) -> dict[tuple[int, int], tuple[int, str]]:
    """Breadth first from the start: open square -> (how often it is reached, moves of a shortest way). An own search, which
    knows nothing of trees."""
    found, queue = {(1, 1): (1, "")}, deque([(1, 1)])
    while queue:
        r, c = queue.popleft()
        for move, (y, x) in maze.MOVES.items():
            if grid[r + y][c + x] != "#":
                at = (r + y, c + x)
                times, way = found.get(at, (0, f"{found[r, c][1]} {move}"))
                found[at] = (times + 1, way)
                queue.extend([at] * (times == 0))
    return found


@pytest.mark.parametrize("size", [5, 7, 17])
def test_a_maze_is_a_tree_and_its_path_the_only_one(size):
    """Connected and one passage fewer than cells: no cycle. The path is the one that a search finds, from start to goal."""
    cells = (size // 2) ** 2
    for i in range(50):
        made = maze.make(size, [0, i])
        grid, squares = made["grid"], "".join(made["grid"])
        assert len(grid) == size and set(map(len, grid)) == {size}
        assert (grid[1][1], grid[-2][-2], squares.count("S"), squares.count("G")) == ("S", "G", 1, 1)
        assert all(grid[r][c] != "#" for r in range(1, size, 2) for c in range(1, size, 2))
        assert all(grid[r][c] == "#" for r in range(0, size, 2) for c in range(0, size, 2))
        assert "".join([grid[0], grid[-1], *(row[0] + row[-1] for row in grid)]).strip("#") == ""
        found = distances(grid)
        assert (
            len(found) == size**2 - squares.count("#") == 2 * cells - 1
        )  # every open square is reached; 127 of 17 x 17
        passages = sum(times for times, _ in found.values()) - 1  # every square looks back at its neighbours
        assert passages == 2 * (len(found) - 1)
        assert found[size - 2, size - 2][1].split() == made["path"].split()


def test_paths_are_as_long_as_they_should_be():
    """17 x 17: mean path length 29.1 moves, 28 the shortest and the median, 90 of 100 at most 32, 99 at most 36 (counted over
    5,000 by another implementation)."""
    paths = sorted(len(maze.make(17, [0, i])["path"].split()) for i in range(1000))
    assert paths[0] == paths[500] == 28 and paths[900] == 32 and paths[990] <= 38
    assert abs(sum(paths) / len(paths) - 29.1) < 0.4


def test_a_maze_is_a_function_of_its_key():
    assert maze.make(9, [0, 5]) == maze.make(9, [0, 5])
    assert len({"".join(maze.make(9, key)["grid"]) for key in ([0, 5], [0, 6], [1, 5])}) == 3


def test_all_mazes_of_a_size_come_up():
    """Spanning trees of 2 x 2 and 3 x 3 cells: 4 and 192 (known counts); 8 x 8 the known 126231322912498539682594816."""
    assert [maze.count(s) for s in (5, 7, 9)] == [4, 192, 100352]
    assert maze.count(17) == pytest.approx(126231322912498539682594816, rel=1e-9)
    assert len({"".join(maze.make(5, [0, i])["grid"]) for i in range(100)}) == 4
    assert 170 < len({"".join(maze.make(7, [0, i])["grid"]) for i in range(4000)}) <= 192


# ---------------------------------------------------------------------------------------------------------------------
# Words


def test_the_words_have_the_published_ids():
    tokenizer = lm.build_tokenizer("word", (), maze.VOCABULARY)
    words = [w.strip(" ") or w for w in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))]
    assert words == [
        *"<pad> <bos> <eos> <unk>".split(), "GRID_START\n", "GRID_END\n", "PATH_START\n",
        *"DONE PATH WALL GOAL START".split(), "NEWLINE\n", *"UP DOWN LEFT RIGHT".split(), "\n",
        *(f"RESERVED_{i}" for i in range(18, 32)),
    ]  # fmt: skip
    special = tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id
    assert special == (0, 1, 2, 3)


def test_prompt_and_demonstration_in_tokens():
    """<bos> GRID_START, 17 rows of 17 squares and NEWLINE, GRID_END PATH_START: 310 tokens. The answer: moves DONE <eos>."""
    tokenizer = lm.build_tokenizer("word", (), maze.VOCABULARY)
    example = data.load(
        settings("--maze_size", "17", "--max_prompt", "310", "--max_new_tokens", "128"), "test"
    ).examples[0]
    ids = data.encode(tokenizer, example.prompt)
    assert len(ids) == 310 and ids[:2] == [1, 4] and ids[-3:] == [12, 5, 6] and ids.count(1) == 1
    rows = [ids[2 + 18 * r : 20 + 18 * r] for r in range(17)]
    assert all(row[-1] == 12 for row in rows)
    code = {9: "#", 8: ".", 11: "S", 10: "G"}
    assert ["".join(code[i] for i in row[:-1]) for row in rows] == example.answer["grid"]
    demo = data.encode_answer(tokenizer, example.demo)
    moves = {13: "UP", 14: "DOWN", 15: "LEFT", 16: "RIGHT"}
    assert [moves[i] for i in demo[:-2]] == example.answer["path"].split() and demo[-2:] == [7, 2]


def test_a_saved_tokenizer_is_the_same_beside_a_qwen2_model(tmp_path):
    """AutoTokenizer takes a tokenizer beside any qwen2 model for Qwen2's own, which then has no words at all."""
    cfg = settings()
    tokenizer = lm.load_tokenizer(cfg, vocabulary=maze.VOCABULARY)
    lm.save(lm.build(cfg, tokenizer), tokenizer, str(tmp_path))
    again = lm.load_tokenizer(settings("--init", str(tmp_path)))
    text = data.load(cfg, "test").examples[0].prompt
    assert data.encode(again, text) == data.encode(tokenizer, text) and again.get_vocab() == tokenizer.get_vocab()


# ---------------------------------------------------------------------------------------------------------------------
# Right or wrong

GRID = ["#######", "#S..#.#", "###.#.#", "#...#.#", "#.###.#", "#....G#", "#######"]
MADE = {"grid": GRID, "path": "RIGHT RIGHT DOWN DOWN LEFT LEFT DOWN DOWN RIGHT RIGHT RIGHT RIGHT"}
ANSWERS = {  # text -> (walk, target, invalid)
    f"{MADE['path']} DONE": (1, 1, 0),
    f"{MADE['path']} ": (0, 0, 1),  # at the goal, but never done
    f"{MADE['path']} DONE\nUP WALL ": (1, 1, 0),  # nobody reads on
    f"{MADE['path']}": (0, 0, 1),
    f"RIGHT LEFT {MADE['path']} DONE": (1, 0, 0),  # there and back
    f"{MADE['path']} LEFT DONE": (1, 0, 0),  # the walk ends at the goal
    f"{MADE['path']} DOWN DONE": (1, 0, 0),  # so this wall is never hit
    f"{MADE['path']} WALL DONE": (0, 0, 1),  # but no such word is a move
    f"DOWN {MADE['path']} DONE": (0, 0, 0),  # a wall
    f"LEFT RIGHT {MADE['path']} DONE": (0, 0, 0),  # the rim
    "RIGHT RIGHT DOWN DOWN RIGHT RIGHT DOWN DOWN DONE": (0, 0, 0),  # the goal, through a wall
    "RIGHT RIGHT DOWN DONE": (0, 0, 0),  # too early
    "DONE": (0, 0, 0),
    "": (0, 0, 1),
    "right right DONE": (0, 0, 1),
    "UP\ud800\0<unk> DONE": (0, 0, 1),
}


@pytest.mark.parametrize("text, wanted", ANSWERS.items(), ids=range(len(ANSWERS)))
def test_both_criteria(text, wanted):
    for row, at in (("walk", 0), ("target", 1)):
        got = VERIFIERS[row](text, MADE)
        assert (got["walk"], got["exact"], got["invalid"]) == wanted and got["reward"] == wanted[at]


# ---------------------------------------------------------------------------------------------------------------------
# Splits


def grids(examples) -> list[str]:
    return ["".join(e.answer["grid"]) for e in examples]


def test_splits_share_no_maze():
    """7 x 7 has 192 mazes, so training meets each of its own many times, and none of the others."""
    few = ("--maze_held_out", "30", "--maze_examples", "1000")
    splits = {name: data.load(settings(*few), name) for name in ("train", "valid", "test")}
    seen = {name: Counter(grids(s.examples)) for name, s in splits.items()}
    assert [len(splits[n].examples) for n in splits] == [1000, 30, 30] and len(seen["valid"]) == len(seen["test"]) == 30
    assert not (seen["train"] & seen["test"] or seen["train"] & seen["valid"] or seen["valid"] & seen["test"])
    assert 60 < len(seen["train"]) < 130
    again = data.load(settings(*few, "--seed", "5"), "train")
    other = data.load(settings(*few, "--data_seed", "5"), "train")
    assert grids(again.examples) == grids(splits["train"].examples) != grids(other.examples)


def test_a_million_mazes_are_made_when_needed(monkeypatch):
    """Lazy examples, prompts and demonstrations are those that the eager ones would be, and loading makes few of them."""
    made, real = [], maze.make

    def counted(size: int, key: list[int]) -> dict:
        made.append(key)
        assert len(made) < 5000, "on the way to a million"
        return real(size, key)

    monkeypatch.setattr(maze, "make", counted)
    few, many = (data.load(settings("--maze_examples", str(n)), "train") for n in (64, 1_000_000))
    made.clear()
    policy = evaluation.open_policy(settings(), many, CPU)
    method = train.resolve(settings("--method", "sft"))
    lazy = train.usable(many, policy, settings("--method", "sft"), method)
    runs.fingerprint(lazy.examples, lazy.prompts, lazy.demos)
    assert len(lazy.examples) == len(lazy.prompts) == len(lazy.demos) == 1_000_000 and len(made) < 100
    eager = train.usable(few, policy, settings("--method", "sft"), method)
    assert isinstance(eager.examples, list) and isinstance(lazy.examples, files.Lazy)
    for i in (0, 7, 63):
        assert lazy.examples[i] == eager.examples[i]
        assert (lazy.prompts[i], lazy.demos[i]) == (eager.prompts[i], eager.demos[i])
    assert lazy.examples[-1] == lazy.examples[999_999] and lazy.examples[999_999].id == "train-999999"
    with pytest.raises(IndexError):
        lazy.examples[1_000_000]
    assert len(data.load(settings("--maze_examples", "1000000", "--max_examples", "5"), "train").examples) == 5


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--maze_size 8", "an odd number"),
        ("--maze_size 3", "too small"),
        ("--maze_size 51", "up to 49"),
        ("--maze_held_out 49", "192 different mazes"),
        ("--maze_size 5 --maze_held_out 1", "only 0 different mazes"),
        ("--max_new_tokens 17", "may have 18 tokens"),
        ("--maze_success any", "is not one of walk, target"),
        ("--arch gpt2", "is not one of qwen3, qwen2"),
        ("--heads 3", "--heads 3 must cut --width 32"),
        ("--heads 4 --kv_heads 3", "--kv_heads 3 must divide"),
    ],
)
def test_impossible_settings_end_in_a_line(capsys, flags, words):
    message = refused(capsys, *flags.split())
    assert words in message and message.count("\n") == 1


# ---------------------------------------------------------------------------------------------------------------------
# Model and training


def test_the_model_of_the_paper_has_its_number_of_parameters():
    cfg = parse(["--config", os.path.join(ROOT, "configs", "maze.yaml")])
    model = lm.build(cfg, lm.load_tokenizer(cfg, vocabulary=maze.VOCABULARY))
    assert sum(p.numel() for p in model.parameters()) == 3_944_704  # tied embeddings counted once
    c = model.config
    assert (c.model_type, c.rope_parameters["rope_theta"], c.rms_norm_eps, c.tie_word_embeddings) == (
        "qwen2",
        1e6,
        1e-6,
        True,
    )
    assert (c.bos_token_id, c.eos_token_id, c.pad_token_id) == (1, 2, 0) and c.max_position_embeddings >= 310 + 180
    assert [n for n, _ in model.model.layers[0].self_attn.named_parameters() if "bias" in n] == [
        "q_proj.bias", "k_proj.bias", "v_proj.bias"]  # fmt: skip


def test_done_ends_a_completion_and_is_read(capsys):
    """DONE is a word of --stop: it ends a walk, as <eos> does, and the verifier sees it; <eos> is no text."""
    cfg = settings()
    policy = evaluation.open_policy(cfg, data.load(cfg, "test"), CPU)
    assert policy.stop == [2, 7] and (policy.pieces[7], policy.pieces[2]) == (b"DONE", b"")
    for word in ("UP DOWN", "nonsense"):
        with pytest.raises(SystemExit):
            evaluation.open_policy(settings("--stop", word), data.load(cfg, "test"), CPU)
        assert f"--stop {word!r}" in capsys.readouterr().err


def test_training_and_evaluation_on_mazes(tmp_path):
    """A model that has learnt a handful of mazes by heart walks them: SFT, then GRPO with the focal weight, then eval.py."""
    sft, rl = str(tmp_path / "sft"), str(tmp_path / "rl")
    small = [*MAZE, "--maze_examples", "16", "--batch_size", "16"]
    train.main(
        parse([*small, "--method", "sft", "--steps", "60", "--lr", "1e-2", "--schedule", "linear", "--run_dir", sft])
    )
    log = lines(sft, "log.jsonl")
    assert log[-1]["loss"] < 0.4 * log[0]["loss"]
    train.main(parse([*small, "--focal_gamma", "0.5", "--steps", "3", "--lr", "1e-3", "--init", sft, "--run_dir", rl]))
    log = lines(rl, "log.jsonl")
    assert len(log) == 3 and all(0 < r["finished"] <= 1 and r["exact"] <= r["walk"] == r["reward"] for r in log)
    assert max(r["grad_norm"] for r in log) > 0 and any(0 < r["correct"] < 1 for r in log)
    samples = lines(rl, "samples.jsonl")
    assert any(s["text"].endswith("DONE") for s in samples)
    evaluation.main(["--init", rl])
    rows = lines(rl, "eval_test.jsonl")
    assert len(rows) == 16 and rows[0]["gold"] == data.load(settings(), "test").examples[0].answer
    assert {"correct", "exact", "walk", "invalid"} <= rows[0]["metrics"].keys()


# ---------------------------------------------------------------------------------------------------------------------
# The sweep


def test_the_report_shows_pass_at_k_beside_the_papers(monkeypatch, tmp_path):
    """Two seeds: mean and Student's t; one: the interval of its mazes. An arm that was never inexact has no exact@k."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(repro, "RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(repro, "RESULTS", str(tmp_path / "results"))
    os.makedirs(tmp_path / "results")
    entry = replace(repro.ENTRIES["maze"], seeds=[0, 1])
    for arm in entry.arms:
        for seed in entry.seeds:
            folder = entry.folder("maze", arm.name, seed)
            os.makedirs(folder)
            assert not repro.done(entry, "maze", arm, seed)
            value = {"value": 0.5 + 0.1 * seed, "lo": 0.45, "hi": 0.625}
            metrics = {f"pass@{k}": value for k in (1, 128, 256)}
            if arm.name == "n8-gamma0.5":
                metrics["exact@1"] = {"value": 0.25, "lo": 0.2, "hi": 0.3}
            runs.write(os.path.join(folder, "pass_maze_test.json"), json.dumps({"metrics": metrics}))
            log = [{"step": s, **{f"valid/pass@{k}": s / 50 for k in (1, 128, 256)}} for s in (25, 50)]
            runs.write(os.path.join(folder, "log.jsonl"), runs.lines_of(log))
            assert repro.done(entry, "maze", arm, seed)
    entry.report(entry, "maze")
    rows = dict(re.findall(r"\| (\S+) \| (.*) \|\n", (tmp_path / "results" / "maze.md").read_text()))
    mean = "55.0 [-8.5, 118.5]"
    assert rows["n8-gamma0.5"] == f"{mean} (83.4) | {mean} (84.0) | {mean} (84.0) | 25.0 [25.0, 25.0]"
    assert rows["n16-gamma1"] == f"{mean} (84.4) | {mean} (86.4) | {mean} (86.5) | {mean}"
    assert rows["sft"] == " | ".join([mean] * 4) and len(rows) == 14  # head, SFT, 4 N x 3 gamma
    one = replace(entry, seeds=[1])
    one.report(one, "maze")
    assert "| sft | 60.0 [45.0, 62.5] |" in (tmp_path / "results" / "maze.md").read_text()


def test_the_sweep_evaluates_last_checkpoints():
    """The best one by greedy answers is not the one whose diversity the table is about."""
    entry = repro.ENTRIES["maze"]
    assert len(entry.arms) == 13 and {repro.MAZE_ARMS[a.name] for a in entry.arms if a.after} == set(repro.TABLE4)
    steps = parse(["--config", os.path.join(ROOT, entry.config)]).steps
    last = entry.folder("maze", "n4-gamma0", 2) + f"/checkpoints/step-{steps:06d}"
    trained, scored = repro.commands(replace(entry, config=os.path.join(ROOT, entry.config)), "maze", entry.arms[1], 2)
    assert scored[0] == "eval.py" and scored[scored.index("--init") + 1] == last and "--samples" in scored
    assert {"--focal_gamma", "--group_size"} <= set(trained) and entry.folder("maze", "sft", 2) in trained
