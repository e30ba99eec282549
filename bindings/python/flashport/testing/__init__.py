"""How results are judged: fp64 oracles in NumPy, the case list, and the checks of ``flashport selftest``.

Nothing here is part of the interface; it may change from release to release.
"""
