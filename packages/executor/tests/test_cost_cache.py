"""What is measured once is found again, and a broken cache never stops the work."""

import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remat_executor.cost_cache import CostCache, OpCost, default_folder

COST = OpCost(time_s=1e-3, workspace_nbytes=8, output_nbytes=64)
costs = st.builds(
    OpCost,
    time_s=st.floats(min_value=0, max_value=1e6),
    workspace_nbytes=st.integers(0, 2**40),
    output_nbytes=st.integers(0, 2**40),
)


@given(known=st.dictionaries(st.text(), costs))
def test_costs_come_back_exactly(tmp_path_factory: pytest.TempPathFactory, known: dict[str, OpCost]) -> None:
    """Another cache on the same folder reads what was added, to the last bit."""
    folder = tmp_path_factory.mktemp("cache")
    CostCache(folder=folder).add(known)
    assert known == CostCache(folder=folder).get([*known, "another"])


def test_additions_of_others_stay(tmp_path: Path) -> None:
    """Two caches that both began empty end with both additions in the file."""
    one, two = CostCache(folder=tmp_path), CostCache(folder=tmp_path)
    assert one.get(["a"]) | two.get(["b"]) == {}
    one.add({"a": COST})
    two.add({"b": COST})
    assert CostCache(folder=tmp_path).get(["a", "b"]) == {"a": COST, "b": COST}


def test_costs_hold_under_the_conditions_they_were_measured_in(tmp_path: Path) -> None:
    """A flag or the number of threads changes within a process: another file, and back to the first."""
    threads = torch.get_num_threads()
    cache = CostCache(folder=tmp_path)
    cache.add({"a": COST})
    try:
        torch.set_num_threads(threads + 1)
        assert cache.get(["a"]) == {}
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(True)
        assert cache.get(["a"]) == {}
        cache.add({"b": COST})
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    assert cache.get(["a", "b"]) == {"a": COST}
    assert len(list(tmp_path.iterdir())) == 2


def test_file_is_whole_at_any_moment(tmp_path: Path) -> None:
    """While several caches save at once, the file is always readable, and no part files stay behind."""

    def save(worker: int) -> None:
        for step in range(10):
            CostCache(folder=tmp_path).add({f"{worker}-{step}": COST})
            assert CostCache(folder=tmp_path).get([f"{worker}-{step}", "none"]).keys() <= {f"{worker}-{step}"}

    with ThreadPoolExecutor(4) as pool, warnings.catch_warnings():
        warnings.simplefilter("error")
        list(pool.map(save, range(4)))
    assert [CostCache(folder=tmp_path).path] == list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"format": "other"}',
        '{"format": "remat-costs", "version": 99, "costs": {}}',
        '{"format": "remat-costs", "version": 1, "costs": {"a": [1.0]}}',
        '{"format": "remat-costs", "version": 1, "costs": {"a": [NaN, 1, 1]}}',
        '{"format": "remat-costs", "version": 1, "costs": {"a": [1.0, -1, 1]}}',
        '{"format": "remat-costs", "version": 1, "costs": {"a": [1.0, "1", 1]}}',
        '{"format": "remat-costs", "version": 1, "costs": {"a": [1.0, 1, 18446744073709551616]}}',
    ],
)
def test_corrupt_file_is_ignored(tmp_path: Path, content: str) -> None:
    """A file that is not ours gives one warning, no costs, and is replaced by the next save."""
    cache = CostCache(folder=tmp_path)
    cache.path.write_text(content)
    with pytest.warns(UserWarning, match="is ignored"):
        assert cache.get(["a"]) == {}
    cache.add({"b": COST})  # a second warning would be an error
    assert CostCache(folder=tmp_path).get(["a", "b"]) == {"b": COST}


def test_binary_file_is_ignored(tmp_path: Path) -> None:
    """Bytes that are no text are a corrupt file too."""
    cache = CostCache(folder=tmp_path)
    cache.path.write_bytes(b"\xff\xfe\x00")
    with pytest.warns(UserWarning, match="is ignored"):
        assert cache.get(["a"]) == {}


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """One warning that says what to do, and the costs are still known to this process."""
    (tmp_path / "file").write_text("in the way")
    cache = CostCache(folder=tmp_path / "file" / "folder")
    with pytest.warns(UserWarning, match="REMAT_CACHE_DIR"):
        cache.add({"a": COST})
    cache.add({"b": COST})  # a second warning would be an error
    assert cache.get(["a", "b"]) == {"a": COST, "b": COST}


def test_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the middle of a save loses nothing and leaves no part file."""
    CostCache(folder=tmp_path).add({"a": COST})

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", fail)
    with pytest.warns(UserWarning, match="No space left"):
        CostCache(folder=tmp_path).add({"b": COST})
    assert CostCache(folder=tmp_path).get(["a", "b"]) == {"a": COST}
    assert len(list(tmp_path.iterdir())) == 1


def test_conditions_have_files_of_their_own(tmp_path: Path) -> None:
    """Another number of threads is another file: kernels take other times and other scratch."""
    before = torch.get_num_threads()
    path = CostCache(folder=tmp_path).path
    try:
        torch.set_num_threads(before + 1)
        assert path != CostCache(folder=tmp_path).path
    finally:
        torch.set_num_threads(before)
    assert path == CostCache(folder=tmp_path).path
    assert torch.__version__ in path.name


def test_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """REMAT_CACHE_DIR is taken as it is; without it the platform's folder for caches is used."""
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path / "mine"))
    assert tmp_path / "mine" == default_folder()
    monkeypatch.delenv("REMAT_CACHE_DIR")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tmp_path / "remat" == default_folder()
