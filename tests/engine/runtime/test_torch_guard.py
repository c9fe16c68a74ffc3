"""The runtime installer plans first and never replaces torch unasked. Wheels and environments are made here."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pip
import pytest

from auto_research.cli import install_runtime
from auto_research.runtime.errors import ConfigError, RunFailure, UnknownName, UserError, guard


def wheel(folder, name, version, requires=()):
    """A wheel with one empty module."""
    module, info = name.replace("-", "_"), f"{name.replace('-', '_')}-{version}.dist-info"
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    files = {
        f"{module}.py": "",
        f"{info}/METADATA": "\n".join(lines) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    path = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for place, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(place, text)
    return path


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Folder that serves as package index."""
    folder = tmp_path_factory.mktemp("index")
    wheel(folder, "torch", "2.7.0a0+vendor")
    wheel(folder, "torch", "9.9.9")
    wheel(folder, "fits-any-torch", "1.0", ["torch>=2.1"])
    wheel(folder, "wants-new-torch", "1.0", ["torch>=9"])
    return folder


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch):
    """pip's own configuration here (indexes, constraints) plays no part."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


@pytest.fixture
def python(tmp_path, monkeypatch, index):
    """Interpreter of an environment that holds pip and torch 2.7.0a0+vendor and nothing else."""
    library = tmp_path / "library"
    library.mkdir()
    (library / "pip").symlink_to(Path(pip.__file__).parent)
    venv.create(tmp_path / "environment", with_pip=False)
    interpreter = str(tmp_path / "environment" / "bin" / "python")
    monkeypatch.setenv("PYTHONPATH", str(library))
    torch = str(index / "torch-2.7.0a0+vendor-py3-none-any.whl")
    subprocess.run([interpreter, "-m", "pip", "install", "-q", "--no-index", torch], check=True)
    return interpreter


def run(python, index, *requirements, allow=False, dry=False):
    options = ["--quiet", "--no-index", "--find-links", str(index)]
    return install_runtime.install(python, requirements, options, allow_torch_change=allow, dry_run=dry)


def installed(python, name):
    code = f"from importlib import metadata; print(metadata.version({name!r}))"
    answer = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return answer.stdout.strip() or None


def test_a_plan_that_replaces_torch_stops_before_installing(python, index):
    with pytest.raises(UserError) as caught:
        run(python, index, "wants-new-torch")
    assert "would replace torch 2.7.0a0+vendor with torch 9.9.9" in str(caught.value)
    assert "--allow-torch-change" in str(caught.value)
    assert installed(python, "torch") == "2.7.0a0+vendor"
    assert installed(python, "wants-new-torch") is None


def test_the_person_can_allow_it(python, index):
    assert run(python, index, "wants-new-torch", allow=True) == {"torch": "9.9.9", "wants-new-torch": "1.0"}
    assert installed(python, "torch") == "9.9.9"


def test_packages_that_fit_are_installed_and_torch_stays(python, index):
    assert run(python, index, "fits-any-torch", dry=True) == {"fits-any-torch": "1.0"}
    assert installed(python, "fits-any-torch") is None
    run(python, index, "fits-any-torch")
    assert installed(python, "fits-any-torch") == "1.0"
    assert installed(python, "torch") == "2.7.0a0+vendor"
    assert run(python, index, "fits-any-torch") == {}


def test_a_vendor_pre_release_of_2_7_counts_as_2_7(python, index):
    # by version rules 2.7.0a0 is older than 2.7, so pip by itself would replace it
    with pytest.raises(UserError):
        install_runtime.check_torch("2.7.0a0+vendor", install_runtime.plan(python, ["torch>=2.7"], _folder(index)))
    assert run(python, index, "torch>=2.7", "fits-any-torch", dry=True) == {"fits-any-torch": "1.0"}
    assert install_runtime.torch_satisfies("2.7.0a0+vendor")
    assert install_runtime.torch_satisfies("2.13.0+cpu")
    assert not install_runtime.torch_satisfies("2.6.1")


def _folder(index):
    return ["--no-index", "--find-links", str(index)]


def test_no_plan_is_one_line_with_the_reason(python, index):
    with pytest.raises(RunFailure, match=r"pip finds no plan: Could not find .*absent-package"):
        run(python, index, "absent-package")


def test_this_environment_keeps_its_torch(index, capfd):
    """The entry point's own path, in the environment of the tests; it stops before anything is installed."""
    before = installed(sys.executable, "torch")
    options = {"allow_torch_change": False, "dry_run": False}
    code = guard(lambda: install_runtime.install(sys.executable, ["wants-new-torch"], _folder(index), **options) and 0)
    assert code == 2
    err = capfd.readouterr().err
    assert err.startswith(f"error: nothing installed: pip would replace torch {before} with torch 9.9.9")
    assert err.count("\n") == 1
    assert installed(sys.executable, "torch") == before


def test_names_of_extras():
    assert install_runtime.extra_names("neural-recs, plum,llm-evolution,dev") == ["llm", "dev"]
    with pytest.raises(UnknownName, match="unknown extra 'gpu'; known: llm, cluster, dev"):
        install_runtime.extra_names("llm,gpu")
    with pytest.raises(ConfigError):
        install_runtime.extra_names(" ,")


def test_only_what_the_extra_adds():
    declared = ["torch>=2.7", 'peft>=0.14; extra == "llm"', 'ruff; extra == "dev"', 'tomli; python_version < "3"']
    assert install_runtime.extra_requirements(["llm"], declared) == ["peft>=0.14"]
    assert install_runtime.extra_requirements(["llm", "dev"], declared) == ["peft>=0.14", "ruff"]
    real = {line.split(">")[0].split("<")[0] for line in install_runtime.extra_requirements(["llm"])}
    assert real == {"transformers", "datasets", "peft", "gguf"}
