"""The processes that tests of distributed attention share."""

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks():
    ranks = Ranks()
    yield ranks
    ranks.stop()
