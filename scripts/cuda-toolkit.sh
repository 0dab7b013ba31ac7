#!/bin/sh
# Makes a CUDA_HOME with what compiling needs (nvcc, the runtime's headers and static library) from PyPI wheels:
# no driver, no root, 271 MB. Version 13.0, because a driver of CUDA 13.0 refuses the PTX of later ones.
# usage: scripts/cuda-toolkit.sh DEST      then: export CUDA_HOME=DEST PATH=DEST/bin:$PATH
set -eu
dest=${1:?usage: scripts/cuda-toolkit.sh DEST}
if [ -x "$dest/bin/nvcc" ]; then
    echo "$dest has nvcc already"
    exit
fi
if [ -e "$dest" ]; then
    echo "$dest exists and has no bin/nvcc; name a folder that is not there" >&2
    exit 1
fi
mkdir -p "$(dirname "$dest")"
wheels=$(mktemp -d "$dest.XXXXXX")
trap 'rm -rf "$wheels"' EXIT
python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps --no-compile \
    --only-binary=:all: --target "$wheels" \
    nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 \
    nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85
toolkit=$wheels/nvidia/cu13
ln -s lib "$toolkit/lib64"
ln -s libcudart_static.a "$toolkit/lib/libcudart.a"
chmod 755 "$toolkit"
mv "$toolkit" "$dest"
"$dest/bin/nvcc" --version | tail -n 2
