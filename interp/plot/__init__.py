"""Results as matplotlib pictures: each function takes a result and an optional Axes, and returns the Axes.

Nothing is computed here, nothing is shown, and no style is changed. Signed numbers get a diverging map centred on 0.
"""

from interp.plot.attention import attention
from interp.plot.attribution import attribution, attribution_map
from interp.plot.heads import heads
from interp.plot.lens import logit_lens

__all__ = ["attention", "attribution", "attribution_map", "heads", "logit_lens"]
