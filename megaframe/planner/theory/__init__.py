"""The theory of large training as closed forms, each with its source: speed-up of more ranks,
crossover of collectives, rooflines of kernels and links, and laws of compute-optimal sizes.

They are functions of plain numbers. `planner.explanations` fills them with those of a plan.
"""
