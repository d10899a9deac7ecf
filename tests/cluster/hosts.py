"""Hosts for tests: network namespaces that are joined as by a switch.

What is in one reaches what is in another by that address alone, as on several machines: it has a
loopback device that nobody else has. Linux's `ip` makes them, for root.
"""

import contextlib
import dataclasses
import os
import shutil
import subprocess


@dataclasses.dataclass(frozen=True)
class Host:
    """A network namespace."""

    namespace: str
    address: str

    def within(self, *command):
        """The command that runs `command` there."""
        return ("ip", "netns", "exec", self.namespace, *command)

    def cut_off(self):
        """Nothing comes in or goes out any more, and nobody is told."""
        _ip("-n", self.namespace, "link", "set", "eth0", "down")

    def joined_again(self):
        _ip("-n", self.namespace, "link", "set", "eth0", "up")


@contextlib.contextmanager
def made(number):
    """So many hosts; PermissionError where this machine makes none."""
    if shutil.which("ip") is None:
        raise PermissionError("there is no ip(8)")
    switch = f"dsgd{os.getpid()}"
    names = [f"{switch}-{n}" for n in range(number)]
    with contextlib.ExitStack() as stack:
        for name in (switch, *names):
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        hosts = []
        for n, name in enumerate(names):
            port = ["netns", switch, "master", "switch"]
            _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", f"port{n}", *port[:2])
            _ip("-n", switch, "link", "set", f"port{n}", *port[2:], "up")
            address = f"10.90.0.{n + 1}"
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")
            hosts.append(Host(name, address))
        yield hosts


def _ip(*arguments):
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise PermissionError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
