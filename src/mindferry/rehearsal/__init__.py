"""Rehearses a parallel strategy: real processes on this machine, the model cut as the cluster would cut it.

A check, not a training engine. The processes and their communication groups are MindSpore's (msrun, AllReduce); the
arithmetic of the cut model is written out in NumPy, forward and backward, so that nothing but the cut is on trial.
It is held against the one-process network of `train`. On the cluster MindSpore's own semi-automatic parallel does
the work.
"""
