"""One thread per process: the suite runs in parallel, and one-thread arithmetic is steadier than threads.

The programs that tests start inherit it: four of them with four threads each wait for each other for minutes.
"""

import os
import pickle

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("no_deadline", deadline=None)  # a busy machine is no failure of a test
hypothesis.settings.load_profile("no_deadline")


@pytest.fixture(scope="session", autouse=True)
def fresh_process():
    """Train a teacher again in the process of the tests, not in a fresh one, which takes seconds to import torch."""
    from pate_torch.teachers import independence

    call_in_fresh_process = independence.call_in_fresh_process
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(independence, "call_in_fresh_process", lambda packed, *given: pickle.loads(packed)(*given))
        yield call_in_fresh_process


@pytest.fixture(autouse=True)
def marked_fresh_process(request, monkeypatch, fresh_process):
    """Give a test that is marked ``fresh_process`` the fresh process."""
    if request.node.get_closest_marker("fresh_process") is not None:
        monkeypatch.setattr("pate_torch.teachers.independence.call_in_fresh_process", fresh_process)


@pytest.fixture(autouse=True)
def home_of_tests(tmp_path_factory, monkeypatch):
    """No test writes into the store of whoever runs it."""
    monkeypatch.setenv("PATE_HOME", str(tmp_path_factory.getbasetemp() / "home"))


@pytest.fixture(scope="session")
def postgres_server():
    """A PostgreSQL server, which starts with the first test that asks for it."""
    from tests.postgres_server import running_server

    with running_server() as server:
        yield server


@pytest.fixture
def simulated_gpu():
    """A simulated GPU, which ``cuda`` names until the test is over."""
    from tests.gpu.simulated_gpu import simulate_gpu

    with simulate_gpu() as gpu:
        yield gpu


def pytest_addoption(parser):
    parser.addoption("--update-pins", action="store_true", help="renew tests/end_to_end/pins by what is found")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Refuse a slow test that does not say why it is slow."""
    for item in items:
        if any(not marker.kwargs.get("reason") for marker in item.iter_markers("slow")):
            raise pytest.UsageError(f"{item.nodeid}: give a reason, as in @pytest.mark.slow(reason=...)")


def pytest_terminal_summary(terminalreporter):
    """What the neighbors of every combination came to, in the end of any run that tried them."""
    for report in [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]:
        for name, value in report.user_properties:
            if name == "neighbors" and report.when == "call":
                terminalreporter.write_line(f"{report.nodeid.split('::')[-1]}: {value}")
