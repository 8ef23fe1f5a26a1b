"""What is measured once is found again, and a broken cache never stops the work."""

import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remat_executor.costs.cache import CostCache, MeasuredCost, default_folder
from remat_graph.serialization.json_reader import write_sealed

COST = MeasuredCost(time_s=1e-3, workspace_nbytes=8, output_nbytes=64)
costs = st.builds(
    MeasuredCost,
    time_s=st.floats(min_value=0, max_value=3600),
    workspace_nbytes=st.integers(0, 2**30),
    output_nbytes=st.integers(0, 2**30),
    doubtful=st.booleans(),
)


@given(known=st.dictionaries(st.text(), costs))
def test_costs_come_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, known: dict[str, MeasuredCost]
) -> None:
    """Another cache on the same folder reads what was added, to the last bit."""
    folder = tmp_path_factory.mktemp("cache")
    CostCache(folder=folder).add(known)
    assert known == CostCache(folder=folder).get([*known, "another"])


def test_costs_of_a_device_have_times_of_issuing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """In a file of its own: one of the version before, which lacks them, is left alone without a warning."""
    properties = SimpleNamespace(name="GPU", total_memory=2**40)
    device = SimpleNamespace(get_device_properties=lambda _: properties)
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    cache = CostCache("cuda", tmp_path)
    before = tmp_path / cache.path.name.replace("costs-v3", "costs-v2")
    write_sealed({"format": "remat-costs", "version": 2, "costs": {"a": [1.0, 1, 1]}}, before)
    assert {} == cache.get(["a"])
    cost = attrs.evolve(COST, issue_s=3e-6)
    cache.add({"a": cost, "slept": attrs.evolve(COST, issue_s=1e5)})
    assert {"a": cost} == CostCache("cuda", tmp_path).get(["a", "slept"])
    assert not recwarn.list
    write_sealed({"format": "remat-costs", "version": 3, "costs": {"a": [1.0, 1, 1]}}, cache.path)
    with pytest.warns(UserWarning, match="is ignored"):
        assert {} == CostCache("cuda", tmp_path).get(["a"])


def test_additions_of_others_stay(tmp_path: Path) -> None:
    """Two caches that both began empty end with both additions in the file."""
    one, two = CostCache(folder=tmp_path), CostCache(folder=tmp_path)
    assert one.get(["a"]) | two.get(["b"]) == {}
    one.add({"a": COST})
    two.add({"b": COST})
    assert CostCache(folder=tmp_path).get(["a", "b"]) == {"a": COST, "b": COST}


def test_a_cost_is_no_longer_doubtful_once_it_is_measured_again(tmp_path: Path) -> None:
    """Also for another cache that knew it as doubtful, and then saves something else."""
    doubtful, other = attrs.evolve(COST, doubtful=True), attrs.evolve(COST, time_s=2e-3)
    one, two = CostCache(folder=tmp_path), CostCache(folder=tmp_path)
    one.add({"a": doubtful, "b": doubtful})
    assert {"a": doubtful} == two.get(["a"])
    one.add({"a": other})
    two.add({"c": COST})
    expected = {"a": other, "b": doubtful, "c": COST}
    assert expected == two.get("abc") == CostCache(folder=tmp_path).get("abc")


def test_a_file_keeps_the_newest_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read and written whole, so it may not grow without end."""
    monkeypatch.setattr("remat_executor.costs.cache._MOST_COSTS", 3)
    cache = CostCache(folder=tmp_path)
    for key in "abcde":
        cache.add({key: COST})
    assert dict.fromkeys("cde", COST) == CostCache(folder=tmp_path).get("abcde")
    assert dict.fromkeys("abcde", COST) == cache.get("abcde"), "this process knows them all"


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


def test_settings_of_libraries_have_costs_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cap on its workspaces, cuDNN runs other kernels."""
    cache = CostCache(folder=tmp_path)
    cache.add({"a": COST})
    monkeypatch.setenv("CUDNN_CONV_WSCAP_DBG", "256")
    assert cache.get(["a"]) == {}
    monkeypatch.delenv("CUDNN_CONV_WSCAP_DBG")
    assert cache.get(["a"]) == {"a": COST}


