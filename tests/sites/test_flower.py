"""Files move through mailboxes: in one process, and by Flower with a server and three clients in separate processes."""

import contextlib
import importlib.util
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pate_torch.cli.main import main
from pate_torch.sites.joiner import Joiner
from pate_torch.sites.mailbox import answer_inbox, exchange_files, load_outgoing, run_joiner, take_replies
from pate_torch.sites.mailbox import main as serve_mailbox
from pate_torch.sites.site import Site
from tests.sites.site_tables import CLASSES, PUBLIC, make_kind, make_rows, make_terms, write_csv

ROOT = Path(__file__).parents[2]
NAMES = ("s0", "s1", "s2")


def make_mailbox(path: Path) -> Path:
    for name in ("inbox", "outbox"):
        (path / name).mkdir(parents=True)
    return path


class Transport:
    """Moves files between the joiner and the mailboxes, each of them twice; the sites answer between the two."""

    def __init__(self, folder: Path):
        self.joiner = Joiner(folder / "join")
        self.sites = [
            Site.create(folder / name, folder / f"home-{name}", name=name, account="scans", num_slots=2)
            for name in NAMES
        ]
        self.mailboxes = [make_mailbox(folder / f"{name}-mail") for name in NAMES]
        self.problems: list[str] = []
        self.reads = 0

    def answer_all(self) -> None:
        for seed, (site, mailbox) in enumerate(zip(self.sites, self.mailboxes, strict=True)):

            def read_data(seed=seed, **columns):
                self.reads += 1
                return make_rows(100, seed)

            self.problems.append(answer_inbox(site, mailbox, read_data))

    def exchange(self, files):
        for mailbox in self.mailboxes:
            exchange_files(mailbox, files)
        self.answer_all()
        return [exchange_files(mailbox, files) for mailbox in self.mailboxes for _ in range(2)]

    def run(self, seconds: float = 0) -> None:
        run_joiner(self.joiner, self.exchange, num_sites=3, seconds=seconds, pause_seconds=0)

    def create_charter(self) -> bytes:
        keys = {path.name: path.read_bytes() for path in sorted((self.joiner.folder / "received").glob("*.key"))}
        return self.joiner.create_charter(keys, make_terms(3))

    def confirm_all(self, charter: bytes, cap: float = 2) -> None:
        for site in self.sites:
            site.confirm(charter, self.joiner.charter.format_fingerprint(), cap)


def test_files_that_are_delivered_twice_give_one_answer_and_one_sum(tmp_path):
    world = Transport(tmp_path)
    world.run()
    charter = world.create_charter()
    world.joiner.ask(make_kind("class_sums"), 0.5)
    with pytest.raises(ValueError, match="is missing"):
        world.run()
    for mailbox in world.mailboxes:  # a mailbox confirms nothing
        assert (mailbox / "inbox" / "round-0.json").exists()
        assert [path.name for path in (mailbox / "outbox").iterdir()] == ["site.key"]
    assert world.reads == 0
    world.confirm_all(charter)
    world.run(seconds=60)
    assert world.reads == 3, "a round that was answered is answered with the same bytes, and no records are read"
    received = {path.read_bytes() for path in (tmp_path / "join" / "received").glob("*.answer-0.pate")}
    assert received == {(tmp_path / name / "answer 0.pate").read_bytes() for name in NAMES}
    noisy = world.joiner.load_sum(0)
    records = [noisy.kind.read_records(make_rows(100, seed), "record") for seed in range(3)]
    exact = sum(noisy.kind.count(each, "add_remove").numbers for each in records) / noisy.kind.unit_length
    assert 0 < np.abs(noisy.numbers - exact).max() < 6 * noisy.sigma
    for name in NAMES:
        assert (tmp_path / f"{name}-mail" / "inbox" / "sum-0.json").exists()
    world.joiner.ask(make_kind("histogram"), 0.5)  # names the sum, which the sites accepted
    world.run(seconds=60)
    assert world.reads == 6 and world.joiner.load_sum().slot == 1

    other = Joiner(tmp_path / "other")
    keys = {path.name: path.read_bytes() for path in sorted((tmp_path / "join" / "received").glob("*.key"))}
    other.create_charter(keys, make_terms(3, max_records=10))
    for _ in range(2):
        other.ask(make_kind("class_sums"), 0.5)
    world.exchange(load_outgoing(other))
    assert world.reads == 6 and all("another charter" in problem for problem in world.problems[-3:])


