"""What a run does about faults: who asks it to leave, what becomes of bad numbers, replicas that
differ, slow ranks, and where the time went. Hangs and lost ranks are found lower down, by the watch
in `megaframe.comm`, because communication is where they show."""
