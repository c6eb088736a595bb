"""Files that the tests of sources share and do not change."""

import pytest

from tests.data.owner_files import write_files


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Paths of the files of ``write_files``, by "own <kind>" and "apart <kind>"."""
    return write_files(tmp_path_factory.mktemp("files"))