def test_a_refusal_stays_at_the_site(tmp_path):
    world = Transport(tmp_path)
    world.run()
    world.confirm_all(world.create_charter(), cap=0.1)
    world.joiner.ask(make_kind("class_sums"), 0.5)
    with pytest.raises(ValueError, match="have not answered") as refusal:
        world.run(seconds=1)
    assert all("scans" in problem for problem in world.problems[-3:])
    assert "scans" not in str(refusal.value)
    assert not list((tmp_path / "join" / "received").glob("*.pate"))
    for mailbox in world.mailboxes:
        assert {path.name for path in (mailbox / "outbox").iterdir()} == {"site.key", "site.confirmed"}


def test_private_and_unknown_names_do_not_move(tmp_path):
    world = Transport(tmp_path)
    world.run()
    world.create_charter()
    (tmp_path / "join" / "round-0.json").write_text("left by a crash")  # the record of the joiner does not list it
    assert (tmp_path / "join" / "joiner.key").exists()
    assert load_outgoing(world.joiner).keys() == {"charter.json"}
    mailbox = world.mailboxes[0]
    (mailbox / "outbox" / "secrets.json").write_text("no")
    assert exchange_files(mailbox, {"../../s0/secrets.json": b"", "charter.json/x": b""}).keys() == {"site.key"}
    assert (tmp_path / "s0" / "secrets.json").stat().st_size > 0
    take_replies(world.joiner, [{"../joiner.key": b"no", "joiner.json": b"no"}], 3)
    assert not list((tmp_path / "join" / "received").glob("*jo*"))


def test_the_module_of_mailboxes_needs_neither_torch_nor_flower():
    modules = "pate_torch, pate_torch.sites.mailbox, pate_torch.cli.main"
    code = f"import sys, {modules}; print({{'torch', 'flwr'}} & {{*sys.modules}})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout == "set()\n"


# ---- Flower ----------------------------------------------------------------------------------------------------------


class Processes:
    """Starts programs of Flower and commands in a folder, with a home of their own, on ports that are free."""

    def __init__(self, folder: Path):
        self.folder, self.children, self.servers = folder, list[subprocess.Popen](), list[multiprocessing.Process]()
        self.ports = [self.find_port() for _ in range(4)]
        self.environment = os.environ | {
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'verify'}",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    @staticmethod
    def find_port() -> int:
        with socket.socket() as connection:
            connection.bind(("127.0.0.1", 0))
            return connection.getsockname()[1]

    def start(self, name: str, program: str, *options: str) -> None:
        """Start a program of Flower."""
        command = [str(Path(sys.executable).with_name(program)), *options]
        with open(self.folder / f"{name}.log", "wb") as log:
            streams = {"stdout": log, "stderr": subprocess.STDOUT}
            settings = {"cwd": self.folder, "env": self.environment, "start_new_session": True}
            self.children.append(subprocess.Popen(command, **streams, **settings))

    def fork(self, command: Callable[..., int], *options: str, home: str) -> multiprocessing.Process:
        """Start a command of this package in a process that need not import anything again."""

        def work() -> None:
            os.chdir(self.folder)
            os.environ["PATE_HOME"] = str(self.folder / f"home-{home}")
            os._exit(command(options))

        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        return process

    def pate(self, *options: str, home: str = "none") -> None:
        process = self.fork(main, *options, home=home)
        process.join(300)
        assert process.exitcode == 0, options

    def serve(self, *options: str, home: str) -> None:
        self.servers.append(self.fork(serve_mailbox, *options, home=home))

    def run_app(self, goal: Path) -> None:
        """Run the Flower app until the last file that it makes is there."""
        command = [str(Path(sys.executable).with_name("flwr")), "run", "app", "test"]
        result = subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
        self.wait_for(goal)

    def wait_for(self, *paths: Path) -> None:
        end = time.monotonic() + 600
        while not all(path.exists() for path in paths):
            assert time.monotonic() < end and all(child.poll() is None for child in self.children), self.read_logs()
            time.sleep(0.2)

    def wait_for_server(self) -> None:
        end = time.monotonic() + 600
        while time.monotonic() < end:
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", self.ports[0])).close()
                return
            time.sleep(0.2)
        raise AssertionError(self.read_logs())

    def read_logs(self) -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.folder.glob("*.log")))

    def stop(self) -> None:
        for server in self.servers:
            server.kill()
        for send in (signal.SIGTERM, signal.SIGKILL):
            for child in reversed(self.children):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, send)  # a session of its own, which holds the processes that it started
            for child in self.children:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(5)


