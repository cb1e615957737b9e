"""run.py: files that are never half written, and the loggers beside log.jsonl. Resuming is in test_resume.py."""

import os
import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest
from test_train import go, lines, on_cpu  # noqa: F401

import run


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    """The disk is full: a reader still finds the old text (F50)."""
    path = str(tmp_path / "a")
    run.write(path, "old")

    def full(handle):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(os, "fsync", full)
        run.write(path, "new, and longer")
    assert open(path).read() == "old"
    run.write(path, "é\n" + run.lines_of([{"a": 1}, {"b": "é"}]))
    assert os.listdir(tmp_path) == ["a"]
    assert open(path, encoding="utf-8").read() == 'é\n{"a": 1}\n{"b": "\\u00e9"}\n'


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_another_logger_gets_what_the_log_gets(name, tmp_path, monkeypatch):
    """Stand-ins for the two packages: every number of every step arrives, and the logger is closed at the end."""
    got, ended = {}, []

    class Board:
        def __init__(self, folder):
            assert folder == str(tmp_path / "a")

        def add_scalar(self, key, value, step):
            got.setdefault(step, {})[key] = value

        def close(self):
            ended.append(1)

    def init(dir, name, config):
        assert (dir, name, config["method"]) == (str(tmp_path / "a"), "a", "sft")

    modules = {
        "wandb": SimpleNamespace(
            init=init, log=lambda metrics, step: got.update({step: dict(metrics)}), finish=lambda: ended.append(1)
        ),
        "torch.utils.tensorboard": SimpleNamespace(SummaryWriter=Board),
    }
    for module, stand_in in modules.items():
        stand_in.__spec__ = ModuleSpec(module, None)  # other packages look whether it is there
        monkeypatch.setitem(sys.modules, module, stand_in)
    go(tmp_path / "a", f"--method sft --steps 2 --report {name}")
    assert got == {row.pop("step"): row for row in lines(tmp_path / "a")} and ended == [1]
    assert "valid/ndcg@2" in got[2]


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_logger_that_is_not_installed_ends_in_one_line_and_leaves_no_run(name, tmp_path, capsys, monkeypatch):
    for module in ("wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit) as stop:
        go(tmp_path / "a", f"--method sft --steps 1 --report {name}")
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and f"pip install {name}" in error
    assert not os.path.exists(tmp_path / "a")
    go(tmp_path / "a", "--method sft --steps 1")
    assert len(lines(tmp_path / "a")) == 1
