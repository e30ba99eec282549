"""What ``flashport bench`` and ``flashport demo`` time, and how.

Nothing here is part of the interface; it may change from release to release.
"""
