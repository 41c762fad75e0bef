"""``python -m benchmarks.echo BYTES``: a bare grpc.aio server that answers every lookup with so
many bytes. It parses nothing and finds nothing: what it costs, no manager on grpc.aio saves."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Before grpc is imported: its C core writes debugging notes to standard error.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import grpc
import grpc.aio
import uvloop

from benchmarks import machine
from benchmarks.load import GRPC_PATH


@contextmanager
def running_echo(reply_bytes: int) -> Iterator[tuple[int, str]]:
    """Run one on the manager's core; its pid and address."""
    machine.pin(machine.SERVER_CPU)
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.echo", str(reply_bytes)],
        stdout=subprocess.PIPE,
        text=True,
    )
    machine.pin(machine.LOADER_CPU)
    try:
        assert process.stdout is not None
        yield process.pid, f"127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


async def _serve(reply: bytes) -> None:
    async def handle(_data: bytes, _context: object) -> bytes:
        return reply

    _, service, method = GRPC_PATH.split("/")
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    )
    handlers = {method: grpc.unary_unary_rpc_method_handler(handle)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(bytes(int(sys.argv[1]))))
