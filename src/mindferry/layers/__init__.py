"""The GPT layer as mindformers ModuleSpecs: one word (`layer_spec`) picks the implementation.

reference: mindformers' own modules, for Ascend. portable: stock MindSpore operators, any device. fused: our
own C++ kernels, for CPUs; where they cannot be built or fail their self-test, portable takes their place.
All have the same parameter tree, so checkpoints fit each of them.
"""

from __future__ import annotations

LAYER_SPECS = ("portable", "reference", "fused")
