"""What nobody may do to us: run code from weights, settings, data or templates, leave the run folder, or read our keys.

docs/security.md says what is trusted; each row of its table names a test here. Every payload is checked to be live: the same
bytes, given to a reader that trusts them, do what they say.
"""

import ast
import contextlib
import io
import json
import os
import pickle
import re
import shutil

import pytest
import torch

import data
import eval as evaluation
import model as lm
import run
import train
from config import Config, dump, fail, parse

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CPU = torch.device("cpu")
ESCAPES = "\x1b]0;owned\x07 \x9b31m \u202e"  # sets the title of a terminal, colours it, turns the line around


def refused(call) -> str:
    """The one line with which a call ends."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as stop:
        call()
    assert stop.value.code == 2 and said.getvalue().count("\n") == 1, said.getvalue()
    return said.getvalue()


class Payload:
    """Touches a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture
def payload(tmp_path):
    """(path that must not appear, an object that makes it)."""
    ran = tmp_path / "ran"
    pickle.loads(pickle.dumps(Payload(ran))).close()
    assert ran.exists()  # it is live
    ran.unlink()
    return ran, Payload(ran)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Hugging Face folder."""
    path = tmp_path_factory.mktemp("hf")
    cfg = Config(layers=1, width=32, max_prompt=64, max_new_tokens=16)
    tokenizer = lm.build_tokenizer("byte", [])
    lm.save(lm.build(cfg, tokenizer), tokenizer, str(path))
    return path


def small(init) -> Config:
    return Config(init=str(init), layers=1, width=32, max_prompt=64, max_new_tokens=16)


# ---------------------------------------------------------------------------------------------------------------------
# Code from files


BANNED = {"exec", "eval", "compile", "__import__", "system", "popen", "unsafe_load", "full_load", "load_all", "extractall", "unpack_archive",
          "urlopen", "urlretrieve", "import_module"}  # fmt: skip
PICKLES = {"workers.py"}  # what our own forked children send back through their pipes


def calls(path: str):
    """(name, where, keywords, what it is called on) of every call in a source file."""
    with open(path, encoding="utf-8") as f:
        tree = ast.parse(f.read())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            f, bare = node.func, isinstance(node.func, ast.Name)
            name = f.id if bare else f.attr if isinstance(f, ast.Attribute) else ""
            on = f.value.id if isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name) else ""
            yield name, bare, on, {k.arg: k.value for k in node.keywords}, f"{os.path.basename(path)}:{node.lineno}"


def is_true(node) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def test_no_source_reads_pickles_or_runs_what_it_reads():
    """weights_only everywhere, safetensors for weights, no remote code unasked, no eval, no shell, no downloads of our own."""
    seen = set()
    for name in sorted(n for n in os.listdir(ROOT) if n.endswith(".py")):
        for call, bare, on, keys, where in calls(os.path.join(ROOT, name)):
            banned = call in BANNED and not (call in ("eval", "compile") and not bare)  # model.eval(), re.compile()
            assert not banned, where
            assert not is_true(keys.get("shell")) and not is_true(keys.get("allow_pickle")), where
            if call in ("load", "loads") and on in ("torch", "pickle", "yaml", "marshal", "joblib", "np"):
                assert (on == "torch" and is_true(keys.get("weights_only"))) or (on == "pickle" and name in PICKLES), (
                    where
                )
                seen.add(on)
            if call == "from_pretrained":
                assert "trust_remote_code" in keys or is_true(keys.get("use_safetensors")), where
                assert not is_true(keys.get("trust_remote_code")), where
                seen.add(call)
    assert {"torch", "from_pretrained"} <= seen  # the names are still those of the code


def test_a_pickle_in_a_checkpoint_is_refused_and_not_run(tmp_path, payload):
    ran, bad = payload
    cfg = Config(run_dir=str(tmp_path / "run"), steps=3, resume=True)
    step = tmp_path / "run" / "checkpoints" / "step-000001"
    step.mkdir(parents=True)
    for place in (tmp_path / "run", step):
        (place / "config.yaml").write_text(dump(cfg))
    for file in ({"step": 1, "optimizer": bad}, bad):
        torch.save(file, step / "trainer.pt")
        message = refused(lambda: run.Run(cfg, 0).read_state())
        assert str(step) in message and "damaged" in message and not ran.exists()


@pytest.mark.parametrize("form", ["zip", "pickle"])
def test_weights_in_a_pickle_are_not_read_at_all(tmp_path, payload, folder, form):
    ran, bad = payload
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    with open(tmp_path / "model" / "pytorch_model.bin", "wb") as f:
        torch.save({"lm_head.weight": bad}, f) if form == "zip" else pickle.dump(bad, f)
    message = refused(lambda: lm.load(small(tmp_path / "model"), None, CPU))
    assert "safetensors" in message and not ran.exists()


CODE = """
from transformers import Qwen3Config, Qwen3ForCausalLM
class C(Qwen3Config): pass
class M(Qwen3ForCausalLM): pass
open({ran!r}, "w").close()
"""


def test_code_beside_the_weights_runs_only_with_the_flag(tmp_path, folder, monkeypatch):
    """The model is of a known kind, so it loads without its code; what the code would do shows with the flag."""
    ran = tmp_path / "ran"
    shutil.copytree(folder, tmp_path / "model")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *a: "y")  # nobody is asked
    (tmp_path / "model" / "theirs.py").write_text(CODE.format(ran=str(ran)))
    path = tmp_path / "model" / "config.json"
    kinds = {"AutoConfig": "theirs.C", "AutoModelForCausalLM": "theirs.M"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": kinds}))
    lm.load(small(tmp_path / "model"), None, CPU)
    assert not ran.exists()
    cfg = small(tmp_path / "model")
    cfg.trust_remote_code = True
    with contextlib.suppress(SystemExit):
        lm.load(cfg, None, CPU)
    assert ran.exists()


def test_a_model_cannot_name_the_attention_code_that_it_runs_with(tmp_path, folder):
    """config.json may name an attention kernel of the hub; the one that --attention says is used."""
    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(
        json.dumps(
            {
                **json.loads(path.read_text()),
                "_attn_implementation": "their/kernel",
                "attn_implementation": "their/kernel",
            }
        )
    )
    model = lm.load(small(tmp_path / "model"), None, CPU)
    assert model.config._attn_implementation == "sdpa"


TEMPLATES = {
    "a file": "{% include '/etc/passwd' %}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['os'].mkdir('RAN') }}",
    "attr": "{{ (raise_exception|attr('__globals__'))['os'].mkdir('RAN') }}",
    "a mutation": "{{ messages.append(1) }}",
    "a long loop": "{% for i in range(1000000000) %}x{% endfor %}",
    "no template": "{% for",
    "an exception": "{{ raise_exception('no system role\n\x1b[31m') }}",
}


@pytest.mark.parametrize("what", TEMPLATES)
def test_a_chat_template_can_neither_read_nor_run_anything(what, tmp_path, folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATES[what])
    message = refused(lambda: lm.load_tokenizer(small(tmp_path / "model")))
    assert "its chat template fails" in message and "\x1b" not in message and os.listdir() == ["model"]


# ---------------------------------------------------------------------------------------------------------------------
# Paths, keys, the terminal


def tree(root) -> set[str]:
    return {os.path.relpath(os.path.join(place, name), root) for place, _, names in os.walk(root) for name in names}


HOSTILE = [
    "../../escaped",
    "/tmp/escaped",
    "..",
    "a/../../escaped",
    "x\0y",
    "C:\\escaped",
    "<script>alert(1)</script>",
    f"bell {ESCAPES}",
    "~/.ssh/x",
]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Questions whose ids, titles and texts are paths, escapes and markup."""
    path = tmp_path_factory.mktemp("data")
    rows = [{"_id": name, "question": f"{name}?", "answer": name, "supporting_facts": [[f"{name} {j}", 0] for j in range(2)],
             "context": [[f"{name} {j}", [f"{name} says {j}."]] for j in range(4)]} for name in HOSTILE]  # fmt: skip
    for file in ("train.json", "validation.json"):
        (path / file).write_text(json.dumps(rows))
    return path


