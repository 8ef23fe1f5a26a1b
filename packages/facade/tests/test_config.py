"""Configs survive a file round trip; each mistake in one gives a single line that names it."""

import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import attrs
import pytest
import yaml

from remat_facade import BadConfig, CannotWrite, from_config, generate_config, load_config, save_config
from remat_facade.config.fields import links_from
from remat_facade.config.types import AutoConfig, OffmateConfig, config_types
from remat_facade.config.yaml_io import config_text
from remat_facade.planning.memory_fit import states_nbytes
from remat_facade.planning.method import Method, choose_method
from remat_facade.planning.planner import RecomputePlanner
from remat_graph import BadFile, Grads, Links, RematError
from remat_solvers import get_solver

TYPES = ("auto", "rotor", "rockmate", "checkmate", "monet", "hilp", "hiremate", "offmate", "noremat")


# What it stands for would be 9 to the 30th texts.
BOMB = "type: auto\na0: &a0 [x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30)
)


def load_text(tmp_path: Path, text: str | bytes) -> RematError:
    """The error of loading this content."""
    path = tmp_path / "config.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(BadFile) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600 + len(str(path))
    return caught.value


def test_the_types_are_those_of_the_design() -> None:
    """Eight types, each with a class of its own name."""
    assert set(TYPES) == set(config_types())
    assert list(TYPES) == [generate_config(name).type for name in TYPES]


@pytest.mark.parametrize("name", TYPES)
def test_a_config_survives_a_file(name: str, tmp_path: Path) -> None:
    """The loaded config equals the saved one, also for values other than defaults."""
    config = attrs.evolve(generate_config(name), seed=3, time_limit_s=2.5)
    assert config == load_config(save_config(config, tmp_path / "new" / "config.yaml"))


@pytest.mark.parametrize("name", TYPES)
def test_every_field_is_explained_in_the_file(name: str) -> None:
    """The YAML has every field with its comment."""
    config = generate_config(name)
    text = config_text(config)
    for field in attrs.fields(type(config)):
        assert f"# {field.metadata['doc']}" in text
        assert field.name in yaml.safe_load(text)


def test_a_solver_by_name_is_its_config() -> None:
    """The name and the config give the same method, and the options reach the solver."""
    by_name, by_default = (choose_method("auto", None, name, 3, 2.0) for name in ("auto", None))
    assert by_name == by_default
    assert by_name.parameters == {"gap": 0.001, "seed": 3}
    assert choose_method("auto", None, "rotor", 0, None) == choose_method("rotor", None, None, 0, None)
    chosen = choose_method("auto", generate_config("auto").with_(gap=0.25), None, 0, None)
    assert get_solver(chosen.solver, **chosen.parameters) == get_solver("auto", gap=0.25)
    assert choose_method("auto", None, "griewank", 0, None) == Method(solver="griewank")


def test_what_a_step_is_like_is_overruled_by_keywords() -> None:
    """A config's outputs and gradients are the method's unless they are given too."""
    config = generate_config("rotor").with_(outputs="dropped", gradients="present")
    found = choose_method("auto", config, None, 0, None)
    assert ("dropped", "present", Grads.PRESENT) == (found.outputs, found.gradients, found.grads)
    assert found.parameters.keys() == {"stages", "slots"}
    other = choose_method("auto", config, None, 0, None, outputs="kept", gradients="auto")
    assert ("kept", "auto", Grads.NEW) == (other.outputs, other.gradients, other.grads)
    named = choose_method("auto", None, "griewank", 0, None, outputs="dropped", gradients="new")
    assert ("dropped", "new", Grads.NEW) == (named.outputs, named.gradients, named.grads)


def test_families_that_monet_leaves_out(tmp_path: Path) -> None:
    """A list in a file reaches the solver."""
    config = generate_config("monet").with_(without=("masks", "pools"))
    found = load_config(save_config(config, tmp_path / "config.yaml"))
    assert config == found
    method = choose_method("auto", found, None, 0, None)
    assert get_solver("monet", without=["masks", "pools"]) == get_solver("monet", **method.parameters)


