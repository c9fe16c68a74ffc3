"""Where code, data and results are looked for."""

import pytest

from auto_research.runtime import paths
from auto_research.runtime.errors import ConfigError


@pytest.fixture
def toy(tmp_path, monkeypatch):
    root = tmp_path / "toy"
    (root / "adapters").mkdir(parents=True)
    (root / "adapters" / "__init__.py").write_text("")
    monkeypatch.delenv("AUTO_RESEARCH_ROOT", raising=False)
    return root


def test_environment_comes_first(toy, monkeypatch):
    monkeypatch.setenv("AUTO_RESEARCH_ROOT", str(toy))
    assert paths.code_root() == toy.resolve()


def test_nearest_parent_with_adapters(toy, monkeypatch):
    below = toy / "results" / "x"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert paths.code_root() == toy.resolve()


def test_checkout_is_the_last_resort(tmp_path, monkeypatch):
    monkeypatch.delenv("AUTO_RESEARCH_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    assert paths.code_root() == paths.checkout_root()


def test_wrong_environment_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTO_RESEARCH_ROOT", str(tmp_path))
    with pytest.raises(ConfigError, match=r"holds no adapters/__init__\.py"):
        paths.code_root()


def test_a_toy_root_without_config_uses_the_checkout_config(toy, monkeypatch):
    monkeypatch.setenv("AUTO_RESEARCH_ROOT", str(toy))
    assert paths.config_dir() == paths.checkout_root() / "config"
    (toy / "config").mkdir()
    assert paths.config_dir() == toy.resolve() / "config"


def test_results_and_downloads_lie_below_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTO_RESEARCH_DATASET_DIR", raising=False)
    assert paths.results_dir() == tmp_path / "results"
    assert str(paths.dataset_dir()) == "data"
    monkeypatch.setenv("AUTO_RESEARCH_DATASET_DIR", "/elsewhere")
    assert str(paths.dataset_dir()) == "/elsewhere"
    assert str(paths.dataset_dir("named")) == "named"
