"""Import torchvision for all tests here: tools import it, and its operators may not fit the torch."""

from importlib.util import find_spec

from tests.helpers.models import import_torchvision

if find_spec("torchvision") is not None:
    import_torchvision()
