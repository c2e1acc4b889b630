"""The faults of `make mutate` can still be planted, so that the list does not rot between two runs of it."""

import pytest

import mutations
from mutate import plant
from notebooks import ROOT


@pytest.mark.parametrize("fault", mutations.FAULTS, ids=lambda fault: fault.name)
def test_fault_can_be_planted(fault, tmp_path):
    for edit in fault.edits:
        (tmp_path / edit.file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / edit.file).write_text((ROOT / edit.file).read_text(encoding="utf-8"), encoding="utf-8")
    before = plant(fault, tmp_path)
    assert all(path.read_text(encoding="utf-8") != text for path, text in before.items())


def test_faults_have_names_of_their_own():
    names = [fault.name for fault in mutations.FAULTS]
    assert len(names) == len(set(names))


def test_a_text_that_is_gone_is_an_error():
    with pytest.raises(ValueError, match="no longer holds"):
        mutations.Edit("one.py", "old", "new")("something else")


def test_a_change_that_changes_nothing_is_an_error():
    with pytest.raises(ValueError, match="changes nothing"):
        mutations.Edit("one.py", change=lambda text: text)("something")