def test_a_short_file_by_hand_keeps_the_defaults(tmp_path: Path) -> None:
    """A type and one field are enough."""
    path = tmp_path / "config.yaml"
    path.write_text("type: noremat\nseed: 7\n")
    assert attrs.evolve(generate_config("noremat"), seed=7) == load_config(path)


def test_numbers_that_yaml_takes_for_texts(tmp_path: Path) -> None:
    """`1e-5` and `55GB` are numbers; a config with such values survives a file too."""
    path = tmp_path / "config.yaml"
    path.write_text(
        "type: offmate\noptimizer: AdamW\noptimizer_options: {lr: 1e-5, betas: [0.9, 0.95], fused: true}\n"
        "links: {to_host_nbytes_per_s: 55GB, to_device_nbytes_per_s: 5e10, host_nbytes_per_s: null}\n"
    )
    config = load_config(path)
    assert isinstance(config, OffmateConfig)
    assert config.optimizer_options == {"lr": 1e-5, "betas": (0.9, 0.95), "fused": True}
    assert config.links is not None
    assert links_from(config.links) == Links(to_host_nbytes_per_s=55e9, to_device_nbytes_per_s=5e10)
    assert config == load_config(save_config(config, path))


def test_shares_and_seconds_may_be_small(tmp_path: Path) -> None:
    """YAML reads `1e-3` as a string; all number fields accept it."""
    path = tmp_path / "config.yaml"
    path.write_text("type: auto\ngap: 1e-3\ntime_limit_s: 1e-2\n")
    assert AutoConfig(gap=1e-3, time_limit_s=1e-2) == load_config(path)
    seconds = {"leaf_seconds": 2.5e-1, "top_seconds": 5e-1}
    path.write_text("type: hilp\nleaf_seconds: 2.5e-1\ntop_seconds: 5e-1\n")
    assert attrs.evolve(generate_config("hilp"), **seconds) == load_config(path)


def test_what_stands_in_two_places_is_written_twice(tmp_path: Path) -> None:
    """A value that occurs twice is written without an alias, which the reader would refuse."""
    betas = (0.9, 0.95)
    config = OffmateConfig(optimizer="AdamW", optimizer_options={"betas": betas, "others": betas})
    assert config == load_config(save_config(config, tmp_path / "config.yaml"))


