"""Published problems whose answers a verifier checks -> Example: mathematics, multiple choice, logic, instructions.

One row of SOURCES per data set; a record is read by the names of its fields, since each copy of a set has others:

    problem | question | prompt        answer | true_answer | final_answer, else the last \\boxed{} of solution
    "42" | "025" | 27.0 | ["9.6\\n"] | "... #### 1,024" (GSM8K)

Files, columns and counts: docs/reasoning.md. JSON arrays, JSON Lines and (GPQA) csv are read. Parquet and Arrow need a
package that nothing else here needs: write them as JSON Lines first. Left out: downloads, images, proofs without an answer.
"""

import csv
import glob
import inspect
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import ifeval
import verify
from config import Config, fail
from files import (
    INVISIBLE,
    Dataset,
    Example,
    Split,
    clean,
    damaged,
    example_rng,
    find,
    folder,
    id_of,
    lines,
    list_of,
    records,
    stable_hash,
    text_of,
)

# of the focal paper, arXiv 2602.06717
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
CHOOSE = "Answer with the letter of the right choice."
QUESTION = ("problem", "question", "prompt", "Problem", "Question")
ANSWER = ("answer", "true_answer", "final_answer", "Answer")
ID = ("unique_id", "id", "key", "index", "idx", "ID", "Record ID")
HELD_OUT = 16  # of the training problems of a set without a validation file, one in so many is validation


class Unusable(Exception):
    """Why a sound record gives no problem; counted under this text."""


@dataclass
class Source:
    """Where a data set's problems are: folders below the data folder, files of each split (all that exist are read, but
    whole files alone), the function that reads a record, and the verifier."""

    what: str
    where: str
    folders: list[str]
    test: list[str]
    train: list[str] = field(default_factory=list)
    valid: list[str] = field(default_factory=list)
    read: Callable[[Config, dict], Example] = None
    check: str = "math"
    whole: tuple[str, ...] = ()


def field_of(record: dict, names: tuple[str, ...]):
    """The first of these fields that the record has."""
    for name in names:
        if name in record:
            return record[name]
    raise KeyError(" or ".join(names))


def shown(text) -> str:
    """A problem's text: line breaks stay, invisible characters go."""
    return text_of(text).translate(INVISIBLE).strip()


def answer_text(value) -> str:
    """An answer as text: 27.0 -> 27; "" where there is none."""
    if type(value) is float:
        return str(int(value)) if value.is_integer() else repr(value)
    return "" if value is None else str(value) if type(value) is int else shown(value)


def answer_of(value) -> str | list[str]:
    """An answer; a list is one whose several forms are all right (Minerva), ["9.6\\n"] -> 9.6."""
    if not isinstance(value, list):
        return answer_text(value)
    forms = list(dict.fromkeys(filter(None, map(answer_text, value))))
    return forms if len(forms) > 1 else "".join(forms)


def read_problem(cfg: Config, record: dict) -> Example:
    """A problem of mathematics. Its solution, where that ends in the answer in a box, is the demonstration."""
    solution = record.get("solution") or ""
    solution = "\n".join(map(text_of, solution)) if isinstance(solution, list) else text_of(solution)
    box = verify.boxed(solution)
    try:
        answer = answer_of(field_of(record, ANSWER))
    except KeyError:
        if box is None:
            raise
        answer = box
    if not answer:
        raise Unusable("no answer")
    forms = [answer] if isinstance(answer, str) else answer
    shows = box is not None and any(verify.same(form, box) for form in forms)
    demo = shown(solution) if shows else f"\\boxed{{{forms[0]}}}"
    return Example("", shown(field_of(record, QUESTION)), answer=answer, demo=demo)


def read_gsm8k(cfg: Config, record: dict) -> Example:
    """The answer ends in #### N; the calculator's marks <<16-3=13>> are no part of the demonstration."""
    worked, _, answer = text_of(record["answer"]).rpartition("####")
    answer, worked = shown(answer).replace(",", ""), shown(re.sub(r"<<[^<>]*>>", "", worked))
    if verify.value_of(answer) is None:
        raise ValueError("no number behind ####")
    return Example("", shown(record["question"]), answer=answer, demo=f"{worked}\nThe answer is \\boxed{{{answer}}}.")


def read_gpqa(cfg: Config, record: dict) -> Example:
    """Four choices in an order that depends on data_seed and the question alone; the answer is the letter of the right one."""
    question = shown(record["Question"])
    choices = [shown(record[f"{kind} Answer{n}"]) for kind, n in
               (("Correct", ""), ("Incorrect", " 1"), ("Incorrect", " 2"), ("Incorrect", " 3"))]  # fmt: skip
    order = example_rng(cfg, question).permutation(4).tolist()
    listed = "\n".join(f"{letter}) {choices[i]}" for letter, i in zip("ABCD", order))
    return Example("", f"{question}\n\n{listed}\n\n{CHOOSE}", answer="ABCD"[order.index(0)])


