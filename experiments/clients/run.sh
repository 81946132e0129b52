#!/usr/bin/env bash
# SAELens and circuit-tracer on interp.compat.transformer_lens, in an environment that has no transformer-lens;
# then on the real TransformerLens 3.9.0, which lies in a folder beside it; then the differences.
# Usage: experiments/clients/run.sh [FOLDER]      (2 GB and some ten minutes; Python >= 3.11 on Linux)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
env=${1:-/tmp/clients}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1 WANDB_MODE=disabled

if [ ! -e "$env/ready" ]; then
    python3 -m venv "$env"
    install() { "$env/bin/pip" install --quiet "$@"; }
    install torch==2.13.0
    # circuit-tracer 0.5.0 needs transformers <= 4.57.3 and huggingface-hub < 1; SAELens takes any.
    install transformers==4.57.3 'huggingface-hub<1' datasets==4.4.1
    install einops jaxtyping 'numpy>=2' pandas xarray pyarrow matplotlib tyro tqdm jinja2 networkx 'scikit-learn>=1.8' \
        scipy h5netcdf h5py filelock
    install 'babe<0.0.8' nltk plotly plotly-express pydantic python-dotenv pyyaml 'simple-parsing<0.2' tenacity wandb rich
    install --no-deps sae-lens==6.54.12 circuit-tracer==0.5.0 --editable "$here/../.."
    install --no-deps --target "$env/real" transformer-lens==3.9.0 better-abc fancy-einsum
    touch "$env/ready"
fi

for transcript in saes circuits; do
    "$env/bin/python" "$here/$transcript.py" interp --save "$env/$transcript-interp.pt"
    PYTHONPATH="$env/real" "$env/bin/python" "$here/$transcript.py" real --save "$env/$transcript-real.pt"
    echo "differences, relative to the largest entry"
    "$env/bin/python" "$here/compare.py" "$env/$transcript-interp.pt" "$env/$transcript-real.pt"
done
