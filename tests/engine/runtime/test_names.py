"""Names that may reach a path."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_research.runtime.errors import ConfigError
from auto_research.runtime.names import check_name, key_name, module_name


@pytest.mark.parametrize("text", ["../x", "a/b", "", "-a", "_a", "A", "a b", "a\n", "é", "a" * 101, None, 3])
def test_names_that_could_leave_a_folder_are_refused(text):
    with pytest.raises(ConfigError, match="run name"):
        check_name(text, "run name")


@settings(deadline=None)
@given(st.from_regex(r"[a-z0-9][a-z0-9_-]{0,20}", fullmatch=True))
def test_allowed_names_come_back_unchanged(text):
    assert check_name(text) == text


def test_two_spellings_of_a_key():
    assert module_name("onerec-v2") == "onerec_v2"
    assert key_name("onerec_v2") == "onerec-v2"
    assert re.fullmatch(r"\w+", module_name("a-b-c"))
