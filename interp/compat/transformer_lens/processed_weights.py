"""State dicts loaded and processed: folded norms, centred writes, as `HookedTransformer` does it in place."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from interp.compat.transformer_lens import processing
from interp.compat.transformer_lens.components import LayerNormPre, RMSNormPre
from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.compat.transformer_lens.folding import fold_layer_norm

State = Mapping[str, Tensor]


class ProcessedWeights(nn.Module):
    """A mixin of `HookedTransformer`; each step by itself is in `processing`."""

    cfg: HookedTransformerConfig
    blocks: Any
    ln_final: Any
    setup: Any
    _share: Any

    def load_and_process_state_dict(
        self,
        state_dict: State,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        fold_value_biases: bool = True,
        refactor_factored_attn_matrices: bool = False,
    ) -> None:
        """Load weights in TransformerLens' layout after these steps; a missing entry keeps the model's own value.

        A step that would change the model's probabilities is left out with a warning. Twice does no more than once.
        """
        state = self.fill_missing_keys(state_dict)
        state, changed = processing.processed(
            state, self.cfg, fold_ln=fold_ln, center_writing_weights=center_writing_weights,
            center_unembed=center_unembed, fold_value_biases=fold_value_biases,
            refactor_factored_attn_matrices=refactor_factored_attn_matrices,
        )  # fmt: skip
        if changed.get("normalization_type", self.cfg.normalization_type) != self.cfg.normalization_type:
            self.cfg.normalization_type = str(changed["normalization_type"])
            self._fold_norms()
        self.load_state_dict(state, strict=False)

    def _fold_norms(self) -> None:
        """Put norms without weights in the place of those that were folded."""
        plain = LayerNormPre if self.cfg.normalization_type == "LNPre" else RMSNormPre
        self.ln_final = RMSNormPre(self.cfg) if self.cfg.final_rms else plain(self.cfg)
        for block in self.blocks:
            block.normalization_type = self.cfg.normalization_type
            block.ln1 = plain(self.cfg)
            if not self.cfg.attn_only:
                block.ln2 = plain(self.cfg)
                if self.cfg.is_layer_norm_activation():
                    block.mlp.ln = plain(self.cfg)
        self.setup()
        self._share()

    def process_weights_(
        self,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        refactor_factored_attn_matrices: bool = False,
    ) -> None:
        """`load_and_process_state_dict` of the model's own weights; value biases are folded as well."""
        self.load_and_process_state_dict(
            self.state_dict(), fold_ln=fold_ln, center_writing_weights=center_writing_weights,
            center_unembed=center_unembed, refactor_factored_attn_matrices=refactor_factored_attn_matrices,
        )  # fmt: skip

    def fill_missing_keys(self, state_dict: State) -> dict[str, Tensor]:
        """The state dict with the model's own values for what it lacks."""
        return processing.fill_missing_keys(self, state_dict)

    def fold_layer_norm(
        self, state_dict: State, fold_biases: bool = True, center_weights: bool = True
    ) -> dict[str, Tensor]:
        """A state dict with gamma and beta folded into what reads the norm."""
        return fold_layer_norm(state_dict, self.cfg, fold_biases, center_weights)

    def center_writing_weights(self, state_dict: State) -> dict[str, Tensor]:
        """A state dict in which what writes to the stream has mean zero."""
        return processing.center_writing_weights(state_dict, self.cfg)

    def center_unembed(self, state_dict: State) -> dict[str, Tensor]:
        """A state dict whose unembedding has mean zero over the vocabulary."""
        return processing.center_unembed(state_dict)

    def fold_value_biases(self, state_dict: State) -> dict[str, Tensor]:
        """A state dict with b_V moved into b_O."""
        return processing.fold_value_biases(state_dict, self.cfg)

    def refactor_factored_attn_matrices(self, state_dict: State) -> dict[str, Tensor]:
        """A state dict with W_Q W_K^T and W_V W_O factored by their singular values."""
        return processing.refactor_factored_attn_matrices(state_dict, self.cfg)
