#!/usr/bin/env bash
# Makes a virtual environment in which llama-cpp-python has Vulkan, and Mesa's software device to run it on: a
# device whose memory the host cannot see, on any machine.
#   scripts/install_vulkan.sh [VENV]        default .vulkan; as root on Debian 12 or later
# Afterwards: GGML_VK_VISIBLE_DEVICES=0 VENV/bin/python -m pytest -m vulkan
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.vulkan}
headers=$PWD/build/vulkan-headers
wheels=$PWD/wheels-vulkan

export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq glslc libvulkan-dev spirv-headers mesa-vulkan-drivers >/dev/null

# ggml needs newer headers than Debian 12 has. Those of the next release are plain text files: unpacking is enough.
if [[ ! -e $headers/usr/include/vulkan/vulkan.hpp ]]; then
    work=$(mktemp -d)
    trap 'rm -r "$work"' EXIT
    mkdir -p "$work/lists/partial" "$headers"
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Origin: Debian' | grep -v security | sort -u | head -n 1)
    [[ -n $mirror ]] || { echo "install_vulkan: no mirror in apt's sources" >&2; exit 1; }
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" >"$work/sources.list"
    apt=(apt-get -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::Lists=$work/lists")
    "${apt[@]}" update -qq
    (cd "$work" && "${apt[@]}" download -qq libvulkan-dev 2>/dev/null)
    dpkg -x "$work"/libvulkan-dev_*.deb "$headers"
fi

# A folder of its own: pip's cache would hand the ordinary wheel out for this one, or this one for that.
test -x "$venv/bin/python" || python3 -m venv "$venv"
"$venv/bin/python" -m pip install --quiet "scikit-build-core>=0.10" "cffi>=2.1" cmake ninja
if ! ls "$wheels"/llama_cpp_python-0.3.36-*.whl >/dev/null 2>&1; then
    scripts/build_llama_cpp.sh "$venv/bin/python" "$wheels" -DGGML_VULKAN=ON -DGGML_RPC=ON \
        "-DVulkan_INCLUDE_DIR=$headers/usr/include"
fi
"$venv/bin/python" -m pip install --quiet "$wheels"/llama_cpp_python-0.3.36-*.whl
"$venv/bin/python" -m pip install --quiet --no-build-isolation ".[test]"
