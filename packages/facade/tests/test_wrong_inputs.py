"""Wrong inputs of the command and of the constructors: one line, the right advice, and exit code 2."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from remat_facade import Hiremate, Offmate, PureRotor, RematError, generate_config, limit_memory
from remat_facade.cli.app import main
from remat_facade.cli.target import Target

from .corpus import GRAPHS

UNET = str(GRAPHS / "unet.json")
PLAN = ["plan", "wrong.py:make", "--budget", "50%"]

FACTORY = """
import threading
import torch
from torch import nn

def make():
    return nn.Linear(4, 4), torch.randn(2, 4)

def model():
    return nn.Linear(4, 4)

def needs(size):
    return nn.Linear(size, size), torch.randn(2, size)

def pair(size, other):
    return needs(size)

def fails(size):
    raise TypeError("inside")

class Net(nn.Linear):
    pass

def by_name(*, batch):
    return nn.Linear(4, 4), torch.randn(batch, 4)

def of_three():
    return 1, 2, 3, 4

def wide():
    return nn.Linear(4, 4), torch.randn(2, 5)

def pieces():
    return nn.ModuleList([nn.Linear(4, 4)]), torch.randn(2, 4)

def text():
    return nn.Linear(4, 4), "sample"

def locked():
    model = nn.Linear(4, 4)
    model.lock = threading.Lock()
    return model, torch.randn(2, 4)

def small():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(4, 8)

def number():
    return 3, torch.randn(2, 4)

four = 4

async def later():
    return make()

