"""Dictionaries on disk: the layouts in which people have them, one file each, and the call that tells them apart.

The readers import none of the projects whose files they read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from interp.core.boundary import public
from interp.core.kinds import Device, require_device
from interp.core.stats import narrowed
from interp.data.sources import Data
from interp.features.cross_layer import Crosscoder, CrossLayerTranscoder
from interp.features.dictionary import Dictionary
from interp.features.fitting_sites import fitting_sites
from interp.features.formats import (
    circuit_tracer,
    crosscoder,
    dictionary_learning,
    gemma_scope,
    gemma_scope_2,
    goodfire,
    llama_scope,
    llamascopium,
    openai,
    qwen_scope,
    saelens,
    sparsify,
)
from interp.features.formats.files import Facts, Files, Layout, Stored
from interp.features.formats.saelens import save as save
from interp.passes.observe import Model

LAYOUTS: tuple[Layout, ...] = (
    saelens.LAYOUT,
    sparsify.LAYOUT,
    dictionary_learning.LAYOUT,
    openai.LAYOUT,
    goodfire.LAYOUT,
    qwen_scope.LAYOUT,
    gemma_scope.LAYOUT,
    gemma_scope_2.LAYOUT,
    gemma_scope_2.OF_LAYERS,
    llama_scope.LAYOUT,
    llama_scope.OF_R1,
    llamascopium.LAYOUT,
    circuit_tracer.LAYOUT,
    circuit_tracer.OF_LAYERS,
    crosscoder.LAYOUT,
)
"""Every layout that is read; of no two do the same files fit both."""


@public()
def load(
    path: Path | str,
    *,
    model: Model | None = None,
    data: Data | None = None,
    layer: int | None = None,
    k: int | None = None,
    norm_scaling_factor: float | None = None,
    dtype: torch.dtype | None = None,
    device: Device = "cpu",
) -> Dictionary | CrossLayerTranscoder | Crosscoder:
    """Load a dictionary from a file or folder of any known layout, which is told by what is in it.

    Constants that other tools apply at run time (norms of the decoder, scales of the activations) are folded into the
    weights: no number changes. Warns if the model it was trained on had its own weights processed at loading, as ours
    never have. Nothing in the files is run.

    Args:
        path: a folder or file of one dictionary.
        model: the model that it belongs to: its sites and widths are checked, and the gain of a norm that it reads
            without is put into its weights (`Dictionary.fitted_to`); None: neither.
        data: some text, at which the dictionary is tried in the model (`fitting_sites`): a `Note` says where another
            site fits and the named one does not; None: not tried. Dictionaries of several layers are not tried.
        layer: the layer, where neither names nor configs say it.
        k: number of active features, where neither names nor configs say it.
        norm_scaling_factor: sqrt(d_in) / mean norm of the model's activations; None: no scaling. Files that were made
            for activations of norm sqrt(d_in) and do not hold it require it, all others refuse it.
        dtype: of the weights; None: as the files say.
        device: where the weights are put.

    Returns:
        The `Dictionary`; of several layers the `CrossLayerTranscoder`, whose weights stay in the files, or the
        `Crosscoder`. Its `metadata` says what its files say, and under "layout" which layout they have.

    Raises:
        ValueError: files of no known layout, or of several, that are damaged, or that say what is neither understood
            nor known to change no number; a `layer`, `k` or factor that is missing; and what `Dictionary` refuses.
        FileNotFoundError: nothing under this path.

    See Also:
        `save`: writes a dictionary in SAELens' layout.

    Example:
        >>> import tempfile
        >>> eye, zero = torch.eye(3), torch.zeros(3)
        >>> sae = Dictionary(interp.features.TopK(2), {"W_enc": eye, "b_enc": zero, "W_dec": eye, "b_dec": zero})
        >>> with tempfile.TemporaryDirectory() as folder: save(sae, folder); same = interp.features.load(folder)
        >>> same.kind
        TopK(k=2, relu=True)
    """
    require_device(device)
    if data is not None and model is None:
        raise ValueError("data requires the model in which the dictionary is tried, got none")
    files = Files(Path(path))
    layout = _layout_of(files)
    try:
        stored = layout.read(files, Facts(layer, k, norm_scaling_factor))
        found = _opened(stored, layout, dtype, device)
        fitted = found if model is None else found.fitted_to(model)
    except ValueError as cause:
        raise ValueError(f"{path} ({layout.name}): {cause}") from cause
    if data is not None and model is not None and isinstance(found, Dictionary):
        fitting_sites(model, data, found)
    return fitted


def _layout_of(files: Files) -> Layout:
    """The only layout that files fit; ValueError for none or several."""
    fitting = [layout for layout in LAYOUTS if layout.fits(files)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ValueError(
            f"{files.path} fits the layouts {', '.join(layout.name for layout in fitting)}: one is required"
        )
    names = files.names
    held = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "no file"
    known = ", ".join(layout.name for layout in LAYOUTS)
    raise ValueError(f"{files.path} must hold a dictionary in a known layout ({known}), got {held}")


def _opened(
    stored: Stored | CrossLayerTranscoder | Crosscoder,
    layout: Layout,
    dtype: torch.dtype | None,
    device: Device,
) -> Dictionary | CrossLayerTranscoder | Crosscoder:
    """What was read, in the dtype and at the place asked for, with the name of its layout."""
    metadata = {"layout": layout.name, **(stored.metadata or {})}
    match stored:
        case CrossLayerTranscoder():
            return replace(stored, dtype=dtype, device=str(device), metadata=metadata)
        case Crosscoder():
            weights = _in(dtype, dict(stored.named_parameters()))
            return Crosscoder(stored.kind, weights, reads=stored.reads, metadata=metadata).to(device)
    return Dictionary(
        stored.kind,
        _in(dtype or stored.dtype, stored.weights),
        reads=stored.reads,
        writes=stored.writes,
        before_gain=stored.before_gain,
        apply_b_dec_to_input=stored.apply_b_dec_to_input,
        normalize_activations=stored.normalize_activations,
        metadata=metadata,
    ).to(device)


def _in(dtype: torch.dtype | None, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights in a dtype, which must hold them; None: as they are."""
    return {
        name: weight if dtype is None else narrowed(weight, dtype, name) for name, weight in weights.items()
    }
