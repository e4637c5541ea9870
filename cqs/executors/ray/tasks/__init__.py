"""Computes the tasks of a plan on the actors, for tensors of the driver."""
