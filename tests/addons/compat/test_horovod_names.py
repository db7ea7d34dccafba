"""What `tfdist.addons.compat.horovod` says to names that it does not have."""

import pytest

import tfdist.addons.compat.horovod


@pytest.mark.parametrize(
    ("name", "words"),
    [("init", "HorovodStrategy()"), ("size", "strategy.mesh.size"), ("join", "'join'")],
)
def test_other_names_of_horovod_say_what_takes_their_place(name, words):
    with pytest.raises(AttributeError, match=r"docs/migrate_from_horovod\.md") as caught:
        getattr(tfdist.addons.compat.horovod, name)
    assert words in str(caught.value)
    assert not hasattr(tfdist.addons.compat.horovod, "__wrapped__")
