"""A hookable Transformer and the exact analyses that take it apart.

import interp
model = interp.HookedTransformer.from_pretrained("demo-4l")
interp.heads(model)
interp.attribute(model, "When Mary and John went to the shop, John gave a drink to", " Mary", " John")
"""

from interp.analyses.activation_cache import ActivationCache
from interp.analyses.attribution import attribute
from interp.analyses.circuits import Circuits
from interp.analyses.heads import RepeatedTokens, heads
from interp.analyses.lens import logit_lens
from interp.analyses.residual import IncompleteSumError, Parts
from interp.analyses.verify import Contract
from interp.core.factored import FactoredMatrix
from interp.core.results import frame
from interp.encoder_decoder import HookedEncoderDecoder
from interp.engine.analysis import Analysis, run
from interp.engine.batch import Batch
from interp.engine.hooks import HookPoint
from interp.engine.observe import observe
from interp.engine.sampling import Sampling
from interp.hooked import HookedTransformer
from interp.model.config import ModelConfig
from interp.model.tap import Edit, Read, Tap, Trace
from interp.model.transformer import Transformer
from interp.zoo import DEMOS

__version__ = "0.1.0"

__all__ = [
    "DEMOS",
    "ActivationCache",
    "Analysis",
    "Batch",
    "Circuits",
    "Contract",
    "Edit",
    "FactoredMatrix",
    "HookPoint",
    "HookedEncoderDecoder",
    "HookedTransformer",
    "IncompleteSumError",
    "ModelConfig",
    "Parts",
    "Read",
    "RepeatedTokens",
    "Sampling",
    "Tap",
    "Trace",
    "Transformer",
    "attribute",
    "frame",
    "heads",
    "logit_lens",
    "observe",
    "run",
]
