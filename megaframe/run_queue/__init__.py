"""Many runs on one machine or cluster: the trials of a sweep or the runs of a file, which of them
run now and on how many ranks, and a page of all. A run knows nothing of it."""
