"""The network lab: several emulated hosts on one machine, connected by links of a given rate, for
whatever depends on the network. It only starts other programs, so it imports no torch."""

from megaframe.lab.hosts import Host, Link, hosts
from megaframe.lab.launch import Drop, Outcome, run_on

__all__ = ["Drop", "Host", "Link", "Outcome", "hosts", "run_on"]
