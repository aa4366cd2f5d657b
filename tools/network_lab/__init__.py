"""The network lab: several emulated hosts on one machine, connected by links of a given rate, for
whatever depends on the network. It only starts other programs, so it imports no torch."""

from network_lab.hosts import Host, Link, emulate_hosts
from network_lab.run import HostsResult, LinkOutage, run_on_hosts

__all__ = ["Host", "HostsResult", "Link", "LinkOutage", "emulate_hosts", "run_on_hosts"]
