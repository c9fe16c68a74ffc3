import fcntl
import os

import pytest
import yaml

from auto_research.experiment.commands import parse_seeds
from auto_research.experiment.graph import checked, gpu_of, hold_run_lock, machine
from auto_research.runtime.errors import ConfigError
from auto_research.runtime.paths import checkout_root
from auto_research.runtime.schema import validate

DEFAULTS = yaml.safe_load((checkout_root() / "config" / "config.yaml").read_text())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("colour", "red"),
        ("tier", "huge"),
        ("seeds", "42;43"),
        ("seeds", "42,"),
        ("seeds", -1),
        ("device", "cuda:99x"),
        ("dataset", "../etc"),
        ("run", "a b"),
        ("cpu_threads", 0),
        ("direction", {"a": "b"}),  # what `--config direction='a: b'` arrives as
        ("offline", "maybe"),
    ],
)
def test_a_wrong_setting_is_refused_and_named(key, value):
    validate(DEFAULTS, "config")
    with pytest.raises(ConfigError, match=key):
        validate({**DEFAULTS, key: value}, "config")


@pytest.mark.parametrize("value", [42, "42,43", "42, 43", [42, 43], ["42", "43"], None])
def test_every_spelling_of_seeds_is_accepted(value):
    validate({**DEFAULTS, "seeds": value}, "config")
    assert parse_seeds(value) in (None, [42], [42, 43])


@pytest.mark.parametrize("value", ["42,42", "a", "1.5", "-3"])
def test_wrong_seeds_are_refused(value):
    with pytest.raises(ConfigError, match="seeds"):
        parse_seeds(value)


def test_flags_beat_the_environment_and_the_environment_beats_a_profile(toy_root, monkeypatch):
    for name in ("AUTO_RESEARCH_DEVICE", "AUTO_RESEARCH_CPU_THREADS"):
        monkeypatch.delenv(name, raising=False)
    profile = {"device": None, "default_device": "cuda:0", "cpu_threads": None, "default_cpu_threads": 3}
    made = machine(profile, checkout_root())
    assert (made.device, made.gpu, made.threads) == ("cuda:0", 1, 3)
    monkeypatch.setenv("AUTO_RESEARCH_DEVICE", "cpu")
    monkeypatch.setenv("AUTO_RESEARCH_CPU_THREADS", "5")
    assert (machine(profile, checkout_root()).device, machine(profile, checkout_root()).threads) == ("cpu", 5)
    assert machine({**profile, "device": "mps", "cpu_threads": 1}, checkout_root()).device == "mps"
    assert gpu_of("cpu") == 0


def test_jobs_keep_freed_memory_unless_told_otherwise(monkeypatch):
    for name in os.environ:
        if name.startswith(("AUTO_RESEARCH_", "MALLOC_")):
            monkeypatch.delenv(name)
    before = dict(os.environ)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "7")
    try:
        machine({"device": "cpu"}, checkout_root()).export()
        assert int(os.environ["MALLOC_MMAP_THRESHOLD_"]) == 2**30
        assert os.environ["MALLOC_TRIM_THRESHOLD_"] == "7"
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_a_working_directory_outside_any_checkout_uses_the_snakefiles(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTO_RESEARCH_ROOT", "x")
    monkeypatch.delenv("AUTO_RESEARCH_ROOT")
    monkeypatch.chdir(tmp_path)
    assert machine({}, checkout_root()).root == checkout_root()


def test_a_user_error_becomes_one_line_and_exit_code_2(capsys):
    def fail():
        raise ConfigError("two\nlines")

    with pytest.raises(SystemExit) as stop:
        checked(fail)
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: two lines\n"


def test_the_run_lock_removes_stale_locks_only_when_nobody_is_alive(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    locks = tmp_path / ".snakemake" / "locks"
    locks.mkdir(parents=True)
    (locks / "0.output.lock").touch()
    other = open(tmp_path / ".snakemake" / "run.lock", "a")  # noqa: SIM115 (the open handle is the lock)
    fcntl.flock(other, fcntl.LOCK_SH)
    assert hold_run_lock(True) is not None
    assert (locks / "0.output.lock").exists()
    other.close()
    first = hold_run_lock(True)
    assert not (locks / "0.output.lock").exists()
    assert locks.is_dir()
    assert hold_run_lock(False) is None
    first.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o500)
    with pytest.raises(SystemExit):
        hold_run_lock(True)
    assert "writable folder" in capsys.readouterr().err
