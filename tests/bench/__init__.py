"""The measured figures of the course, on two cores of the machine at hand: ``python -m tests.bench``.

Each figure has a bar it must reach. What is compared is measured in turns, within one round; medians are shown
with their spread, and a figure that misses its bar is printed as one that does. Peers run as their own
documentation recommends.
"""
