"""Parallel strategies without a cluster: constraints, memory, time, search. Imports no MindSpore.

settings: devices, memory conventions and model presets (data/*.yaml) - formulas: every formula as text that is
both evaluated and explained - strategy, estimate, communication: what a cut costs, stage by stage - layout,
constraints, rules_*: what mindformers would refuse, and when - search: the best and the nearest that work -
runfile, fromlayout, write: training YAMLs in and out - advice, draw, report: for people - calibration, measure,
machine_worker: what was measured - session: all of it for `mindferry plan`.
"""
