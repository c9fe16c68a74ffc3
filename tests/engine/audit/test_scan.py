"""The static scan sees what an adapter's own folder does, and nothing else."""

from pathlib import Path

import pytest

from auto_research.audit.scan import Site, has_device_path, scan_folder


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "__init__.py").touch()
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return folder


def test_a_direct_call_is_a_path(tmp_path):
    folder = write(
        tmp_path / "toy",
        experiment="from auto_research.runtime.devices import device_for\n\n\ndef arm(ctx):\n    return device_for(ctx.device)\n",
    )
    assert scan_folder(folder) == [Site("experiment.py", 5, "device_for")]


def test_comments_and_strings_are_no_path(tmp_path):
    folder = write(
        tmp_path / "toy",
        experiment='"""device_for(None)"""\n# device_for(None) torch.cuda.synchronize()\nTEXT = "device_for(ctx.device) torch.cuda"\n',
    )
    assert scan_folder(folder) == []


def test_an_import_alone_is_no_path(tmp_path):
    folder = write(tmp_path / "toy", model="from auto_research.runtime.devices import device_for\nimport torch.cuda\n")
    assert not has_device_path(folder)


@pytest.mark.parametrize(
    "text",
    [
        "from auto_research.runtime.devices import device_for as pick\npick(None)\n",
        "from auto_research.runtime import devices as machine\nmachine.device_for(None)\n",
        "import auto_research.runtime.devices as d\nd.device_for(None)\n",
        "import auto_research.runtime.devices\nauto_research.runtime.devices.device_for(None)\n",
        "from auto_research.runtime import devices\npick = devices.device_for\npick(None)\n",
        "def arm(ctx):\n    from auto_research.runtime.devices import device_for as here\n    return here(ctx.device)\n",
        "from ..toy.machine import place\nplace(None)\n",
        "from .machine import place\nplace(None)\n",
    ],
)
def test_aliased_imports_are_paths(tmp_path, text):
    machine = "from auto_research.runtime.devices import device_for as place\n"
    folder = write(tmp_path / "toy", experiment=text, machine=machine)
    assert [site.kind for site in scan_folder(folder)] == ["device_for"]


@pytest.mark.parametrize(
    "text",
    [
        "def device_for(x):\n    return x\ndevice_for(None)\n",
        "from auto_research.runtime.devices import device_for\ndef f(device_for):\n    return device_for(None)\n",
        "from somewhere.other import device_for\ndevice_for(None)\n",
        "class A:\n    def device_for(self):\n        return self.device_for()\n",
    ],
)
def test_another_function_of_that_name_is_no_path(tmp_path, text):
    assert scan_folder(write(tmp_path / "toy", experiment=text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nif torch.cuda.is_available():\n    pass\n",
        "from torch import cuda\ncuda.synchronize()\n",
        "import torch.cuda as tc\ntc.empty_cache()\n",
        "from torch.cuda import synchronize as wait\nwait()\n",
    ],
)
def test_torch_cuda_is_a_path(tmp_path, text):
    assert {site.kind for site in scan_folder(write(tmp_path / "toy", model=text))} == {"torch.cuda"}


def test_a_neighbours_use_is_not_inherited(tmp_path):
    neighbour = "from auto_research.runtime.devices import device_for\n\ndef place():\n    return device_for(None)\n"
    write(tmp_path / "adapters" / "neighbour", experiment=neighbour)
    folder = write(
        tmp_path / "adapters" / "toy",
        experiment="from adapters.neighbour.experiment import device_for, place\nplace()\n",
    )
    assert scan_folder(folder) == []
    assert has_device_path(tmp_path / "adapters" / "neighbour")


def test_a_broken_source_names_its_file(tmp_path):
    folder = write(tmp_path / "toy", model="def broken(:\n")
    with pytest.raises(SyntaxError) as caught:
        scan_folder(folder)
    assert str(caught.value.filename).endswith("model.py")
