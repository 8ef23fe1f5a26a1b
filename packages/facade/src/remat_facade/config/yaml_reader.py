"""YAML that people wrote, read with suspicion.

YAML may name a value and repeat it, so that 340 bytes stand for more than a computer holds. No config needs
that, nor deep nesting, nor a field twice; and what is no number or date although it says so is told with its
line. What is made are plain numbers, texts, lists and mappings.
"""

from typing import Any

import yaml

MOST_NBYTES = 1 << 16
"""Of a file that a person wrote; what `save_config` writes takes some two thousand."""

_DEEPEST = 16
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class Refused(yaml.MarkedYAMLError):
    """It is YAML, or nearly, but not for us; `problem` says why."""


def parse(text: str) -> Any:
    """The data of a YAML document.

    Raises:
        Refused: it repeats values, nests deeply, has a field twice, or a value that is none.
        yaml.YAMLError: it is no YAML, more than one document, or makes objects.
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
    """Writes what stands in two places twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


class _Loader(yaml.SafeLoader):
    """PyYAML's own, more careful."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise _refused("names a value to repeat it", event.start_mark)
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
            raise _refused(f"has {node.value[:40]}, which YAML counts in sixties", node.start_mark)
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise _refused("has a value that is none of its kind", node.start_mark) from error


def _refused(problem: str, mark: yaml.Mark) -> Refused:
    return Refused(problem=problem, problem_mark=mark)
