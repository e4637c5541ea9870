"""The commands of ``cqs`` and ``python -m cqs``, one module each."""
