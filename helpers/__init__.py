"""Efficient batch training with PyTorch: the training code of the course.

The package has two shelves. The modules beside this file are the training code, made to be read and copied;
``helpers.train`` is its heart. ``helpers.lab`` is the laboratory around it: it measures, draws, teaches. The lab
imports the training code, never the other way. Importing ``helpers`` imports nothing else: no torch, no CUDA, no
process, no network.
"""
