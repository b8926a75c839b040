#!/usr/bin/env bash
# Builds llama-cpp-python's wheel from its source package, in build/llama-cpp: what another build with further options
# shares with this one, and a program of llama.cpp with either, is compiled once.
#   scripts/build_llama_cpp.sh PYTHON WHEELS [CMAKE_OPTION ...]
# PYTHON needs scikit-build-core, cmake and ninja; WHEELS: folder for the wheel.
set -euo pipefail
python=$(realpath -s "$1") wheels=$(realpath -m "$2")
shift 2
cd "$(dirname "$0")/.."
version=0.3.36
tree=$PWD/build/llama-cpp

if [[ ! -d $tree/source ]]; then
    mkdir -p "$tree"
    "$python" -m pip download --quiet --no-deps --no-build-isolation --no-binary :all: --dest "$tree" "llama-cpp-python==$version"
    tar -xf "$tree/llama_cpp_python-$version.tar.gz" -C "$tree"
    mv "$tree/llama_cpp_python-$version" "$tree/source"
fi
# Without isolation: an isolated build's ninja is gone when the next one wants to go on.
PATH="$(dirname "$python"):$PATH" CMAKE_ARGS="$*" "$python" -m pip wheel --quiet --no-cache-dir --no-deps --no-build-isolation \
    --config-settings=build-dir="$tree/cmake" --wheel-dir "$wheels" "$tree/source"
