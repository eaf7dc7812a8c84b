"""VARUNA_* variables: named in one file, read and written as one value."""

import re

import pytest

from tests.test_layers import FILES, ROOT
from varuna.environment import VarunaEnvironment, variable_name


def test_one_file_names_the_variables() -> None:
    named = {str(path.relative_to(ROOT)) for path in FILES if re.search(r"VARUNA_[A-Z]", path.read_text())}
    assert named == {"varuna/environment.py"}


def test_what_is_written_is_read_back() -> None:
    written = VarunaEnvironment(chunk_size=4, plan="{}", resume_step=0)
    assert written.write() == {"VARUNA_CHUNK_SIZE": "4", "VARUNA_PLAN": "{}", "VARUNA_RESUME_STEP": "0"}
    assert VarunaEnvironment.read({**written.write(), "PATH": "/bin"}) == written


def test_an_empty_variable_counts_as_unset() -> None:
    assert VarunaEnvironment.read({"VARUNA_RESUME_STEP": "", "VARUNA_HOME": ""}) == VarunaEnvironment()


def test_a_wrong_value_is_refused_with_the_name_of_the_variable() -> None:
    with pytest.raises(ValueError, match=r"VARUNA_CHUNK_SIZE must be a whole number, not 'four'"):
        VarunaEnvironment.read({"VARUNA_CHUNK_SIZE": "four"})


def test_messages_name_a_variable_by_its_field() -> None:
    assert variable_name("stage_to_rank_map") == "VARUNA_STAGE_TO_RANK_MAP"
