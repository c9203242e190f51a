"""mindferry: carry a GPT-class training run over to MindSpore Transformers.

Importing this package is cheap on purpose: MindSpore, mindformers and PyTorch are imported by the
functions that use them.
"""

__version__ = "0.1.0"
