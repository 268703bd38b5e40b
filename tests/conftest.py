"""Hypothesis draws other examples in every run, except in CI, where the same commit must give the same verdict."""

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
