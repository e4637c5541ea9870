"""Transports: how packed rows get from rank to rank."""
