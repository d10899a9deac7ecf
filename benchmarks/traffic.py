"""Bytes that processes of this machine send each other, counted in a network of their own.

    python benchmarks/traffic.py COMMAND ...

The kernel counts what passes the loopback device, of all programs together. So a command is run in
a network namespace, which has a loopback device that nobody else uses: Linux's `unshare` makes one,
where the machine allows it. What is counted has TCP's and IP's headers and acknowledgements in it.
"""

import fcntl
import functools
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP
_SET = "TF_DSGD_BENCHMARK_OWN_NETWORK"
_SECONDS = 30.0


def _prefix() -> list[str]:
    return ["unshare", "--map-root-user", "--net", sys.executable, str(Path(__file__).resolve())]


@functools.cache
def can_be_counted() -> bool:
    """Whether this machine lets us make such a network."""
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run([*_prefix(), "true"], capture_output=True, timeout=_SECONDS, check=False)
    return tried.returncode == 0


def alone(command: Sequence[str]) -> list[str]:
    """The command in a network of its own, or as it is where none can be made."""
    return [*_prefix(), *command] if can_be_counted() else list(command)


def counted() -> int | None:
    """Bytes so far in the network of this process; None where it shares that with others."""
    if _SET not in os.environ:
        return None
    for line in Path("/proc/net/dev").read_text().splitlines():
        device, _, numbers = line.partition(":")
        if device.strip() == "lo":
            return int(numbers.split()[0])
    return None


def main() -> None:
    """Opens the loopback device of a new namespace, and becomes the command."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        _, flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, _GET_FLAGS, request))
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", flags | _UP))
    os.environ[_SET] = "1"
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
