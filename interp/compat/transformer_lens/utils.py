"""TransformerLens' `utils` (and `utilities`): its names in one place, from the modules that hold them.

Written by concern: `slices`, `act_names`, `tensors`, `tokenization`, `losses`, `activations`, `initialisation`,
`defaults`, `devices`, `composition`, `prompts`, `hub`. What is not offered raises with the native way to do it.
"""

from interp.compat.transformer_lens.act_names import get_act_name
from interp.compat.transformer_lens.activations import (
    SOFTCAP_DISABLED,
    SUPPORTED_ACTIVATIONS,
    ActivationFunction,
    apply_softcap,
    gelu_fast,
    gelu_new,
    gelu_pytorch_tanh,
    relu2,
    softcap_enabled,
    solu,
)
from interp.compat.transformer_lens.composition import composition_scores, get_matrix_corner
from interp.compat.transformer_lens.defaults import (
    USE_DEFAULT_VALUE,
    LocallyOverridenDefaults,
    get_nested_attr,
    override_or_use_default_value,
    set_nested_attr,
)
from interp.compat.transformer_lens.devices import (
    ModelWithCfg,
    get_device,
    move_to_and_update_config,
    print_gpu_mem,
    warn_if_mps,
)
from interp.compat.transformer_lens.hub import (
    call_hf_with_retry,
    clear_huggingface_cache,
    download_file_from_hf,
    enable_hf_retry,
    get_dataset,
    get_hf_token,
    get_rotary_pct_from_config,
    is_library_available,
    select_compatible_kwargs,
    temporarily_swap_parameter,
)
from interp.compat.transformer_lens.initialisation import (
    NonlinearityType,
    calc_fan_in_and_fan_out,
    init_kaiming_normal_,
    init_kaiming_uniform_,
    init_xavier_normal_,
    init_xavier_uniform_,
)
from interp.compat.transformer_lens.losses import (
    lm_accuracy,
    lm_cross_entropy_loss,
    logits_to_df,
    sample_logits,
)
from interp.compat.transformer_lens.prompts import test_prompt
from interp.compat.transformer_lens.slices import Slice, SliceInput
from interp.compat.transformer_lens.tensors import (
    check_structure,
    filter_dict_by_prefix,
    get_corner,
    get_cumsum_along_dim,
    get_offset_position_ids,
    is_lower_triangular,
    is_square,
    remove_batch_dim,
    repeat_along_head_dimension,
    to_numpy,
    transpose,
)
from interp.compat.transformer_lens.tokenization import (
    get_attention_mask,
    get_input_with_manually_prepended_bos,
    get_tokenizer_with_bos,
    get_tokens_with_bos_removed,
    keep_single_column,
    tokenize_and_concatenate,
)
from interp.compat.transformer_lens.typed_module_list import TypedModuleList

__path__: list[str] = []
"""To the import system a package: `utilities.slice` is this module too (`install.ALIASES`)."""
__all__ = [
    "SOFTCAP_DISABLED",
    "SUPPORTED_ACTIVATIONS",
    "USE_DEFAULT_VALUE",
    "ActivationFunction",
    "LocallyOverridenDefaults",
    "ModelWithCfg",
    "NonlinearityType",
    "Slice",
    "SliceInput",
    "TypedModuleList",
    "apply_softcap",
    "calc_fan_in_and_fan_out",
    "call_hf_with_retry",
    "check_structure",
    "clear_huggingface_cache",
    "composition_scores",
    "download_file_from_hf",
    "enable_hf_retry",
    "filter_dict_by_prefix",
    "gelu_fast",
    "gelu_new",
    "gelu_pytorch_tanh",
    "get_act_name",
    "get_attention_mask",
    "get_corner",
    "get_cumsum_along_dim",
    "get_dataset",
    "get_device",
    "get_hf_token",
    "get_input_with_manually_prepended_bos",
    "get_matrix_corner",
    "get_nested_attr",
    "get_offset_position_ids",
    "get_rotary_pct_from_config",
    "get_tokenizer_with_bos",
    "get_tokens_with_bos_removed",
    "init_kaiming_normal_",
    "init_kaiming_uniform_",
    "init_xavier_normal_",
    "init_xavier_uniform_",
    "is_library_available",
    "is_lower_triangular",
    "is_square",
    "keep_single_column",
    "lm_accuracy",
    "lm_cross_entropy_loss",
    "logits_to_df",
    "move_to_and_update_config",
    "override_or_use_default_value",
    "print_gpu_mem",
    "relu2",
    "remove_batch_dim",
    "repeat_along_head_dimension",
    "sample_logits",
    "select_compatible_kwargs",
    "set_nested_attr",
    "softcap_enabled",
    "solu",
    "temporarily_swap_parameter",
    "test_prompt",
    "to_numpy",
    "tokenize_and_concatenate",
    "transpose",
    "warn_if_mps",
]
