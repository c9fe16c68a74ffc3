import re

import pytest
import yaml

from auto_research.experiment.card import discover, find_card, load_card
from auto_research.runtime.errors import ConfigError, UnknownName


def rewrite(root, change):
    path = root / "adapters" / "toy" / "card.yaml"
    facts = yaml.safe_load(path.read_text())
    change(facts)
    path.write_text(yaml.safe_dump(facts, sort_keys=False))
    return path.parent


def test_discover_finds_a_dropped_folder(toy_root):
    card = discover(toy_root)["toy"]
    assert card.title == "A toy that counts"
    assert card.floors == ["popularity"]
    assert card.metrics == ["ndcg@10", "hit@10"]
    assert card.datasets == ["movielens-100k", "movielens-1m"]
    assert card.paper["id"] == "arXiv:0000.00000"
    assert card.docs == {}


def test_a_folder_without_init_is_refused(toy_root):
    (toy_root / "adapters" / "toy" / "__init__.py").unlink()
    with pytest.raises(ConfigError, match="__init__"):
        discover(toy_root)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(surprise=1), "surprise"),
        (lambda c: c["arms"]["slow"].update(colour="red"), "arms.slow"),
        (lambda c: c["arms"]["slow"].update(needs=["nowhere"]), "nowhere"),
        (lambda c: c.update(headline=["ghost"]), "ghost"),
        (lambda c: c["comparisons"].append({"arm": "slow", "against": "ghost"}), "ghost"),
        (lambda c: c["budgets"]["tiny"].update(overrides={"ghost": {}}), "ghost"),
        (lambda c: c["budgets"]["standard"].update(headline_seeds=[43, 42]), "tuning seed 42"),
        (lambda c: c["artifacts"]["table"].update(needs=["table"]), "circle"),
        (lambda c: c["artifacts"].update(slow={"what": "x", "needs": []}), "names two things"),
        (lambda c: c["artifacts"].update(titles={"what": "x", "needs": []}), "titles"),
        (lambda c: c.update(key="other"), "other"),
        (lambda c: c["budgets"].pop("full"), "full"),
    ],
)
def test_a_wrong_card_is_one_line_that_names_file_and_field(toy_root, change, message):
    folder = rewrite(toy_root, change)
    with pytest.raises(ConfigError) as caught:
        load_card(folder)
    text = str(caught.value)
    assert "card.yaml" in text
    assert message in text
    assert "\n" not in text


def test_title_vectors_are_a_table_a_stage_may_need(toy_root):
    def change(card):
        card["data"]["needs"].append("titles")
        card["arms"]["slow"]["needs"].append("titles")

    assert "titles" in load_card(rewrite(toy_root, change)).arms["slow"]["needs"]


def test_malformed_yaml_and_a_key_given_twice_name_the_line(toy_root):
    path = toy_root / "adapters" / "toy" / "card.yaml"
    good = path.read_text()
    path.write_text(good + "key: again\n")
    with pytest.raises(ConfigError, match=r"line \d+: key 'key' is given twice"):
        load_card(path.parent)
    path.write_text(good + "  : [\n")
    with pytest.raises(ConfigError, match=r"line \d+"):
        load_card(path.parent)


def test_numbers_with_an_exponent_are_numbers(toy_root):
    trials = find_card(toy_root, "toy").budget("standard", "slow")["trials"]
    assert [trial["learning_rate"] for trial in trials] == [0.001, 0.002]


def test_budget_overrides_and_seeds(toy_root):
    card = find_card(toy_root, "toy")
    assert len(card.budget("standard", "popularity")["trials"]) == 1
    assert "seeds" not in card.budget("standard")
    assert "overrides" not in card.budget("standard")
    assert card.seeds("standard", "slow") == [42, 43, 44]
    assert card.seeds("standard", "plain") == [42]
    assert card.seeds("standard", "plain", [7, 8]) == [7, 8]
    assert card.tuned("standard", "slow", 43)
    assert not card.tuned("standard", "slow", 42)
    assert not card.tuned("standard", "popularity", 43)  # one trial leaves nothing to choose


def test_unknown_names_list_what_exists(toy_root):
    with pytest.raises(UnknownName, match="toy"):
        find_card(toy_root, "nope")
    card = find_card(toy_root, "toy")
    with pytest.raises(UnknownName, match="movielens-1m"):
        card.dataset("criteo")
    with pytest.raises(UnknownName, match=re.escape("popularity, slow, plain")):
        card.stage("arm", "nope")
    with pytest.raises(UnknownName):
        find_card(toy_root, "../toy")
