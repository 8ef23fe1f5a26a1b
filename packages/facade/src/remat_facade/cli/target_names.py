"""What is wrong with the name of a model, found without an import: its form, or the module that it names."""

import importlib.util
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

_INSIDE: Mapping[str, tuple[tuple[str, str], ...]] = {
    "torch": (("nn", "nn/modules"),),
    "torchvision": tuple(
        (f"models{part}", f"models{part.replace('.', '/')}")
        for part in ("", ".detection", ".segmentation", ".video", ".quantization", ".optical_flow")
    ),
    "timm": (("models", "models"),),
}
"""The modules that have a package's models, each with the folder of its source files."""


_OF_A_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")  # OWNER/MODEL


def misnamed(target: str, place: str, name: str, *, by_colon: bool, shaped: bool) -> str:
    """What is wrong with the form of a target, and the form that is expected; empty if nothing is.

    Args:
        target: as the user wrote it.
        place: the module or the file in it.
        name: of a function or class in the module.
        by_colon: whether a colon stands between the two, not a dot.
        shaped: whether ``--input`` is given, so that a dot is allowed.
    """
    if target.endswith(".json"):
        return (
            "is the name of a saved graph or plan; expected a model: MODULE:FACTORY, such as train.py:make; "
            "for a saved graph use `remat solve`, `sweep` or `doctor`"
        )
    if not by_colon and target.endswith(".py"):
        return f"names no model in the file; expected {target}:NAME, with a function or class of the file"
    # The colon of a drive, or one in the name of a file, is no other one.
    if by_colon and re.search(r"(?<!^[A-Za-z]):", place) and not Path(place).is_file():
        return "has more than one colon; expected MODULE:FACTORY, such as train.py:make"
    if "/" in target and not place.endswith(".py") and (by_colon or shaped):
        file, member = (place, name) if "/" not in name and place.strip("./") else (target, "NAME")
        hub = ""
        if not by_colon and _OF_A_HUB.fullmatch(target):
            hub = "; for a model of a hub name its class, such as transformers.GPT2LMHeadModel"
        return f"a path needs the ending .py and a colon; expected {file}.py:{member}{hub}"
    whole = place.endswith(".py") or all(place.split("."))
    if name and whole and (by_colon or shaped):
        return ""
    factory = "MODULE:FACTORY, such as train.py:make or package.train:make"
    if shaped:
        names = "torchvision.models.resnet50 or transformers.GPT2LMHeadModel"
        return f"expected the full name of a model, such as {names}, or {factory}"
    return f"expected {factory}; a model's name, such as torchvision.models.resnet50, needs --input 3x224x224"


def full_name(package: str, name: str) -> str:
    """The full name of a known package's function or class that is in one of its modules, or an empty string.

    The source files are searched, because an import of the package would import torch.
    """
    try:
        spec = importlib.util.find_spec(package) if package in _INSIDE else None
    except (ImportError, ValueError):  # a module that was imported in another way has none
        return ""
    folders = (spec and spec.submodule_search_locations) or ()
    if not (folders and name.isidentifier()):
        return ""
    root = Path(next(iter(folders)))
    if _has(rf"\b{name}\b", [root / "__init__.py"]):
        return ""
    defined = rf"^(?:def|class) {name}\b"
    for module, folder in _INSIDE[package]:
        if _has(defined, sorted((root / folder).glob("*.py"))):
            return f"{package}.{module}.{name}"
    return ""


def _has(pattern: str, files: Iterable[Path]) -> bool:
    wanted = re.compile(pattern, re.MULTILINE)
    return any(
        wanted.search(file.read_text(encoding="utf-8", errors="replace")) for file in files if file.is_file()
    )
