#!/usr/bin/env bash
# Checks twofold on a machine with an NVIDIA GPU and no network, and prints one JSON document.
#   scripts/gpu_check.sh pack [DIR]           with network: puts what the other machine lacks into DIR (default
#                                             gpu-check): sources of llama-cpp-python without what a build does not
#                                             need, and wheels. At most 64 MiB, or it fails.
#   scripts/gpu_check.sh run [DIR] [OPTIONS]  builds llama-cpp-python for the GPU's own architecture alone and twofold
#                                             into DIR/venv, then runs scripts/gpu_check.py with OPTIONS
#   PYTHON=VENV/bin/python scripts/gpu_check.sh run - [OPTIONS]     builds nothing: a dry run with another device
# Needs there: nvcc, a C++ compiler, cmake (or what pack --with-cmake carries), the same Python version as here.
# ARCH=90 names the architecture (default: what nvidia-smi says); JOBS=16 limits the build; JSON goes to standard
# output, everything else to standard error.
set -euo pipefail
cd "$(dirname "$0")/.."
most=$((64 << 20))
version=0.3.36
say() { echo "gpu_check: $*" >&2; }

pack() {
    local dir=${1:-gpu-check}
    mkdir -p "$dir/wheels"
    work=$(mktemp -d)
    trap "rm -rf '$work'" EXIT
    python3 -m pip download --quiet --no-deps --no-binary :all: --no-build-isolation --dest "$work" \
        "llama-cpp-python==$version" >&2
    tar -xf "$work"/llama_cpp_python-*.tar.gz -C "$work"
    local top="$work/llama_cpp_python-$version" llama
    llama=$top/vendor/llama.cpp
    rm -rf "$top"/{.git,docs,examples,tests,docker} "$llama"/{models,docs,examples,tests,benches,media,conversion,gguf-py,.github}
    # Of the tools only mtmd belongs to the Python package; of the backends only these two.
    find "$llama/tools" -mindepth 1 -maxdepth 1 -type d ! -name mtmd -exec rm -rf {} +
    find "$llama/ggml/src" -mindepth 1 -maxdepth 1 -type d ! -name ggml-cpu ! -name ggml-cuda ! -name ggml-rpc -exec rm -rf {} +
    tar -czf "$dir/llama_cpp_python.tar.gz" -C "$work" "llama_cpp_python-$version"
    local packages=("cffi>=2.1" "numpy>=1.24" "tqdm>=4.66" "jinja2>=3.1" "threadpoolctl>=3.1" "gguf>=0.19"
        "huggingface_hub>=0.34" "diskcache>=5.6" "typing_extensions>=4.5" "scikit-build-core>=0.10" ninja)
    [[ ${2:-} == --with-cmake ]] && packages+=(cmake)
    python3 -m pip download --quiet --only-binary :all: --dest "$dir/wheels" "${packages[@]}" >&2
    local bytes
    bytes=$(du -sb "$dir" | cut -f1)
    say "$dir has $bytes bytes"
    ((bytes <= most)) || { say "more than $most bytes: leave out --with-cmake"; exit 1; }
}

build() {
    local dir=$1 arch=${ARCH:-}
    [[ -n $arch ]] || arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
    [[ -e $dir/llama_cpp_python.tar.gz ]] || { say "$dir holds nothing: scripts/gpu_check.sh pack $dir first"; exit 1; }
    python3 -m venv "$dir/venv"
    local pip=("$dir/venv/bin/python" -m pip --quiet install --no-index --find-links "$PWD/$dir/wheels")
    "${pip[@]}" cffi numpy tqdm jinja2 threadpoolctl gguf huggingface_hub diskcache typing_extensions scikit-build-core ninja >&2
    if ! command -v cmake >/dev/null; then "${pip[@]}" cmake >&2; fi
    export CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-$(nproc)} PATH="$PWD/$dir/venv/bin:$PATH"
    mkdir -p "$dir/source"
    tar -xf "$dir/llama_cpp_python.tar.gz" -C "$dir/source"
    say "building llama-cpp-python for sm_$arch with $CMAKE_BUILD_PARALLEL_LEVEL jobs"
    CMAKE_ARGS="-DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=$arch -DGGML_NATIVE=ON -DGGML_CUDA_FA_ALL_QUANTS=OFF" \
        "${pip[@]}" --no-deps --no-build-isolation "$dir/source/llama_cpp_python-$version" >&2
    "${pip[@]}" --no-deps --no-build-isolation . >&2
    python=$PWD/$dir/venv/bin/python
    say "built in $SECONDS s"
}

case ${1:-} in
    pack) pack "${@:2}" ;;
    run)
        dir=${2:-gpu-check}
        python=${PYTHON:-}
        if [[ $dir != - ]]; then build "$dir"; fi
        [[ -n $python ]] || { say "run - needs PYTHON, the Python of a virtual environment with twofold"; exit 2; }
        exec env PYTHONPATH=scripts "$python" scripts/gpu_check.py "${@:3}"
        ;;
    *)
        sed -n '2,/^set -euo/{/^set -euo/!s/^# \{0,1\}//p}' "$0" >&2
        exit 2
        ;;
esac
