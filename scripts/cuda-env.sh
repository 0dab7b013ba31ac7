# Sets what a build with the feature `cuda` needs: a toolkit, and libraries to link against. Without CUDA_HOME both are made in
# target/cuda/toolkit, once.
# usage: . scripts/cuda-env.sh        from the root of the repository
if [ -z "${CUDA_HOME:-}" ]; then
    CUDA_HOME=$PWD/target/cuda/toolkit
    scripts/cuda-toolkit.sh "$CUDA_HOME"
    cargo fetch --locked
    python3 scripts/cuda-stand-ins.py \
        "$(cargo metadata --format-version 1 --locked --features candle-train-examples/cuda | python3 -c '
import json, pathlib, sys
packages = json.load(sys.stdin)["packages"]
print(*(pathlib.Path(p["manifest_path"]).parent for p in packages if p["name"] == "cudarc"))')" \
        "$CUDA_HOME/lib/stubs"
fi
export CUDA_HOME CUDA_PATH=$CUDA_HOME PATH=$CUDA_HOME/bin:$PATH
export CUDA_COMPUTE_CAP=${CUDA_COMPUTE_CAP:-80}
