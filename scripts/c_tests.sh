#!/bin/sh
# Builds the C library and its tests with sanitizers in build/c-tests and runs them.
# Needs CMake, a C compiler, and llama-cpp-python in the python3 of PATH or in TWOFOLD_LLAMA_CPP.
# Arguments go to ctest: scripts/c_tests.sh -R pool
set -eu
cd "$(dirname "$0")/.."

tool() {
    if python3 -c 'import cmake' 2>/dev/null; then
        name=$1
        shift
        python3 -c 'import sys, cmake; sys.exit(getattr(cmake, sys.argv.pop(1))())' "$name" "$@"
    else
        "$@"
    fi
}

# -O1: with sanitizers at -O2 GCC takes minutes for the kernel of many columns.
tool cmake -S . -B build/c-tests -DTWOFOLD_PYTHON=OFF -DTWOFOLD_TESTS=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo \
    -DCMAKE_C_FLAGS_RELWITHDEBINFO="-O1 -g" \
    -DTWOFOLD_SANITIZE="${TWOFOLD_SANITIZE-address,undefined}" -DPython_EXECUTABLE="$(command -v python3)" \
    ${TWOFOLD_LLAMA_CPP:+-DTWOFOLD_LLAMA_CPP="$TWOFOLD_LLAMA_CPP"}
tool cmake --build build/c-tests --parallel "${JOBS:-2}"
cd build/c-tests
tool ctest --output-on-failure "$@"
