"""Read YAML files that users wrote, and refuse the parts of YAML that no config needs.

Refused are aliases (with them 340 bytes can expand to more than a computer's memory), deep nesting, duplicate
fields and malformed numbers or dates; the error has the line. The result has numbers, strings, lists and
mappings only.
"""

from typing import Any

import yaml

MOST_NBYTES = 1 << 16
"""Largest file; `save_config` writes about 2,000 bytes."""

_DEEPEST = 16
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class Refused(yaml.MarkedYAMLError):
    """A part of YAML that no config needs; `problem` names it."""


def parse(text: str) -> Any:
    """The data of a YAML document.

    Raises:
        Refused: the document has an alias, deep nesting, a duplicate field or a malformed value.
        yaml.YAMLError: the text is not YAML, has more than one document, or constructs objects.
    """
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def text_of(data: Any) -> str:
    """Data as YAML that `parse` reads."""
    return yaml.dump(data, Dumper=_Dumper, allow_unicode=True).strip()


class _Dumper(yaml.SafeDumper):
    """Writes an object that occurs twice in full both times, without an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the checks of this module."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise _refused("has an alias or anchor (& or *)", event.start_mark)
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _refused("is nested too deeply", event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise _refused(f"has {key.value[:40]} twice", key.start_mark)
                seen.add(key.value)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if isinstance(node, yaml.ScalarNode) and node.tag in _NUMBERS and ":" in node.value:
            raise _refused(f"has {node.value[:40]}, which YAML 1.1 reads in base 60", node.start_mark)
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise _refused("has a malformed value", node.start_mark) from error


def _refused(problem: str, mark: yaml.Mark) -> Refused:
    return Refused(problem=problem, problem_mark=mark)