@pytest.fixture
def processes(tmp_path) -> Iterator[Processes]:
    processes = Processes(tmp_path)
    yield processes
    processes.stop()


@pytest.mark.slow(reason="starts a server and three clients of Flower as processes")
@pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="needs Flower: the extra flower is not installed")
def test_flower_moves_the_same_bytes_between_separate_processes(processes, tmp_path):
    server = f"127.0.0.1:{processes.ports[0]}"
    (tmp_path / "flwr").mkdir()
    (tmp_path / "flwr" / "config.toml").write_text(
        f'[superlink]\ndefault = "test"\n[superlink.test]\naddress = "{server}"\ninsecure = true\n'
    )
    (tmp_path / "app").mkdir()
    settings = (ROOT / "examples" / "flower" / "pyproject.toml").read_text()
    (tmp_path / "app" / "pyproject.toml").write_text(settings.replace("/path/to/join", str(tmp_path / "join")))
    options = ("--insecure", "--port", str(processes.ports[0]), "--disable-runtime-dependency-installation")
    processes.start("superlink", "flower-superlink", *options)
    for seed, name in enumerate(NAMES):
        write_csv(tmp_path / f"{name}.csv", make_rows(100, seed))
        mailbox = make_mailbox(tmp_path / f"{name}-mail")
        processes.pate("site", "init", "--account", "scans", "--folder", name, home=name)
        processes.serve(f"{name}-mail", "--folder", name, "--data", f"{name}.csv", home=name)
        connection = ("--insecure", "--superlink", server, "--port", str(processes.ports[1 + seed]))
        config = ("--node-config", f'mailbox="{mailbox}"')
        processes.start(f"{name}-client", "flower-supernode", *connection, *config)
    processes.wait_for_server()
    processes.run_app(tmp_path / "join" / "received")
    end = time.monotonic() + 600
    while len(keys := sorted((tmp_path / "join" / "received").glob("*.key"))) < 3:
        assert time.monotonic() < end, processes.read_logs()
        time.sleep(0.5)

    terms = ("--colluding", "1", "--classes", "3", "--max-records", "100000")
    processes.pate("join", "charter", *map(str, keys), *terms)
    words = Joiner(tmp_path / "join").charter.format_fingerprint()
    for name in NAMES:
        command = ("site", "confirm", "charter.json", "--folder", name, "--cap", "1", "--heard", words)
        processes.pate(*command, home=name)
    write_csv(tmp_path / "public.csv", PUBLIC)
    details = ("--public", "public.csv", "--label", "y", "--classes", *CLASSES)
    processes.pate("join", "ask", "class_sums", "--epsilon", "0.5", *details)
    processes.run_app(tmp_path / "join" / "sum-0.json")
    processes.wait_for(*(tmp_path / f"{name}-mail" / "inbox" / "sum-0.json" for name in NAMES))

    received = {path.read_bytes() for path in (tmp_path / "join" / "received").glob("*.answer-0.pate")}
    assert received == {(tmp_path / name / "answer 0.pate").read_bytes() for name in NAMES}
    for file in ("charter.json", "round-0.json", "round-0.public", "sum-0.json"):
        for name in NAMES:
            assert (tmp_path / f"{name}-mail" / "inbox" / file).read_bytes() == (tmp_path / "join" / file).read_bytes()
    assert Joiner(tmp_path / "join").load_sum().numbers.any()
