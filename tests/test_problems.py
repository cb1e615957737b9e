"""Published problems: every layout that copies of the sets have, what is left out, and the real answers against themselves."""

import json
import os
import random
import re
import sys

import pytest

import data
import eval as evaluation
import maze
import problems
import verify
import workers
from config import Config, parse
from files import Example

REAL = os.environ.get("DATA_DIR", "")


def put(folder, name: str, content) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(content, str):
        content = (
            "".join(json.dumps(row) + "\n" for row in content) if name.endswith("l") else json.dumps(content, indent=1)
        )
    path.write_text(content, encoding="utf-8")


def load(folder, name: str, split="test", **settings) -> data.Split:
    return data.load(Config(data=name, data_dir=str(folder), **settings), split)


def refused(capsys, call) -> str:
    with pytest.raises(SystemExit) as e:
        call()
    assert e.value.code == 2
    out = capsys.readouterr().err
    assert out.count("\n") == 1, out
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Layouts

LAYOUTS = [  # data set, file, record, answer, demonstration
    ("math500", "math500/test.jsonl", {"problem": "1+1?", "solution": r"It is $\boxed{\frac{4}{2}}$", "answer": r"\frac{4}{2}", "unique_id": "test/a/1.json", "level": 1}, r"\frac{4}{2}", r"It is $\boxed{\frac{4}{2}}$"),
    ("aime24", "aime24/test.jsonl", {"id": 60, "problem": "1+1?", "question": "1+1?", "solution": "?", "answer": "025"}, "025", r"\boxed{025}"),
    ("aime24", "aime24/aime_2024_problems.jsonl", {"ID": "2024-I-1", "Problem": "1+1?", "Solution": "?", "Answer": 25}, "25", r"\boxed{25}"),
    ("aime25", "aime25/test.jsonl", {"index": 0, "question": "1+1?", "true_answer": "70"}, "70", r"\boxed{70}"),
    ("amc23", "amc23/test.jsonl", {"id": 0, "problem": "1+1?", "answer": 27.0}, "27", r"\boxed{27}"),
    ("amc23", "amc23/test.json", {"problem": "1+1?", "answer": 1.5}, "1.5", r"\boxed{1.5}"),
    ("minerva", "math-minerva/test.jsonl", {"problem": "1+1?", "solution": r"So $\boxed{y^{\prime}+r y}$ it is.", "type": "a", "idx": 0}, r"y^{\prime}+r y", r"So $\boxed{y^{\prime}+r y}$ it is."),
    ("olympiadbench", "test.jsonl", {"id": 1606, "question": "1+1?", "solution": ["a", "b"], "final_answer": ["$69$,$84$"], "context": None}, "$69$,$84$", r"\boxed{$69$,$84$}"),
    ("deepscaler", "test/minerva.json", {"problem": "1+1?", "answer": ["9.6\n"]}, "9.6", r"\boxed{9.6}"),
    ("deepscaler", "deepscaler/test/minerva.json", {"problem": "1+1?", "answer": ["-1/3\n", "-1/3", r"-\frac13"]}, ["-1/3", r"-\frac13"], r"\boxed{-1/3}"),
    ("deepscaler", "test/math.json", {"problem": "1+1?", "answer": "2", "solution": r"Not \boxed{3}"}, "2", r"\boxed{2}"),
    ("ttrl", "test.json", {"prompt": "1+1?", "answer": "142.0", "source": "AMC", "id": "7"}, "142.0", r"\boxed{142.0}"),
    ("synlogic", "synlogic/validation.jsonl", {"question": "1+1?", "answer": "[A, B]"}, "[A, B]", r"\boxed{[A, B]}"),
    ("gsm8k", "test.jsonl", {"question": "1+1?", "answer": "She has 1000+24 = <<1000+24=1024>>1024.\n#### 1,024"}, "1024", "She has 1000+24 = 1024.\nThe answer is \\boxed{1024}."),
]  # fmt: skip


