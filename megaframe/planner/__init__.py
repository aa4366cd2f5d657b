"""The planner: predictions of memory and step time, and the search for the best layout.

Memory: `parameter_counts`, `activations`, `memory` (one rank), `peak_memory` (the fullest rank),
`memory_estimates` (many layouts at once). Time: `constants` and `kernel_times` (what chips reach),
`collective_times`, `machine` (both for one layout), `layer_times`, `communication_times`,
`data_parallel_times`, `prediction` (a whole step), `goodput` (a whole run). Search: `candidates`,
`vectorized` (estimates), `layout_search`, `fit`. In words: `advice`, `compare_run`, `plan_page`.
"""