def images():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
"""

# Words of the command, and what the line must name: what came, or what to do.
WITHOUT_TORCH = [
    (["slove"], "Did you mean 'solve'"),
    (["--fast"], "No such option: --fast"),
    (["plan"], "Missing argument 'MODULE:FACTORY'"),
    (["plan", "wrong.py:make"], "Missing option '--budget'"),
    (["solve", UNET], "Missing option '--budget'"),
    (["solve", "nowhere.json", "--budget", "40%"], "nowhere.json: no such file"),
    (["solve", UNET, "--budget", "many"], "is neither a size nor a percentage; give whole bytes"),
    (["solve", UNET, "--budget", "3 bananas"], "'bananas' is not a unit; give whole bytes"),
    (["solve", UNET, "--budget", "0"], "is zero; give whole bytes"),
    (["solve", UNET, "--budget", "-2GiB"], "is negative; give whole bytes"),
    (["solve", UNET, "--budget", "nan%"], "give whole bytes such as"),
    (["solve", UNET, "--budget", "40"], 'it would be 40 B; did you mean "40%" or "40GiB"?'),
    (["solve", UNET, "--budget", "2.5"], "is not a whole number of bytes; give whole bytes"),
    (["solve", UNET, "--budget", "0.4"], 'is not a whole number of bytes; did you mean "40%"?'),
    (["solve", UNET, "--budget", "2 g"], "'g' is not a unit; did you mean \"2GiB\"?"),
    (["solve", ".", "--budget", "40%"], "cannot be read (Is a directory): check the path"),
    (["solve", UNET, "--budget", "40%", "--plan-out", "lazy.py"], "a .py file may be your code, settings"),
    (["solve", UNET, "--budget", "40%", "--seed", "9" * 20], "0 or more, below 2^63, got 9"),
    (["sweep", UNET, "--png", "curves.txt"], "ends with one of .png, .svg, .pdf"),
    (["demo", "--out", "wrong.json"], "wrong.json is a file: name a folder"),
    (
        ["max-batch", "wrong.py:needs", "--budget", "1GiB", "--max-overhead", "much"],
        "a percentage such as 30%",
    ),
    (["max-batch", "wrong.py:needs", "--budget", "1GiB", "--max-overhead", "-3%"], "got '-3%'"),
    (["plan", "wrong.py::make", "--budget", "50%"], "has more than one colon; expected MODULE:FACTORY"),
    (
        ["plan", "openai-community/gpt2", "--input", "128", "--budget", "50%"],
        "for a model of a hub name its class, such as transformers.GPT2LMHeadModel",
    ),
    (["solve", UNET, "--budget", "40%", "--solver", "mincutt"], "did you mean 'mincut'"),
    (["solve", UNET, "--budget", "40%", "--config", "chekmate"], "did you mean checkmate?"),
    (
        ["solve", UNET, "--budget", "40%", "--config", "nowhere.yaml"],
        "nowhere.yaml: cannot be read (No such file or directory): check the path",
    ),
    (["solve", UNET, "--budget", "40%", "--config", "auto", "--solver", "monet"], "either solver or config"),
    (["solve", UNET, "--budget", "40%", "--config", "offmate"], "use Offmate"),
    (["solve", UNET, "--budget", "40%", "--seed", "-1"], "--seed"),
    (
        ["solve", UNET, "--budget", "40%", "--seed", "one"],
        "Invalid value for '--seed': Input should be a valid integer",
    ),
    (["solve", UNET, "--budget", "40%", "--time-limit", "0"], "expected seconds above 0"),
    (["solve", UNET, "--budget", "40%", "--time-limit", "-3"], "expected seconds above 0"),
    (["solve", UNET, "--budget", "40%", "--gradients", "old"], "'old' is not one of 'new', 'present'"),
    (["solve", UNET, "--budget", "40%", "--plan-out", "a", "--order-out", "a"], "names the same file as"),
    (["solve", UNET, "--budget", "40%", "--plan-out", "."], "it is a folder): choose another path"),
    (["solve", "wrong.json", "--budget", "40%"], "wrong.json: is not valid JSON at line 2"),
    (["solve", "wrong.py", "--budget", "40%"], "wrong.py: is a model, and a saved graph was wanted: `remat"),
    (["solve", "wrong.py:make", "--budget", "40%"], "`remat plan wrong.py:make --budget 100% --graph-out"),
    (["min-budget", "wrong.py:make"], "`remat plan wrong.py:make --budget 100% --graph-out FILE` writes one"),
    (["solve", "wrong.graph", "--budget", "40%"], "wrong.graph: is a model, and a saved graph was wanted"),
    (
        ["solve", "missing.graph", "--budget", "40%"],
        "missing.graph: no such file; check the path; a saved gra",
    ),
    (["min-budget", "missing.graph"], "missing.graph: no such file; check the path"),
    (
        ["show", "missing.plan"],
        "missing.plan: no such file; check the path; a saved plan was wanted: `remat plan",
    ),
    (["show", "plan.json", "--graph", "missing.graph"], "missing.graph: no such file"),
    (["check", "wrong.py:make", "--plan", "missing.plan"], "missing.plan: no such file"),
    (["doctor", "missing.graph"], "missing.graph: no such file"),
    (["min-budget", "torch.nn.Linear"], "is a model, and a saved graph was wanted"),
    (["show", "wrong.py:make"], "`remat plan wrong.py:make --budget 40% --plan-out FILE` writes one"),
    (["show", "plan.json", "--graph", "wrong.py:make"], "is a model, and a saved graph was wanted"),
    (["check", "wrong.py:make", "--plan", "wrong.py:make"], "is a model, and a saved plan was wanted"),
    (["check", UNET], "for a saved graph use `remat solve`, `sweep` or `doctor`"),
    ([*PLAN[:3], "40"], 'it would be 40 B; did you mean "40%" or "40GiB"?'),
    ([*PLAN[:3], "lots"], '"auto" for what the device has left'),
    (
        [*PLAN[:3], "2GiB", "--device-memory", "1GiB"],
        "budget 2GiB exceeds the memory of the given device, which has 1.00 GiB: give less",
    ),
    (
        ["plan", "torch.nn.Linear", "--input", "4", "--budget", "auto", "--platform", "v100"],
        "the memory of the device of --platform is unknown; add --device-memory, for example 16GiB",
    ),
    ([*PLAN, "--device-memory", "80"], "remat: --device-memory '80': is 80 bytes; did you mean \"80GiB\"?"),
    ([*PLAN, "--device-memory", "50%"], "a percentage is not a number of bytes; give"),
    ([*PLAN, "--platform", "h1000"], "choose one of a100-spec"),
    ([*PLAN, "--platform", "p32xlarge_fp16"], "name p32xlarge, and plan the model in float16, by `--dtype"),
    ([*PLAN, "--dtype", "half"], "'half' is not one of 'float32', 'float64', 'float16', 'bfloat16'"),
    (["sweep", UNET, "--dtype", "float16"], "--dtype is for a model: give MODULE:FACTORY"),
    ([*PLAN, "--platform", "nowhere.json"], "nowhere.json: no such file"),
    ([*PLAN, "--platform", "H100"], "no cost platform 'H100' (did you mean h100?)"),
    ([*PLAN, "--platform", "h1000"], "; -spec may be left out"),
    ([*PLAN[:3], "40", "%"], "(%): write 40% without a space"),
    ([*PLAN, "--device-memory", "16", "GiB"], "write 16GiB without a space"),
    (["solve", UNET, "--budget", "40%", "more"], "(more); see `remat solve --help`"),
    ([*PLAN, "--optimizer", "adamm"], "name one of adafactor"),
    ([*PLAN, "--solver", "nobody"], "unknown solver 'nobody'"),
    ([*PLAN, "--ways", "all"], "'all' is not one of 'exact', 'rounding', 'none'"),
    ([*PLAN, "--plan-out", "a", "--graph-out", "a"], "--graph-out names the same file as --plan-out"),
    ([*PLAN, "--out", "wrong.py"], "names the same file as MODULE:FACTORY"),
    ([*PLAN, "--input", "3x224y224"], "is not a shape: give sizes such as 3x224x224"),
    ([*PLAN, "--input", "0x4"], "is not a shape: give sizes such as 3x224x224"),
    ([*PLAN, "--input", "9" * 5000], "is not a shape: give sizes such as 3x224x224"),
    ([*PLAN, "--batch", "0"], "--batch"),
    (["plan", "wrong.py", "--budget", "50%"], "expected wrong.py:NAME"),
    (["plan", "wrong", "--budget", "50%"], "expected MODULE:FACTORY"),
    (["plan", "torchvision.models.resnet50", "--budget", "50%"], "needs --input 3x224x224"),
    (["plan", "nowhere.py:make", "--budget", "50%"], "no such file nowhere.py: check the path"),
    (["plan", "no_such_package:make", "--budget", "50%"], "install it, or check the name"),
    (["plan", "no_such_package.net", "--input", "3x8x8", "--budget", "50%"], "install it, or check the name"),
    (["plan", "wrong.py", "--input", "4", "--budget", "50%"], "expected wrong.py:NAME"),
    (["plan", "../t/wrong.Net", "--input", "4", "--budget", "50%"], "expected ../t/wrong.py:Net"),
    (["plan", "../t/wrong", "--input", "4", "--budget", "50%"], "expected ../t/wrong.py:NAME"),
    (["plan", "t/wrong:make", "--budget", "50%"], "expected t/wrong.py:make"),
    (["plan", ".wrong.Net", "--input", "4", "--budget", "50%"], ", or MODULE:FACTORY, such as train.py:make"),
    (
        ["plan", "gpt2", "--input", "4", "--budget", "50%"],
        "expected the full name of a model, such as",
    ),
    (["plan", UNET, "--budget", "50%"], "is the name of a saved graph or plan; expected a model"),
    (["plan", UNET, "--input", "4", "--budget", "50%"], "is the name of a saved graph or plan"),
    (["plan", "torch.Linear", "--input", "4", "--budget", "50%"], "did you mean torch.nn.Linear?"),
    (["sweep", UNET, "--input", "3"], "--input is for a model: give MODULE:FACTORY, or leave it out"),
    (["check", "wrong.py:make", "--budget", "auto"], "is neither a size nor a percentage"),
    (["check", "wrong.py:make", "--budget", "60"], 'did you mean "60%" or "60GiB"?'),
    (["check", "wrong.py:make", "--steps", "0"], "--steps"),
    (["check", "wrong.py:make", "--plan", UNET], "is not a plan file"),
    (["check", "wrong.py:make", "--plan", "nowhere.json"], "nowhere.json: no such file"),
    (["check", "nowhere.py:make"], "no such file nowhere.py"),
    (["max-batch", "wrong.py:needs"], "give either --budget, the bytes of a step, or --device-memory"),
    (["max-batch", "wrong.py:needs", "--budget", "1GiB", "--device-memory", "1GiB"], "give either --budget"),
    (["max-batch", "wrong.py:needs", "--budget", "8"], 'is 8 bytes; did you mean "8GiB"?'),
    (["max-batch", "wrong.py:needs", "--budget", "40%"], "a percentage is not a number of bytes; give"),
    (["max-batch", "wrong.py:needs", "--budget", "1GiB", "--solvers", "auto,nobody"], "'nobody'"),
    (["max-batch", "wrong.py:needs", "--budget", "1GiB", "--max-overhead", "-1"], "--max-overhead"),
    (["max-batch", "wrong.py:needs", "--budget", "1GiB", "--optimizer", "none at all"], "name one of"),
    (["sweep", UNET, "--solvers", "nobody"], "unknown solver 'nobody'"),
    (["sweep", UNET, "--budgets", "50%,lots"], "'lots'"),
    (["sweep", UNET, "--budgets", "50"], 'did you mean "50%" or "50GiB"?'),
    (["sweep", UNET, "--points", "0"], "--points"),
    (["sweep", UNET, "--no", "masks"], "no ways of a family 'masks'"),
    (["sweep", UNET, "--platform", "h100-spec"], "--platform is for a model: give MODULE:FACTORY"),
    (["sweep", UNET, "--csv", "a", "--png", "a"], "--png names the same file as --csv"),
    (["sweep", "nowhere.py:make"], "no such file nowhere.py"),
    (["sweep", "torchvision.models.resnet50"], "no such file; for a model give train.py:make, or its name"),
    (["doctor", "torchvision.models.resnet50"], "with --input 3x224x224"),
    (["doctor", UNET, "--outputs", "kept"], "--outputs is for a model: give MODULE:FACTORY"),
    (["doctor", UNET, "--budget", "many"], "'many'"),
    (["doctor", "wrong.py:make", "--budget", "40"], 'did you mean "40%" or "40GiB"?'),
    (["min-budget", "nowhere.json"], "nowhere.json: no such file"),
    (["min-budget", UNET, "--gradients", "some"], "'some' is not one of 'new', 'present'"),
    (["show", "nowhere.json"], "nowhere.json: no such file"),
    (["show", UNET], "is not a plan file of remat: it names no format"),
    (
        ["min-budget", "plan.json"],
        "'remat-graph' was wanted; `remat plan MODEL --budget 100% --graph-out FILE`",
    ),
    (["show", "plan.json", "--png", "a", "--html", "a", "--graph", UNET], "names the same file as"),
    (["show", "plan.json", "--png", "a"], "add --graph FILE"),
    (["config", "rocket"], "config: type"),
    (["config"], "Missing argument 'TYPE'"),
    (["zoo", "gpt2", "--out"], "requires an argument; see `remat zoo --help`"),
    (["demo", "--model", "gpt5"], "'gpt5' is not one of 'gpt2', 'resnet'"),
    (["demo", "--budget", "auto"], "is neither a size nor a percentage"),
    (["demo", "--steps", "1"], "--steps"),
]
WITH_TORCH = [
    (["plan", "wrong.py:mkae", "--budget", "50%"], "it has make: did you mean that?"),
    (["plan", "wrong.py:model", "--budget", "50%"], "for a model alone give --input, such as 3x224x224"),
    (["plan", "wrong.py:make", "--input", "4", "--budget", "50%"], "leave --input out for (model, sample)"),
    (
        ["plan", "wrong.py:needs", "--budget", "50%"],
        "needs an argument size; give --batch 8, or the argument",
    ),
    (
        ["plan", "wrong.py:make", "--batch", "3", "--budget", "50%"],
        "make() takes no batch size, and the comma",
    ),
    (["max-batch", "wrong.py:make", "--budget", "1MiB"], "such as: def make(batch): return model, sample"),
    (
        ["max-batch", "wrong.py:pair", "--budget", "1MiB"],
        "pair(size, other) cannot be called as pair(1); give",
    ),
    (
        ["plan", "wrong.py:pair", "--budget", "50%"],
        "needs arguments size, other; expected none; give a function",
    ),
    (["plan", "wrong.py:nn.Linear", "--budget", "50%"], "no function nn.Linear"),
    (
        ["plan", "wrong.py:Net", "--budget", "50%"],
        "Net is a class and needs arguments; give --input, the shape",
    ),
    (
        ["plan", "wrong.py:fails", "--batch", "3", "--budget", "50%"],
        "fails(3) raised TypeError: inside (wrong.py, ",
    ),
    (["plan", "wrong.py:of_three", "--budget", "50%"], "returned 4 values; expected (model, sample)"),
    (["plan", "wrong.py:wide", "--budget", "50%"], "with inputs of shape (2, 5)"),
    (
        ["plan", "wrong.py:model", "--input", "5", "--budget", "50%"],
        "Linear refuses inputs of shape (1, 5): Runtime",
    ),
    (
        ["plan", "wrong.py:images", "--input", "8x8x3", "--budget", "50%", "--platform", "h100"],
        "Sequential refuses inputs of shape (1, 8, 8, 3): RuntimeError: ",
    ),
    (
        ["max-batch", "wrong.py:images", "--input", "8x8x3", "--budget", "1GiB", "--platform", "h100"],
        "give another --input or --batch, or a function that returns",
    ),
    (["plan", "wrong.py:four", "--budget", "50%"], "four in wrong.py is an object of type int; expected"),
    (["plan", "wrong.py:later", "--budget", "50%"], "later in wrong.py is an async function; expected"),
    (["plan", "torch.optim.SGD", "--input", "4", "--budget", "50%"], "SGD is not a class of models, such as"),
    (
        ["plan", "torch.nn.functional.relu", "--input", "4", "--budget", "50%"],
        "relu needs arguments: input; give a function of yours",
    ),
    (
        ["plan", "wrong.py:needs", "--batch", "99999999", "--budget", "50%"],
        "use a smaller model or --batch",
    ),
    (["check", "wrong.py:wide", "--budget", "50%"], "with inputs of shape (2, 5)"),
    (["check", "wrong.py:locked", "--budget", "50%"], "copying the model raised TypeError: cannot pickle"),
    (["plan", "wrong.py:pieces", "--budget", "50%"], "a ModuleList has no forward, so a limit would bound"),
    (["sweep", "wrong.py:pieces"], "a ModuleList has no forward, so a limit would bound"),
    (["plan", "wrong.py:text", "--budget", "50%"], "sample: is of type str; expected a tensor"),
    (["plan", "wrong.py:number", "--budget", "50%"], "model: is of type int; expected an nn.Module"),
    (["plan", "wrong.py:make", "--budget", "900TiB"], 'give less, or a percentage such as "40%"'),
    (
        [*PLAN, "--device-memory", "50B"],
        "exceeds the memory of the given device, which has 50 B: give a smaller",
    ),
    (["plan", "wrong.py:small", "--budget", "80%"], "; raise the budget or use a smaller batch"),
    (["plan", "lazy.py:GPT3", "--budget", "50%"], "no function GPT3; the nearest of its names are GPT2Model"),
    (["plan", "torch.nn.Linier", "--input", "4", "--budget", "50%"], "it has Linear: did you mean that?"),
]

MODEL, SAMPLE = nn.Linear(4, 4), torch.randn(2, 4)
WRONG: Any = 3
CONSTRUCTORS: list[tuple[Callable[[], Any], str]] = [
    (lambda: Hiremate(MODEL, SAMPLE, "40"), 'did you mean "40%" or "40GiB"?'),
    (lambda: Hiremate(MODEL, SAMPLE, -1), "is negative; give"),
    (lambda: Hiremate(MODEL, SAMPLE, True), "is a bool, not a number of bytes"),
    (lambda: Hiremate(MODEL, SAMPLE, cast(Any, None)), "give whole bytes such as"),
    (lambda: Hiremate(WRONG, SAMPLE, "40%"), "expected an nn.Module"),
    (lambda: Hiremate(cast(Any, nn.Linear), SAMPLE, "40%"), "class (Linear); expected an nn.Module"),
    (lambda: Hiremate(MODEL, "x", "40%"), "expected a tensor, a tuple or list"),
    (lambda: Hiremate(MODEL, SAMPLE, "40%", solver="mincutt"), "did you mean 'mincut'"),
    (lambda: Hiremate(MODEL, SAMPLE, "40%", config="chekmate"), "did you mean checkmate?"),
    (lambda: Hiremate(MODEL, SAMPLE, "40%", ways=cast(Any, "all")), "not one of 'exact'"),
    (lambda: Hiremate(MODEL, SAMPLE, "40%", outputs=cast(Any, "gone")), "not one of 'kept'"),
    (lambda: Hiremate(MODEL, SAMPLE, "40%", runtime="fast"), "runtime"),
    (lambda: Hiremate(MODEL, SAMPLE, "40%", max_plans=0), "max_plans"),
    (lambda: Hiremate(MODEL, SAMPLE, "40%", reserve_nbytes=-1), "reserve_nbytes"),
    (lambda: Hiremate(MODEL, SAMPLE, "auto", optimizer="adamm"), "name one of adafactor"),
    (lambda: Hiremate(MODEL, SAMPLE, "40%", plan=WRONG), "give the path of a saved plan"),
    (lambda: Hiremate(MODEL, SAMPLE, "40%", platform=cast(Any, "h100")), "get_platform"),
    (lambda: Hiremate(MODEL, SAMPLE, "40%", time_limit_s=-1.0), "time_limit_s"),
    (lambda: PureRotor(MODEL, SAMPLE, "40%", solver="monet"), "use Hiremate"),
    (lambda: limit_memory(MODEL, "40"), 'did you mean "40%" or "40GiB"?'),
    (lambda: limit_memory(WRONG, "40%"), "expected an nn.Module"),
    (lambda: Hiremate(nn.ModuleList([MODEL]), SAMPLE, "40%"), "ModuleList has no forward, so a limit would"),
    (lambda: Offmate(nn.ModuleList([MODEL]), SAMPLE, "40%"), "ModuleList has no forward, so a limit would"),
    (lambda: limit_memory(nn.DataParallel(MODEL), "40%"), "is a DataParallel, which copies a model to"),
    (lambda: Hiremate(nn.DataParallel(MODEL), SAMPLE, "40%"), "is a DataParallel, which copies a model"),
    (lambda: limit_memory(MODEL, optimizer=cast(Any, torch.optim.AdamW)), "optimizer 'class AdamW' is"),
    (
        lambda: Offmate(MODEL, SAMPLE, "1MiB", host_budget="1"),
        "host_budget '1': is 1 bytes; did you mean \"1GiB\"?",
    ),
    (lambda: generate_config("rocket"), "config: type"),
]

CALLS: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    (
        Hiremate,
        (MODEL, "2MiB"),
        {},
        "Hiremate(model, '2MiB'): the sample is missing; give Hiremate(model, sa",
    ),
    (PureRotor, (MODEL, 2**20), {}, "or limit_memory(model, 1048576), which needs none"),
    (
        Hiremate,
        (MODEL,),
        {},
        "Hiremate(): missing a required argument: 'sample'; give Hiremate(model, sample",
    ),
    (Hiremate, (MODEL, SAMPLE), {}, "Hiremate(): missing a required argument: 'budget'; give Hiremate(model"),
    (
        Hiremate,
        (MODEL, "2MiB", SAMPLE),
        {},
        "Hiremate(model, budget, sample): the arguments are in another o",
    ),
    (Hiremate, ("2MiB", MODEL, SAMPLE), {}, "in another order; give Hiremate(model, sample, budget)"),
    (
        Hiremate,
        (MODEL, SAMPLE, "2MiB", 3),
        {},
        "too many positional arguments; give Hiremate(model, sample, ",
    ),
    (Hiremate, (MODEL, SAMPLE, "2MiB"), {"time_limit": 3}, "Hiremate() got an unexpected keyword argument "),
    (Hiremate, (MODEL, SAMPLE, "2MiB"), {"time_limit": 3}, "'time_limit'; did you mean time_limit_s?"),
    (
        Offmate,
        (MODEL, SAMPLE),
        {},
        "Offmate(): missing a required argument: 'budget'; give Offmate(model, sa",
    ),
    (limit_memory, (MODEL, "2MiB"), {"time_limit": 3}, "limit_memory() got an unexpected keyword argument "),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder with a module of factories, and its own cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "wrong", raising=False)
    Path("wrong.py").write_text(FACTORY)
    Path("wrong.json").write_text(FACTORY)
    Path("plan.json").write_text('{"format": "remat-plan"}')
    Path("lazy.py").write_text('def __dir__():\n    return ["GPT2Model", "Net"]\n')


@pytest.mark.parametrize(("words", "said"), [*WITHOUT_TORCH, *WITH_TORCH], ids=lambda part: str(part)[:50])
def test_a_wrong_command_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr, with what came or what to do; nothing is on stdout, and the exit code is 2."""
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1, shown.err
    assert shown.err.startswith("remat: ")
    assert said in shown.err
    assert not shown.out


