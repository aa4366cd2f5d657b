"""The network lab: several hosts on one machine, joined by links of a given rate, for what depends
on the network. It imports no torch: it only starts other programs."""

from megaframe.lab.hosts import Host, Link, hosts
from megaframe.lab.launch import Drop, Outcome, run_on

__all__ = ["Drop", "Host", "Link", "Outcome", "hosts", "run_on"]