def test_any_prefix_of_a_saved_file_is_refused(tmp_path: Path) -> None:
    """A file truncated anywhere never loads as another config."""
    text = config_text(generate_config("rotor")).rstrip("\n")
    for end in range(len(text)):
        load_text(tmp_path, text[:end])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("type: auto\nways: fast\n", 'ways: expected "exact", "rounding" or "none", got'),
        ("type: auto\noutputs: gone\n", 'outputs: expected "kept" or "dropped", got'),
        ("type: rotor\ngradients: [new]\n", 'gradients: expected "auto", "new" or "present", got'),
        ("type: offmate\noutputs: kept\n", "outputs: offmate has no such field"),
        ("type: monet\nwithout: masks\n", "without: expected a list of families of ways, such as [masks"),
        ("type: monet\nwithout: [masks, masks]\n", "without: expected a list of families"),
        ("type: monet\nwithout: [3]\n", "without: expected a list of families"),
        ("type: auto\nsed: 1\n", "did you mean seed?"),
        ("type: auto\nbudget: 1\n", "budget: auto has no such field"),
        ("type: chekmate\n", "did you mean checkmate?"),
        ("type: [auto]\n", "unknown type"),
        ("type: auto\nseed: one\n", "seed: expected a whole number"),
        ("type: auto\nseed: -1\n", "seed: expected a whole number"),
        ("type: auto\ngap: 5\n", "gap: expected a number from 0 to below 1, got 5"),
        ("type: auto\nseed: true\n", "seed: expected a whole number"),
        ("type: auto\ntime_limit_s: 0\n", "time_limit_s: expected seconds above 0"),
        ("type: auto\ntime_limit_s: .inf\n", "time_limit_s: expected seconds above 0"),
        ("type: auto\ntime_limit_s: .nan\n", "time_limit_s: expected seconds above 0"),
        ("type: checkmate\naccounting: papers\n", 'accounting: expected "referee" or "paper"'),
        ("type: checkmate\naccounting: [paper]\n", 'accounting: expected "referee" or "paper"'),
        ("type: offmate\nhost_budget: [1]\n", "host_budget: expected bytes"),
        ("type: offmate\noptimizer: 3\n", "optimizer: expected a class of torch.optim"),
        ("type: offmate\noptimizer: 'mine:'\n", "optimizer: expected a class of torch.optim"),
        ("type: offmate\noptimizer_options: [1]\n", "optimizer_options: expected names with values"),
        ("type: offmate\noptimizer_in_backward: 1\n", "optimizer_in_backward: expected true, false, or null"),
        ("type: offmate\nmaster_weights: null\n", "master_weights: expected true or false"),
        ("type: offmate\nweights: 1\n", "weights: expected a path"),
        ("type: offmate\naccumulation: 0\n", "accumulation: expected a whole number, 1 to 10,000"),
        ("type: offmate\nlinks: 55GB\n", "links: expected bytes per second by name"),
        ("type: offmate\nlinks: {to_hst_nbytes_per_s: 1}\n", "did you mean to_host_nbytes_per_s?"),
        ("type: offmate\nlinks: {to_host_nbytes_per_s: fast}\n", "links: expected bytes per second above 0"),
        ("type: offmate\nlinks: {to_host_nbytes_per_s: 0}\n", "links: expected bytes per second above 0"),
        ("type: offmate\nlinks: {start_s: 1KB}\n", "links: start_s: expected seconds as a number, not 1KB"),
        ("type: offmate\nlinks: {start_s: -1}\n", "links: expected bytes per second above 0"),
        ("remat_config: 2\ntype: auto\n", "newer than this remat reads"),
        ("remat_config: one\ntype: auto\n", "expected a version"),
        ("remat_config: true\ntype: auto\n", "expected a version"),
        ("", "not a remat config"),
        ("[1, 2]\n", "not a remat config"),
        ('{"format": "remat-plan", "version": 1}', "not a remat config"),
        ("type: auto\n  seed: 1\n", "not valid YAML at line"),
        ("type: !!python/object:os.system {}\n", "not valid YAML"),
        ("type: auto\nseed: &a 1\ngap: *a\n", "line 2 has an alias or anchor"),
        ("&a\ntype: auto\nseed: *a\n", "line 1 has an alias or anchor"),
        (BOMB, "line 2 has an alias or anchor"),
        ("type: auto\nseed: " + "[" * 30_000, "line 2 is nested too deeply"),
        ("type: auto\nseed:\n" + "- " * 30_000, "line 3 is nested too deeply"),
        ("type: auto\nseed: 1\nseed: 2\n", "line 3 has seed twice"),
        ("type: auto\nseed: " + "x" * 60_000, "seed: expected a whole number"),
        ("type: auto\n? " + "x" * 60_000 + "\n: 1", "auto has no such field"),
        ("type: offmate\nlinks: {? " + "x" * 60_000 + " : 1}", "unknown name xxx"),
        ("type: " + "x" * 60_000, "unknown type 'xxx"),
        ("type: auto\n#" + "x" * 70_000, "cannot be read (it is longer than 64 KiB"),
        ("type: auto\nseed: " + "1" * 5000, "line 2 has a malformed value"),
        ("type: auto\nseed: 0b_", "line 2 has a malformed value"),
        ("type: auto\nseed: 1:30", "line 2 has 1:30, which YAML 1.1 reads in base 60"),
        ("type: auto\ntime_limit_s: 1:30.5", "line 2 has 1:30.5, which YAML 1.1 reads in base 60"),
        ("type: offmate\noptimizer_options: {lr: .inf}\n", "optimizer_options: expected a finite lr"),
        ("type: auto\nseed: 2001-99-99", "line 2 has a malformed value"),
        ("type: auto\nseed: !!int one", "line 2 has a malformed value"),
        ("type: auto\nseed: !!bool one", "line 2 has a malformed value"),
        ("type: auto\nseed: !!timestamp one", "line 2 has a malformed value"),
        ("type: auto\nseed: " + "1" * 4000, "seed: expected a whole number"),
        ("type: auto\ntime_limit_s: " + "1" * 4000, "time_limit_s: expected seconds above 0"),
        (
            "type: offmate\nlinks: {to_host_nbytes_per_s: " + "9" * 400 + "}",
            "links: expected bytes per second",
        ),
        ("type: offmate\nlinks: {to_host_nbytes_per_s: true}", "links: expected bytes per second"),
        (b"\x89PNG\r\n\x1a\n\x00", "not text"),
        (b"type: auto\n" * 30_000, "is longer than 64 KiB, the limit for such files"),
    ],
)
def test_what_is_wrong_is_named(text: str | bytes, said: str, tmp_path: Path) -> None:
    """Unknown keys, wrong values, newer, foreign and corrupt files: one line each."""
    assert said in str(load_text(tmp_path, text))


