"""The doctor says what is missing and which command mends it; profiles are linked once and never over foreign files."""

import pytest

from auto_research.runtime import doctor
from auto_research.runtime.errors import UserError
from auto_research.runtime.files import write_json


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A toy checkout with two profiles besides default, and one dataset."""
    root = tmp_path / "checkout"
    for name in ("default", "mac", "gpu-a30"):
        (root / "profiles" / name).mkdir(parents=True)
        (root / "profiles" / name / "config.yaml").write_text("cores: 1\n")
    (root / "adapters").mkdir()
    (root / "adapters" / "__init__.py").write_text("")
    (root / "config").mkdir()
    (root / "config" / "datasets.yaml").write_text("toy: {sources: [{kind: url, file: toy.zip}]}\n")
    monkeypatch.setenv("AUTO_RESEARCH_ROOT", str(root))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("AUTO_RESEARCH_DEVICE", raising=False)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return root


def by_name(folder=None):
    return {check.name: check for check in doctor.doctor(folder)}


def test_link_is_idempotent_and_leaves_default_out(root, tmp_path):
    lines = doctor.link_profiles()
    assert [line.split(":")[0] for line in lines] == ["gpu-a30", "mac"]
    folder = tmp_path / "config" / "snakemake"
    assert (folder / "mac" / "config.yaml").read_text() == "cores: 1\n"
    assert not (folder / "default").exists()
    assert all("already linked" in line for line in doctor.link_profiles())


def test_link_to_a_gone_checkout_is_renewed(root, tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "mac").symlink_to(tmp_path / "gone" / "profiles" / "mac")
    doctor.link_profiles(folder)
    assert (folder / "mac").resolve() == (root / "profiles" / "mac").resolve()


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_foreign_things_are_not_touched(root, tmp_path, kind):
    folder = tmp_path / "target"
    folder.mkdir()
    foreign = folder / "mac"
    if kind == "file":
        foreign.write_text("mine")
    elif kind == "folder":
        foreign.mkdir()
    else:
        foreign.symlink_to(tmp_path)
    with pytest.raises(UserError, match="is not a link of this project") as caught:
        doctor.link_profiles(folder)
    assert "\n" not in str(caught.value)
    assert [path.name for path in folder.iterdir()] == ["mac"]  # nothing else was linked either


def test_profiles_line_follows_the_links(root):
    assert by_name()["profiles"].status == "warning"
    assert by_name()["profiles"].fix == "auto-research profiles link"
    doctor.link_profiles()
    assert by_name()["profiles"].status == "ok"


def test_data_lines_follow_the_disk(root, tmp_path):
    folder = tmp_path / "data"
    check = by_name(folder)["data toy"]
    assert (check.status, check.fix) == ("warning", "auto-research data prepare --dataset toy")
    (folder / "downloads").mkdir(parents=True)
    (folder / "downloads" / "toy.zip").write_bytes(b"")
    assert by_name(folder)["data toy"].detail == "downloaded (toy.zip), not prepared"
    write_json("results/data/toy/canonical/manifest.json", {})
    assert by_name(folder)["data toy"].status == "ok"


def test_a_missing_accelerator_is_named_with_the_mending_command(root, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("AUTO_RESEARCH_DEVICE", "cuda:3")
    check = by_name()["device"]
    assert check.status == "missing"
    assert "cuda:3 is not available: this machine has" in check.detail
    assert check.fix == "export AUTO_RESEARCH_DEVICE=auto"


def test_a_broken_registry_is_a_line_not_a_crash(root):
    (root / "config" / "datasets.yaml").write_text("a: [\n")
    check = by_name()["data"]
    assert check.status == "missing"
    assert "not valid YAML" in check.detail


def test_a_missing_package_names_its_extra(root, monkeypatch):
    monkeypatch.setattr(doctor, "OPTIONAL", {"no-such-package-here": "llm"})
    check = by_name()["no-such-package-here"]
    assert (check.status, check.fix) == ("warning", "auto-research-install-runtime --extras llm")
