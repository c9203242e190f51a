"""Published figures that the planner must reproduce. Rows marked recalled were not read from the paper
itself."""

# Hugging Face parameter counts (exact).
GPT2 = {"gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200}

# Brown et al. 2020 table 2.1: name, layers, hidden size, parameters by formula, printed billions.
GPT3 = [
    ("Small", 12, 768, 125_226_240, 0.125),
    ("Medium", 24, 1024, 355_871_744, 0.350),
    ("Large", 24, 1536, 760_300_032, 0.760),
    ("XL", 24, 2048, 1_315_723_264, 1.3),
    ("2.7B", 32, 2560, 2_651_553_280, 2.7),
    ("6.7B", 32, 4096, 6_658_404_352, 6.7),
    ("13B", 40, 5140, 12_952_938_780, 13.0),
    ("175B", 96, 12288, 174_604_259_328, 175.0),
]

# Narayanan et al. 2021 table 1 (recalled): P in 1e9, a, h, l, t, p, GPUs, B, TFLOP/s a GPU, % of peak,
# PFLOP/s.
NARAYANAN_1 = [
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137, 44, 4.4, 32),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138, 44, 8.8, 32),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142, 46, 18.2, 32),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135, 43, 34.6, 32),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138, 44, 70.8, 32),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140, 45, 143.8, 32),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148, 47, 227.1, 24),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155, 50, 297.4, 15),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163, 52, 410.2, 9),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163, 52, 502.0, 6),
]

# Narayanan et al. 2021 table 2 (days recalled): model, GPUs, TFLOP/s a GPU, days for 300e9 tokens.
NARAYANAN_2 = [
    ("megatron-175b", 384, 153, 84),
    ("megatron-175b", 768, 149, 43),
    ("megatron-175b", 1536, 141, 23),
    ("megatron-530b", 560, 171, 156),
    ("megatron-530b", 1120, 167, 80),
    ("megatron-530b", 2240, 159, 42),
    ("megatron-175b", 384, 144, 90),
    ("megatron-175b", 768, 88, 74),
    ("megatron-175b", 1536, 44, 74),
    ("megatron-530b", 640, 138, 169),
    ("megatron-530b", 1120, 98, 137),
    ("megatron-530b", 2240, 48, 140),
]

# Korthikanti et al. 2022 tables 3 and 5 (times recalled): model, p, v, GPUs, B, b, full s, present s, MFU %,
# HFU %.
KORTHIKANTI = [
    ("megatron-22b", 1, 1, 8, 4, 4, 1.42, 1.10, 41.5, 43.7),
    ("megatron-175b", 8, 3, 64, 64, 1, 18.13, 13.75, 51.4, 52.8),
    ("megatron-530b", 35, 3, 280, 280, 1, 49.05, 37.83, 56.0, 57.0),
    ("megatron-1t", 64, 1, 512, 512, 1, 94.42, 71.49, 56.3, 57.0),
]

# Bytes a layer in units of s*b*h, by formula: none, TP, TP+SP, TP+selective, TP+SP+selective, full.
LAYER_UNITS = {
    "megatron-22b": (140.67, 26.33, 17.58, 13, 4.25, 2),
    "megatron-175b": (114, 23, 14.25, 13, 4.25, 2),
    "megatron-530b": (98, 21, 12.25, 13, 4.25, 2),
    "megatron-1t": (98, 21, 12.25, 13, 4.25, 2),
}

# GiB of activations on the first stage: TP, TP+SP+selective, full.
FIRST_STAGE = {
    "megatron-22b": (59.3, 9.6, 4.5),
    "megatron-175b": (66.8, 12.35, 5.8),
    "megatron-530b": (114, 23.1, 10.9),
    "megatron-1t": (131, 26.6, 12.5),
}

# ZeRO figure 1 and table 1 (recalled): parameters, data parallel, GB (1e9) by stage 1, 2, 3.
ZERO = [
    (7.5e9, 64, 31.4, 16.6, 1.9),
    (7.5e9, 4, 52.5, 41.3, 30),
    (7.5e9, 16, 35.6, 21.6, 7.5),
    (7.5e9, 256, 30.4, 15.4, 0.47),
    (7.5e9, 1024, 30.1, 15.1, 0.12),
    (128e9, 64, 536, 284, 32),
    (128e9, 1024, 513, 257, 2),
    (1e12, 64, 4187, 2218, 250),
    (1e12, 1024, 4011, 2013, 15.6),
]

# MT-NLG 530B (arXiv 2201.11990): GPUs, micro-batches, seconds a step, TFLOP/s a GPU. B 1920, t 8, p 35.
MTNLG = [(2240, 240, 60.1, 126), (2800, 192, 50.2, 121), (3360, 160, 44.4, 113)]
