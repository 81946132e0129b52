#!/usr/bin/env bash
# Dictionaries as SAELens, sparsify, dictionary_learning, circuit-tracer and llamascopium write them, for the tests of
# `interp.features.load`. `saelens_dictionaries.py check FOLDER` then reads what `interp.features.save` wrote.
# Usage: experiments/clients/dictionaries.sh [FOLDER]      (6 GB and some ten minutes; Python >= 3.11 on Linux)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
env=${1:-/tmp/dictionaries}
peers=$here/../../tests/features/formats/peers
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1 WANDB_MODE=disabled
export PYTHONHASHSEED=0  # SAELens writes the keys of a config in the order of a set

if [ ! -e "$env/ready" ]; then
    python3 -m venv "$env/saelens"
    "$env/saelens/bin/pip" install --quiet torch==2.13.0 sae-lens==6.54.12 eai-sparsify==1.3.3
    "$env/saelens/bin/pip" install --quiet --no-deps --target "$env/saelens5" sae-lens==5.11.0
    # nnsight 0.3, which dictionary_learning imports, needs transformers < 5, and that datasets < 5.
    python3 -m venv "$env/learning"
    "$env/learning/bin/pip" install --quiet torch==2.13.0 'nnsight>=0.3,<0.4' transformers==4.57.3 datasets==4.4.1 \
        wandb zstandard einops tqdm pandas
    "$env/learning/bin/pip" uninstall --quiet --yes torchvision || true
    "$env/learning/bin/pip" install --quiet --no-deps dictionary-learning==0.1.0
    # circuit-tracer 0.5.0 needs transformers <= 4.57.3 and huggingface-hub < 1.
    python3 -m venv "$env/layers"
    "$env/layers/bin/pip" install --quiet torch==2.13.0 transformers==4.57.3 'huggingface-hub<1' datasets==4.4.1 \
        circuit-tracer==0.5.0 llamascopium==2.0.0b34
    touch "$env/ready"
fi

"$env/saelens/bin/python" "$here/saelens_dictionaries.py" write "$peers/saelens"
PYTHONPATH="$env/saelens5" "$env/saelens/bin/python" "$here/saelens_dictionaries.py" write "$peers/saelens"
"$env/saelens/bin/python" "$here/saelens_dictionaries.py" foreign "$peers/foreign"
"$env/saelens/bin/python" "$here/scope_dictionaries.py" "$peers/scopes"
"$env/saelens/bin/python" "$here/sparsify_dictionaries.py" "$peers/sparsify"
"$env/learning/bin/python" "$here/dictionary_learning_dictionaries.py" "$peers/dictionary_learning"
"$env/layers/bin/python" "$here/circuit_tracer_dictionaries.py" "$peers/circuit_tracer"
"$env/layers/bin/python" "$here/llamascopium_dictionaries.py" "$peers/llamascopium"
