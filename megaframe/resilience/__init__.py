"""What a run does about faults: requests to exit, numbers that are not finite, loss spikes,
replicas that differ, slow ranks, and the accounting of lost time. Hangs and lost ranks are detected
by `megaframe.distributed.watchdog`, because they show up in communication."""
