"""ZeRO: buckets of parameters, reduction of gradients, prefetch of parameters, replicas."""