def sealed(costs: object, **more: object) -> str:
    """A file with a checksum that is right."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "costs.json"
        write_sealed({"format": "remat-costs", "version": 2, "costs": costs, **more}, path)
        return path.read_text()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "[" * 100_000,
        '{"format": "other"}',
        '{"format": "remat-costs", "version": 1, "costs": {}}',
        '{"format": "remat-costs", "version": 2, "costs": {}}',
        '{"format": "remat-costs", "version": 2, "costs": {"a": [1.0, 0, 1e999]}, "sha256": ""}',
        sealed({"a": [1.0, 1, 1]}).replace("1.0", "NaN"),
        sealed([]),
        sealed({"a": 1}),
        sealed({"a": [1.0]}),
        sealed({"a": [1.0, -1, 1]}),
        sealed({"a": [-1.0, 1, 1]}),
        sealed({"a": [1.0, "1", 1]}),
        sealed({"a": [1.0, True, 1]}),
        sealed({"a": [1.0, 2**63, 1]}),
        sealed({"a": [1.0, 1, 2**63]}),
        sealed({"a": [1.0, 10**400, 1]}),
        sealed({"a": [1.0, 4096 * 2**50, 1]}),
        sealed({"a": [1.0, 1, 4096 * 2**50]}),
        sealed({"a": [1e308, 1, 1]}),
        sealed({"a": [3601.0, 1, 1]}),
        sealed({"a": [1.0, 1, 1]}, doubtful="a"),
        sealed({"a": [1.0, 1, 1]}, doubtful=[1]),
    ],
    ids=lambda content: content[:60],
)
def test_corrupt_file_is_ignored(tmp_path: Path, content: str) -> None:
    """A file that is not ours gives one warning, no costs, and is replaced by the next save."""
    cache = CostCache(folder=tmp_path)
    cache.path.write_text(content)
    with pytest.warns(UserWarning, match="is ignored") as caught:
        assert cache.get(["a"]) == {}
    assert (1, 0) == (len(caught), str(caught[0].message).count("\n"))
    cache.add({"b": COST})  # a second warning would be an error
    assert CostCache(folder=tmp_path).get(["a", "b"]) == {"b": COST}


@pytest.mark.parametrize(
    ("was", "now"),
    [("0.001,8,64", "0.001,0,64"), ("0.001,8,64", "0.001,8,0"), ("0.001", "0.01"), ('"a"', '"b"')],
)
def test_an_edited_file_is_ignored(tmp_path: Path, was: str, now: str) -> None:
    """Numbers that could be true are not believed either, once somebody has changed them."""
    cache = CostCache(folder=tmp_path)
    cache.add({"a": COST})
    text = cache.path.read_text()
    assert was in text
    cache.path.write_text(text.replace(was, now))
    with pytest.warns(UserWarning, match="was edited or damaged.*is ignored"):
        assert CostCache(folder=tmp_path).get(["a", "b"]) == {}


def test_what_nobody_would_believe_is_not_kept(tmp_path: Path) -> None:
    """A machine that slept while it measured has no cost of an hour; the others of that save are kept."""
    slept = MeasuredCost(time_s=1e5, workspace_nbytes=0, output_nbytes=0)
    cache = CostCache(folder=tmp_path)
    cache.add({"a": slept, "b": COST})
    assert {"b": COST} == CostCache(folder=tmp_path).get(["a", "b"])
    cache.add({"c": COST})
    assert {"b": COST, "c": COST} == CostCache(folder=tmp_path).get(["a", "b", "c"])


@pytest.mark.skipif(os.name != "posix", reason="modes are posix")
def test_the_file_is_the_users_alone(tmp_path: Path) -> None:
    """Whatever the umask, and whatever it was before."""
    cache = CostCache(folder=tmp_path)
    cache.add({"a": COST})
    assert 0o600 == cache.path.stat().st_mode & 0o777
    cache.path.chmod(0o644)
    cache.add({"b": COST})
    assert 0o600 == cache.path.stat().st_mode & 0o777


@pytest.mark.skipif(os.name != "posix", reason="pipes are posix")
def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path) -> None:
    """It is ignored like any other that is no cache."""
    cache = CostCache(folder=tmp_path)
    os.mkfifo(cache.path)
    with pytest.warns(UserWarning, match="is not a file"):
        assert {} == cache.get(["a"])


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

    monkeypatch.setattr(os, "replace", fail)  # a full disk, which no argument can bring about
    with pytest.warns(UserWarning, match="No space left"):
        CostCache(folder=tmp_path).add({"b": COST})
    assert CostCache(folder=tmp_path).get(["a", "b"]) == {"a": COST}
    assert len(list(tmp_path.iterdir())) == 1


def test_conditions_have_files_of_their_own(tmp_path: Path) -> None:
    """Another number of threads is another file: kernels have other times and other workspaces."""
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
    """REMAT_CACHE_DIR is used unchanged; without it the platform's folder for caches is used."""
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path / "mine"))
    assert tmp_path / "mine" == default_folder()
    monkeypatch.delenv("REMAT_CACHE_DIR")
    monkeypatch.setattr("sys.platform", "linux")  # the environment, as the variables are
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tmp_path / "remat" == default_folder()


def test_a_home_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown user has no home folder: one line, and another folder."""
    monkeypatch.setenv("REMAT_CACHE_DIR", "~nobody_of_this_name/cache")
    with pytest.warns(UserWarning, match="set REMAT_CACHE_DIR"):
        assert default_folder().is_absolute()
