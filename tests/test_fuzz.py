"""Damaged settings and data files: what was asked for is read, or one line says what is wrong; never a traceback.

Every mutation declares what may come of it, so a file that loads with other values or other counts than it says fails
here. All draws are seeded: a failure names the round, and the same round gives the same file.
"""

import contextlib
import dataclasses
import gzip
import io
import json
import math
import os
import random
import re
import string

import pytest

import config
import data
from config import Config, dump, parse

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ROUNDS, EACH = 500, 125  # of settings; of each layout of data files
REFUSED = "refused"  # what a mutation may declare in place of values or counts


def outcome(call):
    """What a call returns, or REFUSED where it ends as bad input must; and the line. Everything else fails the test."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return call(), said.getvalue()
    except SystemExit as stop:
        text = said.getvalue()
        assert stop.code == 2 and text.count("\n") == 1 and text.endswith("\n"), (stop.code, text)
        assert text[:-1].isprintable() and len(text) < 2000, text
        return REFUSED, text


# ---------------------------------------------------------------------------------------------------------------------
# Settings

FIELDS = {f.name: f for f in dataclasses.fields(Config)}
MANY = (list[str], list[int], list[float])


def published() -> dict[str, list[str]]:
    """Lines of the files under configs/."""
    folder = os.path.join(ROOT, "configs")
    return {n: open(os.path.join(folder, n), encoding="utf-8").read().splitlines() for n in sorted(os.listdir(folder))}


CONFIGS = published()
NASTY = ["010", "0o17", "0x1F", "1_000", "1:30", "1:30.5", "yes", "no", "on", "True", "FALSE", "2024-01-01", "1e400", "1e-400",
         "2024-01-01T00:00:00Z", "nan", ".nan", "inf", ".inf", "-.Inf", "-1", "1.0", "1.5", "0.5", "1e3", "-0", "+7", "9" * 30,
         "9" * 5000, "\u0663", "\u00b2", "x", "/etc/passwd", "../../x", "null", "~", "=", "<<", "-5", "1,000", "8", "64", "1"]  # fmt: skip
TAGS = ["!!python/object/apply:os.mkdir [fuzzed]", "!!python/object/new:os.mkdir [fuzzed]", "!!python/name:os.mkdir",
        "!!python/tuple [1, 2]", "!!binary aGk=", "!!set {a, b}", "!!omap [a: 1]", "!!pairs [a: 1]", "!own 1", "!!map 1",
        "!!seq 1", "!!map [1]"]  # fmt: skip
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip(string.ascii_lowercase, string.ascii_lowercase[1:12])
)
WHOLE = ["", "# nothing\n", "- steps\n- 1\n", "steps\n", "5\n", "---\nsteps: 1\n---\nsteps: 2\n", "{steps: 1, steps: 2}\n",
         "? [steps]\n: 1\n", "? {steps: 1}\n: 1\n", "[" * 3000, "{" * 3000, "a: " * 3000, BOMB, "&a steps: 1\n*a : 2\n",
         "? &k [a]\n: 1\n? *k\n: 2\n", "!!set {steps}\n", "!!map [steps]\n", "!!omap [steps: 1]\n", "<<: {steps: 1}\n", "%YAML 9.9\n---\n",
         "&a [*a]\n", "steps: &a [*a]\n", "steps: *nowhere\n", "steps: [5]\n", "\ufeff\ufeffsteps: 1\n", "!!python/object:config.Config {}\n"]  # fmt: skip
MAY_LOAD = {"", "# nothing\n"}


def asked(kind, text: str, quoted: bool):
    """The value that a text stands for in a field of a kind, as on the command line; REFUSED where it has none."""
    if text in ("~", "null") and not quoted:
        return REFUSED
    if kind is bool:
        return {w: b for b in (True, False) for w in ("true 1 yes on" if b else "false 0 no off").split()}.get(
            text.lower(), REFUSED
        )
    try:
        return kind(re.sub(r"(?i)\.(?=inf$)", "", text) if kind is float else text)
    except ValueError:
        return REFUSED


def values_in(lines: list[str]) -> dict[str, str]:
    """key -> text of the lines of a published file."""
    return dict(line.split(" #")[0].rstrip().split(": ", 1) for line in lines if line and line[0] != "#")


def mutated_settings(rng: random.Random, lines: list[str]) -> tuple[str, bytes, object]:
    """(kind of mutation, file, what it declares: REFUSED, values by key, or None where any valid settings will do)."""
    kind = rng.choice(
        "flip truncate drop double swap value value value tag nest encoding encoding encoding name whole alias tab".split()
    )
    lines, known = list(lines), values_in(lines)
    keys = [i for i, line in enumerate(lines) if line and line[0] != "#"]
    at = rng.choice(keys)
    key = lines[at].split(":")[0]
    text, declared = None, {k: v for k, v in known.items() if k != key}
    if kind == "flip":
        raw = bytearray("\n".join(lines).encode())
        for _ in range(rng.choice((1, 1, 1, 5))):
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        return kind, bytes(raw), None
    if kind == "truncate":
        raw = "\n".join(lines).encode()
        return kind, raw[: rng.randrange(len(raw))], None
    if kind == "drop":
        del lines[at]
        declared[key] = None  # the default, which depends on the method
    elif kind == "double":
        lines.insert(rng.choice(keys), lines[at])
        declared = REFUSED
    elif kind == "swap":
        other = rng.choice(keys)
        lines[at], lines[other] = lines[other], lines[at]
        declared = known
    elif kind == "value":
        key = rng.choice([n for n in FIELDS if n != "config"])
        value, quote = rng.choice(NASTY), rng.choice(["", "", "'", '"'])
        lines = [line for line in lines if line.split(":")[0] != key]
        lines.insert(rng.randrange(len(lines)), f"{key}: {quote}{value}{quote}")
        if FIELDS[key].type in MANY:
            meant = asked(FIELDS[key].type.__args__[0], value, bool(quote))
            meant = meant if meant is REFUSED else [meant]
        else:
            meant = asked(FIELDS[key].type, value, bool(quote))
        declared = REFUSED if meant is REFUSED else {**{k: v for k, v in known.items() if k != key}, key: (meant,)}
    elif kind == "tag":
        lines[at] = f"{key}: {rng.choice(TAGS)}"
        declared = REFUSED
    elif kind == "nest":
        lines[at] = f"{key}: {rng.choice(['{a: 1}', '[[1]]', '[{a: 1}]', '[1, [2]]', '[~]', '{}', '[1, 2, null]', ''])}"
        declared = REFUSED
    elif kind == "name":
        lines[at] = (
            rng.choice([key.upper(), f"{key}_", f"-{key}", key.replace("_", "-") + "-", f"{key}\\0", "0", "true"])
            + lines[at][len(key) :]
        )
        declared = REFUSED
    elif kind == "whole":
        text = rng.choice(WHOLE)
        declared = None if text in MAY_LOAD else REFUSED
    elif kind == "alias":
        lines[at] = f"{key}: &a {known[key]}"
        lines.append("log_samples: &b 3\nkeep: *b")
        declared = {**known, "log_samples": (3,), "keep": (3,)}
    elif kind == "tab":
        lines[at] = "\t" + lines[at]
        declared = REFUSED if at else None
    text = "\n".join(lines) if text is None else text
    if kind == "encoding":
        how = rng.choice("NUL utf-16 latin-1 BOM CRLF CR escape".split())
        kind, declared = f"encoding {how}", known if how in ("BOM", "CRLF", "CR") else REFUSED
        at = text.index("\n") + 1
        text = {"BOM": f"\ufeff{text}", "CRLF": text.replace("\n", "\r\n"), "CR": text.replace("\n", "\r"), "latin-1": f"prefix: é\n{text}",
                "NUL": f"{text[:at]}\0{text[at:]}", "escape": f'{text}\nprefix: "\\0"', "utf-16": text}[how]  # fmt: skip
        return kind, text.encode({"utf-16": "utf-16", "latin-1": "latin-1"}.get(how, "utf-8")), declared
    return kind, text.encode("utf-8"), declared


def valid(cfg: Config) -> None:
    """Every value has the type of its field and lies in bounds, and the settings survive being written and read."""
    for name, f in FIELDS.items():
        value = getattr(cfg, name)
        many = f.type in MANY
        assert type(value) is (list if many else f.type), (name, value)
        for v in value if many else [value]:
            assert type(v) is (f.type.__args__[0] if many else f.type), (name, v)
            if isinstance(v, float):
                assert math.isfinite(v) or (name == "returns_gamma" and v > 0), (name, v)
                assert abs(v) <= 1e9 or v == math.inf, (name, v)
            if type(v) is int:
                assert abs(v) <= (2**63 if "seed" in name else 1e9), (name, v)
            if isinstance(v, str):
                v.encode("utf-8")
                assert "\0" not in v, name
        if name in config.AT_LEAST:
            assert value >= config.AT_LEAST[name], (name, value)
        if name in config.CHOICES:
            assert value in config.CHOICES[name], (name, value)


def as_declared(cfg: Config, declared: dict) -> None:
    """Values by key: the text of a line of a published file, (value,) as it must be read, None: not said."""
    for key, text in declared.items():
        if isinstance(text, tuple):
            assert getattr(cfg, key) == text[0], (key, text)
        elif text is not None and FIELDS[key].type in MANY:
            kind = FIELDS[key].type.__args__[0]
            assert getattr(cfg, key) == [kind(v) for v in text.strip("[]").split(", ")], key
        elif text is not None:
            assert getattr(cfg, key) == asked(FIELDS[key].type, text, False), key


def read_as_declared(argv: list[str], declared) -> bool:
    """Settings that load are the declared ones, valid, and the same when they are written and read again."""
    cfg, _ = outcome(lambda: parse(argv))
    if cfg is REFUSED:
        return False
    assert declared is not REFUSED, "garbage was read in silence"
    valid(cfg)
    as_declared(cfg, declared or {})
    with open("back.yaml", "w", encoding="utf-8") as f:
        f.write(dump(cfg))
    again, said = outcome(lambda: parse(["--config", "back.yaml"]))
    assert again is not REFUSED and dataclasses.replace(again, config=cfg.config) == cfg, said
    return True


@contextlib.contextmanager
def told(what: str):
    """Names the mutation of a failure."""
    try:
        yield
    except BaseException as e:
        raise AssertionError(what) from e


@pytest.fixture
def alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_fuzzed_configuration_files_are_read_as_they_say_or_refused_in_one_line(alone):
    counts = {}
    for n in range(ROUNDS):
        rng = random.Random(f"settings {n}")
        name = rng.choice(list(CONFIGS))
        kind, raw, declared = mutated_settings(rng, CONFIGS[name])
        (alone / "a.yaml").write_bytes(raw)
        with told(f"round {n}, {kind} of {name}: {raw[-300:]!r}"):
            loads = read_as_declared(["--config", "a.yaml"], declared)
            counts.setdefault(kind, [0, 0])[loads] += 1
    assert sorted(os.listdir()) == ["a.yaml", "back.yaml"]  # nothing ran
    for kind in ("drop", "swap", "value", "alias", "encoding BOM"):  # else the fuzz says nothing of what is read
        assert counts[kind][1] > 0, counts


def test_fuzzed_command_lines_are_read_as_they_say_or_refused_in_one_line(alone):
    """Values of every kind for every field, broken names, and what a shell can pass that is no text (lone surrogates)."""
    loaded, strange = (
        0,
        ["\ud800", "a\udcff", "\0", "\x1b]0;x\x07", "\u202e", "-", "--", "", " ", "a\nb", "x" * 100_000],
    )
    for n in range(ROUNDS):
        rng = random.Random(f"flags {n}")
        key = rng.choice([k for k in FIELDS if k not in ("config", "resume")])
        value, kind = rng.choice(NASTY + strange), FIELDS[key].type
        meant = asked(kind.__args__[0] if kind in MANY else kind, value, quoted=True)
        declared = REFUSED if meant is REFUSED else {key: ([meant] if kind in MANY else meant,)}
        if value == "--" or re.search("[\ud800\udcff\0]", value):
            declared = REFUSED
        argv = rng.choice(
            [[f"--{key}={value}"], [f"--{key}={value}"], [f"--{key}", value], [f"--{key}", value, "--steps", "3"]]
        )
        if len(argv) > 1 and (value in ("--", "-.Inf") or (value == "-" and kind in MANY)):
            declared = None  # reads as a flag
        if rng.random() < 0.1:
            argv = rng.choice(
                [[f"--{value}=1"], [f"--{key}{value}x", "1"], [*argv, f"-{value}"], [value, *argv], [f"-{key}", "1"]]
            )
            declared = None if value in ("", "-", "--") else REFUSED
        with told(f"round {n}: {argv!r:.300}"):
            loaded += read_as_declared(argv, declared)
    assert 50 < loaded < ROUNDS - 50


def test_lists_in_a_file_may_hold_what_looks_like_a_flag(alone):
    (alone / "a.yaml").write_text("tags: [-s, '--SLATE', -k, --resume]\nprefix: --steps=3\nkeep_by: -length\n")
    cfg = parse(["--config", "a.yaml"])
    assert cfg.tags == ["-s", "--SLATE", "-k", "--resume"] and (cfg.prefix, cfg.keep_by) == ("--steps=3", "-length")
    assert cfg.steps == Config.steps and cfg.resume is False
    (alone / "b.yaml").write_text(dump(cfg))
    assert dataclasses.replace(parse(["--config", "b.yaml"]), config="a.yaml") == cfg


@pytest.mark.parametrize("n", ["\u00b2", "-1", "1.5", "9" * 5000, "x", ""])
def test_a_count_of_examples_to_show_that_is_no_number_is_refused_in_one_line(n, alone):
    assert "-n needs a whole number" in outcome(lambda: data.main(["show", "world", "-n", n]))[1]


# ---------------------------------------------------------------------------------------------------------------------
# Data files


@dataclasses.dataclass
class Format:
    """A published layout: data set, its files (the first is mutated three times in four), and of a table the separator, the kind
    of each column (i: id, n: number, s: stars, t: text) per file, and does it have a header?"""

    name: str
    files: dict[str, bytes]
    sep: str = ""
    columns: tuple[str, ...] = ()
    header: bool = True
    json: str = ""  # array or lines


USERS, MOVIES = range(1, 9), range(10, 24)
TITLES = {m: f"{'Thé' if m % 3 else 'Plan'} {m}{', The' if m % 4 == 0 else ''} ({1980 + m})" for m in MOVIES}
EVENTS = [(u, 10 + (u * 3 + 5 * j) % 14, 1 + (u + j) % 9 / 2, 1_100_000_000 + 50 * j) for u in USERS for j in range(6)]


def table_of(sep: str, rows, header: str = "", end: str = "\n", encoding: str = "utf-8") -> bytes:
    rows = [header.replace(" ", sep)] * bool(header) + [sep.join(map(str, row)) for row in rows]
    return "".join(f"{row}{end}" for row in rows).encode(encoding)


def question(i: int) -> dict:
    """A record of HotpotQA with four passages, two of them gold."""
    context = [[f"T{i}.{j}", [f"First of {i}.{j}.", " Second."]] for j in range(4)]
    return {"_id": f"id{i}", "question": f"Who is {i}?", "answer": "yes", "supporting_facts": [[f"T{i}.{j}", 0] for j in (0, 2)],
            "context": context, "level": 3.5}  # fmt: skip


def hub(i: int) -> dict:
    """The same record in the columns of the hub."""
    q = question(i)
    columns = lambda rows, a, b: {a: [x for x, _ in rows], b: [y for _, y in rows]}  # noqa: E731
    return {"id": q["_id"], "question": q["question"], "answer": "yes", "level": 3.5, "context": columns(q["context"], "title", "sentences"),
            "supporting_facts": columns(q["supporting_facts"], "title", "sent_id")}  # fmt: skip


def hops(i: int) -> dict:
    """A record of MuSiQue."""
    paragraphs = [
        {"idx": j, "title": f"P{j % 3}", "paragraph_text": f"Text {i}.{j}", "is_supporting": j in (1, 2)}
        for j in range(4)
    ]
    return {"id": f"2hop__{i}", "question": f"Who is {i}?", "answer": "a", "level": 3.5, "paragraphs": paragraphs}


def json_lines(records) -> bytes:
    return "".join(json.dumps(r) + "\n" for r in records).encode()


STAMPED = [(u, m, 7, t * 1000) for u, m, _, t in EVENTS]
FORMATS = {
    "csv": Format("movielens", {
        "ratings.csv": table_of(",", EVENTS, "userId movieId rating timestamp", "\r\n"),
        "movies.csv": table_of(",", [(m, f'"{t}"' if "," in t else t, "Drama|War") for m, t in TITLES.items()], "movieId title genres", "\r\n"),
    }, ",", ("iisn", "itt")),
    "u.data": Format("movielens", {
        "u.data": table_of("\t", [(u, m, math.ceil(r), t) for u, m, r, t in EVENTS]),
        "u.item": table_of("|", [(m, t, "", "", "", *[0] * 19) for m, t in TITLES.items()], encoding="iso-8859-1"),
    }, "\t", ("iisn", "i" + "t" * 23), header=False),
    "dat": Format("movielens", {
        "ratings.dat": table_of("::", [(u, m, math.ceil(r), t) for u, m, r, t in EVENTS]),
        "movies.dat": table_of("::", [(m, t, "Drama") for m, t in TITLES.items()], encoding="iso-8859-1"),
    }, "::", ("iisn", "itt"), header=False),
    "dates": Format("lastfm", {
        "user_taggedartists.dat": table_of("\t", [(u, m, 7, 1 + t % 28, 1 + m % 12, 2008) for u, m, _, t in EVENTS],
                                           "userID artistID tagID day month year", "\r\n"),
        "artists.dat": table_of("\t", [(m, t, "http://x", "") for m, t in TITLES.items()], "id name url pictureURL", "\r\n"),
    }, "\t", ("iinnnn", "ittt")),
    "stamps": Format("lastfm", {
        "user_taggedartists-timestamps.dat": table_of("\t", STAMPED, "userID artistID tagID timestamp", "\r\n"),
        "artists.dat": table_of("\t", [(m, t, "http://x", "") for m, t in TITLES.items()], "id name url pictureURL", "\r\n"),
    }, "\t", ("iinn", "ittt")),
    "hotpotqa": Format("hotpotqa", {"hotpot_train_v1.1.json": json.dumps([question(i) for i in range(6)]).encode()}, json="array"),
    "hub": Format("hotpotqa", {"train.json": json_lines(map(hub, range(6)))}, json="lines"),
    "musique": Format("musique", {"musique_ans_v1.0_train.jsonl": json_lines(map(hops, range(6)))}, json="lines"),
}  # fmt: skip
NO_NUMBER = [
    "x",
    "",
    "nan",
    "inf",
    "1e3",
    "0x10",
    "-",
    "9" * 30,
    "9" * 5000,
    "1_0",
    " 1",
    "+1",
    "1 ",
    "\u0661",
    "\u00b2",
    "null",
    "--1",
    "1.25",
]
WRONG = {
    "": [None, 1, True, [], {}, ["x"]],
    "[": [None, 1, True, "x", {}, "", [1], [None]],
    "b": [None, 1, 0, "false", "", [], {}],
}  # by kind of value
DEEP = "[" * 100_000
SAME = "same"  # loads, and nothing at all differs
COUNTED = "counted"  # loads with every row of the file in a count, or is refused


@dataclasses.dataclass
class Loaded:
    """What the splits of a data set hold together: examples, dropped rows by reason, and rows accounted for, at least and at most."""

    examples: list
    dropped: dict[str, int]
    least: int
    most: int


def load(name: str, folder) -> Loaded:
    splits = {"movielens": 3, "lastfm": 3}.get(name, 1)
    settings = {"data": name, "data_dir": str(folder), "pool_size": 5, "slate_size": 3, "rank_size": 2}
    got = [data.load(Config(**settings), s) for s in ("train", "valid", "test")[:splits]]
    examples, dropped = [e for s in got for e in s.examples], dict(got[-1].dropped)
    assert all(s.dropped == dropped for s in got)
    for e in examples:
        assert set(e.gold) <= set(e.candidates) and len(set(e.candidates)) == len(e.candidates) <= 5
        assert all(type(u) is float and u > 0 for u in e.gold.values())
    if splits == 1:
        rows = len(examples) + dropped.get("question without a supporting passage", 0)
        return Loaded(examples, dropped, rows, rows)
    few = dropped.get("user with fewer than 3 items", 0)  # users, of one or two rows each
    rows = len(examples) + len(got[-1].examples) + sum(dropped.values()) - few  # a user's first item is no target
    return Loaded(examples, dropped, rows + few, rows + 2 * few)


def rows_in(f: Format, raw: bytes) -> int | None:
    """Rows of a file, counted by its line ends; None for a JSON array."""
    lines = sum(bool(line.strip()) for line in raw.split(b"\n"))
    return None if f.json == "array" else lines - bool(f.columns and f.header)


def damage(rng: random.Random, raw: bytes) -> tuple[str, bytes, str]:
    """Mutations that know nothing of the format."""
    kind = rng.choice("flip flip flip truncate truncate garbage NUL empty packed utf-16".split())
    at = rng.randrange(len(raw))
    if kind == "flip":
        out = bytearray(raw)
        for _ in range(rng.choice((1, 1, 1, 3))):
            out[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        return kind, bytes(out), COUNTED
    if kind == "truncate":
        return kind, raw[:at], COUNTED if raw[:at].endswith(b"\n") else REFUSED
    if kind == "garbage":
        return kind, raw[:at] + rng.randbytes(rng.choice((1, 5, 200))) + raw[at:], COUNTED
    if kind == "NUL":
        return kind, raw[:at] + b"\0" + raw[at:], REFUSED
    if kind == "empty":
        return kind, rng.choice([b"", b"\n", b"\r\n\r\n", b" ", b"\xef\xbb\xbf"]), REFUSED
    packed = rng.choice([gzip.compress(raw, mtime=0), b"PK\x03\x04" + raw, b"BZh9" + raw, b"\xfd7zXZ\0" + raw])
    return kind, packed if kind == "packed" else raw.decode("latin-1").encode("utf-16"), REFUSED


def ends(rng: random.Random, raw: bytes, kind: str) -> tuple[str, bytes, str]:
    """Line ends and byte order marks."""
    lines = raw.replace(b"\r\n", b"\n").split(b"\n")
    if kind == "mixed":
        return kind, b"".join(line + rng.choice((b"\n", b"\r\n")) for line in lines[:-1]), SAME
    if kind == "CR":
        return kind, b"\r".join(lines), REFUSED
    if kind == "BOM":
        return kind, b"\xef\xbb\xbf" + raw, SAME
    if kind == "blank":
        lines.insert(rng.randrange(1, len(lines)), b"")
        return kind, b"\n".join(lines), SAME
    return kind, {"LF": b"\n", "CRLF": b"\r\n"}[kind].join(lines), SAME


def mutated_table(rng: random.Random, f: Format, file: str) -> tuple[str, bytes, object]:
    """(kind, file, what it declares: REFUSED, SAME, COUNTED, or the change of a count of what was dropped)."""
    raw, index = f.files[file], list(f.files).index(file)
    kinds, sep = f.columns[index], "|" if file == "u.item" else f.sep
    coding = "iso-8859-1" if file in ("u.item", "movies.dat") else "utf-8"
    kind = rng.choice("damage damage damage LF CRLF mixed CR BOM blank field field field wrong wrong swap cut join delete double "
                      "exchange header quote span big".split())  # fmt: skip
    if kind == "damage":
        return damage(rng, raw)
    if kind in "LF CRLF mixed CR BOM blank".split():
        kind, raw, declared = ends(rng, raw, kind)
        return kind, raw, REFUSED if kind == "BOM" and coding != "utf-8" else declared
    lines = raw.split(b"\n")[:-1]
    row = rng.randrange(bool(f.header), len(lines))
    cells, declared = lines[row].decode(coding).rstrip("\r").split(sep), REFUSED
    column = rng.randrange(len(cells))
    simple = '"' not in "".join(cells)  # a quoted title with a comma is more than one cell here
    if kind == "field":
        how = rng.choice(("delete", "double", "swap"))
        other = rng.randrange(len(cells))
        if how == "swap":
            cells[column], cells[other] = cells[other], cells[column]
            declared = COUNTED
        else:
            cells[column : column + 1] = [cells[column]] * (2 if how == "double" else 0)
    elif kind == "wrong":
        column = rng.choice([i for i, k in enumerate(kinds) if k in "ins"]) if simple else 0
        cells[column] = rng.choice(NO_NUMBER + ["5.5", "-1", "0.7"] * (kinds[column] == "s"))
        lines[row] = sep.join(cells).encode("utf-8")
        return kind, b"\n".join(lines) + b"\n", REFUSED
    elif kind == "big":
        cells[0] = rng.choice(["9" * 18, str(2**63 - 1), str(2**62)])
    if kind in ("field", "big"):
        lines[row] = sep.join(cells).encode(coding)
    elif kind == "swap":
        other = rng.randrange(bool(f.header), len(lines))
        lines[row], lines[other] = lines[other], lines[row]
        declared = {}
    elif kind == "cut":
        at = rng.randrange(1, len(lines[row]))
        whole = lines[row].rfind(sep.encode()) < at  # inside the last cell: a legal row, of another value
        lines[row], declared = lines[row][:at], COUNTED if whole else REFUSED
    elif kind == "join":
        lines[row : row + 2] = [b"".join(lines[row : row + 2])]
        if row == len(lines) - 1 and len(lines) < len(raw.split(b"\n")) - 1:
            return kind, b"\n".join(lines) + b"\n", REFUSED
        declared = REFUSED if len(lines) < raw.count(b"\n") else SAME
    elif kind == "delete":
        row = rng.randrange(len(lines))
        del lines[row]
        declared = REFUSED if f.header and not row else COUNTED
    elif kind == "double":
        lines.insert(row, lines[row])
        declared = REFUSED if index else {"item the user already had": 1}
    elif kind == "exchange":
        lines[row] = b"\xff\xfe" + lines[row] if coding == "utf-8" else "Ω".encode() + lines[row]
    elif kind == "header":
        lines = [*lines[1:], lines[0]] if f.header else lines
        declared = REFUSED if f.header else {}
    elif kind == "span":  # a quote opens in one row and closes in the next: one valid row of CSV, of two rows
        row, mark = min(row, len(lines) - 2), sep.encode()
        lines[row] = lines[row].replace(mark, mark + b'"', 1)
        lines[row + 1] = b'"'.join(lines[row + 1].rpartition(mark)[::2]).replace(b'"', b'"' + mark, 1)
        declared = REFUSED if sep == "," else COUNTED
    elif kind == "quote":
        at = rng.randrange(len(lines[row]))
        lines[row] = lines[row][:at] + b'"' + lines[row][at:]
        declared = COUNTED
    return kind, b"\n".join(lines) + b"\n", declared


REQUIRED = {
    "hotpotqa": {"question": "", "context": "[", "supporting_facts": "["},
    "hub": {"question": "", "context": "[", "supporting_facts": "["},
    "musique": {"question": "", "paragraphs": "[", "id": "", "title": "", "paragraph_text": "", "is_supporting": "b"},
}


def mutated_json(rng: random.Random, layout: str, f: Format, file: str) -> tuple[str, bytes, object]:
    raw = f.files[file]
    kind = rng.choice("damage damage damage BOM CRLF form delete double swap missing wrong wrong wrong twice constant deep long "
                      "join half comma surrogate inner".split())  # fmt: skip
    if kind == "damage":
        kind, out, declared = damage(rng, raw)
        if kind == "truncate":  # a record without its line end is whole
            declared = (
                COUNTED if f.json == "lines" and raw[len(out) - 1 : len(out) + 1] in (b"}\n", b"\n{") else REFUSED
            )
        return kind, out, declared
    if kind in ("BOM", "CRLF"):
        return ends(rng, raw, kind)
    records = json.loads(raw) if f.json == "array" else [json.loads(line) for line in raw.splitlines()]
    at, declared = rng.randrange(len(records)), REFUSED
    record, other = records[at], rng.randrange(len(records))
    write = lambda rows: json.dumps(rows).encode() if f.json == "array" else json_lines(rows)  # noqa: E731
    places = {k: record if k in record else record["paragraphs"][rng.randrange(4)] for k in REQUIRED[layout]}
    key = rng.choice(list(places))
    if kind == "form":
        return kind, json_lines(records) if f.json == "array" else json.dumps(records, indent=1).encode(), SAME
    if kind in ("delete", "double"):
        records[at : at + 1] = [record] * (2 if kind == "double" else 0)
        return kind, write(records), len(records)
    if kind == "swap":
        records[at], records[other] = records[other], records[at]
        return kind, write(records), len(records)
    if kind == "missing":
        del places[key][key]
        return kind, write(records), REFUSED
    if kind == "wrong":
        places[key][key] = rng.choice(
            [w for w in WRONG[REQUIRED[layout][key]] if (key, w) != ("id", 1)]
        )  # an id may be 1
        return kind, write(records), REFUSED
    if kind == "inner":  # a value inside the lists of a record
        if layout == "hotpotqa":
            inner = [
                record["context"][0],
                record["context"][0][1],
                record["supporting_facts"],
                record["supporting_facts"][0],
            ]
        elif layout == "hub":
            inner = [record["context"]["title"], record["context"]["sentences"], record["supporting_facts"]["title"]]
        else:
            inner = [record["paragraphs"]]
        rng.choice(inner)[0] = rng.choice([None, 1, True, {}, 2.5])
        return kind, write(records), REFUSED
    text = write(records).decode()
    if kind == "twice":
        return kind, text.replace('"question": ', '"question": "x", "question": ', 1).encode(), REFUSED
    if kind == "constant":
        return (
            kind,
            text.replace(
                "3.5", rng.choice(["NaN", "Infinity", "-Infinity", "nan", "0x1", "01", "+1", ".5", "1."]), 1
            ).encode(),
            REFUSED,
        )
    if kind == "deep":
        return (
            kind,
            text.replace("3.5", rng.choice([DEEP, DEEP + "]" * len(DEEP), '{"a":' * 50_000]), 1).encode(),
            REFUSED,
        )
    if kind == "long":
        return kind, text.replace("3.5", "9" * 5000, 1).encode(), REFUSED
    if kind == "surrogate":  # half a character in a text costs that character, not the file
        text = text.replace("Who is", rng.choice(["\\ud800", "\\udc00 x", "\\ud800\\ud800"]), 1)
        return kind, text.encode(), len(records)
    if f.json == "array":
        return (
            kind,
            {"join": f"{text} {text}", "half": text.replace('}, {"_id"', "", 1), "comma": f"{text[:-1]},]"}[
                kind
            ].encode(),
            REFUSED,
        )
    whole = text.split("\n")
    if kind == "join":
        whole[:2] = [whole[0] + whole[1]]
    elif kind == "half":
        whole[at] = whole[at][: rng.randrange(1, len(whole[at]))]
    else:
        whole[at] += ","
    return kind, "\n".join(whole).encode(), REFUSED


def as_counted(f: Format, file: str, raw: bytes, got: Loaded, before: Loaded, declared) -> None:
    """Counts of a load against what the mutation declares."""
    if declared == SAME:
        assert got == before
    elif isinstance(declared, dict):
        assert len(got.examples) == len(before.examples)
        changed = {k: got.dropped.get(k, 0) - before.dropped.get(k, 0) for k in {*got.dropped, *before.dropped}}
        assert {k: v for k, v in changed.items() if v} == declared
    elif isinstance(declared, int):
        assert got.least == declared
    else:
        assert declared == COUNTED, "garbage was read in silence"
        events = file == next(iter(f.files))
        rows = rows_in(f, raw) if events else rows_in(f, next(iter(f.files.values())))
        assert got.least <= (before.least if rows is None else rows) <= got.most


@pytest.mark.parametrize("layout", FORMATS)
def test_fuzzed_data_files_keep_their_counts_or_are_refused_in_one_line(layout, tmp_path):
    """The line names the file and, where there is one, the line or record."""
    f, counts = FORMATS[layout], {}
    for name, raw in f.files.items():
        (tmp_path / name).write_bytes(raw)
    before = load(f.name, tmp_path)
    assert before.least == before.most == rows_in(f, next(iter(f.files.values()))) or f.json == "array"
    for n in range(EACH):
        rng = random.Random(f"{layout} {n}")
        file = list(f.files)[rng.random() > 0.75 and len(f.files) > 1]
        kind, raw, declared = mutated_json(rng, layout, f, file) if f.json else mutated_table(rng, f, file)
        (tmp_path / file).write_bytes(raw)
        with told(f"round {n}, {kind} of {file}, {declared}: {raw[:200]!r} ... {raw[-200:]!r}"):
            got, line = outcome(lambda: load(f.name, tmp_path))
            counts.setdefault(kind, [0, 0])[got is not REFUSED] += 1
            if got is not REFUSED:
                as_counted(f, file, raw, got, before, declared)
            else:
                assert declared in (REFUSED, COUNTED) and (kind != "packed" or "unpack it" in line), line
                assert "no usable example" in line or re.search(
                    rf"{re.escape(file)}( line \d| record \d|: is )", line
                ), line
        (tmp_path / file).write_bytes(f.files[file])
    assert sum(loads for _, loads in counts.values()) > 5, counts


@pytest.mark.parametrize("text", [t for t in NO_NUMBER if t != "1.25"] + ["1.0"])
def test_a_number_of_a_table_is_written_in_digits(text):
    """What Python's int() takes beyond that (1_0, blanks, other scripts) is damage in a published file."""
    for kind in (data.whole, data.ident, data.part_of_date):
        with pytest.raises(ValueError):
            kind(text)
    assert (data.whole("-12"), data.ident("007"), data.STARS["3.5"]) == (-12, 7, 3.5)


@pytest.mark.parametrize(
    "pack", [gzip.compress, lambda raw: b"PK\x03\x04" + raw, lambda raw: b"BZh9" + raw, lambda raw: b"\xfd7zXZ\0" + raw]
)
def test_a_packed_file_says_so(pack, tmp_path):
    for name, raw in FORMATS["csv"].files.items():
        (tmp_path / name).write_bytes(pack(raw))
    assert "movies.csv: is a packed file: unpack it" in outcome(lambda: load("movielens", tmp_path))[1]
