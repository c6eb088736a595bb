"""Move the files of several sites by NVIDIA FLARE: a job that reaches mailboxes, and neither records nor keys.

    pip install 'pate-torch[sites]' nvflare
    python examples/nvflare/transport.py join anna-mail bert-mail carl-mail

The simulator of NVIDIA FLARE runs the server and one client for each mailbox, on this machine. The page
docs/howto/sites-transport.md has the steps before and after it. The script was run with version 2.9.0.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.job_config.api import FedJob

from pate_torch.sites.mailbox import exchange_files, run_joiner

TASK, FILES = "exchange", "files"


class MailboxExecutor(Executor):
    """Moves files between NVIDIA FLARE and the mailbox of one site."""

    def __init__(self, mailbox: str):
        super().__init__()
        self.mailbox = mailbox

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        reply = Shareable()
        reply[FILES] = exchange_files(Path(self.mailbox), shareable[FILES])
        return reply


class JoinerController(Controller):
    """Exchanges files with all sites until the joiner has what it waits for."""

    def __init__(self, folder: str, num_sites: int, seconds: float):
        super().__init__()
        self.folder, self.num_sites, self.seconds = folder, num_sites, seconds

    def start_controller(self, fl_ctx: FLContext) -> None:
        pass

    def stop_controller(self, fl_ctx: FLContext) -> None:
        pass

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        from pate_torch.sites.joiner import Joiner

        def exchange(files):
            replies = []

            def receive(client_task: ClientTask, fl_ctx: FLContext) -> None:
                replies.append(client_task.result.get(FILES, {}))

            data = Shareable()
            data[FILES] = dict(files)
            task = Task(TASK, data, timeout=60, result_received_cb=receive)
            self.broadcast_and_wait(task, fl_ctx, min_responses=self.num_sites, abort_signal=abort_signal)
            return replies

        joiner = Joiner(Path(self.folder))
        run_joiner(joiner, exchange, num_sites=self.num_sites, seconds=self.seconds, pause_seconds=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder of the joiner")
    parser.add_argument("mailboxes", type=Path, nargs="+", help="mailbox of each site")
    parser.add_argument("--seconds", type=float, default=600, help="time to wait for the sites (default: 600)")
    parsed = parser.parse_args()
    num_sites = len(parsed.mailboxes)
    job = FedJob(name="pate_sites", min_clients=num_sites)
    job.to_server(JoinerController(str(parsed.folder.resolve()), num_sites, parsed.seconds))
    for number, mailbox in enumerate(parsed.mailboxes, 1):
        job.to(MailboxExecutor(str(mailbox.resolve())), f"site-{number}", tasks=[TASK])
    with tempfile.TemporaryDirectory() as workspace:
        sys.exit(job.simulator_run(workspace))


if __name__ == "__main__":
    main()
