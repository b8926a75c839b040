#!/bin/sh
# Builds codec and kernels for AArch64 in build/neon-tests and runs their tests in QEMU.
# Needs CMake, llama-cpp-python as c_tests.sh does (for ggml's header alone), and of Debian the packages
# gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user. Arguments go to ctest.
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

# Static, so that no AArch64 system is needed to run the tests.
tool cmake -S . -B build/neon-tests -DTWOFOLD_PYTHON=OFF -DTWOFOLD_TESTS=ON -DTWOFOLD_CROSS=ON \
    -DCMAKE_BUILD_TYPE=Release -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
    -DCMAKE_C_COMPILER="${CC:-aarch64-linux-gnu-gcc}" -DCMAKE_EXE_LINKER_FLAGS=-static \
    -DCMAKE_CROSSCOMPILING_EMULATOR="qemu-aarch64;-cpu;max" -DPython_EXECUTABLE="$(command -v python3)" \
    ${TWOFOLD_LLAMA_CPP:+-DTWOFOLD_LLAMA_CPP="$TWOFOLD_LLAMA_CPP"}
tool cmake --build build/neon-tests --parallel "${JOBS:-2}"
cd build/neon-tests
tool ctest --output-on-failure --parallel "${JOBS:-2}" "$@"
