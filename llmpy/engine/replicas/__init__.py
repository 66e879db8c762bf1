"""Replicas: engines of one model in one process, behind objects with the calls of the core's (docs/use/parallel.md).

`cores.py` chooses between the core's objects and these, so the rest of the package does not know how many engines there are.
"""