@pytest.mark.parametrize(
    "words",
    [
        ["solve", UNET, "--budget", "1%", "--time-limit", "2"],
        ["plan", "wrong.py:make", "--budget", "100B", "--time-limit", "2"],
        ["plan", "wrong.py:model", "--input", "4", "--budget", "100B", "--time-limit", "2"],
        ["check", "wrong.py:make", "--budget", "100B", "--time-limit", "2"],
    ],
    ids=lambda words: words[0],
)
def test_a_budget_that_is_too_small_is_one_line(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """With the smallest that works, and no traceback of any thread or library before it."""
    assert main(words) == 2
    shown = capfd.readouterr()
    assert shown.err.count("\n") == 1, shown.err
    assert "is too small: no schedule" in shown.err
    assert "the smallest budget with a schedule is" in shown.err
    assert not shown.out


@pytest.mark.parametrize(("make", "said"), CONSTRUCTORS)
def test_a_wrong_argument_is_one_line(make: Callable[[], Any], said: str) -> None:
    """The error is one of remat's, its text is one line, and names what came or what to do."""
    with pytest.raises(RematError) as caught:
        make()
    assert "\n" not in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(("called", "args", "kwargs", "said"), CALLS)
def test_a_wrong_call_names_what_was_called(
    called: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], said: str
) -> None:
    """Not the class that it inherits from; and it says which call is expected."""
    with pytest.raises(TypeError) as caught:
        called(*args, **kwargs)
    assert said in str(caught.value)