SECRETS = {
    "WANDB_API_KEY": "wandb-" + "5" * 34,
    "HF_TOKEN": "hf_" + "7" * 34,
    "AWS_SECRET_ACCESS_KEY": "aws-" + "9" * 34,
}


def test_a_run_on_hostile_data_writes_in_its_folder_only_and_no_keys(tmp_path, hostile, monkeypatch):
    """Names made from data: none. Checkpoints hold tensors and JSON; every line of a log is strict JSON; nothing is HTML."""
    monkeypatch.chdir(tmp_path)
    for key, value in SECRETS.items():
        monkeypatch.setenv(key, value)
    settings = "--data hotpotqa --method grpo --group_size 2 --batch_size 2 --steps 2 --layers 1 --width 32 --tokenizer byte --pool_size 6"
    settings += " --slate_size 3 --rank_size 2 --max_prompt 1000 --max_new_tokens 8 --save_every 1 --keep 1 --best_metric mrr --eval_k 1"
    before = tree(hostile)
    train.main(parse([*settings.split(), "--data_dir", str(hostile), "--run_dir", "out/run"]))
    evaluation.main(["--init", "out/run", "--split", "test"])
    assert os.listdir(tmp_path) == ["out"] and os.listdir("out") == ["run"] and tree(hostile) == before
    files = tree("out/run")
    assert len(files) > 8 and not any("escaped" in f or "script" in f for f in files)
    assert {os.path.splitext(f)[1] for f in files} <= {
        ".json",
        ".jsonl",
        ".yaml",
        ".pt",
        ".safetensors",
        ".jinja",
        "",
    }, files
    for name in files:
        with open(os.path.join("out/run", name), "rb") as f:
            raw = f.read()
        assert not any(value.encode() in raw for value in SECRETS.values()), name
        assert (b"<html" not in raw.lower() and b"\x1b" not in raw) or name.endswith((".pt", ".safetensors")), name
        if name.endswith(".jsonl"):
            for line in raw.decode().splitlines():
                json.loads(line, parse_constant=pytest.fail)


