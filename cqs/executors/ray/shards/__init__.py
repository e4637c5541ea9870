"""Keeps sequences on the actors, which compute attention as ranks of a process group."""
