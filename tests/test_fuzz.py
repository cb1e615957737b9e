"""Damaged settings and data files: what was asked for is read, or one line says what is wrong; never a traceback.

Every mutation declares what may come of it, so a file that loads with other values or other counts than it says fails
here. All draws are seeded: a failure names the round, and the same round gives the same file.
"""

import contextlib
import dataclasses
import io
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
ROUNDS = 500
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
         "&a [*a]\n", "steps: &a [*a]\n", "steps: *nowhere\n", "\ufeff\ufeffsteps: 1\n", "!!python/object:config.Config {}\n"]  # fmt: skip
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
    return dict(line.split(" #")[0].split(": ", 1) for line in lines if line and line[0] != "#")


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
