import pytest

from auto_research.experiment.fingerprint import STAGES, Fingerprints, tree_hash
from auto_research.runtime.errors import ConfigError


@pytest.fixture
def two(toy_root):
    """The toy and a neighbour that shares a block with nobody."""
    neighbour = toy_root / "adapters" / "neighbour"
    neighbour.mkdir()
    (neighbour / "__init__.py").write_text("")
    card = (toy_root / "adapters" / "toy" / "card.yaml").read_text().replace("key: toy", "key: neighbour")
    (neighbour / "card.yaml").write_text(card)
    (neighbour / "experiment.py").write_text("from auto_research.experiment.contract import Experiment\n")
    return toy_root


def stages(root):
    prints = Fingerprints(root)
    return {
        (key, name): prints.stage(key, kind, name, "tiny")
        for key in ("toy", "neighbour")
        for kind, name in (("artifact", "table"), ("arm", "slow"), ("arm", "plain"))
    }


def changed(root, before):
    return {stage for stage, value in stages(root).items() if value != before[stage]}


def edit(root, name, old, new):
    path = root / "adapters" / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("toy/model.py", "A model: one number.", "Another docstring."),
        ("toy/model.py", '    """The next value."""\n', ""),
        ("toy/model.py", "    return value", "    # why\n\n    return value"),
        ("toy/experiment.py", "rate = (ctx.tuned", "rate = (  ctx.tuned"),
        ("toy/card.yaml", "gpu: {path: false}", "gpu: {path: false, notes: a card note}"),
        ("toy/card.yaml", "problem: Shows", "problem: It shows"),
        ("toy/card.yaml", "smoke: {seeds: [42], steps: 6", "smoke: {seeds: [42], steps: 7"),
        ("toy/card.yaml", "also: [hit@10]", "also: []"),
    ],
)
def test_what_no_stage_reads_changes_nothing(two, file, old, new):
    before = stages(two)
    edit(two, file, old, new)
    assert changed(two, before) == set()


def test_prose_in_the_folder_changes_nothing_and_data_does(two):
    before = stages(two)
    (two / "adapters" / "toy" / "README.md").write_text("words")
    assert changed(two, before) == set()
    (two / "adapters" / "toy" / "prompts.txt").write_text("words")
    assert {key for key, _ in changed(two, before)} == {"toy"}


def test_code_of_an_adapter_changes_that_adapter_only(two):
    before = stages(two)
    edit(two, "toy/model.py", "step + 1", "step + 2")
    assert changed(two, before) == {("toy", "table"), ("toy", "slow"), ("toy", "plain")}
    edit(two, "toy/model.py", "step + 2", "step + 1")
    assert changed(two, before) == set()


def test_a_budget_or_switch_changes_the_stages_that_read_it(two):
    before = stages(two)
    edit(two, "toy/card.yaml", "switch: {width: 1}", "switch: {width: 2}")
    assert changed(two, before) == {("toy", "plain")}
    edit(
        two,
        "toy/card.yaml",
        "tiny: {seeds: [42], steps: 4, users: 20}",
        "tiny: {seeds: [42], steps: 4, users: 20, overrides: {slow: {steps: 5}}}",
    )
    assert changed(two, before) == {("toy", "plain"), ("toy", "slow")}


def test_a_module_imported_inside_a_function_and_parent_packages_count(two):
    edit(
        two,
        "neighbour/experiment.py",
        "import Experiment\n",
        "import Experiment\n\n\ndef late():\n    from adapters.toy import model\n",
    )
    before = stages(two)
    edit(two, "toy/model.py", "step + 1", "step + 2")
    assert {key for key, _ in changed(two, before)} == {"toy", "neighbour"}
    before = stages(two)
    (two / "adapters" / "toy" / "__init__.py").write_text("VERSION = 2\n")
    assert {key for key, _ in changed(two, before)} == {"toy", "neighbour"}


def test_an_unused_module_of_the_folder_does_not_count(two):
    before = stages(two)
    (two / "adapters" / "toy" / "search.py").write_text("GENES = 3\n")
    assert changed(two, before) == set()


def test_command_lines_and_fingerprints_are_not_part_of_a_stage(two):
    closure = Fingerprints(two).closure(STAGES, "adapters.toy.experiment")
    assert "auto_research.experiment.commands" not in closure
    assert "auto_research.experiment.fingerprint" not in closure
    assert "auto_research.runtime.seeds" in closure
    assert "auto_research" in closure


def test_a_syntax_error_is_one_line_with_file_and_line(two):
    (two / "adapters" / "neighbour" / "experiment.py").write_text("def broken(:\n")
    with pytest.raises(ConfigError, match=r"experiment\.py"):
        Fingerprints(two).stage("toy", "arm", "slow", "tiny")


def test_tree_hash_sees_constants_that_only_look_like_docstrings(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("def f():\n    return 'text'\n")
    first = tree_hash(path)
    path.write_text("def f():\n    return 'other'\n")
    assert tree_hash(path) != first