def read_ifeval(cfg: Config, record: dict) -> Example:
    """The prompt as published, and its instructions; copies that give each instruction every key fill up with null."""
    wanted = [[text_of(kind), {k: v for k, v in given.items() if v is not None}] for kind, given in
              zip(list_of(record["instruction_id_list"]), list_of(record["kwargs"]), strict=True)]  # fmt: skip
    for kind, given in wanted:
        if kind not in ifeval.KINDS:
            raise Unusable("instruction of a kind that is not known here")
        if (package := ifeval.NEEDS.get(kind)) and ifeval.optional(package) is None:
            raise Unusable(
                f"instruction that only {package} can check, which is not installed here (docs/reasoning.md)"
            )
        inspect.signature(ifeval.KINDS[kind]).bind("", **given)
    if not wanted:
        raise Unusable("no instruction")
    return Example("", text_of(record["prompt"]), answer=wanted)


SOURCES = {
    "deepscaler": Source(
        "40,000 problems of mathematics to train on: DeepScaleR; valid: AIME 2024, test: its five test sets",
        "https://huggingface.co/datasets/agentica-org/DeepScaleR-Preview-Dataset (deepscaler.json) or "
        "https://github.com/agentica-project/rllm, branch deepscaler (train/*.json, test/*.json)",
        ["deepscaler", "math-deepscaler"],
        [f"test/{name}.json" for name in ("aime", "amc", "math", "minerva", "olympiad_bench")],
        ["deepscaler.json", "train/deepscaler.json"]
        + [f"train/{name}.json" for name in ("aime", "amc", "math", "omni_math", "still")],
        ["test/aime.json"],
        whole=("deepscaler.json",),
    ),
    "gsm8k": Source(
        "grade-school word problems: GSM8K; valid: a sixteenth of train",
        "https://github.com/openai/grade-school-math (train.jsonl, test.jsonl)",
        ["gsm8k", "math-gsm8k", "grade_school_math/data"],
        ["test.jsonl"],
        ["train.jsonl"],
        read=read_gsm8k,
        check="number",
    ),
    "math500": Source(
        "competition mathematics, 500 problems: MATH-500",
        "https://huggingface.co/datasets/HuggingFaceH4/MATH-500 (test.jsonl) or https://github.com/openai/prm800k "
        "(prm800k/math_splits/test.jsonl, Git LFS)",
        ["math500", "math-math500", "MATH-500", "prm800k/math_splits"],
        ["test.jsonl", "test.json"],
    ),
    "aime24": Source(
        "AIME 2024, 30 problems",
        "https://huggingface.co/datasets/HuggingFaceH4/aime_2024 or math-ai/aime24, as JSON Lines",
        ["aime24", "math-aime24"],
        ["test.jsonl", "test.json", "aime_2024_problems.jsonl"],
    ),
    "aime25": Source(
        "AIME 2025, 30 problems",
        "https://huggingface.co/datasets/opencompass/AIME2025 or math-ai/aime25, as JSON Lines",
        ["aime25", "math-aime25"],
        ["test.jsonl", "test.json", "aime2025-I.jsonl", "aime2025-II.jsonl"],
    ),
    "amc23": Source(
        "AMC 12 of 2023, 40 problems",
        "https://huggingface.co/datasets/math-ai/amc23, as JSON Lines",
        ["amc23", "math-amc23"],
        ["test.jsonl", "test.json"],
    ),
    "minerva": Source(
        "university science with numbers and formulas, 272 problems: Minerva",
        "https://huggingface.co/datasets/math-ai/minervamath or https://github.com/QwenLM/Qwen2.5-Math, as JSON Lines",
        ["minerva", "math-minerva", "minerva_math"],
        ["test.jsonl", "test.json"],
    ),
    "olympiadbench": Source(
        "olympiad mathematics with final answers, 675 problems: OlympiadBench, OE_TO_maths_en_COMP",
        "https://huggingface.co/datasets/Hothan/OlympiadBench or https://github.com/QwenLM/Qwen2.5-Math, as JSON Lines",
        ["olympiadbench", "math-olympiadbench", "olympiad_bench"],
        ["test.jsonl", "test.json"],
    ),
    "ttrl": Source(
        "problems of your own in the layout of TTRL: prompt, answer (text), optional id; valid: a sixteenth of train",
        "https://github.com/PRIME-RL/TTRL (train.json, test.json of one of its sets)",
        ["ttrl", "math-ttrl"],
        ["test.json", "test.jsonl"],
        ["train.json", "train.jsonl"],
    ),
    "gpqa": Source(
        "graduate-level multiple choice: GPQA diamond",
        "https://huggingface.co/datasets/Idavidrein/gpqa (gpqa_diamond.csv; gated: accept its terms)",
        ["gpqa", "dataset"],
        ["gpqa_diamond.csv", "gpqa_diamond.jsonl"],
        read=read_gpqa,
        check="choice",
    ),
    "synlogic": Source(
        "logic puzzles with one right answer: SynLogic; valid: a sixteenth of train",
        "https://huggingface.co/datasets/MiniMaxAI/SynLogic, as JSON Lines with question and answer (text) per row",
        ["synlogic", "SynLogic"],
        ["test.jsonl", "validation.jsonl"],
        ["train.jsonl"],
    ),
    "ifeval": Source(
        "instructions that a program can check: IFEval",
        "https://github.com/google-research/google-research/tree/master/instruction_following_eval "
        "(data/input_data.jsonl)",
        ["ifeval", "instruction_following_eval/data", "data"],
        ["input_data.jsonl", "ifeval_input_data.jsonl"],
        read=read_ifeval,
        check="ifeval",
    ),
}  # fmt: skip


