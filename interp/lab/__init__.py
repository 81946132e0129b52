"""The laboratory: what is trained or written rather than loaded. Nothing else in the package imports it.

    interp.lab.training   one training loop over any config
    interp.lab.rasp       programs over sequences, compiled to models whose circuit is known
    interp.lab.depth      depth as time: do tokens meet or collapse?

Here stand mixers other than softmax attention, options of it, other MLPs, blocks and output layers. Each
file holds all there is of one: the record of a config, what it refuses, the sites it adds, and its module. The line
here is what makes configs with it readable; a record of your own is readable once its class is defined.
"""

from typing import TYPE_CHECKING

from interp.core.late import names_of
from interp.lab.conv_mlp import ConvMLP
from interp.lab.cost import cost, costs
from interp.lab.differential import Differential
from interp.lab.dual_chunk import DualChunk
from interp.lab.lightning import Lightning
from interp.lab.linear import Linear
from interp.lab.linformer import Linformer
from interp.lab.macaron import Macaron
from interp.lab.memory import LongTermMemory
from interp.lab.neighbours import Datastore
from interp.lab.ngpt import NGPT
from interp.lab.output import AdaptiveSoftmax, HierarchicalSoftmax
from interp.lab.performer import Performer
from interp.lab.polar import Polar
from interp.lab.pool import Pool
from interp.lab.reformer import Reformer
from interp.lab.sparsity import BigBird, Dilated, FixedBlocks, Longformer, Segments, Strided
from interp.lab.spatial import SpatialGating, TokenMixing
from interp.lab.synthesizer import Synthesizer
from interp.lab.temperature import AdaptiveTemperature, LogN

if TYPE_CHECKING:
    from interp.lab import depth as depth, rasp as rasp, training as training

__all__ = [
    "NGPT", "AdaptiveSoftmax", "AdaptiveTemperature", "BigBird", "ConvMLP", "Datastore", "Differential", "Dilated",
    "DualChunk", "FixedBlocks", "HierarchicalSoftmax", "Lightning", "Linear", "Linformer", "LogN", "LongTermMemory",
    "Longformer", "Macaron", "Performer", "Polar", "Pool", "Reformer", "Segments", "SpatialGating", "Strided",
    "Synthesizer", "TokenMixing", "cost", "costs", "depth", "rasp", "training",
]  # fmt: skip

__getattr__ = names_of("interp.lab", {"depth": "depth", "rasp": "rasp", "training": "training"})
