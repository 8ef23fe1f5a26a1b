"""`remat plan MODULE:FACTORY` saves a plan of a user's model; each mistake gives one line."""

from collections.abc import Callable
from pathlib import Path

import pytest

from remat_facade import generate_config, save_config
from remat_facade.cli.app import main
from remat_graph import Grads, load_graph, load_plan

FACTORIES = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))

    def forward(self, x, scale=1.0):
        return (self.layers(x) * scale).square().mean()

def pair():
    return Model(), torch.randn(32, 8)

def triple():
    return Model(), (torch.randn(32, 8),), {"scale": 2.0}

def alone():
    return Model()

class Two(Model):
    def forward(self, x):
        y = self.layers(x)
        return y.square().mean(), y

def two():
    return Two(), torch.randn(32, 8)

def frozen():
    return Model().requires_grad_(False), torch.randn(32, 8)

def narrow():
    return Model(), torch.randn(32, 7)

def broken():
    return Model(), undefined

def exits():
    raise SystemExit(0)

class Exits(Model):
    def forward(self, x):
        raise SystemExit(0)

def exiting():
    return Exits(), torch.randn(32, 8)

constant = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a module of factories, and its own cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "user_factories.py").write_text(FACTORIES)
    return tmp_path


@pytest.fixture
def complaint(capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Plan a target that cannot be planned, and return stderr."""

    def plan(target: str) -> str:
        assert main(["plan", target, "--budget", "100%"]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1, err
        return err

    return plan


@pytest.mark.parametrize("target", ["user_factories.py:pair", "user_factories:triple"])
def test_a_model_of_the_users_is_planned(
    target: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The target is in a file or a module; plan and graph match and can be solved again without the model."""
    words = ["--budget", "100%", "--solver", "noremat", "--out", "plan.json", "--graph-out", "new/graph.json"]
    assert main(["plan", target, *words]) == 0
    out = capsys.readouterr().out
    assert "Model, predicted" in out
    assert "wrote plan.json" in out

    graph = load_graph(folder / "new" / "graph.json")
    assert load_plan(folder / "plan.json", graph).graph_name == "Model"
    assert main(["solve", "new/graph.json", "--budget", "100%", "--solver", "noremat"]) == 0


@pytest.mark.parametrize("by", ["words", "file"])
def test_a_plan_for_what_the_loop_holds(by: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Dropped outputs are in the graph and gradients in the plan, asked for by options or by a config."""
    save_config(
        generate_config("noremat").with_(outputs="dropped", gradients="present"), folder / "config.yaml"
    )
    words = {
        "words": ["--solver", "noremat", "--outputs", "dropped", "--gradients", "present"],
        "file": ["--config", "config.yaml"],
    }[by]
    out = ["--out", "plan.json", "--graph-out", "graph.json"]
    assert main(["plan", "user_factories.py:two", "--budget", "100%", *words, *out]) == 0
    assert "for steps that find a .grad" in capsys.readouterr().out
    graph, plan = load_graph(folder / "graph.json"), load_plan(folder / "plan.json")
    assert [32 * 8 * 4] == [graph.values[v].nbytes for v in graph.dropped]
    assert plan.grads is Grads.PRESENT
    over = ["--outputs", "kept", "--gradients", "new"]
    assert main(["plan", "user_factories.py:two", "--budget", "100%", *words[:2], *over, *out]) == 0
    assert not load_graph(folder / "graph.json").dropped
    assert load_plan(folder / "plan.json").grads is Grads.NEW


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--outputs", "gone"], "'gone' is not one of 'kept', 'dropped'"),
        (["--gradients", "old"], "'old' is not one of 'new', 'present'"),
    ],
)
def test_other_words_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before a model is loaded."""
    assert main(["plan", "nowhere.py:pair", "--budget", "100%", *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("user_factories", "MODULE:FACTORY"),
        ("user_factories:", "MODULE:FACTORY"),
        (":pair", "MODULE:FACTORY"),
        ("user_factories.py:piar", "it has"),
        ("user_factories.py:constant", "constant in user_factories.py is an object of type int"),
        ("nowhere.py:pair", "no such file nowhere.py"),
        ("nowhere_at_all:pair", "No module named"),
        ("user_factories.py:alone", "expected (model, sample)"),
        ("user_factories.py:broken", "NameError: name 'undefined' is not defined (user_factories.py, line"),
        ("user_factories.py:exits", "calling exits() raised SystemExit: 0 (user_factories.py, line"),
        ("user_factories.py:exiting", "the model ended the program (exit code 0)"),
        ("user_factories.py:frozen", "trainable"),
        ("user_factories.py:narrow", "cannot be multiplied (32x7 and 8x"),
        ("user_factories.py:narrow", "(return (self.layers(x) * scale)"),
    ],
)
def test_a_wrong_target_is_one_line(target: str, said: str, complaint: Callable[[str], str]) -> None:
    """The error names what was expected, or the failing line of the user's code."""
    assert said in complaint(target)


def test_a_module_that_does_not_parse(folder: Path, complaint: Callable[[str], str]) -> None:
    """A syntax error gives one line."""
    (folder / "unfinished.py").write_text("def make(:\n")
    assert "SyntaxError" in complaint("unfinished.py:make")


@pytest.mark.filterwarnings("default")
def test_a_cache_that_cannot_be_written_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan is made nevertheless, and the warning names the variable to set."""
    (folder / "file").write_text("mine")
    monkeypatch.setenv("REMAT_CACHE_DIR", str(folder / "file"))
    assert main(["plan", "user_factories.py:pair", "--budget", "100%", "--solver", "noremat"]) == 0
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "REMAT_CACHE_DIR" in err
    assert (folder / "file").read_text() == "mine"


def test_the_times_may_be_those_of_another_device(capsys: pytest.CaptureFixture[str]) -> None:
    """The plan records the platform; an unknown platform gives one line."""
    words = ["plan", "user_factories:pair", "--budget", "100%", "--no-zoo"]
    assert main([*words, "--platform", "h200-spec", "--out", "plan.json"]) == 0
    assert load_plan("plan.json").platform.startswith("h200-spec (by its data sheet, not measured")
    capsys.readouterr()
    assert main([*words, "--platform", "abacus"]) == 2
    err = capsys.readouterr().err
    assert "no cost platform 'abacus': choose one of " in err
    assert ", h200-spec, " in err
    assert ", roofline" in err
    assert err.count("\n") == 1
    assert main([*words, "--platform", "abacus.json"]) == 2
    assert "abacus.json: no such file; check the path" in capsys.readouterr().err