def rows(cfg: Config, path: str) -> Iterator[dict]:
    """Records of a JSON or csv file; a csv's first line names the columns, quoted cells may hold line breaks."""
    if not path.endswith(".csv"):
        yield from records(cfg, path)
        return
    reader = csv.DictReader(lines(cfg, path), strict=True)
    try:
        for row in reader:
            if None in row or None in row.values():
                damaged(
                    cfg, f"{path} line {reader.line_num}", f"not the {len(reader.fieldnames)} columns of the header"
                )
            yield row
    except csv.Error as e:
        damaged(cfg, f"{path} line {reader.line_num}", f"{e}: the file is cut short or damaged")


def paths_of(cfg: Config, source: Source, names: list[str]) -> list[str]:
    """The files of a split, each name once; a whole file makes its parts needless."""
    packed = [p for sub in ["", *source.folders] for kind in ("parquet", "arrow")
              for p in sorted(glob.glob(os.path.join(folder(cfg), sub, f"*.{kind}")))]  # fmt: skip
    have = [os.path.isfile(os.path.join(folder(cfg), sub, name)) for sub in ["", *source.folders] for name in names]
    if packed and not any(have):
        fail(f"--data {cfg.data}: {packed[0]} is read by the package datasets only: write it as JSON Lines with its to_json, "
             f"as {os.path.join(os.path.dirname(packed[0]), names[0])}")  # fmt: skip
    paths = find(cfg, source.folders, names)
    paths = [p for p in paths if os.path.basename(p) in source.whole] or paths
    first = {}
    for path in paths:
        first.setdefault(next(n for n in names if path.endswith(os.sep + n.replace("/", os.sep))), path)
    return list(first.values())


def load(cfg: Config, split: str) -> Split:
    """The problems of a split, in the order of the files. Dropped, and counted: those without an answer, repeated ones, and
    all copies of a problem whose copies have different answers (the filters of the focal paper; its third, the length, is
    --max_prompt). Where the template is instruct, a problem of all but IFEval comes behind INSTRUCTION."""
    source = SOURCES[cfg.data]
    names = {"train": source.train, "valid": source.valid or source.train, "test": source.test}[split]
    if not names:
        fail(
            f"--split {split}: --data {cfg.data} is published for tests only; train on deepscaler, gsm8k or another set"
        )
    if source.check == "math":
        verify.math_verify()  # imported before any worker is forked; says it where it is missing
    read, dropped, found = source.read or read_problem, Counter(), []
    for path in paths_of(cfg, source, names):
        for n, record in enumerate(rows(cfg, path), 1):
            try:
                example = read(cfg, record)
                example.id = next((id_of(record[name]) for name in ID if record.get(name) is not None), "")
            except Unusable as e:
                dropped[str(e)] += 1
                continue
            except (KeyError, TypeError, ValueError, AttributeError) as e:
                damaged(cfg, f"{path} record {n}", f"no {cfg.data} record: {type(e).__name__} {e}")
            if example.prompt:
                found.append(example)
            else:
                dropped["no question"] += 1
    found = distinct(found, dropped)
    if split != "test" and not source.valid:
        found = [e for e in found if (stable_hash(e.prompt) % HELD_OUT == 0) == (split == "valid")]
    shared = Counter(e.id for e in found)
    for e in found:
        if not e.id or shared[e.id] > 1:
            e.id = f"{stable_hash(clean(e.prompt)):016x}"
        e.check = source.check
        if cfg.template == "instruct" and cfg.data != "ifeval":
            e.prompt = f"{INSTRUCTION}\n\n{e.prompt}"
    return Split(found, +dropped)


def distinct(found: list[Example], dropped: Counter) -> list[Example]:
    """Each problem once, in order. Two are the same if their texts differ in white space at most."""
    copies, out = {}, []
    for e in found:
        copies.setdefault(clean(e.prompt), []).append(e)
    for first, *others in copies.values():
        if all(agree(first.answer, e.answer) for e in others):
            out.append(first)
            dropped["problem that is there twice"] += len(others)
        else:
            dropped["problem with two answers"] += 1 + len(others)
    return out


def agree(a, b) -> bool:
    """Are two answers from files the same, or has each a form that is?"""
    forms = [[x] if isinstance(x, str) else x for x in (a, b)]
    texts = ((x, y) for x in forms[0] for y in forms[1] if isinstance(x, str) and isinstance(y, str))
    return a == b or any(verify.same(x, y) for x, y in texts)


ROWS = {name: Dataset(load, source.what, source.where) for name, source in SOURCES.items()}
