"""The grid of decode shapes: the list, how it is measured, and what is said of it.

``shapes`` needs the standard library alone: ci/roofline.py estimates the same list for AMD.
"""
