"""Where the time of a step on several processes goes, and what to do about it.

measure (train a few steps, or read what a training left) -> judge (findings, remedies). Beside them two readers of
what Ascend machines write: profiler (MindSpore's profiler output) and hccl_log (CANN's plog files).
"""
