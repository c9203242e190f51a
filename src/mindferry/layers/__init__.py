"""The GPT layer as mindformers ModuleSpecs: one word (`layer_spec`) picks the implementation.

reference: mindformers' own modules, for Ascend. portable: stock MindSpore operators, any device.
All have the same parameter tree, so checkpoints fit each of them.
"""

from __future__ import annotations

LAYER_SPECS = ("portable", "reference")
