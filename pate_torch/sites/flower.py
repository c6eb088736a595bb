"""Flower as a transport: a Flower app that moves the files of the protocol, and nothing else.

The app of the server sends the files that the joiner has for all sites, collects the files in the outboxes of their
mailboxes, bundles the keys and adds up the answers. The app of a client moves files between Flower and a mailbox
(``pate_torch.sites.mailbox``). The client reads no records and no keys, because the person who starts a run of Flower
chooses the code that runs at the clients. Masks and noise come from the site, never from Flower, and no step relies on
the encryption of Flower.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from pate_torch.sites.mailbox import exchange_files, run_joiner

_REPLY_SECONDS, _PAUSE_SECONDS = 60.0, 5.0
client_app = ClientApp()
server_app = ServerApp()


@client_app.query()
def forward_files(message: Message, context: Context) -> Message:
    """Move the received files into the mailbox of this site, and reply with its outgoing files."""
    files = exchange_files(Path(str(context.node_config["mailbox"])), _get_files(message))
    return Message(_make_content(files), reply_to=message)


@server_app.main()
def run(grid: Grid, context: Context) -> None:
    """Exchange files until the joiner has all files that it waits for (``mailbox.run_joiner``)."""
    from pate_torch.sites.joiner import Joiner

    config = context.run_config

    def exchange(files: Mapping[str, bytes]) -> Iterator[dict[str, bytes]]:
        messages = [
            Message(_make_content(files), dst_node_id=node, message_type=MessageType.QUERY)
            for node in grid.get_node_ids()
        ]
        replies = grid.send_and_receive(messages, timeout=_REPLY_SECONDS)
        return (_get_files(reply) for reply in replies if not reply.has_error())

    run_joiner(
        Joiner(Path(str(config["folder"]))),
        exchange,
        num_sites=int(config["sites"]),
        seconds=float(config["seconds"]),
        pause_seconds=_PAUSE_SECONDS,
    )


def _make_content(files: Mapping[str, bytes]) -> RecordDict:
    return RecordDict({"files": ConfigRecord(dict(files))})


def _get_files(message: Message) -> dict[str, bytes]:
    return {name: raw for name, raw in message.content["files"].items() if isinstance(raw, bytes)}
