"""Canonical and effective genomes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_track import DEFINITION

from auto_research.evolve.genome import (
    canonical,
    changed_genes,
    effective,
    fingerprint,
    illegal_reason,
    inert_genes,
    trial_id,
)
from auto_research.experiment.search import InvalidGenome, track_from

TRACK = track_from(DEFINITION)
GENOMES = st.fixed_dictionaries({gene.name: st.sampled_from(gene.allowed) for gene in TRACK.genes})
BASE = TRACK.baseline()


@given(GENOMES)
def test_effective_is_idempotent_and_keeps_active_genes(genome):
    once = effective(genome, TRACK)
    assert effective(once, TRACK) == once
    inert = inert_genes(genome, TRACK)
    assert all(once[name] == genome[name] for name in genome if name not in inert)
    assert all(once[name] == BASE[name] for name in inert)


@given(GENOMES, st.randoms())
def test_gene_order_never_changes_a_fingerprint(genome, random):
    names = list(genome)
    random.shuffle(names)
    assert fingerprint(canonical({n: genome[n] for n in names}, TRACK)) == fingerprint(canonical(genome, TRACK))


@given(GENOMES)
def test_a_value_of_an_inert_gene_does_not_change_the_effective_fingerprint(genome):
    for name in inert_genes(genome, TRACK):
        for value in TRACK.by_name[name].allowed:
            assert fingerprint(effective({**genome, name: value}, TRACK)) == fingerprint(effective(genome, TRACK))


def test_an_inert_gene_keeps_nothing_alive():
    # deep makes channel inert, so moe cannot keep experts alive
    genome = {**BASE, "block": "deep", "channel": "moe", "experts": 4}
    assert inert_genes(genome, TRACK) == {"channel", "experts"}
    assert effective(genome, TRACK) == {**BASE, "block": "deep"}


def test_an_inert_gene_keeps_nothing_alive_even_when_its_default_would():
    changed = json.loads(json.dumps(DEFINITION))
    changed["genome"][1]["default"] = "moe"
    track = track_from(changed)
    genome = {**track.baseline(), "block": "deep", "experts": 4}
    assert effective(genome, track)["experts"] == 2


def test_values_above_another_gene_are_written_as_one():
    definition = {
        **DEFINITION,
        "genome": [
            {"name": "layers", "type": "int", "allowed": [1, 2, 3], "default": 2},
            {"name": "period", "type": "int", "allowed": [1, 2, 3], "default": 2},
        ],
        "operators": [],
        "merges": [{"gene": "period", "above": "layers", "becomes": 3}],
    }
    track = track_from(definition)
    assert effective({"layers": 1, "period": 2}, track) == {"layers": 1, "period": 3}
    assert effective({"layers": 2, "period": 2}, track) == {"layers": 2, "period": 2}
    # a period of 3 with 3 layers is a real skip, and no other value is merged with it
    assert len({fingerprint(effective({"layers": 3, "period": p}, track)) for p in (1, 2, 3)}) == 3


@pytest.mark.parametrize(
    "genome",
    [
        {**BASE, "width": 9},
        {**BASE, "width": True},
        {**BASE, "block": 1},
        {**BASE, "extra": 1},
        {name: value for name, value in BASE.items() if name != "rate"},
    ],
)
def test_a_genome_outside_the_space_is_invalid(genome):
    with pytest.raises(InvalidGenome):
        canonical(genome, TRACK)


def test_numbers_are_taken_verbatim_from_the_allowed_list():
    assert repr(canonical({**BASE, "width": 16.0}, TRACK)["width"]) == "16"


def test_changed_genes_and_trial_id():
    child = {**BASE, "width": 16, "block": "mix"}
    assert changed_genes(BASE, child) == [
        {"gene": "block", "from": "plain", "to": "mix"},
        {"gene": "width", "from": 8, "to": 16},
    ]
    assert trial_id(3, 1, "0123456789abcdef") == "g03-s01-01234567"


def test_illegal_combinations_have_a_reason_unless_the_gene_is_inert():
    track = track_from({**DEFINITION, "illegal": [{"when": {"channel": ["moe"], "width": [32]}, "reason": "too wide"}]})
    assert illegal_reason({**BASE, "channel": "moe", "width": 32}, track) == "too wide"
    assert illegal_reason({**BASE, "block": "deep", "channel": "moe", "width": 32}, track) is None
    assert illegal_reason(BASE, track) is None
