"""The ten lines of use in remat-graph's README run as they stand."""

import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a folder that has the corpus where the clone has it."""
    shutil.copytree(ROOT / "tests" / "data" / "graphs", tmp_path / "tests" / "data" / "graphs")
    monkeypatch.chdir(tmp_path)
    readme = (ROOT / "packages" / "graph" / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    assert "by hand" in capsys.readouterr().out
    assert (tmp_path / "vgg16.plan.json").is_file()
