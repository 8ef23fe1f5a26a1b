"""Configs as YAML files."""

from pathlib import Path
from typing import Any

import attrs
import yaml

from remat_facade.config import yaml_reader
from remat_facade.config.types import Config, class_of
from remat_facade.errors import BadConfig
from remat_graph import BadFile
from remat_graph.errors import shown
from remat_graph.serialization.json_reader import read_text
from remat_graph.serialization.outputs import write_whole

FORMAT = 1

_MARK = "remat_config"


def config_text(config: Config) -> str:
    """The YAML of a config, with a comment on every field."""
    lines = [f"# remat config: {config.about}", "---", f"{_MARK}: {FORMAT}", f"type: {config.type}"]
    for field in attrs.fields(config.__class__):
        value = yaml_reader.text_of({field.name: getattr(config, field.name)})
        lines += ["", f"# {field.metadata['doc']}", value]
    return "\n".join([*lines, "...", ""])


def config_facts(config: Config) -> dict[str, Any]:
    """The type of a config, what it is, and the value and the comment of every field, for JSON."""
    fields = {
        field.name: {"value": getattr(config, field.name), "about": field.metadata["doc"]}
        for field in attrs.fields(config.__class__)
    }
    return {"type": config.type, "about": config.about, "fields": fields}


def save_config(config: Config, path: str | Path) -> Path:
    """Write a config as a YAML file, atomically.

    Raises:
        CannotWrite: the file cannot be written.
    """
    return write_whole(path, config_text(config))


def load_config(path: str | Path) -> Config:
    """Read a file that `save_config` or a user wrote.

    Raises:
        BadFile: the file is missing, truncated, of a newer format, not a config, or has an invalid field.
    """
    name = str(path)
    try:
        text = read_text(path, yaml_reader.MOST_NBYTES)
    except UnicodeDecodeError as error:
        raise BadFile(path=name, problem=f"is not text, so not a config: {_HINT}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadFile(path=name, problem=f"cannot be read ({reason}): check the path") from error
    try:
        return _from_text(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}" if mark else ""
        if isinstance(error, yaml_reader.Refused):
            problem = f"{line} {error.problem}"
        else:
            problem = "is not valid YAML" + (f" at {line}" if line else "")
        raise BadFile(path=name, problem=f"{problem}: correct the file, or {_HINT}") from error
    except BadConfig as error:
        raise BadFile(path=name, problem=f"{error.field}: {error.problem}") from error


_HINT = "write one with `remat config TYPE --out FILE`"


def _from_text(text: str) -> Config:
    lines = [line.strip() for line in text.splitlines()]
    if "---" in lines and "..." not in lines:
        raise BadConfig(
            field="end", problem=f"the file is truncated (it starts with --- but has no final ...): {_HINT}"
        )
    content = yaml_reader.parse(text)
    if not isinstance(content, dict) or "type" not in content:
        raise BadConfig(field="type", problem=f"missing, so the file is not a remat config: {_HINT}")
    version = content.pop(_MARK, FORMAT)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise BadConfig(field=_MARK, problem=f"expected a version such as {FORMAT}, got {shown(version)}")
    if version > FORMAT:
        raise BadConfig(
            field=_MARK,
            problem=f"format {version} is newer than this remat reads ({FORMAT}): upgrade remat-facade",
        )
    return class_of(content.pop("type")).from_fields(content)
