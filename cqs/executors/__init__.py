"""Executors: they compute the tasks of a plan in this process or on a Ray cluster."""
