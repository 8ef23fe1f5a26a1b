"""An integration whose library is missing says which extra installs it."""

import importlib
import sys

import pytest

PREFIX = "remat_facade.integrations."


@pytest.mark.parametrize("library", ["transformers", "lightning", "torchtitan"])
def test_a_missing_library_names_its_extra(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is of the class and the name that programs look for."""
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, PREFIX + library, raising=False)
    with pytest.raises(
        ModuleNotFoundError, match=rf'needs {library}: pip install "remat-facade\[{library}\]"'
    ) as caught:
        importlib.import_module(PREFIX + library)
    assert caught.value.name == library


def test_an_error_of_the_library_itself_is_left_as_it_is() -> None:
    """A part that the library misses is installed by no extra of this package."""
    from remat_facade.integrations.extras import from_extra

    with pytest.raises(ModuleNotFoundError, match="another") as caught, from_extra("transformers"):
        raise ModuleNotFoundError("No module named 'another'", name="another")
    assert caught.value.name == "another"