# They are compared with what there is, or seed; nothing is made for each.
HARMLESS = {"seed", "leaf", "exact", "moves"}


@pytest.mark.parametrize("name", TYPES)
def test_every_count_that_drives_a_loop_has_a_bound(name: str) -> None:
    """Billions of levels, slots or stages would need memory and time that no limit bounds."""
    defaults = generate_config(name)
    for field in attrs.fields(type(defaults)):
        if type(getattr(defaults, field.name)) is int and field.name not in HARMLESS:
            with pytest.raises(BadConfig, match=r"expected a whole number, \d to [\d,]+, got 1000000000000"):
                attrs.evolve(defaults, **{field.name: 10**12})


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    """The error names a path that cannot be read."""
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(BadFile, match="cannot be read"):
            load_config(path)


def test_an_unknown_type_lists_the_types() -> None:
    """The error lists the known types."""
    with pytest.raises(BadConfig, match="expected one of auto, rotor"):
        generate_config("fastest")


def test_a_failed_save_leaves_no_trace(tmp_path: Path) -> None:
    """If a file cannot be written, the error says so and no file is left."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CannotWrite, match="choose another path"):
        save_config(generate_config(), tmp_path / "file" / "config.yaml")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CannotWrite):
        save_config(generate_config(), tmp_path / "folder")
    assert {"file", "folder"} == {path.name for path in tmp_path.iterdir()}
    assert (tmp_path / "file").read_text() == "mine"


def bomb() -> object:
    """A value whose `repr` takes forever."""
    made: object = "x"
    for _ in range(40):
        made = [made] * 9
    return made


@pytest.mark.parametrize(
    "value", ["x" * 10**6, 10**5000, bomb(), ("x" * 10**6,)], ids=["text", "int", "list", "tuple"]
)
@pytest.mark.parametrize(
    "wrong",
    [
        generate_config,
        lambda value: AutoConfig(seed=value),
        lambda value: AutoConfig(time_limit_s=value),
        lambda value: OffmateConfig(links=value),
        lambda value: OffmateConfig(links={"to_host_nbytes_per_s": value}),
        lambda value: OffmateConfig(master_weights=value),
        lambda value: choose_method("rotor", None, value, 0, None),
        lambda value: states_nbytes((), value),
        lambda value: RecomputePlanner(budget="50%", reserve_nbytes=value if value != 10**5000 else -value),
        lambda value: RecomputePlanner(budget=value).check(),
    ],
)
def test_what_code_gives_is_told_briefly_too(wrong: Callable[[object], object], value: object) -> None:
    """Long or deep values give one of our errors in one readable line."""
    with pytest.raises(RematError) as caught:
        wrong(value)
    assert len(str(caught.value)) <= 2000
    assert "\n" not in str(caught.value)


def test_type_checkers_know_every_type_by_name() -> None:
    """The overloads of `from_config` name all config types."""
    named = set()
    for overload in typing.get_overloads(from_config):
        hint = inspect.signature(overload).parameters["config"].annotation
        for each in (hint, *typing.get_args(hint)):
            named |= set(typing.get_args(each)) if typing.get_origin(each) is Literal else set()
    assert named == set(config_types())