def test_what_needs_no_torch_imports_none() -> None:
    """Help, the version and every mistake that can be found before it import no heavy library.

    A mistake in the words themselves is found before a solver or a file is read, so without numpy and yaml.
    """
    code = (
        "import sys; from remat_facade.cli.app import main\n"
        "import ast\n"
        "heavy, *runs = ast.literal_eval(sys.argv[1])\n"
        "for words, code in runs:\n"
        "    assert main(words) == code, words\n"
        "    assert not heavy & set(sys.modules), (words, heavy & set(sys.modules))\n"
    )
    heavy = {"torch", "numba", "scipy", "matplotlib"}
    wrong = [words for words, _ in WITHOUT_TORCH]
    of_words = [
        words
        for words in wrong
        if words[0] in ("plan", "check", "max-batch") and not {"--solver", "--config"} & set(words)
    ]
    assert len(of_words) > 40
    right = [(["--help"], 0), (["--version"], 0)]
    for refused, runs in [(heavy | {"numpy", "yaml", "rich"}, of_words), (heavy, wrong)]:
        given = repr([refused, *right, *((words, 2) for words in runs)])
        done = subprocess.run([sys.executable, "-c", code, given], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        assert "remat-facade 0." in done.stdout


def test_a_batch_size_goes_to_the_argument_of_that_name() -> None:
    """Where the function takes it by keyword only."""
    _, sample, _ = Target.parse("wrong.py:by_name", batch=3).load()
    assert sample.shape == (3, 4)
