"""The pages that run as they stand: where they are, what they take as given, and what of them does not run.

A page that begins in the middle of a user's program names a model or a file that it does not make. These are
given before its block with that first line. Lines are named without their comments.
"""

import re
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    *("index", "budgets", "options", "troubleshooting", "performance", "solvers", "gallery/index"),
    *("coming_from/checkpoint", "coming_from/deepspeed", "coming_from/activation_memory_budget"),
    *("coming_from/research", "trainers", "ways", "README", "packages/facade/README"),
    "packages/solvers/README",
)

LEFT_OUT = {
    "trainers": {
        # The environment `integrations` alone has Lightning; the page on it runs there.
        "from remat_facade.integrations.lightning import MemoryLimit",
    },
    "README": {
        # Plans GPT-2 at several sizes of the batch: a minute.
        "remat max-batch transformers.GPT2LMHeadModel --input 1024 --device-memory 8GiB --platform h100-spec",
        # Needs a group of processes; `examples/ddp.py` has the same lines and runs.
        'planned = Hiremate(model, sample, "2GiB", ranks="together")',
    },
    "packages/facade/README": {
        # Trains for minutes; the tests of the command run a short demo.
        "remat demo",
        # Measures 64 images of full size: gigabytes, and minutes on a CPU.
        "remat plan torchvision.models.resnet50 --input 3x224x224 --batch 64 --budget 40%",
        # Plans GPT-2 at several sizes of the batch: a minute.
        "remat max-batch transformers.GPT2LMHeadModel --input 1024 --device-memory 8GiB --platform h100-spec",
    },
}
"""Blocks by their first line, and commands, that no test here runs, with the reason."""

LANGUAGE_MODEL = """
import torch
from remat_facade import limit_memory
from tests.helpers.small_llama import WORDS, small_llama
model = small_llama()
batch = dict.fromkeys(("input_ids", "labels"), torch.arange(2 * 16).reshape(2, 16) % WORDS)
sample, data = batch, [batch, batch]
"""
TRAINER = """
from transformers import Trainer, TrainingArguments
args = TrainingArguments(output_dir="out", use_cpu=True, report_to=[])
"""
LOOP = """
def train(model):
    for each in data:
        model(**each).loss.backward()
"""
FACTORY = """
from tests.repository.pages import write
write("train.py", '''
import torch
from torch import nn
def make():
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    return nn.Sequential(*blocks), torch.randn(512, 64)
''')
"""
IMAGES = """
from tests.repository.pages import write
write("my_models.py", '''
from torch import nn
class Net(nn.Sequential):
    def __init__(self):
        widths = [3, 16, 16, 16]
        blocks = [
            nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 1, 1))
            for i, o in zip(widths, widths[1:])
        ]
        super().__init__(*blocks, nn.Dropout(), nn.Flatten(), nn.Linear(16 * 32 * 32, 10))
''')
"""
CALL = """
from remat_facade.cli.app import main
assert main({words!r}.split()) == 0
"""
PLANNED = CALL.format(
    words="plan train.py:make --budget 60% --graph-out graph.json --plan-out plan.json --time-limit 3"
)
GRAPH = CALL.format(
    words="plan my_models.py:Net --input 3x32x32 --batch 8 --budget 70% --graph-out graph.json --time-limit 3"
)

GIVEN = {
    "trainers": {
        "from remat_facade import limit_memory, planned": LANGUAGE_MODEL + LOOP,
        "from remat_facade.integrations.transformers import RematCallback": LANGUAGE_MODEL + TRAINER,
    },
    "ways": {
        'model = limit_memory(model, "2GiB")': LANGUAGE_MODEL,
        "remat sweep graph.json --no masks --no masks,pools --no all --png sweep.png": IMAGES + GRAPH,
    },
    "README": {
        "remat check my_models.py:Net --input 3x32x32 --batch 32 --budget 70%": IMAGES,
        "remat plan train.py:make --budget 60% --plan-out plan.json --graph-out graph.json": FACTORY,
        "from remat_facade.integrations.transformers import RematCallback": LANGUAGE_MODEL + TRAINER,
        "from remat_facade import Offmate": LANGUAGE_MODEL,
    },
    "packages/facade/README": {
        "from remat_facade import Hiremate": LANGUAGE_MODEL,
        "remat demo": FACTORY + PLANNED,
    },
    "packages/solvers/README": {
        "from remat_graph import load_graph": "from tests.repository.pages import copy_corpus; copy_corpus()",
    },
}
"""Python that runs before a block, by the first line of this block."""


class Block(NamedTuple):
    """A block of a page; indented ones are lines of the shell."""

    language: str
    title: str
    text: str


def path_of(page: str) -> Path:
    """Where a page is: READMEs by their path, other pages in `docs`."""
    return (ROOT if page.endswith("README") else ROOT / "docs") / f"{page}.md"


def blocks(page: str) -> list[Block]:
    """The blocks of a page, in order."""
    text = path_of(page).read_text(encoding="utf-8")
    found = re.findall(
        r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```|(?<=\n\n)((?: {4}[^\n]*\n)+)',
        text,
        re.DOTALL | re.MULTILINE,
    )
    return [
        Block(language or "console", title, fenced or re.sub("(?m)^ {4}", "", indented))
        for language, title, fenced, indented in found
    ]


def without_comment(line: str) -> str:
    """A line of Python or of the shell up to its comment."""
    return re.split(r"\s+# ", line)[0]


def first_line(block: Block) -> str:
    """By which the lists above name a block."""
    return without_comment(block.text.partition("\n")[0])


def runs(page: str, line: str) -> bool:
    """Whether a block with this first line, or this command, runs."""
    return without_comment(line) not in LEFT_OUT.get(page, set())


def give(page: str, block: Block, names: dict[str, Any]) -> None:
    """Run what the page takes as given before a block."""
    exec(compile(GIVEN.get(page, {}).get(first_line(block), ""), f"given for {page}.md", "exec"), names)


def write(name: str, text: str) -> None:
    """Write a module into the current folder; one of this name from another page is forgotten."""
    Path(name).write_text(text, encoding="utf-8")
    sys.modules.pop(Path(name).stem, None)


def copy_corpus() -> None:
    """The saved graph that a page names, in the current folder."""
    shutil.copy(ROOT / "tests" / "data" / "graphs" / "resnet50.json", "resnet50.json")
