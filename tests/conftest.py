"""Hypothesis draws other examples in every run, except in CI, where the same commit must give the same verdict."""

import os

from hypothesis import settings

# before torch is imported: tests run in as many processes as there are cores, and threads of several processes that
# wait for each other on the same cores take ten times as long
os.environ.setdefault("OMP_NUM_THREADS", "1")

# how long an example takes depends on what else the machine does; what hangs is ended by the test's own time limit
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")
