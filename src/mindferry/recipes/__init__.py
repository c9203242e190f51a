"""Recipes of training runs: how other frameworks state them, and what they mean step by step."""

from __future__ import annotations