def test_what_json_cannot_say_is_null():
    row = {"loss": float("nan"), "kl": float("inf"), "rewards": [1.0, -float("inf")], "text": "NaN"}
    assert run.lines_of([row]) == '{"loss": null, "kl": null, "rewards": [1.0, null], "text": "NaN"}\n'


@pytest.mark.parametrize("linked", ["step", "best"])
def test_pruning_deletes_nothing_outside_the_checkpoints(tmp_path, linked):
    """Whatever a link in the folder points at stays, with all it holds."""
    outside = tmp_path / "elsewhere" / "step-000001"
    outside.mkdir(parents=True)
    (outside / "kept").write_text("mine")
    cfg = Config(run_dir=str(tmp_path / "run"), keep=1, layers=1, width=32, max_prompt=64, max_new_tokens=16)
    home = tmp_path / "run" / "checkpoints"
    home.mkdir(parents=True)
    os.symlink(outside, home / ("step-000001" if linked == "step" else "best"))
    tokenizer = lm.build_tokenizer("byte", [])
    policy = evaluation.Policy(lm.build(cfg, tokenizer), tokenizer, [], [], torch.float32)
    writer = run.Run(Config(run_dir=str(tmp_path / "new")), 0)
    writer.cfg, writer.folder = cfg, str(home)
    for step in (2, 3, 4):
        writer.save(step, policy, torch.optim.AdamW(policy.model.parameters()), better=False)
    assert (outside / "kept").read_text() == "mine"
    assert {n for n in os.listdir(home) if not os.path.islink(home / n) and n[0] != "."} == {"step-000004"}


def test_nothing_from_data_reaches_the_terminal_raw(hostile, capsys, monkeypatch):
    """data.py show and error lines write escapes as text; a bell or a title bar is not ours to ring or set."""
    monkeypatch.setattr(data, "clean", lambda text: text)  # whatever the loaders leave
    data.main(["show", "hotpotqa", "--data_dir", str(hostile), "--split", "train", "-n", "99", "--max_prompt", "4000"])
    out = capsys.readouterr().out
    assert "\\x1b]0;owned\\x07" in out and all(c.isprintable() or c == "\n" for c in out)
    message = refused(lambda: fail(f"no {ESCAPES} here"))
    assert "\\x1b]0;owned\\x07 \\x9b31m \\u202e" in message and message[:-1].isprintable()


def test_a_hub_name_may_pin_a_commit(monkeypatch):
    asked = {}

    class AutoModel:
        def from_pretrained(path, **kwargs):
            asked.update(kwargs, path=path)

    lm.from_hub(AutoModel, Config(init="owner/model@0123abc"))
    assert (asked["path"], asked["revision"], asked["trust_remote_code"]) == ("owner/model", "0123abc", False)
    lm.from_hub(AutoModel, Config(init="owner/model"))
    assert asked["path"] == "owner/model"


def test_every_row_of_the_page_names_a_test():
    with open(os.path.join(ROOT, "docs", "security.md"), encoding="utf-8") as f:
        rows = [line for line in f if line.startswith("|")][2:]
    assert len(rows) > 8
    for row in rows:
        names = re.findall(r"`(test_\w+)\.py::(test_\w+)`", row)
        assert names, row
        for file, name in names:
            with open(os.path.join(ROOT, "tests", f"{file}.py"), encoding="utf-8") as f:
                assert f"\ndef {name}(" in f.read(), name