@pytest.mark.parametrize("name, file, record, answer, demo", LAYOUTS)
def test_every_layout_is_read(tmp_path, name, file, record, answer, demo):
    put(tmp_path, file, [record])
    (e,) = load(tmp_path, name).examples
    assert (e.prompt, e.answer, e.demo) == ("1+1?", answer, demo)
    assert e.check == problems.SOURCES[name].check and not e.gold and not e.candidates
    assert verify.VERIFIERS[e.check](e.demo, e.answer)["exact"] == 1
    (e,) = load(tmp_path, name, template="instruct").examples
    assert e.prompt == "Please reason step by step, and put your final answer within \\boxed{}.\n\n1+1?"


def test_ids_are_those_of_the_file_where_they_tell_problems_apart(tmp_path):
    put(tmp_path, "test.jsonl", [{"id": i, "problem": f"{n}?", "answer": "1"} for n, i in enumerate((7, 8, 8))])
    first, *others = [e.id for e in load(tmp_path, "math500").examples]
    assert first == "7" and len(set(others)) == 2 and all(re.fullmatch("[0-9a-f]{16}", id) for id in others)


def test_what_is_left_out_is_counted(tmp_path):
    rows = [
        ("a", "1"),
        ("a ", "1.0"),
        ("b", "1"),
        ("b", "2"),
        (" b", "1"),
        ("c", None),
        ("d", " "),
        ("", "1"),
        ("e", ["1", "2"]),
        ("e", "2"),
    ]
    put(tmp_path, "deepscaler.json", [{"problem": q, "answer": a} for q, a in rows])
    put(tmp_path, "train/math.json", [{"problem": "part of the whole", "answer": "1"}])
    split = load(tmp_path, "deepscaler", "train")
    assert [e.prompt for e in split.examples] == ["a", "e"]
    assert split.dropped == {
        "problem that is there twice": 2,
        "problem with two answers": 3,
        "no answer": 2,
        "no question": 1,
    }
    put(tmp_path, "deepscaler.json", [{"problem": q, "answer": "1"} for q in ("short", "long " * 50)])
    from model import build_tokenizer

    split = load(tmp_path, "deepscaler", "train")
    kept, _ = data.fit(split, build_tokenizer("byte", []), Config(max_prompt=100))
    assert len(kept) == 1 and split.dropped == {"prompt longer than --max_prompt": 1}


def test_parts_of_a_training_set_are_read_together_and_a_sixteenth_is_held_out(tmp_path):
    for name in ("aime", "still"):
        put(tmp_path, f"train/{name}.json", [{"problem": f"{name} {i}", "answer": i} for i in range(3)])
    assert [e.answer for e in load(tmp_path, "deepscaler", "train").examples] == ["0", "1", "2"] * 2
    put(tmp_path, "train.json", [{"prompt": f"{i}", "answer": "1"} for i in range(800)])
    train, valid = ({e.prompt for e in load(tmp_path, "ttrl", s).examples} for s in ("train", "valid"))
    assert not train & valid and len(train | valid) == 800 and 30 < len(valid) < 70


GPQA = """Record ID,Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3,Writer
rec1,"Which, of
these?",right,wrong,"false, too",no,me
rec2,Why?,right,wrong,false,no,me
rec3,How?,right,wrong,false,no,me
"""


def test_gpqa_letters_are_shuffled_by_the_seed(tmp_path, capsys):
    put(tmp_path, "gpqa/gpqa_diamond.csv", GPQA)
    read = [load(tmp_path, "gpqa", data_seed=seed).examples for seed in (0, 0, *range(1, 9))]
    assert [e.id for e in read[0]] == ["rec1", "rec2", "rec3"]
    assert read[0] == read[1] and len({e.answer for some in read for e in some}) == 4
    for e in (e for some in read for e in some):
        assert f"\n{e.answer}) right\n" in e.prompt and e.prompt.endswith(
            "\n\nAnswer with the letter of the right choice."
        )
        assert e.check == "choice" and sorted(re.findall(r"(?m)^([A-D])\) ", e.prompt)) == list("ABCD")
    assert read[0][0].prompt.startswith("Which, of\nthese?\n\nA) ")
    put(tmp_path, "gpqa/gpqa_diamond.csv", GPQA.replace("wrong,false,no,me\nrec3", "wrong\nrec3"))
    assert "line 4: not the 7 columns" in refused(capsys, lambda: load(tmp_path, "gpqa"))
    put(tmp_path, "gpqa/gpqa_diamond.csv", GPQA.replace("Correct Answer", "Answer"))
    assert "record 1" in (line := refused(capsys, lambda: load(tmp_path, "gpqa"))) and "'Correct Answer'" in line


