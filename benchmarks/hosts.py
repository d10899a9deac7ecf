"""Hosts of a network of their own: network namespaces that are joined as by a switch.

What is in one reaches what is in another by its address alone, as on several machines: it has a
loopback device that nobody else has. Linux's `ip` and `tc` make them, for root.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess


@dataclasses.dataclass(frozen=True)
class Host:
    """A network namespace."""

    namespace: str
    address: str
    switch: str
    port: str

    def within(self, *command):
        """The command that runs `command` there."""
        return ("ip", "netns", "exec", self.namespace, *command)

    def cut_off(self):
        """Nothing comes in or goes out any more, and nobody is told."""
        _ip("-n", self.namespace, "link", "set", "eth0", "down")

    def joined_again(self):
        """What comes and goes passes again."""
        _ip("-n", self.namespace, "link", "set", "eth0", "up")

    def limit(self, megabits):
        """Lets so many megabits a second out, and as many in."""
        for namespace, device in ((self.namespace, "eth0"), (self.switch, self.port)):
            shaped = ("root", "tbf", "rate", f"{megabits}mbit", "burst", "128kb", "latency", "1s")
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, *shaped)

    def counted(self):
        """Bytes that came in and went out since it was made, with the headers of TCP and IP."""
        told = _run("ip", "-n", self.namespace, "-json", "-statistics", "link", "show", "eth0")
        counts = json.loads(told)[0]["stats64"]
        return counts["rx"]["bytes"], counts["tx"]["bytes"]


@contextlib.contextmanager
def made(number):
    """So many hosts; PermissionError where this machine makes none."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        raise PermissionError("there is no ip(8), or no tc(8)")
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
            host = Host(name, f"10.90.0.{n + 1}", switch, f"port{n}")
            link = ("type", "veth", "peer", "name", host.port, "netns", switch)
            _ip("-n", name, "link", "add", "eth0", *link)
            _ip("-n", switch, "link", "set", host.port, "master", "switch", "up")
            _ip("-n", name, "address", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")
            hosts.append(host)
        yield hosts


def _ip(*arguments):
    _run("ip", *arguments)


def _run(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise PermissionError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
