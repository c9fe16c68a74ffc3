"""Schema violations name the place."""

import pytest

from auto_research.runtime import schema
from auto_research.runtime.errors import ConfigError


@pytest.fixture
def toy_schema(tmp_path, monkeypatch):
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "__init__.py").write_text("")
    (tmp_path / "config" / "schemas").mkdir(parents=True)
    (tmp_path / "config" / "schemas" / "toy.schema.yaml").write_text(
        "type: object\nadditionalProperties: false\n"
        "properties: {arms: {type: array, items: {type: object, required: [key], properties: {key: {enum: [a, b]}}}}}\n"
    )
    monkeypatch.setenv("AUTO_RESEARCH_ROOT", str(tmp_path))
    return tmp_path


def test_valid_object_comes_back(toy_schema):
    value = {"arms": [{"key": "a"}]}
    assert schema.validate(value, "toy") is value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"arms": [{"key": "a"}, {"key": "c"}]}, "card.yaml: at arms.1.key: 'c' is not one of"),
        ({"unknown": 1}, "card.yaml: at top level: Additional properties are not allowed ('unknown' was unexpected)"),
        ({"arms": [{}]}, "card.yaml: at arms.0: 'key' is a required property"),
    ],
)
def test_message_names_file_path_and_reason(toy_schema, value, message):
    with pytest.raises(ConfigError) as caught:
        schema.validate(value, "toy", source="card.yaml")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_long_values_are_cut(toy_schema):
    with pytest.raises(ConfigError) as caught:
        schema.validate({"arms": "x" * 5000}, "toy")
    assert len(str(caught.value)) < 400


def test_unknown_schema(toy_schema):
    with pytest.raises(ConfigError, match="no schema absent"):
        schema.validate({}, "absent")
    with pytest.raises(ConfigError, match="is not allowed"):
        schema.validate({}, "../toy")


def test_yaml_error_has_line_and_column(tmp_path):
    (tmp_path / "a.yaml").write_text("a: 1\nb: [1, 2\nc: }\n")
    with pytest.raises(ConfigError, match=r"a\.yaml: not valid YAML at line 3, column"):
        schema.load_yaml(tmp_path / "a.yaml")