def test_ifeval_with_and_without_the_nulls_of_the_hub(tmp_path, monkeypatch, capsys):
    nulls = dict.fromkeys(["num_words", "relation", "keywords", "language", "num_bullets", "N"])
    kinds = ["punctuation:no_comma", "length_constraints:number_words"]
    rows = [
        {"key": 1000, "prompt": "Write.\n", "instruction_id_list": kinds, "kwargs": [{}, {"relation": "at least", "num_words": 3}]},
        {"key": "0", "prompt": "Write on", "instruction_id_list": kinds, "kwargs": [nulls, nulls | {"relation": "at least", "num_words": 3}]},
        {"key": 2, "prompt": "Count", "instruction_id_list": ["count:numbers"], "kwargs": [nulls | {"N": 3}]},
        {"key": 3, "prompt": "auf Deutsch", "instruction_id_list": ["language:response_language"], "kwargs": [{"language": "de"}]},
    ]  # fmt: skip
    put(tmp_path, "input_data.jsonl", rows)
    monkeypatch.setattr(problems.ifeval, "optional", lambda name: None)
    split = load(tmp_path, "ifeval", template="instruct")
    assert [(e.id, e.prompt) for e in split.examples] == [("1000", "Write.\n"), ("0", "Write on")]
    assert split.examples[0].answer == split.examples[1].answer == json.loads(json.dumps(split.examples[0].answer))
    assert [verify.VERIFIERS["ifeval"](t, split.examples[0].answer)["reward"] for t in ("a b c", "a b", "a, b c")] == [
        1,
        0,
        0,
    ]
    assert sum(split.dropped.values()) == 2 and any("langdetect" in why for why in split.dropped)
    put(tmp_path, "input_data.jsonl", [rows[0] | {"kwargs": [{}, {"relation": "at least"}]}])
    assert "record 1: no ifeval record" in refused(capsys, lambda: load(tmp_path, "ifeval"))
    put(tmp_path, "input_data.jsonl", [rows[0] | {"kwargs": [{}]}])
    assert "record 1: no ifeval record" in refused(capsys, lambda: load(tmp_path, "ifeval"))


# ---------------------------------------------------------------------------------------------------------------------
# Files that are not as they should be


