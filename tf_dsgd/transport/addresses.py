"""The addresses of tasks in a configuration: "host:port", for each index of a job.

Whatever is wrong in them is a ValueError that says where it stands and what to write instead.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
from typing import Any

from tf_dsgd.transport import sockets

INDEX = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)
"""What may be a task's index."""

_ADDRESS_REMEDY = 'Write "host:port", such as "10.0.0.3:2222" or "[fd00::3]:2222".'
_MOST_LETTERS, _MOST_OF_LABEL = 253, 63  # of a name, and between two of its dots (RFC 1035)
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_.])?|\[[0-9A-Fa-f:.%]+\]", re.ASCII)


def read_addresses(addresses: Any, where: str) -> dict[int, str]:
    """The tasks of one job, index -> address.

    Args:
        addresses: a list of addresses, or a dict from index to address where tasks are left out.
        where: what an error calls them.
    """
    if isinstance(addresses, dict):
        tasks = {}
        for key, address in addresses.items():
            if not INDEX.fullmatch(str(key)):
                raise ValueError(
                    f"{where} has the key {json.dumps(key)}, which is not a task index. Use 0, 1, "
                    "2, ..."
                )
            tasks[int(key)] = address
    elif isinstance(addresses, (list, tuple)):
        tasks = dict(enumerate(addresses))
    else:
        raise ValueError(
            f"{where} must be a list of addresses, or an object from index to address, not "
            f"{kind_of(addresses)}. {_ADDRESS_REMEDY}"
        )
    if not tasks:
        raise ValueError(
            f"{where} is empty. Name the address of each of its tasks, or leave the job out."
        )
    return {index: _address(tasks[index], f"{where}[{index}]") for index in sorted(tasks)}


def _address(address: Any, where: str) -> str:
    """One "host:port"."""

    def wrong(what: str) -> ValueError:
        return ValueError(
            f"{where} is {json.dumps(address, default=str)}, {what} {_ADDRESS_REMEDY}"
        )

    if not isinstance(address, str):
        raise wrong("which is not text.")
    if not address.strip():
        raise wrong("which is empty.")
    if "://" in address:
        raise wrong(f'which begins with a scheme. Leave "{address.split("://")[0]}://" out.')
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]") or not port:
        raise wrong("which has no port.")
    if ":" in host and not host.startswith("["):
        raise wrong("which has more than one colon; IPv6 addresses stand in brackets.")
    if not host:
        raise wrong("which has no host.")
    if not _is_host(host):
        raise wrong(f"whose host {json.dumps(host)} is not a host name or IP address.")
    if set(host) <= set("[]:.0"):
        raise wrong("which stands for all of a machine's addresses: others cannot find it.")
    if not (port.isascii() and port.isdigit()) or not 0 < int(port.lstrip("0")[:9] or 0) < 1 << 16:
        raise wrong(f"whose port {json.dumps(port)} is not a number from 1 to 65535.")
    return f"{host}:{port.lstrip('0')}"


def _is_host(host: str) -> bool:
    """Whether it may be a host name, or is an IP address, in brackets if it is of version 6."""
    if not _HOST.fullmatch(host):
        return False
    if host[0] != "[" and not re.fullmatch(r"[0-9.]+", host, re.ASCII):
        labels = host.removesuffix(".").split(".")
        return len(host) <= _MOST_LETTERS and all(0 < len(x) <= _MOST_OF_LABEL for x in labels)
    try:
        return ipaddress.ip_address(host.strip("[]")).version == (6 if host[0] == "[" else 4)
    except ValueError:
        return False


def place_of(address: str) -> tuple[str, str]:
    """The same for all ways to write an address, as far as it takes no look-up to tell."""
    host, _, port = address.lower().rpartition(":")
    host = host.strip("[]").removesuffix(".")
    with contextlib.suppress(ValueError):  # it is a name
        host = str(sockets.unmapped(ipaddress.ip_address(host)))
    return "localhost" if host in ("127.0.0.1", "::1") else host, port


def kind_of(value: Any) -> str:
    """What a value is in JSON's words."""
    kinds = {dict: "an object", list: "a list", str: "text", type(None): "null"}
    return kinds.get(type(value), f"the value {json.dumps(value, default=str)}")
