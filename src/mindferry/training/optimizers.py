"""Optimizers that a source may have and mindformers' grouping cannot say."""

from __future__ import annotations

from mindformers.core.optim.adamw import AdamW  # core.optim.AdamW is a factory
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister


@MindFormerRegister.register(MindFormerModuleType.OPTIMIZER)
class AdamWDecayAll(AdamW):
    """mindformers' AdamW with the same decay on every tensor, as torch.optim.AdamW(model.parameters()).

    mindformers puts 1-D tensors and biases into a group with decay 0 before it builds the optimizer.
    """

    def __init__(
        self, params, learning_rate=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, swap=False
    ):
        groups = [{**group, "weight_decay": weight_decay} for group in params]
        super().__init__(groups, learning_rate, betas, eps, weight_decay, swap)