@pytest.mark.parametrize("name, file, content, words", [
    ("math500", "test.jsonl", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
    ("math500", "test.jsonl", [{"text": "1+1?", "answer": "2"}], "record 1: no math500 record: KeyError"),
    ("math500", "test.jsonl", [{"problem": "1+1?", "answer": True}], "TypeError True where a text belongs"),
    ("math500", "test.jsonl", [{"problem": "1+1?"}], "answer or true_answer"),
    ("math500", "test.jsonl", [{"problem": 5, "answer": "1"}], "5 where a text belongs"),
    ("gsm8k", "test.jsonl", [{"question": "1+1?", "answer": "two"}], "no number behind ####"),
    ("math500", "math500/test.parquet", "PAR1", "is read by the package datasets only: write it as JSON Lines"),
    ("math500", "math500/data-00000-of-00001.arrow", "ARROW1", "is read by the package datasets only"),
    ("math500", "other.jsonl", [], "HuggingFaceH4/MATH-500"),
])  # fmt: skip
def test_a_file_that_cannot_be_read_ends_in_one_line(tmp_path, capsys, name, file, content, words):
    put(tmp_path, file, content)
    assert words in refused(capsys, lambda: load(tmp_path, name))


def test_a_system_message_goes_where_the_chat_template_puts_it(capsys):
    from model import build_tokenizer

    tokenizer = build_tokenizer("byte", [])
    split = data.Split([Example("1", "1+1?", answer="2", check="math")])
    cfg = Config(system="Think.")
    assert "no chat template" in refused(capsys, lambda: data.fit(split, tokenizer, cfg))
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    _, ((*ids,),) = data.fit(split, tokenizer, cfg)
    assert tokenizer.decode(ids) == "[system:Think.][user:1+1?]"
    _, ((*ids,),) = data.fit(split, tokenizer, Config())
    assert tokenizer.decode(ids) == "[user:1+1?]"


def test_test_sets_are_not_trained_on(tmp_path, capsys):
    put(tmp_path, "test.jsonl", [{"problem": "1+1?", "answer": "2"}])
    assert "--split train: --data math500 is published for tests only" in refused(
        capsys, lambda: load(tmp_path, "math500", "train")
    )


def test_missing_math_verify_is_said_once_and_in_words(tmp_path, capsys, monkeypatch):
    put(tmp_path, "test.jsonl", [{"problem": "1+1?", "answer": "\\sqrt{4}"}])
    monkeypatch.setitem(sys.modules, "math_verify", None)
    verify.math_verify.cache_clear()
    try:
        load(tmp_path, "math500")
        (e,) = load(tmp_path, "math500").examples
        out = capsys.readouterr().err
        assert out.count("math-verify is not installed (pip install -r requirements-math.txt)") == out.count("\n") == 1
        said = ("\\sqrt{4}", "\\sqrt4", "2")
        assert [verify.check_math(f"\\boxed{{{text}}}", e.answer)["reward"] for text in said] == [1, 0, 0]
    finally:
        verify.math_verify.cache_clear()


def test_every_set_is_a_row_of_its_own():
    import config

    assert set(problems.SOURCES) <= set(config.PROBLEMS) and set(problems.SOURCES) <= set(data.DATASETS)
    assert all(s.check in verify.VERIFIERS for s in problems.SOURCES.values())


def test_an_evaluation_reports_all_that_verifiers_say():
    answers = {"ifeval": [["punctuation:no_comma", {}]], "walk": maze.make(5, [0]), "target": maze.make(5, [0])}
    for name, check in verify.VERIFIERS.items():
        assert check("5", answers.get(name, "5")).keys() - {"reward"} <= set(evaluation.EVALUATED["text"].split())


# ---------------------------------------------------------------------------------------------------------------------
# The real files

FILES = {  # data set, split -> folder of the samples, problems in them
    ("deepscaler", "train"): ("math-deepscaler", 1797), ("deepscaler", "test"): ("math-deepscaler", 1137),
    ("gsm8k", "train"): ("math-gsm8k", 1415), ("gsm8k", "test"): ("math-gsm8k", 1000), ("math500", "test"): ("math-math500", 350),
    ("aime24", "test"): ("math-aime24", 20), ("aime25", "test"): ("math-aime25", 20), ("amc23", "test"): ("math-amc23", 30),
    ("minerva", "test"): ("math-minerva", 194), ("olympiadbench", "test"): ("math-olympiadbench", 500),
}  # fmt: skip


def real(name: str, split: str) -> list[Example]:
    folder, count = FILES[name, split]
    if not os.path.isdir(os.path.join(REAL, folder)):
        pytest.skip(f"no {folder} below $DATA_DIR")
    examples = data.load(parse(["--data", name, "--data_dir", REAL], training=False), split).examples
    assert len(examples) == count
    return examples


def form(e: Example) -> str:
    return e.answer if isinstance(e.answer, str) else e.answer[0]


@pytest.mark.parametrize("name, split", FILES)
def test_every_gold_answer_is_right_and_fifty_planted_ones_are_not(name, split, monkeypatch):
    """Without algebra, so that the answers are read right by what is here; the test below is with it."""
    monkeypatch.setattr(verify, "math_verify", lambda: None)
    examples = real(name, split)
    right = [verify.VERIFIERS[e.check](f"So \\boxed{{{form(e)}}}.", e.answer) for e in examples]
    assert [form(e) for e, got in zip(examples, right) if got["reward"] != 1 or not got["exact"]] == []
    shown = [verify.VERIFIERS[e.check](e.demo, e.answer) for e in examples]
    assert [e.demo for e, got in zip(examples, shown) if got["reward"] != 1] == []
    for text, e in planted(examples):
        assert verify.VERIFIERS[e.check](text, e.answer)["reward"] == 0, (text, e.answer)


def planted(examples: list[Example], n=50) -> list[tuple[str, Example]]:
    """Wrong answers to n problems: that of another problem, or its own plus one. The code under test has no say in it."""
    rng, out = random.Random(0), []
    while len(out) < n:
        e, other = rng.choice(examples), form(rng.choice(examples))
        said = other if len(out) % 2 else f"{form(e)}+1"
        if plain(said) != plain(form(e)):
            out.append((f"\\boxed{{{said}}}", e))
    return out


def plain(answer: str) -> float | str:
    try:
        return float(answer.replace(",", ""))
    except ValueError:
        return answer


def test_math_verify_agrees_on_real_answers_and_planted_ones():
    """A draw of 25 of each kind: comparing all of them takes a minute (docs/reasoning.md has the whole count)."""
    pytest.importorskip("math_verify")
    examples = [e for name in ("math500", "olympiadbench") for e in random.Random(1).sample(real(name, "test"), 25)]
    right = workers.run(verify.equal, [(form(e), form(e)) for e in examples], 2, 10.0)
    assert [form(e) for e, got in zip(examples, right) if got is not True] == []
    wrong = workers.run(verify.check_math, [(text, e.answer) for text, e in planted(examples)], 2, 10.0)
    assert [got for got in wrong if isinstance(got, workers.Failure) or got["reward"]] == []


def test_the_instructions_of_ifeval_are_all_known():
    if not os.path.isdir(os.path.join(REAL, "ifeval")):
        pytest.skip("no ifeval below $DATA_DIR")
    split = data.load(parse(["--data", "ifeval", "--data_dir", REAL], training=False), "test")
    left_out = {why: n for why, n in split.dropped.items() if "not installed" not in why}
    assert len(split.examples) + sum(split.dropped.values()) == 441 and not left_out
    for e in split.examples:
        assert verify.VERIFIERS["ifeval"]("A, b.", e.answer)["reward"] in (0, 1)


# ---------------------------------------------------------------------------------------------------------------------
# In a run


def test_no_answer_in_mathematics_hangs_a_run(monkeypatch):
    """Where nobody asked for workers there are two all the same: only from outside can a comparison be ended. And a
    verifier gets text that is text: bytes that are none become U+FFFD."""
    import torch

    import rewards
    from model import build_tokenizer
    from rollout import demonstrations

    def verifier(text, answer):
        while text == "hang":
            pass
        return {"reward": float(text == "�")}

    monkeypatch.setitem(verify.VERIFIERS, "math", verifier)
    tokenizer = build_tokenizer("byte", [])
    pieces = rewards.token_bytes(tokenizer)
    said = [
        *(data.encode_answer(tokenizer, t) for t in ("hang", "ab")),
        [pieces.index(b"\xff"), tokenizer.eos_token_id],
    ]
    roll = demonstrations([[5]], [said], torch.device("cpu"))
    cfg = Config(data="math500", method="grpo", reward_timeout=0.5)
    got = rewards.score(roll, [Example("a", "?", answer="7", check="math")], pieces, cfg, "sequence")
    assert got.valid[:, 0].tolist() == [False, True, True] and got.parts["reward_errors"] == [1, 0, 0]
    assert got.reward[1:, 0].tolist() == [0, 1]
